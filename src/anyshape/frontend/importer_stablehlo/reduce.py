"""Translations of StableHLO's reductions, windows and sorts.

What a body means is found by its one operation; of sorts and of the largest element with its place, by trying the body
on numbers. A body of another kind is applied to halves of the operand, and these to halves again.
"""
from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.elementwise import total_order
from anyshape.frontend.importer_stablehlo.module import Block, Type
from anyshape.frontend.importer_stablehlo.shapes import padded, padded_or_cut, spaced
from anyshape.frontend.importer_stablehlo.table import COMPLEX, Call, held, translates
from anyshape.frontend.symbols.known import Known, Unknown
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Size, floordiv

aten = torch.ops.aten

REDUCES = {"add": "sum", "multiply": "prod", "maximum": "amax", "minimum": "amin"}
MOST_WINDOW = 256  # positions of a window that are unrolled
MOST_HALVES = 16  # halvings: 65536 elements
MOST_DRAWS = 48  # on which a body is tried


def only(block: Block) -> str:
    """The operation of a body that is one operation on its two arguments; "" for others."""
    if len(block.operations) == 1 and block.results == block.operations[0].outputs and sorted(
            block.operations[0].inputs) == sorted(block.arguments):
        return block.operations[0].name.removeprefix("stablehlo.")
    return ""


def _is_neutral(one: Any, name: str, dtype: str) -> bool:
    """Does a first value change nothing?"""
    if not isinstance(one, Known) or one.array.dtype == object:
        return False
    value = one.array.reshape(-1)[0]
    if name in ("add", "or"):
        return bool(value == 0)
    if name == "multiply":
        return bool(value == 1)
    if name == "and":
        return bool(value == np.invert(np.zeros_like(value)))
    if dtype in COMPLEX:
        return False
    kind = one.array.dtype
    if kind.kind == "b":
        return bool(value) == (name == "minimum")
    if np.issubdtype(kind, np.integer):
        limits = np.iinfo(kind)
        return bool(value == (limits.min if name == "maximum" else limits.max))
    return bool(float(value) == (-math.inf if name == "maximum" else math.inf))


def _changes_nothing(c: Call, body: Block, first: Sequence[Any]) -> bool:
    """Are first values neutral to a body? Padding is made of them, and counts where they are not."""
    if len(first) == 1 and only(body):
        return _is_neutral(first[0], only(body), c.dtype)
    if not all(isinstance(one, Known) and one.array.dtype != object for one in first):
        return False
    start = [one.items()[0] for one in first]
    return all(_probe(c, body, *start, *given[::2]) == _typed(body, given[::2])
               for given in _draws(body.types[:len(first)]))


