"""View rows: no arithmetic, a map from result indices to operand indices; `strided` gives the map as strides."""
from __future__ import annotations

from typing import Any

from anyshape.ir.graph import Node
from anyshape.ir.op import Body, Index, type_of
from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import (
    Attrs,
    Inputs,
    Types,
    add_row,
    broadcast_index,
    dim,
    dims_attr,
    dims_in,
    fail,
    int_attr,
    size,
    size_attr,
    sizes,
    tensor,
)
from anyshape.sym.expr import Expr, Size, dense_strides, product
from anyshape.sym.index_arithmetic import groups, reshape_index

Sizes = tuple[Size, ...]
Strided = tuple[Sizes, Size] | None


# ---- reshape


def _has_call(item: Size) -> bool:
    return isinstance(item, Expr) and any(not isinstance(atom, str) for mono, _ in item.terms for atom, _ in mono)


def _infer_reshape(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    shape = sizes(name, attrs, "shape")
    count = product(shape)
    # where a floor division stands, the counts may be equal by a fact that formulas do not show
    if count != source.count and not (_has_call(count) or _has_call(source.count)):
        fail(name, f"{source} has {source.count} elements, the new shape has {count}")
    return (TensorType(source.dtype, shape, None, source.device),)


def _reshape_body(body: Body[Any], node: Node, index: Index) -> object:
    shape = type_of(node.inputs[0]).shape
    return body.read(node.inputs[0], reshape_index(shape, node.output.tensor.shape, index))


def _reshape_strided(shape: Sizes, strides: Sizes, offset: Size, node: Node) -> Strided:
    result = node.output.tensor.shape
    if 0 in shape or 0 in result:
        return dense_strides(result), offset
    found: list[Size | None] = [None] * len(result)
    for group in groups(shape, result):
        for outer, inner in zip(group.source, group.source[1:], strict=False):
            if strides[outer] != shape[inner] * strides[inner]:
                return None
        step: Size = strides[group.source[-1]] if group.source else 1
        for position in reversed(group.result):
            found[position] = step
            step = step * result[position]
    # a dim of size 1 gets the stride it would have in a dense tensor
    step = 1
    for position in reversed(range(len(result))):
        own = found[position]
        if own is None:
            own = found[position] = step
        step = own * result[position]
    return tuple(s for s in found if s is not None), offset


# ---- permute


def _infer_permute(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    order = dims_in(name, attrs["dims"], source.rank)
    if len(order) != source.rank:
        fail(name, f"dims {order} are not all dims of {source}")
    return (TensorType(source.dtype, tuple(source.shape[d] for d in order), None, source.device),)


def _permute_body(body: Body[Any], node: Node, index: Index) -> object:
    found: list[Size] = [0] * len(index)
    for position, own in zip(dims_attr(node), index, strict=True):
        found[position] = own
    return body.read(node.inputs[0], tuple(found))


def _permute_strided(shape: Sizes, strides: Sizes, offset: Size, node: Node) -> Strided:
    return tuple(strides[d] for d in dims_attr(node)), offset


# ---- broadcast


def _infer_broadcast(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    shape = sizes(name, attrs, "shape")
    if source.rank > len(shape):
        fail(name, f"{source} has more dims than the new shape")
    for old, new in zip(source.shape, shape[len(shape) - source.rank:], strict=True):
        if old != 1 and old != new:
            fail(name, f"{source} has a dim {old} where the new shape has {new}", "only a literal 1 stretches")
    return (TensorType(source.dtype, shape, None, source.device),)


def _broadcast_body(body: Body[Any], node: Node, index: Index) -> object:
    return body.read(node.inputs[0], broadcast_index(type_of(node.inputs[0]).shape, index))


def _broadcast_strided(shape: Sizes, strides: Sizes, offset: Size, node: Node) -> Strided:
    result = node.output.tensor.shape
    new = len(result) - len(shape)
    kept = [0 if old == 1 and size_ != 1 else stride
            for old, size_, stride in zip(shape, result[new:], strides, strict=True)]
    return (0,) * new + tuple(kept), offset


# ---- slice


def _infer_slice(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    at = dim(name, attrs, source.rank)
    start, count = size(name, attrs, "start"), size(name, attrs, "count")
    step = attrs["step"]
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        fail(name, f"the step {step} is not a positive number")
    last = start + (count - 1) * step
    beyond = last - source.shape[at]
    if count != 0 and isinstance(beyond, int) and beyond >= 0:
        fail(name, f"the last element, {last}, is not inside dim {at} of {source}", "clamp start and count")
    shape = source.shape[:at] + (count,) + source.shape[at + 1:]
    return (TensorType(source.dtype, shape, None, source.device),)


def slice_parts(node: Node) -> tuple[int, Size, int]:
    return int_attr(node, "dim"), size_attr(node, "start"), int_attr(node, "step")


def _slice_body(body: Body[Any], node: Node, index: Index) -> object:
    at, start, step = slice_parts(node)
    return body.read(node.inputs[0], index[:at] + (start + index[at] * step,) + index[at + 1:])


def _slice_strided(shape: Sizes, strides: Sizes, offset: Size, node: Node) -> Strided:
    at, start, step = slice_parts(node)
    return strides[:at] + (strides[at] * step,) + strides[at + 1:], offset + start * strides[at]


add_row("reshape", "view", "x | shape", _infer_reshape, body=_reshape_body, strided=_reshape_strided, cost=0)
add_row("permute", "view", "x | dims", _infer_permute, body=_permute_body, strided=_permute_strided, cost=0)
add_row("broadcast", "view", "x | shape", _infer_broadcast, body=_broadcast_body, strided=_broadcast_strided, cost=0)
add_row("slice", "view", "x | dim, start, count, step", _infer_slice, body=_slice_body, strided=_slice_strided, cost=0)
