"""Translations of normalisation layers, forward and backward, as sums and pointwise work.

Half precisions are computed in f32. The variance is taken in two passes, as PyTorch's kernels effectively do.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyshape.frontend.aten.reduce import mean, variance
from anyshape.frontend.aten.table import Decline, Translator, translates, wide
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size, product
from anyshape.torch_compat import aten


def _cast_to(t: Translator, values: Sequence[Value | None]) -> tuple[Value | None, ...]:
    kinds = t.result if isinstance(t.result, tuple) else (t.result,)
    return tuple(None if kind is None or x is None else t.cast(x, kind.dtype)
                 for x, kind in zip(values, kinds, strict=True))


def _inner(x: Value, normalized_shape: Any) -> tuple[int, ...]:
    rank = x.tensor.rank
    return tuple(range(rank - len(normalized_shape), rank))


@translates(aten.native_layer_norm.default)
def layer_norm(t: Translator, x: Value, normalized_shape: Any, weight: Value | None, bias: Value | None,
               eps: float) -> tuple[Value | None, ...]:
    kind = wide(x.tensor.dtype)
    y = t.cast(x, kind)
    spread, middle = variance(t, y, _inner(x, normalized_shape), 0, True)
    scale = t.op("rsqrt", t.op("add", spread, eps))
    out = t.op("mul", t.op("sub", y, middle), scale)
    if weight is not None:
        out = t.pointwise("mul", out, weight, dtype=kind)
    if bias is not None:
        out = t.pointwise("add", out, bias, dtype=kind)
    return _cast_to(t, (out, middle, scale))


@translates(aten.native_layer_norm_backward.default)
def layer_norm_backward(t: Translator, grad: Value, x: Value, normalized_shape: Any, middle: Value, scale: Value,
                        weight: Value | None, bias: Value | None, output_mask: Any) -> tuple[Value | None, ...]:
    kind = wide(x.tensor.dtype)
    dims = _inner(x, normalized_shape)
    outer = tuple(d for d in range(x.tensor.rank) if d not in dims)
    g, r = t.cast(grad, kind), t.cast(scale, kind)
    hat = t.op("mul", t.op("sub", t.cast(x, kind), t.cast(middle, kind)), r)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        weighted = g if weight is None else t.pointwise("mul", g, weight, dtype=kind)
        average = mean(t, weighted, dims, True)
        along = mean(t, t.op("mul", weighted, hat), dims, True)
        inner = t.op("sub", t.op("sub", weighted, average), t.op("mul", hat, along))
        results[0] = t.op("mul", inner, r)
    if output_mask[1] and weight is not None:
        results[1] = t.reduce("sum", t.op("mul", g, hat), outer)
    if output_mask[2] and bias is not None:
        results[2] = t.reduce("sum", g, outer)
    return _cast_to(t, results)


@translates(aten.native_group_norm.default)
def group_norm(t: Translator, x: Value, weight: Value | None, bias: Value | None, batch: Size, channels: Size,
               area: Size, groups: int, eps: float) -> tuple[Value | None, ...]:
    if not isinstance(channels, int):
        raise Decline("a group norm over a symbolic number of channels")
    kind = wide(x.tensor.dtype)
    shape = x.tensor.shape
    y = t.reshape(t.cast(x, kind), (batch, groups, channels // groups, product(shape[2:])))
    spread, middle = variance(t, y, (2, 3), 0, True)
    scale = t.op("rsqrt", t.op("add", spread, eps))
    out = t.op("mul", t.op("sub", y, middle), scale)
    per_channel = (groups, channels // groups, 1)
    if weight is not None:
        out = t.pointwise("mul", out, t.reshape(weight, per_channel), dtype=kind)
    if bias is not None:
        out = t.pointwise("add", out, t.reshape(bias, per_channel), dtype=kind)
    flat = (batch, groups)
    return _cast_to(t, (t.reshape(out, shape), t.reshape(middle, flat), t.reshape(scale, flat)))


@translates(aten.native_group_norm_backward.default)
def group_norm_backward(t: Translator, grad: Value, x: Value, middle: Value, scale: Value, weight: Value | None,
                        batch: Size, channels: Size, area: Size, groups: int,
                        output_mask: Any) -> tuple[Value | None, ...]:
    if not isinstance(channels, int):
        raise Decline("a group norm over a symbolic number of channels")
    kind = wide(x.tensor.dtype)
    each = channels // groups
    grouped = (batch, groups, each, product(x.tensor.shape[2:]))
    g, y = (t.reshape(t.cast(v, kind), grouped) for v in (grad, x))
    m, r = (t.reshape(t.cast(v, kind), (batch, groups, 1, 1)) for v in (middle, scale))
    hat = t.op("mul", t.op("sub", y, m), r)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        weighted = g if weight is None else t.pointwise("mul", g, t.reshape(weight, (groups, each, 1)), dtype=kind)
        average = mean(t, weighted, (2, 3), True)
        along = mean(t, t.op("mul", weighted, hat), (2, 3), True)
        inner = t.op("sub", t.op("sub", weighted, average), t.op("mul", hat, along))
        results[0] = t.reshape(t.op("mul", inner, r), x.tensor.shape)
    if output_mask[1] and weight is not None:
        results[1] = t.reshape(t.reduce("sum", t.op("mul", g, hat), (0, 3)), (channels,))
    if output_mask[2]:
        results[2] = t.reshape(t.reduce("sum", g, (0, 3)), (channels,))
    return _cast_to(t, results)


@translates(aten._native_batch_norm_legit_no_training.default)
def batch_norm_inference(t: Translator, x: Value, weight: Value | None, bias: Value | None, running_mean: Value,
                         running_var: Value, momentum: float, eps: float) -> tuple[Value | None, ...]:
    kind = wide(x.tensor.dtype)
    tail = (1,) * (x.tensor.rank - 2)

    def line(v: Value) -> Value:
        return t.reshape(t.cast(v, kind), (*v.tensor.shape, *tail))

    scale = t.op("rsqrt", t.op("add", line(running_var), eps))
    out = t.pointwise("mul", t.pointwise("sub", t.cast(x, kind), line(running_mean), dtype=kind), scale, dtype=kind)
    if weight is not None:
        out = t.op("mul", out, line(weight))
    if bias is not None:
        out = t.op("add", out, line(bias))
    saved = [t.full(0, kind_.shape, kind_.dtype) for kind_ in t.result[1:]]
    return _cast_to(t, (out, *saved))
