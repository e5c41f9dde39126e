"""Translations of PyTorch's fused attention for CPUs, forward and backward; see ops/attention.py.

Half precision stays PyTorch's where the processor has units for it that ours does not use.
"""
from __future__ import annotations

from typing import Any

from anyshape.frontend.aten.table import Decline, Mismatch, Translator, translates
from anyshape.ir.graph import Value
from anyshape.ops.attention import DTYPES, HALF, wide
from anyshape.torch_compat import aten


def _fits(q: Value, k: Value, v: Value) -> None:
    for a, b, dims in ((q, k, (0, 3)), (k, v, (0, 1, 2, 3))):
        for dim in dims:
            if a.tensor.shape[dim] != b.tensor.shape[dim]:
                raise Mismatch(a.tensor.shape[dim], b.tensor.shape[dim])


def _given(t: Translator, q: Value, k: Value, v: Value, dropout: Any, mask: Value | None,
           scale: Any) -> tuple[tuple[Value, ...], float | None]:
    """The operands after the values, and the scale."""
    dtype = q.tensor.dtype
    if "attention" not in t.target.own_ops:
        raise Decline("attention is PyTorch's on this device")
    if dtype not in DTYPES or (dtype in HALF and not t.target.multiplies(dtype)):
        raise Decline(f"{dtype} on this processor")
    if dropout:
        raise Decline("dropout")
    _fits(q, k, v)
    if scale is not None:
        if not isinstance(scale, (int, float)):
            raise Decline("a scale that is computed")
        scale = float(scale)
    if mask is None:
        return (), scale
    if mask.tensor.dtype not in (dtype, wide(dtype)):
        raise Decline("a mask of another dtype")
    mask = t.cast(mask, wide(dtype))
    shape = (1,) * (4 - mask.tensor.rank) + mask.tensor.shape
    wanted = (*q.tensor.shape[:3], k.tensor.shape[2])
    for have, want in zip(shape, wanted, strict=True):
        if have not in (1, want):
            raise Mismatch(have, want)
    mask = t.reshape(mask, shape)
    if shape[3] != wanted[3]:  # a column is not read in a vector
        mask = t.broadcast(mask, (*shape[:3], wanted[3]))
    return (mask,), scale


def _heads_first(t: Translator, x: Value) -> Value:
    return t.permute(x, (0, 2, 1, 3))


@translates(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(t: Translator, q: Value, k: Value, v: Value, dropout_p: Any = 0.0, is_causal: bool = False, *,
              attn_mask: Value | None = None, scale: Any = None) -> tuple[Value, Value]:
    more, scale = _given(t, q, k, v, dropout_p, attn_mask, scale)
    result, sums = t.builder.multi("attention", q, k, v, *more, causal=bool(is_causal), scale=scale)
    return _heads_first(t, result), sums


@translates(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def attention_backward(t: Translator, grad_out: Value, q: Value, k: Value, v: Value, out: Value, logsumexp: Value,
                       dropout_p: Any = 0.0, is_causal: bool = False, *, attn_mask: Value | None = None,
                       scale: Any = None) -> tuple[Value, ...]:
    more, scale = _given(t, q, k, v, dropout_p, attn_mask, scale)
    products = t.reduce("sum", t.pointwise("mul", grad_out, out, dtype=wide(q.tensor.dtype)), (3,))
    gradients = t.builder.multi("attention_backward", grad_out, q, k, v, logsumexp, products, *more,
                                causal=bool(is_causal), scale=scale)
    return tuple(_heads_first(t, gradient) for gradient in gradients)
