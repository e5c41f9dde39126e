"""Translations of ATen ops that make tensors, copy them, or change their dtype.

    aten.arange.start_step(0, 8, 2)  -->  iota(count=4, start=0, step=2)
"""
from __future__ import annotations

from typing import Any

import torch

from anyshape.frontend.aten.table import Decline, Translator, is_float, translates
from anyshape.ir.graph import Value
from anyshape.sym.expr import Expr
from anyshape.torch_compat import aten

prims = torch.ops.prims

# uninitialised memory is any memory: zeros are made where they are used, and cost nothing when nobody reads them
_ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros, aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided,
          aten.new_empty_strided, aten.empty_permuted, aten._efficientzerotensor)
_ONES = (aten.ones, aten.ones_like, aten.new_ones)


@translates(*(packet.default for packet in _ZEROS if hasattr(packet, "default")), aten.empty.memory_format,
            prims.empty_strided.default, prims.empty_permuted.default)
def zeros(t: Translator, *arguments: Any, **more: Any) -> Value:
    return t.full(0, t.out.shape, t.out.dtype)


@translates(*(packet.default for packet in _ONES))
def ones(t: Translator, *arguments: Any, **more: Any) -> Value:
    return t.full(1, t.out.shape, t.out.dtype)


@translates(aten.full.default, prims.full.default)
def full(t: Translator, size: Any, value: Any, **more: Any) -> Value:
    return t.full(value, t.out.shape, t.out.dtype)


@translates(aten.full_like.default, prims.full_like.default)
def full_like(t: Translator, x: Value, value: Any, *arguments: Any, **more: Any) -> Value:
    return t.full(value, t.out.shape, t.out.dtype)


@translates(aten.new_full.default)
def new_full(t: Translator, x: Value, size: Any, value: Any, **more: Any) -> Value:
    return t.full(value, t.out.shape, t.out.dtype)


@translates(aten.scalar_tensor.default, prims.scalar_tensor.default)
def scalar_tensor(t: Translator, value: Any, **more: Any) -> Value:
    return t.full(value, (), t.out.dtype)


@translates(aten.arange.start_step)
def arange(t: Translator, start: Any, end: Any, step: Any = 1, **more: Any) -> Value:
    return _range(t, start, step)


@translates(aten.arange.default)
def arange_end(t: Translator, end: Any, **more: Any) -> Value:
    return _range(t, 0, 1)


@translates(aten.arange.start)
def arange_start(t: Translator, start: Any, end: Any, **more: Any) -> Value:
    return _range(t, start, 1)


@translates(prims.iota.default)
def iota(t: Translator, length: Any, *, start: Any, step: Any, **more: Any) -> Value:
    return _range(t, start, step)


def _range(t: Translator, start: Any, step: Any) -> Value:
    if isinstance(start, Value) or isinstance(step, Value):
        raise Decline("a range whose ends are computed")
    kind = t.out.dtype
    whole = all(isinstance(x, (int, Expr)) or float(x).is_integer() for x in (start, step))
    if not whole and not is_float(kind):
        raise Decline("a range of whole numbers with fractional ends")
    if whole:
        start, step = (x if isinstance(x, Expr) else int(x) for x in (start, step))
        return t.cast(t.iota(t.out.shape[0], start, step), kind)
    return t.iota(t.out.shape[0], start, step, kind)


@translates(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default,
            aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_copy.default, aten.alias_copy.default,
            aten.view_of.default if hasattr(aten, "view_of") else prims.view_of.default, aten.positive.default,
            prims.clone.default)
def identity(t: Translator, x: Value, **more: Any) -> Value:
    return x


@translates(aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, prims.device_put.default)
def to_copy(t: Translator, x: Value, *arguments: Any, **more: Any) -> Value:
    if t.out.device != x.tensor.device:
        raise Decline("a copy between devices")
    return t.cast(x, t.out.dtype)


@translates(aten.copy.default)
def copy(t: Translator, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return t.broadcast(t.cast(source, t.out.dtype), t.out.shape)


@translates(aten._local_scalar_dense.default)
def local_scalar(t: Translator, x: Value) -> Value:
    """A float read out of a tensor stays a rank-0 value (whole numbers become sizes, which the walk refuses)."""
    value = t.reshape(t.cast(x, "f64"), ())
    t.floats.add(value.name)
    return value
