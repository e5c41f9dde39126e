"""Translations of ONNX operators that rearrange elements: the result's shape is sizes, the data only move.

    Reshape(x: f32[b, t, 768], [0, -1, 12, 64])  -->  reshape(x | shape=(b, t, 12, 64))
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from anyshape.frontend.aten.index import concat as concat_parts
from anyshape.frontend.aten.table import Decline, Mismatch, is_float
from anyshape.frontend.importer_onnx.model import ELEMENTS
from anyshape.frontend.importer_onnx.table import Call, moves, translates
from anyshape.frontend.symbols.known import Known, Ratio
from anyshape.frontend.symbols.numpy_arrays import dtype_of
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, Size, coefficient_of, floordiv, maximum, minimum, product, symbols_of
from anyshape.sym.prover import prove_at_most, prove_nonnegative
from anyshape.torch_compat import aten


@translates("Reshape")
def reshape(c: Call) -> Any:
    x = c.value(0)
    wanted = list(c.sizes(1) if c.has(1) else c.attr("shape"))
    have = x.tensor.shape
    if not c.attr("allowzero", 0):
        wanted = [have[place] if size == 0 and place < len(have) else size for place, size in enumerate(wanted)]
    if wanted.count(-1) == 1:
        at = wanted.index(-1)
        left, rest = list(have), wanted[:at] + wanted[at + 1:]
        for size in list(rest):  # equal dims are taken out of both, so that n*0 = n*(-1) has one answer
            if size in left:
                left.remove(size)
                rest.remove(size)
        if product(rest) == 0:
            raise Decline("a size of -1 beside one of 0")
        wanted[at] = floordiv(product(left), product(rest))
    count = product(wanted)
    if isinstance(count, int) and isinstance(x.tensor.count, int) and count != x.tensor.count:
        raise Mismatch(x.tensor.count, count)
    if count != x.tensor.count:
        return _refilled(c, x, wanted, count)
    return c.t.reshape(x, wanted)


def _refilled(c: Call, x: Value, wanted: Sequence[Size], count: Size) -> Value:
    """A reshape of which nothing shows that the counts are equal: a symbol is written as the other sizes, or a call is
    checked for it."""
    have = x.tensor.count
    difference = count - have
    for name in symbols_of(difference):
        parts = coefficient_of(difference, name)
        if parts is not None and parts[0] in (1, -1):
            raise Mismatch(have, count)
    c.assume(count - have)
    c.assume(have - count)
    flat = c.op("reshape", x, shape=(have,))
    return c.op("reshape", c.t.window(flat, 0, 0, count), shape=tuple(wanted))


@translates("Flatten")
def flatten(c: Call) -> Any:
    x = c.value(0)
    axis = c.attr("axis", 1)
    axis = axis + x.tensor.rank if axis < 0 else axis
    return c.t.reshape(x, (product(x.tensor.shape[:axis]), product(x.tensor.shape[axis:])))


@translates("Squeeze")
def squeeze(c: Call) -> Any:
    x = c.value(0)
    axes = c.ints(1, "axes")
    rank = x.tensor.rank
    if axes is None:
        chosen = {d for d, n in enumerate(x.tensor.shape) if _is_one(c, n)}
    else:
        chosen = {c.dim(axis, rank) for axis in axes}
    for d in chosen:
        if x.tensor.shape[d] != 1:
            raise Mismatch(x.tensor.shape[d], 1)
    return c.t.reshape(x, tuple(n for d, n in enumerate(x.tensor.shape) if d not in chosen))


def _is_one(c: Call, size: Size) -> bool:
    """Whether a size is 1. One that is not known is taken to be larger; calls in which it is 1, or 0, have programs of
    their own."""
    for least in (2, 1):
        if not prove_at_most(c.t.sizes.facts(), size, least - 1):
            c.presume(size - least)
        if prove_at_most(c.t.sizes.facts(), least, size):
            return least == 1
    return False


@translates("Unsqueeze")
def unsqueeze(c: Call) -> Any:
    x = c.value(0)
    axes = c.ints(1, "axes")
    rank = x.tensor.rank + len(axes)
    own = iter(x.tensor.shape)
    places = {c.dim(axis, rank) for axis in axes}
    return c.t.reshape(x, tuple(1 if d in places else next(own) for d in range(rank)))


@translates("Transpose")
def transpose(c: Call) -> Any:
    x = c.value(0)
    return c.t.permute(x, c.attr("perm", tuple(reversed(range(x.tensor.rank)))))


@translates("Concat")
@moves()
def concat(c: Call) -> Any:
    parts = c.values()
    return concat_parts(c.t, parts, c.axis(1, parts[0].tensor.rank))


@translates("Expand")
def expand(c: Call) -> Any:
    x, wanted = c.value(0), list(c.sizes(1))
    return expanded(c, x, wanted)


def expanded(c: Call, x: Value, wanted: Sequence[Size]) -> Value:
    """numpy's broadcasting in both directions."""
    rank = max(x.tensor.rank, len(wanted))
    have = (1,) * (rank - x.tensor.rank) + x.tensor.shape
    want = (1,) * (rank - len(wanted)) + tuple(wanted)
    shape = []
    for m, n in zip(have, want, strict=True):
        if m != n and m != 1 and n != 1:
            raise Mismatch(m, n)
        shape.append(n if m == 1 else m)
    return c.t.broadcast(c.t.reshape(x, have), shape)  # type: ignore[no-any-return]


