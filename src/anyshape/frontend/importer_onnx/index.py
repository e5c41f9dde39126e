"""Translations of ONNX lookups and writes at places that are data, sorting, one-hot.

    Gather(x, i, axis=0)  -->  take(x, i, dim=0), with negative indices counted from the end
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyshape.frontend.aten.scatter import index_put
from anyshape.frontend.aten.table import Decline, Mismatch
from anyshape.frontend.importer_onnx.model import OnnxNode, clean
from anyshape.frontend.importer_onnx.table import Call, moves, translates
from anyshape.frontend.symbols.known import Known
from anyshape.ir.graph import Value
from anyshape.ir.types import NATIVE, TensorType
from anyshape.sym.expr import Size, floordiv, product, symbol
from anyshape.torch_compat import aten


def wrapped(c: Call, place: int, size: Size) -> Value:
    """An operand of indices as i64, negative ones counted from the end of `size`."""
    found = c.at(place)
    at = c.t.cast(c.value(place), "i64")
    if isinstance(found, Known) and not found.symbolic and (found.array.size == 0 or int(found.array.min()) >= 0):
        return at  # type: ignore[no-any-return]
    if found.dtype.startswith("u") if isinstance(found, Known) else c.dtype(place).startswith("u"):
        return at  # type: ignore[no-any-return]
    return c.op("where", c.op("lt", at, 0), c.op("add", at, size), at)


@translates("Gather")
@moves(0)
def gather(c: Call) -> Any:
    x, axis = c.value(0), c.axis(0)
    found = c.at(1)
    size = x.tensor.shape[axis]
    if (isinstance(found, Known) and found.shape == () and isinstance(size, int)) or (
            isinstance(found, Known) and found.shape == () and isinstance(found.items()[0], int)):
        at = found.items()[0]
        at = at + size if isinstance(at, int) and at < 0 else at
        shape = tuple(n for d, n in enumerate(x.tensor.shape) if d != axis)
        if isinstance(at, int) or c.t.at_most(0, at):
            return c.t.reshape(c.t.window(x, axis, at, 1), shape)
    if x.tensor.dtype not in NATIVE:
        raise Decline(f"dtype {x.tensor.dtype}")
    return c.op("take", x, wrapped(c, 1, size), dim=axis)


@translates("GatherElements")
@moves(0)
def gather_elements(c: Call) -> Any:
    x, axis = c.value(0), c.axis(0)
    return c.op("gather", x, wrapped(c, 1, x.tensor.shape[axis]), dim=axis)


def _apart(c: Call, at: Value, batch: int, shape: tuple[Size, ...]) -> list[Value]:
    """The columns of indices [..., k], as indices of dims batch, batch + 1, ..."""
    depth, = c.fixed(at.tensor.shape[-1:])
    lead = at.tensor.shape[:-1]
    found = []
    for place in range(depth):
        column = c.t.reshape(c.t.window(at, at.tensor.rank - 1, place, 1), lead)
        size = shape[batch + place]
        found.append(c.op("where", c.op("lt", column, 0), c.op("add", column, size), column))
    return found


@translates("GatherND")
@moves(0)
def gather_nd(c: Call) -> Any:
    x, at, batch = c.value(0), c.t.cast(c.value(1), "i64"), c.attr("batch_dims", 0)
    columns = _apart(c, at, batch, x.tensor.shape)
    rank = at.tensor.rank - 1
    lines = []
    for d in range(batch):
        shape = [1] * rank
        shape[d] = at.tensor.shape[d]  # type: ignore[call-overload]
        lines.append(c.t.reshape(c.t.iota(at.tensor.shape[d]), shape))
    return c.op("index", x, *lines, *columns, dims=tuple(range(batch + len(columns))))


_COMBINED = {"none": None, "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@translates("ScatterElements", "Scatter")
def scatter_elements(c: Call) -> Any:
    x, axis, how = c.value(0), c.axis(0), c.attr("reduction", "none")
    at, y = wrapped(c, 1, x.tensor.shape[axis]), c.value(2)
    if how == "none":
        return c.aten(aten.scatter.src, x, axis, at, y, types=x.tensor)
    return c.aten(aten.scatter_reduce.two, x, axis, at, y, _COMBINED[how], types=x.tensor)


@translates("ScatterND")
def scatter_nd(c: Call) -> Any:
    x, at, y, how = c.value(0), c.t.cast(c.value(1), "i64"), c.value(2), c.attr("reduction", "none")
    columns = _apart(c, at, 0, x.tensor.shape)
    c.t.result = x.tensor
    if how in ("none", "add"):
        return index_put(c.t, x, columns, y, how == "add")
    # combined along one line: the places as one number
    place = c.t.full(0, columns[0].tensor.shape, "i64")
    for column, size in zip(columns, x.tensor.shape, strict=False):
        place = c.op("add", c.op("mul", place, size), column)
    inner = x.tensor.shape[len(columns):]
    rows, width = product(x.tensor.shape[:len(columns)]), product(inner)
    count = place.tensor.count
    flat, updates = c.t.reshape(x, (rows, width)), c.t.reshape(y, (count, width))
    wide = c.t.broadcast(c.t.reshape(place, (count, 1)), (count, width))
    done = c.aten(aten.scatter_reduce.two, flat, 0, wide, updates, _COMBINED[how], types=flat.tensor)
    return c.t.reshape(done, x.tensor.shape)


@translates("OneHot")
def one_hot(c: Call) -> Any:
    at, depth, values = c.value(0), c.sizes(1)[0], c.value(2)
    rank = at.tensor.rank + 1
    axis = c.dim(c.attr("axis", -1), rank)
    at = c.t.cast(at, "i64")
    at = c.op("where", c.op("lt", at, 0), c.op("add", at, depth), at)
    shape = at.tensor.shape
    line = c.t.reshape(c.t.iota(depth), (depth,) + (1,) * (rank - 1 - axis))
    hot = c.op("eq", c.t.reshape(at, (*shape[:axis], 1, *shape[axis:])), line)
    off, on = (c.t.reshape(c.t.window(values, 0, place, 1), ()) for place in range(2))
    return c.t.where(hot, on, off, values.tensor.dtype)


@translates("TopK")
def top_k(c: Call) -> Any:
    x, axis = c.value(0), c.axis(-1)
    count = c.sizes(1)[0] if c.has(1) else c.attr("k")
    if isinstance(spare := x.tensor.shape[axis] - count, int) and spare < 0:
        raise Decline(f"{count} of {x.tensor.shape[axis]} elements")
    c.assume(spare)
    shape = tuple(count if d == axis else n for d, n in enumerate(x.tensor.shape))
    kinds = (TensorType(x.tensor.dtype, shape), TensorType("i64", shape))
    return c.extern("onnx.topk", x, count, axis, bool(c.attr("largest", 1)), types=kinds)


@translates("ReverseSequence")
def reverse_sequence(c: Call) -> Any:
    x, lengths = c.value(0), c.t.cast(c.value(1), "i64")
    time, batch = c.attr("time_axis", 0), c.attr("batch_axis", 1)
    size, rank = x.tensor.shape[time], x.tensor.rank
    if lengths.tensor.shape[0] != x.tensor.shape[batch]:
        raise Mismatch(lengths.tensor.shape[0], x.tensor.shape[batch])
    order = [time, batch, *(d for d in range(rank) if d not in (time, batch))]
    y = c.t.permute(x, order)
    line = c.t.reshape(c.t.iota(size), (size, 1))
    back = c.op("sub", c.op("sub", lengths, 1), line)
    at = c.op("where", c.op("lt", line, lengths), back, line)
    column = c.t.reshape(c.t.iota(x.tensor.shape[batch]), (1, x.tensor.shape[batch]))
    y = c.op("index", y, at, column, dims=(0, 1))
    return c.t.permute(y, [order.index(d) for d in range(rank)])


@translates("TensorScatter")
def tensor_scatter(c: Call) -> Any:
    past, update = c.value(0), c.value(1)
    axis = c.dim(c.attr("axis", -2), past.tensor.rank)
    length, count, batch = past.tensor.shape[axis], update.tensor.shape[axis], past.tensor.shape[0]
    start = c.t.cast(c.value(2), "i64") if c.has(2) else c.t.full(0, (batch,), "i64")
    at = c.op("add", c.t.reshape(start, (batch, 1)), c.t.iota(count))
    if c.attr("mode", "linear") == "circular":
        at = c.op("remainder", at, c.t.full(length, (), "i64"))
    rank = past.tensor.rank
    order = [0, axis, *(d for d in range(1, rank) if d != axis)]
    x, y = c.t.permute(past, order), c.t.permute(update, order)
    rows = c.t.broadcast(c.t.reshape(c.t.iota(batch), (batch, 1)), (batch, count))
    c.t.result = x.tensor
    done = index_put(c.t, x, [rows, at], y)
    return c.t.permute(done, [order.index(d) for d in range(rank)])


@translates("Col2Im")
def col2im(c: Call) -> Any:
    x, image, block = c.value(0), c.sizes(1), [int(n) for n in c.numbers(2)]
    count = len(block)
    pads = list(c.attr("pads", (0,) * (2 * count)))
    strides, dilations = c.attr("strides", (1,) * count), c.attr("dilations", (1,) * count)
    n, depth = x.tensor.shape[0], x.tensor.shape[1]
    area = 1
    for size in block:
        area *= size
    shape = (n, floordiv(depth, area), *image)
    return c.extern("onnx.col2im", x, list(image), block, list(strides), list(dilations), pads,
                    types=TensorType(x.tensor.dtype, shape))


SIZED_BY_DATA = ("NonMaxSuppression", "Unique", "Compress", "NonZero")


@translates(*SIZED_BY_DATA)
def by_the_data(c: Call) -> Any:
    raise Decline("the size of its result is in the data")


def sized_by_data(node: OnnxNode, kinds: Sequence[TensorType]) -> list[TensorType]:
    """The types of the results of such an operator, as far as they are known: one symbol is the size that the data
    decide, the same one for all NonZero of one tensor.

    Args:
        kinds: of its operands.
    """
    if node.op not in SIZED_BY_DATA or not kinds[0].rank:
        return []
    name = node.inputs[0] if node.op == "NonZero" else node.outputs[0]
    count = symbol(clean(f"{node.op}_{name}"))
    if node.op == "NonZero":
        return [TensorType("i64", (kinds[0].rank, count))]
    if node.op == "NonMaxSuppression":
        return [TensorType("i64", (count, 3))]
    axis = node.attributes.get("axis")
    shape = (count,) if axis is None else tuple(
        count if d == axis % kinds[0].rank else n for d, n in enumerate(kinds[0].shape))
    first = TensorType(kinds[0].dtype, shape)
    if node.op == "Compress":
        return [first]
    whole = product(kinds[0].shape) if axis is None else kinds[0].shape[axis]
    return [first, *(TensorType("i64", (size,)) for size in (count, whole, count))]
