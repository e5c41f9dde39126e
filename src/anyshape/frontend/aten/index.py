"""Translations of ATen ops that move elements: joining, padding, turning, lookups, slices written into a copy.

    aten.slice_scatter(x [n], y [k], dim=0, start=2, end=2+k)  -->  concat(x[:2], y, x[2+k:])
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline, Mismatch, Translator, literal, translates
from anyshape.frontend.aten.view import clamped, position
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size, mod
from anyshape.torch_compat import aten

prims = torch.ops.prims


def concat(t: Translator, parts: Sequence[Value], dim: int) -> Value:
    """The parts one after another; parts known to be empty are left out."""
    kept = [x for x in parts if x.tensor.shape[dim] != 0] or list(parts[:1])
    for x in kept[1:]:
        for d, (have, want) in enumerate(zip(x.tensor.shape, kept[0].tensor.shape, strict=True)):
            if d != dim and have != want:
                raise Mismatch(have, want)
    return kept[0] if len(kept) == 1 else t.op("concat", *kept, dim=dim)


@translates(aten.cat.default, aten.concat.default, prims.cat.default)
def cat(t: Translator, tensors: Sequence[Value], dim: int = 0) -> Value:
    # an empty tensor of rank 1 may be joined to anything
    parts = [t.cast(x, t.out.dtype) for x in tensors if x.tensor.rank == len(t.out.shape)]
    return concat(t, parts, dim % len(t.out.shape))


@translates(aten.stack.default)
def stack(t: Translator, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim = dim % len(t.out.shape)
    parts = []
    for x in tensors:
        shape = x.tensor.shape
        parts.append(t.reshape(t.cast(x, t.out.dtype), shape[:dim] + (1,) + shape[dim:]))
    return concat(t, parts, dim)


@translates(aten.flip.default, prims.rev.default)
def flip(t: Translator, x: Value, dims: Sequence[int]) -> Value:
    chosen = tuple(sorted(d % x.tensor.rank for d in dims))
    return t.op("flip", x, dims=chosen) if chosen else x


@translates(aten.roll.default)
def roll(t: Translator, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shape = x.tensor.shape
    y = x
    moves = [shifts] if not isinstance(shifts, (list, tuple)) else list(shifts)
    if not dims:
        y = t.reshape(y, (x.tensor.count,))
        dims = [0]
    for shift, dim in zip(moves, [dims] if isinstance(dims, int) else dims, strict=True):
        at = dim % y.tensor.rank
        size = y.tensor.shape[at]
        if size == 0:
            continue
        head = _turn(t, shift, size)
        if head != 0:
            y = concat(t, [t.window(y, at, head, size - head), t.window(y, at, 0, head)], at)
    return t.reshape(y, shape)


def _turn(t: Translator, shift: Size, size: Size) -> Size:
    # where element 0 of the result comes from: -shift modulo size, without a division where the range shows how
    if t.at_most(0, -shift) and t.at_most(-shift, size):
        return -shift
    if t.at_most(0, shift) and t.at_most(shift, size):
        return size - shift
    return mod(-shift, size)


@translates(aten.repeat.default)
def repeat(t: Translator, x: Value, repeats: Sequence[Size]) -> Value:
    own: list[Size] = []
    wide: list[Size] = []
    shape = (1,) * (len(repeats) - x.tensor.rank) + x.tensor.shape
    for size, count in zip(shape, repeats, strict=True):
        own += [size] if count == 1 else [1, size]
        wide += [size] if count == 1 else [count, size]
    return t.reshape(t.broadcast(t.reshape(x, own), wide), t.out.shape)


@translates(aten.constant_pad_nd.default)
def constant_pad_nd(t: Translator, x: Value, pad: Sequence[Size], value: Any = 0) -> Value:
    low: list[Size] = [0] * x.tensor.rank
    high: list[Size] = [0] * x.tensor.rank
    for at in range(len(pad) // 2):
        low[-1 - at], high[-1 - at] = pad[2 * at], pad[2 * at + 1]
    return padded(t, x, low, high, value)


def padded(t: Translator, x: Value, low: Sequence[Size], high: Sequence[Size], value: Any = 0) -> Value:
    """`x` with `low` elements before and `high` after it in each dimension, all equal to a literal."""
    if isinstance(value, Value) or not isinstance(value, (bool, int, float)):
        raise Decline("padding with a computed value")
    if all(n == 0 for n in (*low, *high)):
        return x
    return t.op("pad", x, low=tuple(low), high=tuple(high), value=literal(value, x.tensor.dtype))


def _pad_one(t: Translator, x: Value, dim: int, low: Size, high: Size) -> Value:
    rank = x.tensor.rank
    return padded(t, x, [low if d == dim else 0 for d in range(rank)], [high if d == dim else 0 for d in range(rank)])


@translates(aten.slice_backward.default)
def slice_backward(t: Translator, grad: Value, sizes: Any, dim: int, start: Size, end: Size, step: Size) -> Value:
    dim = dim % grad.tensor.rank
    size, count = t.out.shape[dim], grad.tensor.shape[dim]
    begin = clamped(t, start, size, 0)
    if step == 1:
        return _pad_one(t, grad, dim, begin, size - begin - count)
    if not isinstance(step, int):
        raise Decline("a slice with a symbolic step")
    # each element followed by step - 1 zeros, cut to length
    shape = grad.tensor.shape
    spread = _pad_one(t, t.reshape(grad, shape[:dim + 1] + (1,) + shape[dim + 1:]), dim + 1, 0, step - 1)
    flat = t.reshape(spread, shape[:dim] + (count * step,) + shape[dim + 1:])
    return _pad_one(t, flat, dim, begin, size - begin - count * step)


@translates(aten.select_backward.default)
def select_backward(t: Translator, grad: Value, sizes: Any, dim: int, index: Size) -> Value:
    dim = dim % len(t.out.shape)
    size = t.out.shape[dim]
    at = position(t, index, size)
    shape = grad.tensor.shape
    return _pad_one(t, t.reshape(grad, shape[:dim] + (1,) + shape[dim:]), dim, at, size - at - 1)


@translates(aten.slice_scatter.default)
def slice_scatter(t: Translator, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None,
                  step: Any = 1) -> Value:
    if not isinstance(step, int):
        raise Decline("a slice with a symbolic step")
    dim = dim % x.tensor.rank
    begin = clamped(t, start, x.tensor.shape[dim], 0)
    if step != 1:
        return t.op("overwrite", x, t.cast(source, x.tensor.dtype), dim=dim, start=begin, step=step)
    return _overwritten(t, x, source, dim, begin)


@translates(aten.select_scatter.default)
def select_scatter(t: Translator, x: Value, source: Value, dim: int, index: Size) -> Value:
    dim = dim % x.tensor.rank
    shape = source.tensor.shape
    return _overwritten(t, x, t.reshape(source, shape[:dim] + (1,) + shape[dim:]), dim,
                        position(t, index, x.tensor.shape[dim]))


@translates(aten.diagonal_scatter.default)
def diagonal_scatter(t: Translator, x: Value, source: Value, offset: Any = 0, dim1: int = 0, dim2: int = 1) -> Value:
    if not isinstance(offset, int):
        raise Decline("a diagonal that a size says")
    rank, shape = x.tensor.rank, x.tensor.shape
    first, second = dim1 % rank, dim2 % rank
    # a diagonal right of the main one begins in the first row, and its places are numbers of rows; else of columns
    along, across = (first, second) if offset >= 0 else (second, first)
    order = [d for d in range(rank) if d not in (first, second)] + [along]
    wide = _pad_one(t, t.cast(source, x.tensor.dtype), rank - 2, 0, shape[along] - source.tensor.shape[-1])
    wide = t.permute(wide, [order.index(d) for d in range(rank) if d != across])
    wide = t.reshape(wide, tuple(1 if d == across else size for d, size in enumerate(shape)))
    row, column = (t.reshape(t.iota(shape[d]), tuple(shape[d] if e == d else 1 for e in range(rank)))
                   for d in (first, second))
    return t.where(t.op("eq", t.op("sub", column, row), offset), wide, x)


def _overwritten(t: Translator, x: Value, source: Value, dim: int, begin: Size) -> Value:
    size, count = x.tensor.shape[dim], source.tensor.shape[dim]
    rest = size - begin - count
    parts = [t.window(x, dim, 0, begin), t.cast(source, x.tensor.dtype), t.window(x, dim, begin + count, rest)]
    return concat(t, [part for part in parts if part.tensor.shape[dim] != 0] or parts[:1], dim)


@translates(aten.tril.default)
def tril(t: Translator, x: Value, diagonal: Size = 0) -> Value:
    return _triangle(t, x, "le", diagonal)


@translates(aten.triu.default)
def triu(t: Translator, x: Value, diagonal: Size = 0) -> Value:
    return _triangle(t, x, "ge", diagonal)


def _triangle(t: Translator, x: Value, comparison: str, diagonal: Size) -> Value:
    rows, columns = x.tensor.shape[-2:]
    row = t.reshape(t.iota(rows), (rows, 1))
    inside = t.op(comparison, t.op("sub", t.iota(columns), row), diagonal)
    return t.where(inside, x, 0)


@translates(aten.embedding.default)
def embedding(t: Translator, weight: Value, indices: Value, padding_idx: Any = -1, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> Value:
    return t.op("take", weight, t.cast(indices, "i64"), dim=0)


@translates(aten.index_select.default)
def index_select(t: Translator, x: Value, dim: int, index: Value) -> Value:
    if not x.tensor.rank:
        raise Decline("a lookup in a rank-0 tensor")
    rank_1 = t.reshape(index, (index.tensor.count,))
    return t.op("take", x, t.cast(rank_1, "i64"), dim=dim % x.tensor.rank)


@translates(aten.gather.default)
def gather(t: Translator, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not x.tensor.rank or x.tensor.rank != index.tensor.rank:
        raise Decline("a lookup in a rank-0 tensor")
    return t.op("gather", x, t.cast(index, "i64"), dim=dim % x.tensor.rank)


@translates(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(t: Translator, x: Value, indices: Sequence[Value | None]) -> Value:
    dims = [d for d, own in enumerate(indices) if own is not None]
    if any(own is not None and own.tensor.dtype in ("bool", "u8") for own in indices):
        raise Decline("a mask picks a number of elements that depends on the data")
    chosen = [t.cast(indices[d], "i64") for d in dims]
    t.check_broadcast(chosen)
    if dims != list(range(dims[0], dims[0] + len(dims))):
        # indices that are apart put their dimensions in front
        x = t.permute(x, dims + [d for d in range(x.tensor.rank) if d not in dims])
        dims = list(range(len(dims)))
    turned = _looked_up_in_order(t, x, chosen, dims)
    return t.op("index", x, *chosen, dims=tuple(dims)) if turned is None else turned


def _looked_up_in_order(t: Translator, x: Value, chosen: Sequence[Value], dims: Sequence[int]) -> Value | None:
    """The lookup as a view where every index counts 0, 1, ... through its dim along an axis of its own, as masks do
    that are made for every (batch, row, column) at once."""
    rank = max(value.tensor.rank for value in chosen)
    axes = []
    for value, dim in zip(chosen, dims, strict=True):
        size = x.tensor.shape[dim]
        aligned = (1,) * (rank - value.tensor.rank) + value.tensor.shape
        own = [axis for axis, extent in enumerate(aligned) if extent != 1]
        if len(own) != 1 or aligned[own[0]] != size or not _counts_up(t, value):
            return None
        axes.append(own[0])
    if len(set(axes)) != len(axes):
        return None
    order = sorted(range(len(axes)), key=axes.__getitem__)
    first, after = dims[0], dims[0] + len(dims)
    moved = t.permute(x, [*range(first), *(first + k for k in order), *range(after, x.tensor.rank)])
    block: list[Size] = [1] * rank
    for axis, dim in zip(axes, dims, strict=True):
        block[axis] = x.tensor.shape[dim]
    return t.reshape(moved, x.tensor.shape[:first] + tuple(block) + x.tensor.shape[after:])


def _counts_up(t: Translator, value: Value) -> bool:
    """Is it iota from 0 in steps of 1, whatever its shape? Dims of size 1 and the number 0 may have been added."""
    made = {node.output.name: node for node in t.builder.nodes if node.op in ("iota", "reshape", "cast")
            or (node.op == "add" and node.inputs[1] == 0)}
    count = value.tensor.count
    # through a narrower dtype, or bool, the numbers would not be the same ones
    while value.tensor.dtype in ("i32", "i64") and (node := made.get(value.name)) is not None:
        if node.op == "iota":
            return node.attr("start") == 0 and node.attr("step") == 1
        value = next(iter(node.values()))
        if value.tensor.count != count:
            return False
    return False


def is_at(t: Translator, at: Value, dim: int, size: Size) -> Value:
    """Whether the position along `dim`, which has `size`, is the one that `at` has for its line."""
    line = t.reshape(t.iota(size), (size,) + (1,) * (at.tensor.rank - 1 - dim))
    return t.op("eq", line, at)


@translates(aten.nll_loss_forward.default)
def nll_loss_forward(t: Translator, x: Value, target: Value, weight: Value | None, reduction: int,
                     ignore_index: int) -> tuple[Value, Value]:
    kind = x.tensor.dtype
    dim = x.tensor.rank - 1
    used = t.op("ne", target, ignore_index)
    safe = t.op("where", used, target, 0)
    column = t.reshape(safe, safe.tensor.shape[:dim] + (1,))
    loss = t.op("neg", t.reshape(t.op("gather", x, column, dim=dim), safe.tensor.shape))
    scale = t.cast(used, kind) if weight is None else t.where(used, t.op("take", weight, safe, dim=0), 0.0, kind)
    loss = t.where(used, loss if weight is None else t.op("mul", loss, scale), 0.0, kind)
    if reduction == 0:
        return loss, t.full(0.0, (), kind)
    dims = tuple(range(loss.tensor.rank))
    total, weights = t.reduce("sum", loss, dims), t.reduce("sum", scale, dims)
    return (t.op("div", total, weights) if reduction == 1 else total), weights


@translates(aten.nll_loss_backward.default)
def nll_loss_backward(t: Translator, grad: Value, x: Value, target: Value, weight: Value | None, reduction: int,
                      ignore_index: int, total_weight: Value) -> Value:
    kind = x.tensor.dtype
    dim = x.tensor.rank - 1
    column = t.reshape(target, target.tensor.shape[:dim] + (1,))
    used = t.op("ne", column, ignore_index)
    scale: Value = t.op("div", grad, total_weight) if reduction == 1 else grad
    if reduction == 0 and target.tensor.rank:
        scale = t.reshape(scale, column.tensor.shape)
    scale = t.op("neg", scale)
    if weight is not None:
        scale = t.pointwise("mul", scale, t.op("take", weight, t.op("where", used, column, 0), dim=0), dtype=kind)
    return t.where(t.op("bit_and", used, is_at(t, column, dim, x.tensor.shape[dim])), scale, 0.0)