def is_associative(c: Call, body: Block) -> bool:
    """May a body's operands be grouped otherwise? Tried on numbers."""
    tries = list(_draws(body.types[:len(body.types) // 2]))
    for (one, other) in itertools.pairwise(tries):
        a, b, d = one[::2], one[1::2], other[::2]
        first, last = _probe(c, body, *a, *b), _probe(c, body, *b, *d)
        if first is None or last is None:
            return False
        left, right = _probe(c, body, *first, *d), _probe(c, body, *a, *last)
        if left is None or right is None or not all(
                np.isclose(x, y, rtol=1e-4, atol=1e-4) if isinstance(x, (float, complex)) else x == y
                for x, y in zip(left, right, strict=True)):
            return False
    return True


# ---- reduce


@translates("reduce")
def reduce(c: Call) -> Any:
    dims = tuple(sorted(c.attr("dimensions")))
    count = len(c.inputs) // 2
    body = c.operation.regions[0]
    values = c.same([c.tensor(one) for one in c.inputs[:count]])
    first = c.inputs[count:]
    if count == 1:
        found = _plainly(c, only(body), values[0], dims)
        if found is not None:
            if _is_neutral(first[0], only(body), c.dtype):
                return found
            return c.walk.run(body, (c.t.broadcast(_lone(c, first[0], found.tensor.rank), found.tensor.shape), found))
    elif count == 2:
        found = _extreme(c, body, values, dims)
        if found is not None:
            return found
    for dim in reversed(dims):
        values = _halved(c, body, values, dim, first)
    start = [c.t.broadcast(_lone(c, one, value.tensor.rank), value.tensor.shape)
             for one, value in zip(first, values, strict=True)]
    return c.walk.run(body, (*start, *values))


def _lone(c: Call, one: Any, rank: int) -> Value:
    return c.t.reshape(c.tensor(one), (1,) * rank)


def _plainly(c: Call, name: str, x: Value, dims: Sequence[int]) -> Value | None:
    """A reduction that is a row."""
    if not dims:
        return x if name else None
    if c.dtype in COMPLEX:
        if name == "add":
            return c.extern("aten.sum.dim_IntList", x, list(dims), types=c.type(  # type: ignore[no-any-return]
                [n for d, n in enumerate(x.tensor.shape) if d not in dims]))
        return None
    if c.dtype == "bool":
        name = {"add": "or", "maximum": "or", "multiply": "and", "minimum": "and"}.get(name, name)
        row = {"or": "any", "and": "all"}.get(name)
        return None if row is None else c.op(row, x, dims=tuple(dims), keep=False)
    row = REDUCES.get(name)
    if row is None:
        return None
    if c.dtype == "u64" and row in ("amax", "amin"):
        return c.op("bit_xor", c.op(row, c.op("bit_xor", x, -(1 << 63)), dims=tuple(dims), keep=False), -(1 << 63))
    found = c.op(row, x, dims=tuple(dims), keep=False)
    return c.wrapped(c.t.cast(found, x.tensor.dtype))


def _halved(c: Call, body: Block, values: Sequence[Value], dim: int, first: Sequence[Any]) -> list[Value]:
    """The values with one dim reduced: both halves by the body, until one element is left."""
    values = list(values)
    size = values[0].tensor.shape[dim]
    if not isinstance(size, int):
        raise Decline("a body of several operations over a dim whose size is not known")
    if size > 1 << MOST_HALVES:
        raise Decline(f"a body of several operations over {size} elements")
    if size == 0:
        shape = [n for d, n in enumerate(values[0].tensor.shape) if d != dim]
        return [c.t.broadcast(_lone(c, one, len(shape)), shape) for one in first]
    while size > 1:
        half = size // 2
        left = [c.t.window(value, dim, 0, half) for value in values]
        right = [c.t.window(value, dim, half, half) for value in values]
        done = [c.tensor(one) for one in c.walk.run(body, (*left, *right))]
        if size % 2:
            done = [joined(c, [a, c.t.window(b, dim, 2 * half, 1)], dim) for a, b in zip(done, values, strict=True)]
        values, size = done, half + size % 2
    shape = [n for d, n in enumerate(values[0].tensor.shape) if d != dim]
    return [c.t.reshape(value, shape) for value in values]


def joined(c: Call, values: Sequence[Value], dim: int) -> Value:
    if values[0].tensor.dtype in COMPLEX:
        shape = list(values[0].tensor.shape)
        shape[dim] = sum(one.tensor.shape[dim] for one in values)  # type: ignore[misc]
        return c.extern("aten.cat.default", list(values), dim,  # type: ignore[no-any-return]
                        types=c.type(shape, values[0].tensor.dtype))
    return c.op("concat", *values, dim=dim)


def _probe(c: Call, body: Block, *numbers: Any) -> list[Any] | None:
    """What a body gives for numbers; None where it cannot be folded."""
    arguments = [Known(np.asarray(one, numpy_dtype(kind.dtype)), kind.dtype)
                 for one, kind in zip(numbers, body.types, strict=True)]
    try:
        found = c.walk.run(body, arguments)
        return [one.items()[0] for one in found] if all(isinstance(one, Known) for one in found) else None
    except (Decline, Unknown):
        return None


def _draws(kinds: Sequence[Type]) -> Iterator[list[Any]]:
    """What to try a body on: two numbers of each type, of both signs, near and far, every other time two equal ones."""
    draw = random.Random(0)
    for _ in range(MOST_DRAWS):
        given: list[Any] = []
        for kind in kinds:
            dtype = numpy_dtype(kind.dtype)
            if dtype.kind == "b":
                pool: tuple[Any, ...] = (False, True)
            elif dtype.kind in "iu":
                low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
                pool = (low, high, low // 2, 1, 2, 5, *((-1, -2, -3) if low else (0, 3, 4)))
            elif kind.dtype in COMPLEX:
                pool = (1 + 2j, 1 - 3j, -2 + 2j, -2 + 0.25j, 0.75j)
            else:
                pool = (-1e4, -2.5, -1.0, 0.25, 0.75, 3.0, 1e4)
            first = draw.choice(pool)
            given += [first, first if draw.random() < 0.5 else draw.choice(pool)]
        yield given


def _extreme(c: Call, body: Block, values: Sequence[Value], dims: Sequence[int]) -> Any:
    """The largest or smallest element with its place, the first of equal ones, as argmax and argmin have it."""
    x, places = values
    if len(dims) != 1 or c.dtype in COMPLEX or body.types[1].dtype not in ("i32", "i64", "u32") or c.dtype in (
            "bool", "u64") or not _is_counted(c, places, dims[0]):
        return None
    floats = kind_of(x.tensor.dtype) == "float"
    cases: list[tuple[float, int, float, int]] = [(1, 0, 2, 1), (2, 0, 1, 1), (1, 0, 1, 1), (1, 5, 1, 3)]
    if floats:
        cases += [(math.nan, 0, 1, 1), (1, 0, math.nan, 1), (math.nan, 0, math.nan, 1)]
    answers = [_probe(c, body, a, i, b, j) for a, i, b, j in cases]
    for name, better in (("argmax", [1, 0, 0, 3]), ("argmin", [0, 1, 0, 3])):
        wanted = [*better, *([0, 1, 0] if floats else [])]
        if [None if one is None else one[1] for one in answers] == wanted and _picks(c, body, name == "argmax"):
            shape = [n for d, n in enumerate(x.tensor.shape) if d not in dims]
            at = c.aten(getattr(aten, name).default, x, dims[0], False, types=c.type(shape, "i64"))
            largest = c.op("amax" if name == "argmax" else "amin", x, dims=tuple(dims), keep=False)
            return c.t.cast(largest, x.tensor.dtype), c.t.cast(at, places.tensor.dtype)
    return None


def _picks(c: Call, body: Block, largest: bool) -> bool:
    """Does a body keep the larger or the smaller number with its place, and of equal ones the first place?"""
    for a, b, i, j in _draws(body.types[:2]):
        i, j = max(i, 0), max(j, 0)
        first = (a > b) == largest if a != b else i <= j
        if _probe(c, body, a, i, b, j) != _typed(body, (a, i) if first else (b, j)):
            return False
    return True


def _typed(body: Block, given: Sequence[Any]) -> list[Any]:
    """Numbers, rounded as the body's are."""
    return [np.asarray(one, numpy_dtype(kind.dtype)).item() for one, kind in zip(given, body.types, strict=False)]


def _is_counted(c: Call, value: Value, dim: int) -> bool:
    """Is a tensor 0, 1, 2, ... along a dim?"""
    made = {out.name: node for node in c.t.builder.nodes for out in node.outputs}
    node = made.get(value.name)
    while node is not None and node.op in ("cast", "broadcast", "reshape", "bit_and"):
        if node.op == "broadcast" and node.output.tensor.rank != node.inputs[0].type.rank:  # type: ignore[union-attr]
            return False
        node = made.get(node.inputs[0].name)  # type: ignore[union-attr]
    shape = value.tensor.shape
    return node is not None and node.op == "iota" and node.attr("start") == 0 and node.attr("step") == 1 and (
        node.output.tensor.count == shape[dim] and all(n != shape[dim] or d == dim for d, n in enumerate(shape)))


# ---- windows


Sizes = tuple[Size, ...]
Steps = tuple[Any, ...]
Window = tuple[Sizes, Steps, Steps, Steps, Sizes, Sizes]


def _window(c: Call) -> Window:
    """Sizes, strides, base dilations, window dilations, and padding at both ends."""
    sizes = c.attr("window_dimensions")
    rank = len(sizes)
    ones = (1,) * rank
    pairs = c.attr("padding")
    pairs = ((0, 0),) * rank if pairs is None else tuple((int(a), int(b)) for a, b in np.asarray(pairs).reshape(-1, 2))
    return (sizes, c.attr("window_strides") or ones, c.attr("base_dilations") or ones,
            c.attr("window_dilations") or ones, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))


def sizes_of_window(c: Call) -> Window:
    """The same, of a call whose last five operands are these."""
    *lines, pairs = (c.sizes(place) for place in range(len(c.inputs) - 5, len(c.inputs)))
    return (*lines, pairs[::2], pairs[1::2])  # type: ignore[return-value]


@translates("reduce_window")
def reduce_window(c: Call) -> Any:
    return windows(c, c.operation.regions[0], len(c.inputs) // 2, _window(c))


def windows(c: Call, body: Block, count: int, window: Window) -> Any:
    """Reductions of windows. The first `count` operands are reduced, the next ones are first values, and are what
    padding is made of (StableHLO specification, reduce_window)."""
    sizes, strides, spread, dilated, low, high = window
    values = c.same([c.tensor(one) for one in c.inputs[:count]])
    first = c.inputs[count:2 * count]
    plain = all(n == 1 for n in (*strides, *spread, *dilated))
    along = [d for d, n in enumerate(sizes) if n != 1]
    if plain and len(along) == 1 and values[0].tensor.shape[along[0]] == sizes[along[0]]:
        d = along[0]
        ends = all(a == b == 0 for k, (a, b) in enumerate(zip(low, high, strict=True)) if k != d)
        if ends and (low[d], high[d]) in ((sizes[d] - 1, 0), (0, sizes[d] - 1)) and _changes_nothing(c, body, first):
            return _prefix(c, body, values, d, first, backward=low[d] == 0)
    whole = [n for n in (*sizes, *strides, *spread, *dilated) if isinstance(n, int)]
    if len(whole) != 4 * len(sizes):
        raise Decline("windows whose sizes are not known")
    dim_by_dim = math.prod(whole[:len(sizes)]) > MOST_WINDOW
    if dim_by_dim and max(whole[:len(sizes)]) > 1 << MOST_HALVES:
        raise Decline(f"windows of {math.prod(whole[:len(sizes)])} elements")
    fills = [c.walk.t.cast(c.tensor(one), held(kind.dtype)) if not isinstance(one, Known) else _number(one)
             for one, kind in zip(first, c.operation.takes[count:], strict=False)]
    wide = [_spread_out(c, value, spread, low, high, fill) for value, fill in zip(values, fills, strict=True)]
    shape = [_positions(n, int(size), stride, step) for n, size, stride, step in zip(
        wide[0].tensor.shape, whole, strides, dilated, strict=False)]
    result: list[Any] = [c.t.broadcast(_lone(c, one, len(shape)), shape) for one in first]
    if dim_by_dim and 0 not in shape:
        for d in reversed(range(len(sizes))):  # the last dim first: elements meet in their order
            wide = _windowed(c, body, wide, d, whole[d], strides[d], dilated[d], shape[d])
        return c.walk.run(body, (*result, *wide))
    for place in itertools.product(*(range(n) for n in whole[:len(sizes)])):
        part = [_at(c, value, place, strides, dilated, shape) for value in wide]
        result = list(c.walk.run(body, (*result, *part)))
    return tuple(result)


def _windowed(c: Call, body: Block, values: Sequence[Value], dim: int, size: int, stride: int, step: int, count: Size
              ) -> list[Value]:
    """Windows along one dim, of which there are `count`: those of twice the size are made of two neighbours each, and
    the size is a sum of powers of 2."""
    def of_body(left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        return [c.tensor(one) for one in c.walk.run(body, (*left, *right))]
    now, reach, at = list(values), 1, 0
    found: list[Value] = []
    while True:
        if size & reach:
            part = [c.t.window(value, dim, at * step, count, stride) for value in now]
            found, at = of_body(found, part) if found else part, at + reach
        if at == size:
            return found
        left = now[0].tensor.shape[dim] - reach * step
        now = of_body(*([c.t.window(value, dim, start, left) for value in now] for start in (0, reach * step)))
        reach *= 2


def _number(one: Known) -> Any:
    if one.array.dtype == object:
        raise Decline("a first value made of sizes")
    item = one.items()[0]
    return item if isinstance(item, (bool, int, float, complex)) else float(item)


def _spread_out(c: Call, x: Value, spread: Sequence[Any], low: Sequence[Size], high: Sequence[Size], fill: Any
                ) -> Value:
    for d, gap in enumerate(spread):
        x = spaced(c, x, d, gap - 1, fill)
    return padded_or_cut(c, x, low, high, fill)


def _positions(n: Size, size: int, stride: int, step: int) -> Size:
    """How often a window fits."""
    left = n - ((size - 1) * step + 1)
    if isinstance(left, int):
        return left // stride + 1 if left >= 0 else 0
    return floordiv(left, stride) + 1 if stride > 1 else left + 1


def _at(c: Call, x: Value, place: Sequence[int], strides: Sequence[int], dilated: Sequence[int],
        shape: Sequence[Size]) -> Value:
    """For each window, the element at one position of it."""
    for d, (at, stride, step) in enumerate(zip(place, strides, dilated, strict=True)):
        x = c.t.window(x, d, at * step, shape[d], stride)
    return x


def _prefix(c: Call, body: Block, values: Sequence[Value], dim: int, first: Sequence[Any], backward: bool) -> Any:
    """Windows from the start to each element, or from each to the end: a scan."""
    x = values[0]
    row = {"add": "cumsum", "multiply": "cumprod"}.get(only(body))
    if row is not None and len(values) == 1 and c.dtype != "bool" and (
            c.dtype not in COMPLEX or row == "cumsum") and _is_neutral(first[0], only(body), c.dtype):
        def scanned(part: Value) -> Value:
            turned = c.op("flip", part, dims=(dim,)) if backward else part
            found = c.wrapped(c.t.cast(c.op(row, turned, dim=dim), part.tensor.dtype))
            return c.op("flip", found, dims=(dim,)) if backward else found
        return c.by_parts(scanned, x) if c.dtype in COMPLEX else scanned(x)
    size = x.tensor.shape[dim]
    if not isinstance(size, int):
        return _prefix_by_torch(c, body, x, dim, first, backward)
    step, now = 1, list(values)
    while step < size:  # Hillis and Steele, 1986: each element with the one `step` before it
        if backward:
            moved = [c.t.window(value, dim, step, size - step) for value in now]
            kept = [c.t.window(value, dim, 0, size - step) for value in now]
            rest = [c.t.window(value, dim, size - step, step) for value in now]
            done = [c.tensor(one) for one in c.walk.run(body, (*moved, *kept))]
            now = [joined(c, [a, b], dim) for a, b in zip(done, rest, strict=True)]
        else:
            moved = [c.t.window(value, dim, 0, size - step) for value in now]
            kept = [c.t.window(value, dim, step, size - step) for value in now]
            rest = [c.t.window(value, dim, 0, step) for value in now]
            done = [c.tensor(one) for one in c.walk.run(body, (*moved, *kept))]
            now = [joined(c, [b, a], dim) for a, b in zip(done, rest, strict=True)]
        step *= 2
    start = [c.t.broadcast(_lone(c, one, x.tensor.rank), x.tensor.shape) for one in first]
    return c.walk.run(body, (*start, *now))


def _prefix_by_torch(c: Call, body: Block, x: Value, dim: int, first: Sequence[Any], backward: bool) -> Value:
    """The largest or smallest element so far, or the logarithm of the sum of exponentials."""
    name = {"maximum": aten.cummax, "minimum": aten.cummin}.get(only(body))
    if name is None and c.dtype in ("f32", "f64") and _is_neutral(first[0], "maximum", c.dtype) and _is_logaddexp(
            c, body):
        x = c.op("flip", x, dims=(dim,)) if backward else x
        found = c.aten(aten.logcumsumexp.default, x, dim, types=x.tensor.dense())
        return c.op("flip", found, dims=(dim,)) if backward else found
    if name is None or c.dtype in (*COMPLEX, "u64") or not _is_neutral(first[0], only(body), c.dtype):
        raise Decline("a scan by this body over a dim whose size is not known")
    if backward:
        x = c.op("flip", x, dims=(dim,))
    found, _ = c.aten(name.default, x, dim, types=(x.tensor.dense(), c.type(x.tensor.shape, "i64")))
    return c.op("flip", found, dims=(dim,)) if backward else found


def _is_logaddexp(c: Call, body: Block) -> bool:
    """Does a body give log(exp(a) + exp(b))? Tried on numbers."""
    cases = ((0.5, 2.0), (2.0, 0.5), (-3.0, -3.0), (200.0, -200.0), (1e4, 1e4), (-math.inf, 1.0),
             (-math.inf, -math.inf), (math.inf, 1.0), (math.nan, 1.0))
    answers = [_probe(c, body, a, b) for a, b in cases]
    with np.errstate(invalid="ignore"):
        return all(one is not None and len(one) == 1 and np.allclose(
            one[0], np.logaddexp(a, b), rtol=1e-6, equal_nan=True) for one, (a, b) in zip(answers, cases, strict=True))


@translates("select_and_scatter")
def select_and_scatter(c: Call) -> Any:
    """Each element of the source goes to the element that its window selects, by the body that combines."""
    select, combine = c.operation.regions
    sizes: Any
    sizes, strides, _, _, low, high = _window(c)
    x, source = c.value(0), c.value(1)
    if math.prod(sizes) > MOST_WINDOW:
        raise Decline(f"windows of {math.prod(sizes)} elements")
    floats = kind_of(x.tensor.dtype) == "float"
    ones = c.t.full(True, x.tensor.shape, "bool")
    wide, inside = (_spread_out(c, one, (1,) * len(sizes), low, high, fill) for one, fill in
                    ((x, 0.0 if floats else 0), (ones, False)))
    shape = source.tensor.shape
    best: Any = None
    where: Any = None
    for number, place in enumerate(itertools.product(*(range(n) for n in sizes))):
        value = _at(c, wide, place, strides, (1,) * len(sizes), shape)
        there = _at(c, inside, place, strides, (1,) * len(sizes), shape)
        here = c.t.full(number, shape, "i32")
        if best is None:
            best, where = value, c.op("where", there, here, c.t.full(-1, shape, "i32"))
            continue
        keeps = c.tensor(c.walk.run(select, (best, value))[0])  # is the one that was selected before still it?
        takes = c.op("bit_and", there, c.op("bit_or", c.op("lt", where, 0), c.op("bit_not", keeps)))
        best, where = c.op("where", takes, value, best), c.op("where", takes, here, where)
    wide_shape = wide.tensor.shape
    sums = only(combine) == "add" and c.dtype != "bool"
    zero: Any = 0.0 if floats else False if c.dtype == "bool" else 0
    total = c.t.broadcast(_lone(c, c.inputs[2], x.tensor.rank), wide_shape)
    for number, place in enumerate(itertools.product(*(range(n) for n in sizes))):
        chosen = c.op("eq", where, number)
        if sums:  # others add 0
            part = c.op("where", chosen, source, c.t.full(zero, shape, source.tensor.dtype))
            total = c.op("add", total, _put_at(c, part, place, strides, wide_shape, zero))
            continue
        there = _put_at(c, chosen, place, strides, wide_shape, False)
        part = _put_at(c, source, place, strides, wide_shape, zero)
        total = c.op("where", there, c.tensor(c.walk.run(combine, (total, part))[0]), total)
    for d, n in enumerate(x.tensor.shape):
        total = c.t.window(total, d, low[d], n)
    return c.wrapped(total)


def _put_at(c: Call, part: Value, place: Sequence[int], strides: Sequence[int], shape: Sequence[Size], zero: Any
            ) -> Value:
    """The inverse of `_at`: elements where they come from, 0 elsewhere."""
    for d, stride in enumerate(strides):
        part = spaced(c, part, d, stride - 1, zero)
        n = part.tensor.shape[d]
        part = padded(c, part, [place[d] if k == d else 0 for k in range(len(strides))],
                      [shape[d] - n - place[d] if k == d else 0 for k in range(len(strides))], zero)
    return part


# ---- sorts


@translates("sort")
def sort(c: Call) -> Any:
    dim = c.attr("dimension", -1)
    values = c.same(c.values())
    if not values[0].tensor.rank:
        return tuple(values)
    dim %= values[0].tensor.rank
    keys = _keys(c)
    order: Value | None = None
    sorted_by = [(place, key, descending) for place, descending in keys for key in (
        c.parts(values[place]) if values[place].tensor.dtype in COMPLEX else (values[place],))]
    for place, key, descending in reversed(sorted_by):
        if order is not None:
            key = _along(c, key, order, dim)
        held_key = c.op("bit_xor", key, -(1 << 63)) if c.operation.takes[place].dtype == "u64" else key
        if kind_of(key.tensor.dtype) == "float" and _is_total(c, place):
            held_key = _ranked(c, key)
        shape = key.tensor.shape
        kinds = (held_key.tensor.dense(), c.type(shape, "i64"))
        _, found = c.aten(aten.sort.stable, held_key, stable=True, dim=dim, descending=descending, types=kinds)
        order = found if order is None else _along(c, order, found, dim)
    assert order is not None
    return tuple(_along(c, value, order, dim) for value in values)


def _is_total(c: Call, place: int) -> bool:
    """Whether a sort tells -0 from 0 in an operand, as the total order of floats does."""
    body = c.operation.regions[0]
    given: list[Any] = [0] * len(body.types)
    given[2 * place + 1] = -0.0
    found = _probe(c, body, *given), _probe(c, body, *given[:2 * place], -0.0, 0.0, *given[2 * place + 2:])
    return None not in found and found[0] != found[1]


def _along(c: Call, x: Value, order: Value, dim: int) -> Value:
    if x.tensor.dtype in COMPLEX:
        return c.extern("aten.gather.default", x, dim, order, types=x.tensor.dense())  # type: ignore[no-any-return]
    return c.op("gather", x, order, dim=dim)


def _keys(c: Call) -> list[tuple[int, bool]]:
    """(operand, descending) of what a sort goes by, the first one first: by trying its body on numbers."""
    body = c.operation.regions[0]
    count = len(c.inputs)
    def less(first: Sequence[int], second: Sequence[int]) -> bool:
        given = [n for pair in zip(first, second, strict=True) for n in pair]
        found = _probe(c, body, *given)
        if found is None:
            raise Decline("its body is not known")
        return bool(found[0])

    keys: list[tuple[int, bool]] = []
    equal = [0] * count
    for k in range(count):
        above = [int(j == k) for j in range(count)]
        up, down = less(equal, above), less(above, equal)
        if up != down:
            keys.append((k, down))
    if not keys or less(equal, equal):
        raise Decline("its body is no order")
    # the order among keys: which decides where two disagree
    def before(a: tuple[int, bool], b: tuple[int, bool]) -> bool:
        first, second = [0] * count, [0] * count
        for (k, descending), wins in ((a, True), (b, False)):
            (first if wins == (not descending) else second)[k] = 0
            (second if wins == (not descending) else first)[k] = 1
        return less(first, second)

    ordered: list[tuple[int, bool]] = []
    for key in keys:
        at = next((i for i, other in enumerate(ordered) if before(key, other)), len(ordered))
        ordered.insert(at, key)
    for given in _draws(body.types[::2]):  # one that goes by something else, such as the absolute value, shows
        pairs = [(given[2 * k], given[2 * k + 1], descending) for k, descending in ordered]
        a, b, descending = next((one for one in pairs if one[0] != one[1]), (0, 0, False))
        if descending:
            a, b = b, a
        if less(given[::2], given[1::2]) != (_parts(a) < _parts(b)):
            raise Decline("its body is an order by something else than the operands")
    return ordered


def _parts(one: Any) -> tuple[float, ...]:
    """What complex numbers are sorted by; of others, themselves."""
    return (one.real, one.imag) if isinstance(one, complex) else (one,)


@translates("chlo.top_k")
def top_k(c: Call) -> Any:
    return largest(c, c.attr("k"))


def largest(c: Call, count: int) -> Any:
    """The largest elements along the last dim, and where they are."""
    x = c.value(0)
    dim = x.tensor.rank - 1
    key = _ranked(c, x) if kind_of(x.tensor.dtype) == "float" else x
    kinds = (key.tensor.dense(), c.type(x.tensor.shape, "i64"))
    values, places = c.aten(aten.sort.stable, key, stable=True, dim=dim, descending=True, types=kinds)
    places = c.t.window(places, dim, 0, count)
    values = c.t.window(values, dim, 0, count) if key is x else _along(c, x, places, dim)
    return values, c.t.cast(places, "i32")


def nearly_largest(c: Call, order: Block, dim: int, count: int) -> Any:
    """The first elements of a dim by an order, and the others at their places: none is missed, as XLA may."""
    x, others = c.value(0), c.value(1)
    descending = _probe(c, order, 1, 0, 0, 0)
    if descending is None or descending == _probe(c, order, 0, 1, 0, 0) or not 0 <= dim < x.tensor.rank:
        raise Decline("its body is no order")
    kinds = (x.tensor.dense(), c.type(x.tensor.shape, "i64"))
    values, places = c.aten(aten.sort.stable, x, stable=True, dim=dim, descending=bool(descending[0]), types=kinds)
    return c.t.window(values, dim, 0, count), _along(c, others, c.t.window(places, dim, 0, count), dim)


def _ranked(c: Call, x: Value) -> Value:
    """Numbers whose usual order is the total order of floats, in which -0 is below 0 and a negative NaN below -inf."""
    if x.tensor.dtype == "f64":
        return total_order(c, x)
    wide, below = c.t.cast(x, "f64"), c.op("signbit", x)  # f64 has room between and below the numbers of f32
    for which, rank in ((c.op("eq", x, 0.0), -1e-300), (c.op("eq", x, -math.inf), -1e300),
                        (c.op("ne", x, x), -math.inf)):
        wide = c.op("where", c.op("bit_and", which, below), rank, wide)
    return wide