@translates("Tile")
@moves(0)
def tile(c: Call) -> Any:
    x, times = c.value(0), c.sizes(1)
    shape = tuple(n * t for n, t in zip(x.tensor.shape, times, strict=True))
    return c.aten(aten.repeat.default, x, list(times), types=TensorType(x.tensor.dtype, shape))


@translates("ConstantOfShape")
def constant_of_shape(c: Call) -> Any:
    value = c.attr("value")
    if value is None:
        return c.t.full(0.0, c.sizes(0), "f32")
    item = value.reshape(-1)[0]
    dtype = dtype_of(value)
    return c.t.full(float(item) if is_float(dtype) else item.item(), c.sizes(0), dtype)


@translates("Range")
def range_(c: Call) -> Any:
    dtype = c.dtype(0)
    if is_float(dtype) and not _counts(c):
        first, last, by = (float(c.numbers(place)[0]) for place in range(3))
        return c.t.cast(c.t.iota(max(0, math.ceil((last - first) / by)), first, by, dtype), dtype)
    start, limit = c.sizes(0)[0], c.sizes(1)[0]
    step = int(c.numbers(2)[0])
    if step == 0:
        raise Decline("a range in steps of 0")
    count = floordiv(limit - start + step - 1, step) if step > 0 else floordiv(start - limit - step - 1, -step)
    if not prove_nonnegative(c.t.sizes.facts(), count):
        count = maximum(count, 0)
    return c.t.iota(count, start, step, dtype)


def _counts(c: Call) -> bool:
    """Whether a range of floats goes over sizes, in whole steps."""
    operands = [c.at(place) for place in range(3)]
    items = [one.items()[0] if isinstance(one, Known) else 0.5 for one in operands]
    return any(isinstance(one, Expr) for one in items) and all(
        isinstance(one, Expr) or (not isinstance(one, Ratio) and one == int(one)) for one in items)


# ---- slices


def _bound(c: Call, at: Size, size: Size, low: Size, high: Size) -> Size:
    """A bound of a slice as numpy takes it: counted from the end when negative, then put into [low, high]."""
    facts = c.t.sizes.facts()
    if isinstance(at, int):
        if abs(at) >= FAR:
            return high if at > 0 else low
        at = at + size if at < 0 else at
    elif not prove_nonnegative(facts, at):
        # where it may count from either end, there is a program for each: from the back is meant by -n, else the front
        from_the_back = prove_at_most(facts, at, 0)
        c.presume(-at - 1 if from_the_back else at)
        facts = c.t.sizes.facts()
        if prove_at_most(facts, at, -1):
            at = at + size
    if not prove_at_most(facts, low, at):
        at = maximum(at, low)
    return at if prove_at_most(facts, at, high) else minimum(at, high)


FAR = (1 << 31) - 1  # from here on a bound means the end: "pass in INT_MAX" (ONNX Slice-13)


