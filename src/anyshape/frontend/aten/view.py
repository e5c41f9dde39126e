"""Translations of ATen views. Values are dense, so a view is a plain reindexing; the traced strides play no part.

    aten.select.int(x [b, 4, n], 1, 2)  -->  s = slice(x | dim=1, start=2, count=1, step=1); reshape(s | shape=(b, n))
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline, Translator, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size, dense_strides, maximum, minimum, product
from anyshape.torch_compat import aten

prims = torch.ops.prims


@translates(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default,
            aten.view_copy.default, aten.reshape_copy.default if hasattr(aten, "reshape_copy") else aten.view.default,
            aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.flatten.using_ints,
            aten.unflatten.int, aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims,
            aten.unsqueeze_copy.default, aten.view_as.default, aten.reshape_as.default, aten.ravel.default,
            prims.reshape.default, prims.squeeze.default, prims.collapse_view.default, prims.split_dim.default)
def reshape(t: Translator, x: Value, *arguments: Any, **more: Any) -> Value:
    return t.reshape(x, t.out.shape)


@translates(aten.expand.default, aten.expand_copy.default, aten.expand_as.default, aten.broadcast_to.default)
def expand(t: Translator, x: Value, *arguments: Any, **more: Any) -> Value:
    return t.broadcast(x, t.out.shape)


@translates(prims.broadcast_in_dim.default)
def broadcast_in_dim(t: Translator, x: Value, shape: Any, dims: Sequence[int]) -> Value:
    aligned: list[Size] = [1] * len(t.out.shape)
    for own, dim in zip(x.tensor.shape, dims, strict=True):
        aligned[dim] = own
    return t.broadcast(t.reshape(x, aligned), t.out.shape)


@translates(aten.permute.default, aten.permute_copy.default, prims.transpose.default)
def permute(t: Translator, x: Value, dims: Sequence[int]) -> Value:
    rank = x.tensor.rank
    return t.permute(x, [d % rank for d in dims])


@translates(aten.t.default, aten.numpy_T.default, aten.t_copy.default)
def reverse_dims(t: Translator, x: Value) -> Value:
    return t.permute(x, range(x.tensor.rank - 1, -1, -1))


@translates(aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default)
def transpose(t: Translator, x: Value, first: int, second: int) -> Value:
    rank = x.tensor.rank
    order = list(range(rank))
    if rank:
        first, second = first % rank, second % rank
        order[first], order[second] = second, first
    return t.permute(x, order)


@translates(aten.movedim.int, aten.movedim.intlist)
def movedim(t: Translator, x: Value, source: Any, destination: Any) -> Value:
    rank = x.tensor.rank
    sources = [d % rank for d in ([source] if isinstance(source, int) else source)]
    targets = [d % rank for d in ([destination] if isinstance(destination, int) else destination)]
    order = [-1] * rank
    for own, target in zip(sources, targets, strict=True):
        order[target] = own
    rest = iter([d for d in range(rank) if d not in sources])
    return t.permute(x, [next(rest) if own < 0 else own for own in order])


def position(t: Translator, index: Size, size: Size) -> Size:
    """An index into `size` elements, where negative ones count from the end."""
    if t.at_most(0, index):
        return index
    if t.at_most(index, -1):
        return index + size
    raise Decline(f"the index {index} may count from either end")


def clamped(t: Translator, index: Size | None, size: Size, default: Size) -> Size:
    """A slice bound as torch.Tensor slicing takes it: counted from the end when negative, then put into [0, size]."""
    if index is None:
        return default
    at = position(t, index, size)
    if not t.at_most(0, at):
        at = maximum(at, 0)
    return at if t.at_most(at, size) else minimum(at, size)


@translates(aten.select.int, aten.select_copy.int)
def select(t: Translator, x: Value, dim: int, index: Size) -> Value:
    dim = dim % x.tensor.rank
    at = position(t, index, x.tensor.shape[dim])
    return t.reshape(t.window(x, dim, at, 1), t.out.shape)


@translates(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(t: Translator, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Value:
    dim = dim % x.tensor.rank
    if not isinstance(step, int):
        raise Decline("a slice with a symbolic step")
    begin = clamped(t, start, x.tensor.shape[dim], 0)
    return t.window(x, dim, begin, t.out.shape[dim], step)


@translates(aten.narrow.default)
def narrow(t: Translator, x: Value, dim: int, start: Size, length: Size) -> Value:
    dim = dim % x.tensor.rank
    return t.window(x, dim, position(t, start, x.tensor.shape[dim]), length)


@translates(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.split_with_sizes_copy.default,
            aten.split_copy.Tensor, aten.chunk.default)
def split(t: Translator, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    dim = dim % x.tensor.rank
    pieces = []
    start: Size = 0
    for kind in _results(t):
        pieces.append(t.window(x, dim, start, kind.shape[dim]))
        start = start + kind.shape[dim]
    return tuple(pieces)


@translates(aten.unbind.int, aten.unbind_copy.int)
def unbind(t: Translator, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = dim % x.tensor.rank
    return tuple(t.reshape(t.window(x, dim, at, 1), kind.shape) for at, kind in enumerate(_results(t)))


def _results(t: Translator) -> tuple[TensorType, ...]:
    return t.result if isinstance(t.result, tuple) else (t.result,)


@translates(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(t: Translator, x: Value, size: Any, stride: Any, storage_offset: Any = None) -> Value:
    """The walk lets this through only when the traced operand is dense, as our value is."""
    shape, strides = tuple(size), tuple(stride)
    same = all(a == b or n == 1 for a, b, n in zip(strides, dense_strides(shape), shape, strict=True))
    if same and storage_offset in (None, 0) and product(shape) == x.tensor.count:
        return t.reshape(x, shape)
    raise Decline("a window of storage by strides")


@translates(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(t: Translator, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    rank = x.tensor.rank
    first, second = dim1 % rank, dim2 % rank
    moved = t.permute(x, [d for d in range(rank) if d not in (first, second)] + [first, second])
    count = t.out.shape[-1]
    row = t.iota(count, max(-offset, 0))
    column = t.iota(count, max(offset, 0))
    return t.op("index", moved, row, column, dims=(rank - 2, rank - 1))
