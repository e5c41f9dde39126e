"""Rows whose result element is one operand element at another index: flip, repeat, concat, pad, take, gather, index."""
from __future__ import annotations

from typing import Any

from anyshape.ir.graph import Node, Operand
from anyshape.ir.op import Body, Index, type_of
from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import (
    Attrs,
    Inputs,
    Types,
    add_row,
    broadcast_index,
    broadcast_shapes,
    check_scalar,
    dim,
    dims_attr,
    dims_in,
    fail,
    indices,
    int_attr,
    native,
    same_device,
    sizes,
    sizes_attr,
    tensor,
    within,
)
from anyshape.sym.expr import Size, floordiv

# ---- flip


def _infer_flip(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    dims_in(name, attrs["dims"], source.rank)
    return (source.dense(),)


def _flip_body(body: Body[Any], node: Node, index: Index) -> object:
    dims = dims_attr(node)
    shape = node.output.tensor.shape
    return body.read(node.inputs[0], tuple(shape[d] - 1 - own if d in dims else own for d, own in enumerate(index)))


# ---- repeat


def _infer_repeat(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    at, times = dim(name, attrs, source.rank), attrs["times"]
    native(name, source.dtype)
    if not isinstance(times, int) or isinstance(times, bool) or times < 1:
        fail(name, f"times is {times!r}, not a positive number")
    shape = source.shape[:at] + (source.shape[at] * times,) + source.shape[at + 1:]
    return (TensorType(source.dtype, shape, None, source.device),)


def _repeat_body(body: Body[Any], node: Node, index: Index) -> object:
    at, times = int_attr(node, "dim"), int_attr(node, "times")
    return body.read(node.inputs[0], index[:at] + (floordiv(index[at], times),) + index[at + 1:])


# ---- concat


def _infer_concat(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    types = [tensor(name, inputs, position) for position in range(len(inputs))]
    first = types[0]
    at = dim(name, attrs, first.rank)
    native(name, first.dtype)
    total: Size = 0
    for kind in types:
        if kind.dtype != first.dtype:
            fail(name, f"operands have dtypes {first.dtype} and {kind.dtype}", "insert a cast")
        if kind.shape[:at] + kind.shape[at + 1:] != first.shape[:at] + first.shape[at + 1:] or kind.rank != first.rank:
            fail(name, f"{first} and {kind} differ outside dim {at}")
        total = total + kind.shape[at]
    shape = first.shape[:at] + (total,) + first.shape[at + 1:]
    return (TensorType(first.dtype, shape, None, same_device(name, types)),)


def _concat_body(body: Body[Any], node: Node, index: Index) -> object:
    at = int_attr(node, "dim")
    dtype = node.output.tensor.dtype
    zero = False if dtype == "bool" else 0
    parts: list[tuple[Size, Size, Operand]] = []  # begin, end, operand
    begin: Size = 0
    for operand in node.inputs:
        end = begin + type_of(operand).shape[at]
        if end != begin:
            parts.append((begin, end, operand))
        begin = end
    if len(parts) < 2:
        return body.read(parts[0][2] if parts else node.inputs[0], index)
    position = body.index(index[at])
    result: Any = None
    for begin, end, operand in reversed(parts):
        last = result is None
        below = None if last else body.apply("lt", position, body.index(end), dtype="bool")
        mask = below
        if begin != 0:
            mask = body.apply("ge", position, body.index(begin), dtype="bool")
            if below is not None:
                mask = body.apply("and", mask, below, dtype="bool")
        own = index[:at] + (index[at] - begin,) + index[at + 1:]
        element = body.read_where(mask, operand, own, zero)
        result = element if last else body.apply("where", below, element, result, dtype=dtype)
    return result


# ---- pad


def _infer_pad(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    native(name, source.dtype)
    low, high = (sizes(name, attrs, key, negative=True) for key in ("low", "high"))
    if len(low) != source.rank or len(high) != source.rank:
        fail(name, f"low and high have {len(low)} and {len(high)} entries, {source} has {source.rank} dims")
    check_scalar(name, attrs["value"], source.dtype)
    shape = tuple(item + a + b for item, a, b in zip(source.shape, low, high, strict=True))
    if any(isinstance(item, int) and item < 0 for item in shape):
        fail(name, f"low {low} and high {high} take more than there is of {source}")
    return (TensorType(source.dtype, shape, None, source.device),)


def _pad_body(body: Body[Any], node: Node, index: Index) -> object:
    low, high, value = sizes_attr(node, "low"), sizes_attr(node, "high"), node.attr("value")
    assert isinstance(value, (bool, int, float)), value
    mask = None
    own: list[Size] = []
    for position, item, a, b in zip(index, type_of(node.inputs[0]).shape, low, high, strict=True):
        own.append(position - a)
        first = None if isinstance(a, int) and a <= 0 else 0
        last = None if isinstance(b, int) and b <= 0 else item
        if first is None and last is None:
            continue
        here = within(body, position - a, first, last)
        mask = here if mask is None else body.apply("and", mask, here, dtype="bool")
    if mask is None:
        return body.read(node.inputs[0], tuple(own))
    return body.read_where(mask, node.inputs[0], tuple(own), value)


# ---- take, gather, index


def _infer_take(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source, at = tensor(name, inputs, 0), indices(name, inputs, 1)
    where = dim(name, attrs, source.rank)
    shape = source.shape[:where] + at.shape + source.shape[where + 1:]
    return (TensorType(source.dtype, shape, None, same_device(name, (source, at))),)


def _take_body(body: Body[Any], node: Node, index: Index) -> object:
    where = int_attr(node, "dim")
    source, rank = type_of(node.inputs[0]), type_of(node.inputs[1]).rank
    register = body.read(node.inputs[1], index[where:where + rank])
    position = body.checked_index(register, source.shape[where], False)
    return body.read(node.inputs[0], index[:where] + (position,) + index[where + rank:])


def _infer_gather(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source, at = tensor(name, inputs, 0), indices(name, inputs, 1)
    where = dim(name, attrs, source.rank)
    if at.rank != source.rank:
        fail(name, f"the index {at} has another rank than {source}")
    for d, (have, want) in enumerate(zip(source.shape, at.shape, strict=True)):
        beyond = want - have
        if d != where and isinstance(beyond, int) and beyond > 0:
            fail(name, f"the index {at} is larger than {source} in dim {d}")
    return (TensorType(source.dtype, at.shape, None, same_device(name, (source, at))),)


def _gather_body(body: Body[Any], node: Node, index: Index) -> object:
    where = int_attr(node, "dim")
    register = body.read(node.inputs[1], index)
    position = body.checked_index(register, type_of(node.inputs[0]).shape[where], False)
    return body.read(node.inputs[0], index[:where] + (position,) + index[where + 1:])


def _infer_index(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    dims = dims_in(name, attrs["dims"], source.rank)
    if len(dims) != len(inputs) - 1 or dims != tuple(range(dims[0], dims[0] + len(dims))):
        fail(name, f"dims {dims} are not {len(inputs) - 1} consecutive ascending dims", "permute first")
    types = [indices(name, inputs, position) for position in range(1, len(inputs))]
    block = broadcast_shapes(name, [kind.shape for kind in types])
    shape = source.shape[:dims[0]] + block + source.shape[dims[-1] + 1:]
    return (TensorType(source.dtype, shape, None, same_device(name, (source, *types))),)


def _index_body(body: Body[Any], node: Node, index: Index) -> object:
    dims = dims_attr(node)
    source = type_of(node.inputs[0])
    before, after = dims[0], source.rank - dims[0] - len(dims)
    block = index[before:len(index) - after]
    positions: list[Size] = []
    for operand, d in zip(node.inputs[1:], dims, strict=True):
        register = body.read(operand, broadcast_index(type_of(operand).shape, block))
        positions.append(body.checked_index(register, source.shape[d], True))
    return body.read(node.inputs[0], index[:before] + tuple(positions) + index[len(index) - after:])


add_row("flip", "index", "x | dims", _infer_flip, body=_flip_body)
add_row("repeat", "index", "x | dim, times", _infer_repeat, body=_repeat_body)
add_row("concat", "index", "x, ... | dim", _infer_concat, body=_concat_body, cost=2)
add_row("pad", "index", "x | low, high, value", _infer_pad, body=_pad_body, cost=2)
add_row("take", "index", "x, i | dim", _infer_take, body=_take_body, cost=4, checks=True)
add_row("gather", "index", "x, i | dim", _infer_gather, body=_gather_body, cost=4, checks=True)
add_row("index", "index", "x, i, ... | dims", _infer_index, body=_index_body, cost=4, checks=True)