@translates("Slice")
def slice_(c: Call) -> Any:
    x = c.value(0)
    rank = x.tensor.rank
    if c.has(1):
        starts, ends = c.sizes(1, 1 << 64), c.sizes(2, 1 << 64)
        axes = c.ints(3, default=tuple(range(len(starts))))
        steps = c.ints(4, default=(1,) * len(starts))
    else:
        starts, ends = c.attr("starts"), c.attr("ends")
        axes, steps = c.attr("axes", tuple(range(len(starts)))), (1,) * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = c.dim(axis, rank)
        size = x.tensor.shape[axis]
        if step > 0:
            begin, stop = _bound(c, start, size, 0, size), _bound(c, end, size, 0, size)
            x = _taken(c, x, axis, begin, stop - begin, step)
        else:
            begin = _bound(c, start, size, -1, size - 1)
            stop = _bound(c, end, size, -1, size - 1)
            x = c.op("flip", x, dims=(axis,))
            x = _taken(c, x, axis, size - 1 - begin, begin - stop, -step)
    return x


def _taken(c: Call, x: Value, axis: int, begin: Size, length: Size, step: int) -> Value:
    count = floordiv(length + step - 1, step)
    if not prove_nonnegative(c.t.sizes.facts(), count):
        count = maximum(count, 0)
    return c.t.window(x, axis, begin, count, step)


@translates("Split")
def split(c: Call) -> Any:
    x = c.value(0)
    axis = c.axis(0)
    size = x.tensor.shape[axis]
    parts = list(c.sizes(1)) if c.has(1) else list(c.attr("split", ()))
    if not parts:
        count = c.attr("num_outputs", len(c.node.outputs))
        each = floordiv(size + count - 1, count)
        parts = [each] * (count - 1)
        parts.append(size - each * (count - 1))
    total: Size = 0
    for part in parts:
        total = total + part
    if total != size:
        raise Mismatch(size, total)
    found = []
    start: Size = 0
    for part in parts:
        found.append(c.t.window(x, axis, start, part))
        start = start + part
    return tuple(found)


# ---- padding


@translates("Pad")
@moves(0, 2)
def pad(c: Call) -> Any:
    x, mode = c.value(0), c.attr("mode", "constant")
    rank = x.tensor.rank
    given = list(c.sizes(1)) if c.has(1) else list(c.attr("pads", c.attr("paddings", ())))
    axes = [c.dim(axis, rank) for axis in c.ints(3, default=range(rank))]
    half = len(given) // 2
    low: list[Size] = [0] * rank
    high: list[Size] = [0] * rank
    for place, axis in enumerate(axes):
        low[axis], high[axis] = given[place], given[half + place]
    if mode != "constant":
        for axis in axes:
            x = _padded(c, x, axis, low[axis], high[axis], mode)
        return x
    value = c.numbers(2)[0] if c.has(2) and not isinstance(c.at(2), Value) else c.attr("value", 0)
    if isinstance(c.at(2), Value):
        return _padded_by(c, x, low, high)
    if x.tensor.dtype == "bool":
        value = bool(value)
    elif is_float(x.tensor.dtype):
        value = float(value)
    else:
        value = int(value)
    return x if not any(n != 0 for n in (*low, *high)) else c.op("pad", x, low=tuple(low), high=tuple(high),
                                                                value=value)


def _padded_by(c: Call, x: Value, low: list[Size], high: list[Size]) -> Value:
    """Padding with a number that is data."""
    if x.tensor.dtype == "bool":
        raise Decline("bools padded with data")
    zero = 0.0 if is_float(x.tensor.dtype) else 0
    whole = c.op("pad", x, low=tuple(low), high=tuple(high), value=zero)
    inside = c.op("pad", c.t.full(True, x.tensor.shape, "bool"), low=tuple(low), high=tuple(high), value=False)
    return c.t.where(inside, whole, c.t.reshape(c.value(2), ()), x.tensor.dtype)  # type: ignore[no-any-return]


