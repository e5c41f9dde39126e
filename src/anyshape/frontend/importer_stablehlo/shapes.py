"""Translations of StableHLO operations that move elements and compute nothing: broadcast, reshape, slice, pad."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.table import COMPLEX, Call, held, translates
from anyshape.frontend.symbols.known import Known
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Expr, Size, ceildiv, maximum, product
from anyshape.sym.prover import prove_equal, prove_nonnegative

aten = torch.ops.aten


def reshaped(c: Call, x: Value, shape: Sequence[Size]) -> Value:
    """The elements of x under another shape, whose number of elements may be written otherwise."""
    count = product(shape)
    if x.tensor.count != count:
        if not prove_equal(c.walk.facts, x.tensor.count, count):
            c.walk.must(x.tensor.count, count)
        x = c.t.window(c.op("reshape", x, shape=(x.tensor.count,)), 0, 0, count)
    return c.t.reshape(x, shape)


@translates("reshape")
def reshape(c: Call) -> Any:
    return reshaped(c, c.value(0), c.shape)


@translates("dynamic_reshape")
def dynamic_reshape(c: Call) -> Any:
    return reshaped(c, c.value(0), c.sizes(1))


@translates("transpose")
def transpose(c: Call) -> Any:
    return c.t.permute(c.value(0), c.attr("permutation"))


def spread(c: Call, shape: Sequence[Size], dims: Sequence[int]) -> Value:
    """The first operand under a larger shape: dim k is dim dims[k] of it."""
    one = c.inputs[0]
    if isinstance(one, Known) and one.array.size == 1 and one.dtype not in COMPLEX:
        item = one.items()[0]
        if isinstance(item, (bool, int, float, Expr)):
            return c.t.full(item, shape, held(c.dtype))
        if one.dtype == "bf16":
            return c.t.full(float(item), shape, "bf16")
    x = c.value(0)
    order = sorted(range(len(dims)), key=lambda d: dims[d])
    x = c.t.permute(x, order)
    middle: list[Size] = [1] * len(shape)
    for d in order:
        size = x.tensor.shape[order.index(d)]
        if size != 1 and size != shape[dims[d]]:
            x = c.shaped(x, [shape[dims[d]] if k == order.index(d) else n for k, n in enumerate(x.tensor.shape)])
            size = shape[dims[d]]
        middle[dims[d]] = size
    return c.t.broadcast(c.t.reshape(x, middle), shape)


@translates("broadcast_in_dim")
def broadcast_in_dim(c: Call) -> Any:
    return spread(c, c.shape, c.attr("broadcast_dimensions"))


@translates("broadcast")
def broadcast(c: Call) -> Any:
    sizes = c.attr("broadcast_sizes")
    have = c.sizes_of(0)
    return spread(c, (*sizes, *have), range(len(sizes), len(sizes) + len(have)))


@translates("dynamic_broadcast_in_dim")
def dynamic_broadcast_in_dim(c: Call) -> Any:
    return spread(c, c.sizes(1), c.attr("broadcast_dimensions"))


def counted(c: Call, shape: Sequence[Size], dim: int, dtype: str) -> Value:
    """0, 1, 2, ... along one dim, the same along all others."""
    plain = held(dtype)
    line = c.t.cast(c.t.iota(shape[dim]), plain if kind_of(plain) != "bool" else "i64")
    return c.t.broadcast(c.t.reshape(line, [n if d == dim else 1 for d, n in enumerate(shape)]), shape)


@translates("iota")
def iota(c: Call) -> Any:
    return _counted(c, c.shape)


@translates("dynamic_iota")
def dynamic_iota(c: Call) -> Any:
    return _counted(c, c.sizes(0))


def _counted(c: Call, shape: Sequence[Size]) -> Value:
    half = {"c64": "f32", "c128": "f64"}.get(c.dtype, c.dtype)
    line = c.wrapped(counted(c, shape, c.attr("iota_dimension"), half))
    return c.of_parts(line, c.t.full(0.0, shape, half)) if c.dtype in COMPLEX else line


@translates("reverse")
def reverse(c: Call) -> Any:
    x, dims = c.value(0), tuple(sorted(c.attr("dimensions")))
    if not dims:
        return x
    if c.dtype in COMPLEX:
        return c.aten(aten.flip.default, x, dims, types=c.type(x.tensor.shape))
    return c.op("flip", x, dims=dims)


@translates("concatenate")
def concatenate(c: Call) -> Any:
    values, dim = c.values(), c.attr("dimension")
    first = values[0].tensor.shape
    values = [c.shaped(one, [n if d == dim else first[d] for d, n in enumerate(one.tensor.shape)]) for one in values]
    if len(values) == 1:
        return values[0]
    if c.dtype in COMPLEX:
        total: Size = 0
        for one in values:
            total = total + one.tensor.shape[dim]
        return c.extern("aten.cat.default", values, dim,
                        types=c.type([total if d == dim else n for d, n in enumerate(first)]))
    return c.op("concat", *values, dim=dim)


# ---- slices


def sliced(c: Call, x: Value, starts: Sequence[Size], limits: Sequence[Size], steps: Sequence[Any]) -> Value:
    """Elements from `starts` to below `limits`, every `steps`th."""
    for dim, (start, limit, step) in enumerate(zip(starts, limits, steps, strict=True)):
        if not isinstance(step, int):
            raise Decline("a step that is a size")
        count = limit - start if step == 1 else ceildiv(limit - start, step)
        if isinstance(count, Expr) and not prove_nonnegative(c.walk.facts, count):
            count = maximum(0, count)
        x = c.t.window(x, dim, start, count, step)
    return x


@translates("slice")
def slice_(c: Call) -> Any:
    return sliced(c, c.value(0), c.attr("start_indices"), c.attr("limit_indices"), c.attr("strides"))


@translates("real_dynamic_slice")
def real_dynamic_slice(c: Call) -> Any:
    return sliced(c, c.value(0), c.sizes(1), c.sizes(2), c.sizes(3))


def clamped(c: Call, start: Any, most: Size) -> Any:
    """A start index between 0 and `most`: a size, or an i64 of rank 0."""
    if isinstance(start, Known) and start.array.dtype != object:
        number = int(start.items()[0])
        if number <= 0:
            return 0
        if isinstance(most, int):
            return min(number, most)
        start = c.t.full(number, (), "i64")
    value = c.t.cast(c.tensor(start), "i64")
    return c.op("maximum", c.op("minimum", value, c.t.full(most, (), "i64")), 0)


@translates("dynamic_slice")
def dynamic_slice(c: Call) -> Any:
    x, sizes = c.value(0), c.attr("slice_sizes")
    for dim, size in enumerate(sizes):
        have = x.tensor.shape[dim]
        if have == size:
            continue
        start = clamped(c, c.inputs[1 + dim], have - size)
        if isinstance(start, int):
            x = c.t.window(x, dim, start, size)
            continue
        places = c.op("add", c.t.iota(size), c.t.broadcast(c.t.reshape(start, (1,)), (size,)))
        x = c.op("take", x, places, dim=dim)
    return x


@translates("dynamic_update_slice")
def dynamic_update_slice(c: Call) -> Any:
    x, update = c.value(0), c.value(1)
    shape, part = x.tensor.shape, update.tensor.shape
    moving = [d for d in range(len(shape)) if shape[d] != part[d]]
    starts = {d: clamped(c, c.inputs[2 + d], shape[d] - part[d]) for d in moving}
    if not moving:
        return update
    if c.dtype in COMPLEX:
        return c.by_parts(lambda one, other: _updated(c, one, other, moving, starts), x, update)
    return _updated(c, x, update, moving, starts)


def _updated(c: Call, x: Value, update: Value, moving: Sequence[int], starts: dict[int, Any]) -> Value:
    shape, part = x.tensor.shape, update.tensor.shape
    if len(moving) == 1 and isinstance(starts[moving[0]], int):
        return c.op("overwrite", x, update, dim=moving[0], start=starts[moving[0]], step=1)
    # a row of places for each moving dim, which come first in both
    order = [*moving, *(d for d in range(len(shape)) if d not in moving)]
    places = []
    for position, d in enumerate(moving):
        start = starts[d] if isinstance(starts[d], Value) else c.t.full(starts[d], (), "i64")
        line = c.op("add", c.t.iota(part[d]), c.t.broadcast(c.t.reshape(start, (1,)), (part[d],)))
        places.append(c.t.broadcast(c.t.reshape(line, [part[d] if k == position else 1 for k in range(len(moving))]),
                                    [part[k] for k in moving]))
    done = c.op("put", c.t.permute(x, order), c.t.permute(update, order), *places, dims=tuple(range(len(moving))))
    return c.t.permute(done, [order.index(d) for d in range(len(shape))])


# ---- padding


def spaced(c: Call, x: Value, dim: int, gap: Any, fill: Any) -> Value:
    """`gap` elements between any two along one dim."""
    if gap == 0:
        return x
    if not (gap >= 0 if isinstance(gap, int) else prove_nonnegative(c.walk.facts, gap)):
        raise Decline("a gap that may be below 0")
    shape: list[Size] = list(x.tensor.shape)
    size = shape[dim]
    shape[dim:dim + 1] = [size, 1]
    x = padded(c, c.t.reshape(x, shape), [0] * len(shape),
               [gap if d == dim + 1 else 0 for d in range(len(shape))], fill)
    shape[dim:dim + 2] = [size * (gap + 1)]
    x = c.t.reshape(x, shape)
    count = size * (gap + 1) - gap
    return c.t.window(x, dim, 0, count if prove_nonnegative(c.walk.facts, count) else maximum(0, count))


def padded(c: Call, x: Value, low: Sequence[Size], high: Sequence[Size], fill: Any) -> Value:
    """More (or fewer) elements at both ends of each dim. fill: a number, or a tensor of rank 0."""
    if all(a == 0 and b == 0 for a, b in zip(low, high, strict=True)):
        return x
    if x.tensor.dtype in COMPLEX:
        return c.by_parts(lambda part, one: padded(c, part, low, high, one), x, fill)
    if not isinstance(fill, Value):
        if kind_of(x.tensor.dtype) == "float":
            fill = float(fill)
        return c.op("pad", x, low=tuple(low), high=tuple(high), value=fill)
    inside = c.op("pad", c.t.full(True, x.tensor.shape, "bool"), low=tuple(low), high=tuple(high), value=False)
    zero = False if x.tensor.dtype == "bool" else 0.0 if kind_of(x.tensor.dtype) == "float" else 0
    value = c.op("pad", x, low=tuple(low), high=tuple(high), value=zero)
    around = c.t.broadcast(c.t.reshape(fill, (1,) * value.tensor.rank), value.tensor.shape)
    return c.op("where", inside, value, around)


def _pad(c: Call, low: Sequence[Size], high: Sequence[Size], gaps: Sequence[Any]) -> Value:
    fill = c.operand(1)
    if not isinstance(fill, (bool, int, float, complex, Value)):
        fill = float(fill)
    x = c.value(0)
    for dim, gap in enumerate(gaps):
        x = spaced(c, x, dim, gap, fill)
    return padded_or_cut(c, x, low, high, fill)


def padded_or_cut(c: Call, x: Value, low: Sequence[Size], high: Sequence[Size], fill: Any) -> Value:
    """More elements at both ends of each dim, or fewer where a number is negative. fill: as of `padded`."""
    if not any(isinstance(n, int) and n < 0 for n in (*low, *high)):
        return padded(c, x, low, high, fill)
    for dim, (a, b) in enumerate(zip(low, high, strict=True)):
        x = _one_dim(c, x, dim, a, b, fill)
    return x


def _one_dim(c: Call, x: Value, dim: int, low: Size, high: Size, fill: Any) -> Value:
    """Padding of one dim, or a cut where it is negative; what is cut may be padding of the other end."""
    cut = [-n if isinstance(n, int) and n < 0 else 0 for n in (low, high)]
    before, after = ([n if d == dim and not less else 0 for d in range(x.tensor.rank)]
                     for n, less in zip((low, high), cut, strict=True))
    x = padded(c, x, before, after, fill)
    if any(cut):
        left = x.tensor.shape[dim] - sum(cut)
        if isinstance(left, int) and left < 0:
            raise Decline("more is cut than there is")
        x = c.t.window(x, dim, cut[0], left)
    return x


@translates("pad")
def pad(c: Call) -> Any:
    return _pad(c, c.attr("edge_padding_low"), c.attr("edge_padding_high"), c.attr("interior_padding"))


@translates("dynamic_pad")
def dynamic_pad(c: Call) -> Any:
    return _pad(c, c.sizes(2), c.sizes(3), c.sizes(4))
