"""Translations of StableHLO's gather and scatter.

A gather is an index into the flat operand, computed per element of the result; a scatter adds (or the like) each
element of its updates at an index of the flat operand. Start indices of a gather are clamped so that its windows are
inside (StableHLO specification, gather); updates of a scatter whose window is not wholly inside are left out, as XLA
does it, where the specification leaves out single elements.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.elementwise import chosen
from anyshape.frontend.importer_stablehlo.module import Block
from anyshape.frontend.importer_stablehlo.reduce import is_associative, joined, only
from anyshape.frontend.importer_stablehlo.shapes import sliced
from anyshape.frontend.importer_stablehlo.table import COMPLEX, MASKS, Call, translates
from anyshape.frontend.symbols.known import Known
from anyshape.ir.graph import Value
from anyshape.sym.expr import Size, maximum, minimum, product
from anyshape.sym.prover import prove_nonnegative

aten = torch.ops.aten


def _starts(c: Call, place: int, axis: int) -> tuple[list[Value], tuple[Size, ...]]:
    """The components of start indices as i64 tensors of the batch shape, and that shape."""
    indices = c.t.cast(c.value(place), "i64")
    shape = indices.tensor.shape
    if axis == len(shape):
        return [indices], shape
    count = shape[axis]
    if not isinstance(count, int):
        raise Decline("as many index components as a size says")
    batch = tuple(n for d, n in enumerate(shape) if d != axis)
    return [c.t.reshape(c.t.window(indices, axis, k, 1), batch) for k in range(count)], batch


def _line(c: Call, shape: Sequence[Size], dim: int) -> Value:
    """0, 1, ... along one dim of a shape, ready to be broadcast."""
    return c.t.reshape(c.t.iota(shape[dim]), [n if d == dim else 1 for d, n in enumerate(shape)])


def _gather(c: Call, sizes: Sequence[Size]) -> Value:
    how = c.attr("dimension_numbers")
    x = c.value(0)
    shape = x.tensor.shape
    if isinstance(c.inputs[1], Known) and c.inputs[1].array.dtype == object and len(c.inputs[1].shape) == 1:
        return _at_sizes(c, x, how, sizes)
    starts, batch = _starts(c, 1, how["index_vector_dim"])
    offset_dims, collapsed = how["offset_dims"], (*how["collapsed_slice_dims"], *how["operand_batching_dims"])
    window = [d for d in range(len(shape)) if d not in collapsed]
    rank = len(batch) + len(offset_dims)
    batch_dims = [d for d in range(rank) if d not in offset_dims]
    result: list[Size] = [0] * rank
    for d, size in zip(batch_dims, batch, strict=True):
        result[d] = size
    for d, source in zip(offset_dims, window, strict=True):
        result[d] = sizes[source]
    if len(starts) == 1 and not how["operand_batching_dims"] and how["start_index_map"] == tuple(collapsed) and all(
            sizes[d] == shape[d] for d in window):
        return _take(c, x, starts[0], collapsed[0], offset_dims, result)
    flat: Any = 0
    strides = [product(shape[d + 1:]) for d in range(len(shape))]
    for component, d in zip(starts, how["start_index_map"], strict=True):
        inside = _between(c, component, shape[d] - sizes[d])
        flat = _plus(c, flat, _times(c, _placed(c, inside, batch_dims, rank), strides[d]))
    for position, d in enumerate(how["operand_batching_dims"]):
        along = how["start_indices_batching_dims"][position]
        along -= along > how["index_vector_dim"]
        line = _line(c, result, batch_dims[along])
        flat = _plus(c, flat, _times(c, line, strides[d]))
    for d, source in zip(offset_dims, window, strict=True):
        if result[d] != 1:
            flat = _plus(c, flat, _times(c, _line(c, result, d), strides[source]))
    if not isinstance(flat, Value):
        flat = c.t.full(0, (1,) * rank, "i64")
    places = c.t.broadcast(flat, result)
    count = product(result)
    found = _flat_take(c, c.t.reshape(x, (product(shape),)), c.t.reshape(places, (count,)))
    return c.t.reshape(found, result)


@translates("torch_index_select")
def torch_index_select(c: Call) -> Any:
    """Rows of a table, as TensorFlow's gather has them."""
    dim, batch = c.attr("dim"), c.attr("batch_dims", 0)
    x, places = c.value(0), c.t.cast(c.value(1), "i64")
    if batch:
        if batch != dim or places.tensor.rank != dim + 1 or c.dtype in COMPLEX:
            raise Decline("rows of many tables")
        places = _between(c, places, x.tensor.shape[dim] - 1)
        shape = (*places.tensor.shape, *x.tensor.shape[dim + 1:])
        return c.op("gather", x, c.t.broadcast(_placed(c, places, range(dim + 1), len(shape)), shape), dim=dim)
    shape = (*x.tensor.shape[:dim], *places.tensor.shape, *x.tensor.shape[dim + 1:])
    offset = [d for d in range(len(shape)) if not dim <= d < dim + places.tensor.rank]
    return _take(c, x, places, dim, offset, shape)