def _padded(c: Call, x: Value, axis: int, low: Size, high: Size, mode: str) -> Value:
    """Elements of the tensor itself around it: a lookup of its positions."""
    if low == 0 and high == 0:
        return x
    size = x.tensor.shape[axis]
    facts = c.t.sizes.facts()
    count = size + low + high
    at = c.t.iota(count, -low, 1)
    if mode == "edge":
        at = c.op("minimum", c.op("maximum", at, 0), size - 1)
    elif mode == "wrap":
        at = c.op("remainder", at, c.t.full(size, (), "i64"))
    elif mode == "reflect":
        if not (isinstance(low, int) and isinstance(high, int)):
            raise Decline("reflection over sizes")
        # |i| before, 2(n - 1) - i behind; more than n - 1 on a side goes back and forth
        period = 2 * (size - 1)
        if isinstance(size, int) and size == 1:
            at = c.t.full(0, (count,), "i64")
        elif prove_at_most(facts, max(low, high), size - 1):
            at = c.op("abs", at)
            at = c.op("minimum", at, c.op("sub", c.t.full(period, (), "i64"), at))
        else:
            at = c.op("remainder", at, c.op("maximum", c.t.full(period, (), "i64"), 1))
            at = c.op("minimum", at, c.op("sub", c.t.full(period, (), "i64"), at))
    else:
        raise Decline(f"padding by {mode}")
    return c.op("take", x, at, dim=axis)


@translates("CenterCropPad")
def center_crop_pad(c: Call) -> Any:
    x, wanted = c.value(0), c.sizes(1)
    rank = x.tensor.rank
    axes = [c.dim(axis, rank) for axis in c.attr("axes", tuple(range(rank)))]
    facts = c.t.sizes.facts()
    for axis, want in zip(axes, wanted, strict=True):
        have = x.tensor.shape[axis]
        if prove_at_most(facts, want, have):
            x = c.t.window(x, axis, floordiv(have - want, 2), want)
        elif prove_at_most(facts, have, want):
            low = [floordiv(want - have, 2) if d == axis else 0 for d in range(rank)]
            high = [want - have - floordiv(want - have, 2) if d == axis else 0 for d in range(rank)]
            x = c.op("pad", x, low=tuple(low), high=tuple(high), value=0.0 if is_float(x.tensor.dtype) else 0)
        else:  # whichever is larger: padded to both, then cut
            both = maximum(have, want)
            lower = floordiv(both - have, 2)
            low = [lower if d == axis else 0 for d in range(rank)]
            high = [both - have - lower if d == axis else 0 for d in range(rank)]
            x = c.op("pad", x, low=tuple(low), high=tuple(high), value=0.0 if is_float(x.tensor.dtype) else 0)
            x = c.t.window(x, axis, floordiv(both - want, 2), want)
    return x


@translates("DepthToSpace")
def depth_to_space(c: Call) -> Any:
    x, size = c.value(0), c.attr("blocksize")
    n, depth, h, w = x.tensor.shape
    each = floordiv(depth, size * size)
    if c.attr("mode", "DCR") == "DCR":
        x = c.t.permute(c.t.reshape(x, (n, size, size, each, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        x = c.t.permute(c.t.reshape(x, (n, each, size, size, h, w)), (0, 1, 4, 2, 5, 3))
    return c.t.reshape(x, (n, each, h * size, w * size))


@translates("SpaceToDepth")
def space_to_depth(c: Call) -> Any:
    x, size = c.value(0), c.attr("blocksize")
    n, depth, h, w = x.tensor.shape
    rows, columns = floordiv(h, size), floordiv(w, size)
    order = (0, 3, 5, 1, 2, 4) if c.attr("mode", "DCR") == "DCR" else (0, 1, 3, 5, 2, 4)
    x = c.t.permute(c.t.reshape(x, (n, depth, rows, size, columns, size)), order)
    return c.t.reshape(x, (n, depth * size * size, rows, columns))


@translates("Trilu")
def triangle(c: Call) -> Any:
    x = c.value(0)
    diagonal = c.sizes(1)[0] if c.has(1) else 0
    rows, columns = x.tensor.shape[-2:]
    across = c.op("sub", c.t.iota(columns), c.t.reshape(c.t.iota(rows), (rows, 1)))
    inside = c.op("ge" if c.attr("upper", 1) else "le", across, diagonal)
    dtype = x.tensor.dtype
    return c.t.where(inside, x, False if dtype == "bool" else 0, dtype)


@translates("EyeLike")
def eye_like(c: Call) -> Any:
    kind = c.kind(0)
    dtype = ELEMENTS[c.attr("dtype")] if c.attr("dtype") is not None else kind.dtype
    rows, columns = kind.shape
    across = c.op("sub", c.t.iota(columns), c.t.reshape(c.t.iota(rows), (rows, 1)))
    return c.t.cast(c.op("eq", across, c.attr("k", 0)), dtype)


