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
    if c.dtype in COMPLEX:
        return c.extern("aten.index_select.default", x, 0, places,  # type: ignore[no-any-return]
                        types=c.type(places.tensor.shape))
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


COMBINES = {"stablehlo.add": "scatter_add", "stablehlo.multiply": "scatter_mul", "stablehlo.maximum": "scatter_amax",
            "stablehlo.minimum": "scatter_amin", "stablehlo.or": "scatter_amax", "stablehlo.and": "scatter_amin"}


def combine_of(c: Call) -> str:
    """The row that a scatter's body means."""
    body = c.operation.regions[0]
    if not body.operations:
        if body.results == (body.arguments[1],):
            return "scatter"
        if body.results == (body.arguments[0],):
            return ""
    elif len(body.operations) == 1 and set(body.operations[0].inputs) == set(body.arguments):
        found = COMBINES.get(body.operations[0].name)
        bits = body.operations[0].name in ("stablehlo.or", "stablehlo.and")
        if found is not None and (not bits or c.dtype == "bool"):
            return found
    raise Decline("its body is more than one operation")


@translates("scatter")
def scatter(c: Call) -> Any:
    if len(c.inputs) != 3:
        raise Decline("several operands")
    row = combine_of(c)
    x, updates = c.value(0), c.value(2)
    if not row:
        return x
    if c.dtype == "u64" and row in ("scatter_amax", "scatter_amin"):
        flip = [c.op("bit_xor", one, -(1 << 63)) for one in (x, updates)]
        return c.op("bit_xor", _scattered(c, row, *flip), -(1 << 63))
    if c.dtype == "bool" and row != "scatter":
        # sums and products of bools are "or" and "and"
        row = {"scatter_add": "scatter_amax", "scatter_mul": "scatter_amin"}.get(row, row)
        whole = [c.op("cast", one, dtype="i8") for one in (x, updates)]
        return c.op("ne", _scattered(c, row, *whole), 0)
    if c.dtype in COMPLEX:
        if row not in ("scatter", "scatter_add"):
            raise Decline("products or orders of complex numbers")
        return c.by_parts(lambda one, other: _scattered(c, row, one, other), x, updates)
    found = _scattered(c, row, x, updates)
    return c.wrapped(found) if c.dtype in MASKS else found


def _scattered(c: Call, row: str, x: Value, updates: Value) -> Value:
    how = c.attr("scatter_dimension_numbers")
    shape, part = x.tensor.shape, updates.tensor.shape
    starts, _ = _starts(c, 1, how["index_vector_dim"])
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
    count, total = product(part), product(shape)
    places = c.t.reshape(c.t.broadcast(spot, part), (count,))
    values = c.t.reshape(updates, (count,))
    target = c.t.reshape(x, (total,))
    return c.t.reshape(c.op(row, target, values, places, dim=0), shape)