def _flat_take(c: Call, x: Value, places: Value) -> Value:
    if x.tensor.dtype in COMPLEX:
        return c.extern("aten.index_select.default", x, 0, places,  # type: ignore[no-any-return]
                        types=c.type(places.tensor.shape, x.tensor.dtype))
    return c.op("take", x, places, dim=0)


def _between(c: Call, value: Value, most: Size) -> Value:
    top = c.t.full(most, value.tensor.shape, "i64")
    return c.op("maximum", c.op("minimum", value, top), 0)


def _placed(c: Call, value: Value, dims: Sequence[int], rank: int) -> Value:
    """A tensor over some dims of a shape, ready to be broadcast."""
    shape: list[Size] = [1] * rank
    for d, size in zip(dims, value.tensor.shape, strict=True):
        shape[d] = size
    return c.t.reshape(value, shape)


def _plus(c: Call, a: Any, b: Any) -> Any:
    if isinstance(a, int) and a == 0:
        return b
    return c.op("add", a, b)


def _times(c: Call, a: Value, size: Size) -> Value:
    if size == 1:
        return a
    return c.op("mul", a, size if isinstance(size, int) else c.t.full(size, a.tensor.shape, "i64"))


def _inside(c: Call, start: Size, most: Size) -> Size:
    """A start between 0 and `most`."""
    if not prove_nonnegative(c.walk.facts, most - start):
        start = minimum(start, most)
    return start if prove_nonnegative(c.walk.facts, start) else maximum(start, 0)


def _at_sizes(c: Call, x: Value, how: Any, sizes: Sequence[Size]) -> Value:
    """Of a start that is made of sizes: a slice."""
    start = dict(zip(how["start_index_map"], c.sizes(1), strict=True))
    starts = [_inside(c, start.get(d, 0), have - size)
              for d, (have, size) in enumerate(zip(x.tensor.shape, sizes, strict=True))]
    x = sliced(c, x, starts, [a + n for a, n in zip(starts, sizes, strict=True)], [1] * len(sizes))
    return c.t.reshape(x, [n for d, n in enumerate(x.tensor.shape) if d not in how["collapsed_slice_dims"]])


def _take(c: Call, x: Value, places: Value, dim: int, offset_dims: Sequence[int], result: Sequence[Size]) -> Value:
    """Rows of a table."""
    batch = places.tensor.shape
    inside = _between(c, places, x.tensor.shape[dim] - 1)
    if c.dtype in COMPLEX:
        found = c.extern("aten.index_select.default", x, dim, c.t.reshape(inside, (product(batch),)), types=c.type(
            [*x.tensor.shape[:dim], product(batch), *x.tensor.shape[dim + 1:]]))
    else:
        found = c.op("take", x, c.t.reshape(inside, (product(batch),)), dim=dim)
    shape = (*x.tensor.shape[:dim], *batch, *x.tensor.shape[dim + 1:])
    found = c.t.reshape(found, shape)
    taken = list(range(dim, dim + len(batch)))
    others = [d for d in range(len(shape)) if d not in taken]
    order: list[int] = []
    for d in range(len(result)):
        order.append(others.pop(0) if d in offset_dims else taken.pop(0))
    return c.t.permute(found, order)


@translates("gather")
def gather(c: Call) -> Any:
    return _gather(c, c.attr("slice_sizes"))


