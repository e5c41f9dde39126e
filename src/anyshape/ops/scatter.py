"""Rows that write elements into a copy of their first operand, at places that other operands say.

    put(x, y, i | dims=(0,))      x, with row y[t] at row i[t]
    put_add(x, y, i | dims=(0,))  x, with row y[t] added to row i[t]; put_mul, put_amax, put_amin likewise
    scatter(x, y, i | dim=1)      x, with y[r, t] at [r, i[r, t]]; scatter_add and the others likewise
    overwrite(x, y | dim=0, start=2, step=1)  x, with y at rows 2, 3, ...: what sizes say, not data

`put` is to `index` what `scatter` is to `gather`. Where several elements go to one place, the last one stays, or they
are combined in their order. An element whose place is outside of x goes nowhere; `checked`, of which the indices are
made, is what raises.
"""
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
    dim,
    dims_attr,
    dims_in,
    fail,
    indices,
    int_attr,
    native,
    same_device,
    size,
    size_attr,
    tensor,
)
from anyshape.sym.expr import Size


def _infer_checked(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    kind = indices(name, inputs, 0)
    size(name, attrs, "size")
    if not isinstance(attrs["wrap"], bool):
        fail(name, f"wrap is {attrs['wrap']!r}, not a bool")
    return (kind.dense(),)


def _checked_body(body: Body[Any], node: Node, index: Index) -> object:
    register = body.read(node.inputs[0], index)
    return body.index(body.checked_index(register, size_attr(node, "size"), node.attr("wrap") is True))


def _both(name: str, inputs: Inputs) -> tuple[TensorType, TensorType]:
    target, source = tensor(name, inputs, 0), tensor(name, inputs, 1)
    native(name, target.dtype)
    if source.dtype != target.dtype:
        fail(name, f"operands have dtypes {target.dtype} and {source.dtype}", "insert a cast")
    return target, source


def _infer_put(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    target, source = _both(name, inputs)
    dims = dims_in(name, attrs["dims"], target.rank)
    if not dims or len(dims) != len(inputs) - 2 or dims != tuple(range(dims[0], dims[0] + len(dims))):
        fail(name, f"dims {dims} are not {len(inputs) - 2} consecutive ascending dims", "permute first")
    types = [indices(name, inputs, position) for position in range(2, len(inputs))]
    block = broadcast_shapes(name, [kind.shape for kind in types])
    shape = target.shape[:dims[0]] + block + target.shape[dims[-1] + 1:]
    if source.shape != shape:
        fail(name, f"{source} is written to places of shape {tuple(map(str, shape))}", "broadcast it first")
    return (TensorType(target.dtype, target.shape, None, same_device(name, (target, source, *types))),)


def _block(node: Node) -> tuple[int, int]:
    """The dims of the second operand that stand for the indices: first, and one past the last."""
    first, count = dims_attr(node)[0], len(dims_attr(node))
    return first, type_of(node.inputs[1]).rank - (type_of(node.inputs[0]).rank - first - count)


def _put_into(body: Body[Any], node: Node, index: Index) -> tuple[Index, object]:
    first, after = _block(node)
    positions: list[Size] = []
    mask = None
    for operand, d in zip(node.inputs[2:], dims_attr(node), strict=True):
        own = broadcast_index(type_of(operand).shape, index[first:after])
        position, inside = _place(body, operand, own, type_of(node.inputs[0]).shape[d])
        positions.append(position)
        mask = inside if mask is None else body.apply("and", mask, inside, dtype="bool")
    return index[:first] + tuple(positions) + index[after:], mask


def _place(body: Body[Any], operand: Operand, index: Index, count: Size) -> tuple[Size, object]:
    """One coordinate, and whether it is inside."""
    register = body.read(operand, index)
    low = body.apply("ge", register, body.constant(0, "i64"), dtype="bool")
    inside = body.apply("and", low, body.apply("lt", register, body.index(count), dtype="bool"), dtype="bool")
    return body.as_index(register), inside


def _infer_overwrite(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    target, source = _both(name, inputs)
    where = dim(name, attrs, target.rank)
    start, step = size(name, attrs, "start"), attrs["step"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        fail(name, f"the step {step} is not a positive number")
    if source.rank != target.rank or any(
            a != b for d, (a, b) in enumerate(zip(source.shape, target.shape, strict=True)) if d != where):
        fail(name, f"{source} and {target} differ outside dim {where}")
    beyond = start + (source.shape[where] - 1) * step - target.shape[where]
    if source.shape[where] != 0 and isinstance(beyond, int) and beyond >= 0:
        fail(name, f"the last element is not inside dim {where} of {target}", "clamp start")
    return (TensorType(target.dtype, target.shape, None, same_device(name, (target, source))),)


def _overwrite_into(body: Body[Any], node: Node, index: Index) -> tuple[Index, object]:
    where, start, step = int_attr(node, "dim"), size_attr(node, "start"), int_attr(node, "step")
    return index[:where] + (start + index[where] * step,) + index[where + 1:], None


def _infer_scatter(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    target, source = _both(name, inputs)
    where = dim(name, attrs, target.rank)
    at = indices(name, inputs, 2)
    if at.shape != source.shape or at.rank != target.rank:
        fail(name, f"{source} is written to places {at} of {target}", "give each element an index")
    for d, (have, want) in enumerate(zip(target.shape, at.shape, strict=True)):
        beyond = want - have
        if d != where and isinstance(beyond, int) and beyond > 0:
            fail(name, f"the index {at} is larger than {target} in dim {d}")
    return (TensorType(target.dtype, target.shape, None, same_device(name, (target, source, at))),)


def _scatter_into(body: Body[Any], node: Node, index: Index) -> tuple[Index, object]:
    where = int_attr(node, "dim")
    position, inside = _place(body, node.inputs[2], index, type_of(node.inputs[0]).shape[where])
    return index[:where] + (position,) + index[where + 1:], inside


def _put_meeting(node: Node) -> tuple[int, ...]:
    return tuple(range(*_block(node)))


def _scatter_meeting(node: Node) -> tuple[int, ...]:
    return (int_attr(node, "dim"),)


def _never_meeting(node: Node) -> tuple[int, ...]:
    return ()


add_row("overwrite", "scatter", "x, y | dim, start, step", _infer_overwrite, into=_overwrite_into,
        meeting=_never_meeting)
add_row("checked", "index", "i | size, wrap", _infer_checked, body=_checked_body, cost=4, checks=True)
for _end, _combine in (("", ""), ("_add", "add"), ("_mul", "mul"), ("_amax", "maximum"), ("_amin", "minimum")):
    add_row(f"put{_end}", "scatter", "x, y, i, ... | dims", _infer_put, into=_put_into, meeting=_put_meeting,
            combine=_combine)
    add_row(f"scatter{_end}", "scatter", "x, y, i | dim", _infer_scatter, into=_scatter_into, meeting=_scatter_meeting,
            combine=_combine)
