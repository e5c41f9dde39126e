"""Memory-format propagation: results of PyTorch's operators that lie as one of their operands does, with channels last
where that has them.

    max_pool2d_with_indices(x, ...) -> values, indices           both as x
    convolution(x, w, b, ...), turned                            as x
    convolution_backward(grad, x, w, ...) -> x', w', b'          x' as x; what lies otherwise is brought into that order
"""
from __future__ import annotations

from anyshape.base.onednn_bugs import right_with_channels_last
from anyshape.ir.graph import Node, Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size

# target -> the operand that leads; the results that follow are those of its rank, but for gradients of weights
LEADERS = {
    "aten.convolution.default": 0,
    "aten.convolution_backward.default": 1,
    "aten.max_pool2d_with_indices.default": 0,
    "aten.max_pool2d_with_indices_backward.default": 1,
}
_WEIGHTS = "aten.convolution_backward.default"
_MASK = -1  # its last argument says which gradients there are: of the operand, of the weights, of the bias
RANKS = (4, 5)  # of what can have its channels last
# where the arguments of a call are: stride, padding, dilation, transposed, and more
_ARGUMENTS = {"aten.convolution.default": 3, _WEIGHTS: 4}


def leader(node: Node) -> Value | None:
    """The operand whose order of dims the results have; None: the node is none of these."""
    if node.op != "extern":
        return None
    target = node.attr("target")
    place = LEADERS.get(target) if isinstance(target, str) else None
    value = None if place is None else node.inputs[place]
    return value if isinstance(value, Value) and value.tensor.rank in RANKS and trusted(node) else None


def trusted(node: Node) -> bool:
    """Is an operator of PyTorch, if it is a convolution or the backward of one, right with channels last?"""
    target = node.attr("target")
    at = _ARGUMENTS.get(target) if isinstance(target, str) else None
    if at is None:
        return True
    images, weights = (*node.inputs, None, None)[at - 3:at - 1]
    template = node.attr("template")
    assert isinstance(template, tuple) and isinstance(template[0], tuple)
    apart, transposed, _, groups = template[0][at + 3:at + 7]
    assert isinstance(apart, tuple)
    entries = [*apart[1:], groups, transposed]
    numbers = [entry[1] for entry in entries if isinstance(entry, tuple) and isinstance(entry[1], int)
               and entry[0] != "operand"]
    if not isinstance(images, Value) or not isinstance(weights, Value) or len(numbers) != len(entries):
        return False
    *dilation, count, turned = numbers
    return right_with_channels_last(images.tensor.dtype, weights.tensor.shape, dilation, bool(turned), count)


def followers(node: Node) -> tuple[bool, ...]:
    """For each result of such a node, whether it lies as the leader does."""
    if node.attr("target") != _WEIGHTS:
        return (True,) * len(node.outputs)
    template = node.attr("template")
    assert isinstance(template, tuple) and isinstance(template[0], tuple)
    mask = template[0][_MASK]
    assert isinstance(mask, tuple) and isinstance(mask[1], tuple)
    return tuple(k == 0 and bool(mask[1][1]) for k in range(len(node.outputs)))


def last_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """The strides, in elements, of a tensor [N, C, *S] that lies as [N, *S, C]."""
    step: Size = shape[1]
    inside: list[Size] = []
    for size in reversed(shape[2:]):
        inside.insert(0, step)
        step = step * size
    return (step, 1, *inside)


def lies_last(kind: TensorType) -> bool:
    """Does a tensor [N, C, *S] lie as [N, *S, C], and not as it is?"""
    if kind.rank not in RANKS or kind.strides is None:
        return False
    return all(a == b for a, b, size in zip(kind.strides, last_strides(kind.shape), kind.shape, strict=True)
               if size != 1) and any(a != b for a, b, size in zip(
                   kind.strides, kind.dense().layout(), kind.shape, strict=True) if size != 1)