@translates("dynamic_gather")
def dynamic_gather(c: Call) -> Any:
    return _gather(c, c.sizes(2))


COMBINES = {"add": "scatter_add", "multiply": "scatter_mul", "maximum": "scatter_amax", "minimum": "scatter_amin",
            "or": "scatter_amax", "and": "scatter_amin"}
MOST_TURNS = 64  # updates that come one after another


def combine_of(c: Call) -> str | None:
    """The row that a scatter's body means, "" where it leaves all as it is; None where there is no such row."""
    body = c.operation.regions[0]
    if not body.operations:
        if body.results == (body.arguments[1],):
            return "scatter"
        return "" if body.results == (body.arguments[0],) else None
    name = only(body)
    if (name in ("or", "and") and c.dtype != "bool") or (c.dtype in COMPLEX and name != "add"):
        return None
    return COMBINES.get(name)


@translates("scatter")
def scatter(c: Call) -> Any:
    count = len(c.inputs) // 2
    row = combine_of(c) if count == 1 else None
    if row is None:
        return _by_body(c, count)
    x, updates = c.value(0), c.value(2)
    if not row:
        return x
    places = _places(c, x, updates)
    if c.dtype == "u64" and row in ("scatter_amax", "scatter_amin"):
        flipped, new = (c.op("bit_xor", one, -(1 << 63)) for one in (x, updates))
        return c.op("bit_xor", _scattered(c, row, flipped, new, places), -(1 << 63))
    if c.dtype == "bool" and row != "scatter":
        # sums and products of bools are "or" and "and"
        row = {"scatter_add": "scatter_amax", "scatter_mul": "scatter_amin"}.get(row, row)
        whole, new = (c.op("cast", one, dtype="i8") for one in (x, updates))
        return c.op("ne", _scattered(c, row, whole, new, places), 0)
    found = _scattered(c, row, x, updates, places)
    return c.wrapped(found) if c.dtype in MASKS else found


def _scattered(c: Call, row: str, x: Value, updates: Value, places: Value) -> Value:
    if x.tensor.dtype in COMPLEX:
        return c.by_parts(lambda one, other: _scattered(c, row, one, other, places), x, updates)
    shape = x.tensor.shape
    flat = (c.t.reshape(one, (product(one.tensor.shape),)) for one in (x, updates, places))
    return c.t.reshape(c.op(row, *flat, dim=0), shape)


def _places(c: Call, x: Value, updates: Value) -> Value:
    """For each update, its place among all elements of x; -1 where it has none."""
    how = c.attr("scatter_dimension_numbers")
    shape, part = x.tensor.shape, updates.tensor.shape
    starts, _ = _starts(c, len(c.inputs) // 2, how["index_vector_dim"])
    window_dims = how["update_window_dims"]
    inserted = (*how["inserted_window_dims"], *how["input_batching_dims"])
    window = [d for d in range(len(shape)) if d not in inserted]
    batch_dims = [d for d in range(len(part)) if d not in window_dims]
    sizes = {source: part[d] for d, source in zip(window_dims, window, strict=True)}
    strides = [product(shape[d + 1:]) for d in range(len(shape))]
    flat: Any = 0
    inside: Any = None
    for component, d in zip(starts, how["scattered_dims_to_operand_dims"], strict=True):
        placed = _placed(c, component, batch_dims, len(part))
        top = c.t.full(shape[d] - sizes.get(d, 1), placed.tensor.shape, "i64")
        here = c.op("bit_and", c.op("ge", placed, 0), c.op("le", placed, top))
        inside = here if inside is None else c.op("bit_and", inside, here)
        flat = _plus(c, flat, _times(c, placed, strides[d]))
    for position, d in enumerate(how["input_batching_dims"]):
        along = how["scatter_indices_batching_dims"][position]
        along -= along > how["index_vector_dim"]
        flat = _plus(c, flat, _times(c, _line(c, part, batch_dims[along]), strides[d]))
    for d, source in zip(window_dims, window, strict=True):
        if part[d] != 1:
            flat = _plus(c, flat, _times(c, _line(c, part, d), strides[source]))
    spot: Value = flat if isinstance(flat, Value) else c.t.full(0, (1,) * len(part), "i64")
    if inside is not None:
        spot = c.op("where", inside, spot, c.t.full(-1, spot.tensor.shape, "i64"))  # nowhere
    return c.t.broadcast(spot, part)


# ---- scatters by other bodies


def _by_body(c: Call, count: int) -> tuple[Value, ...]:
    """Elements that updates reach, by the body. Updates of one place are combined first, or come one after another."""
    body = c.operation.regions[0]
    operands, updates = c.same(c.values()[:count]), c.same(c.values()[count + 1:])
    shape, part = operands[0].tensor.shape, updates[0].tensor.shape
    places = _places(c, operands[0], updates[0])
    if 0 in shape or 0 in part:
        return tuple(operands)
    window_dims = c.attr("scatter_dimension_numbers")["update_window_dims"]
    batch_dims = [d for d in range(len(part)) if d not in window_dims]
    turns, each = product(part[d] for d in batch_dims), product(part[d] for d in window_dims)
    order = (*batch_dims, *window_dims)
    rows = [c.t.reshape(c.t.permute(one, order), (turns * each,)) for one in (places, *updates)]
    now = [c.t.reshape(one, (product(shape),)) for one in operands]
    if c.attr("unique_indices") or turns == 1:
        now = _put_by(c, body, now, *rows)
    elif only(body) == "subtract" and body.operations[0].inputs == body.arguments:
        zero = c.by_parts(lambda one: c.op("neg", one), rows[1]) if c.dtype in COMPLEX else c.op("neg", rows[1])
        now = [c.wrapped(_scattered(c, "scatter_add", now[0], zero, rows[0]))]
    elif isinstance(turns, int) and isinstance(each, int) and is_associative(c, body):
        now = _put_by(c, body, now, *_combined(c, body, *rows))
    elif isinstance(turns, int) and turns <= MOST_TURNS:
        for turn in range(turns):
            now = _put_by(c, body, now, *(c.t.window(one, 0, turn * each, each) for one in rows))
    else:
        raise Decline("its body is more than one operation, and nothing shows that each place has one update")
    return tuple(c.t.reshape(one, shape) for one in now)


def _body(c: Call, body: Block, values: Sequence[Value]) -> list[Value]:
    """What a body gives for lines of elements; constants of it as wide as those."""
    shape = values[0].tensor.shape
    found = [c.tensor(one) for one in c.walk.run(body, values)]
    return [one if one.tensor.rank else c.t.broadcast(c.t.reshape(one, (1,)), shape) for one in found]


def _put_by(c: Call, body: Block, now: Sequence[Value], places: Value, *updates: Value) -> list[Value]:
    """Elements at places that differ, by the body."""
    inside = c.op("maximum", places, 0)
    found = _body(c, body, [*(_flat_take(c, one, inside) for one in now), *updates])
    return [_scattered(c, "scatter", one, new, places) for one, new in zip(now, found, strict=True)]


def _combined(c: Call, body: Block, places: Value, *updates: Value) -> list[Value]:
    """Places and updates in which only the last one of each place has it, and is made of all of them: a scan over
    sorted places (Hillis and Steele, 1986)."""
    count = places.tensor.shape[0]
    assert isinstance(count, int)
    kind = places.tensor.dense()
    places, order = c.aten(aten.sort.stable, places, stable=True, dim=0, descending=False, types=(kind, kind))
    now = [_flat_take(c, one, order) for one in updates]
    step = 1
    while step < count:
        ends = [[c.t.window(one, 0, at, count - step) for one in (places, *now)] for at in (0, step)]
        (before, *left), (here, *right) = ends
        same = c.op("eq", before, here)
        done = [chosen(c, same, one, other) for one, other in zip(_body(c, body, [*left, *right]), right, strict=True)]
        now = [joined(c, [c.t.window(one, 0, 0, step), other], 0) for one, other in zip(now, done, strict=True)]
        step *= 2
    following = c.op("concat", c.t.window(places, 0, 1, count - 1), c.t.full(-1, (1,), "i64"), dim=0)
    last = c.op("ne", places, following)
    return [c.op("where", last, places, c.t.full(-1, (count,), "i64")), *now]
