"""Extern calls: an op that has no translation is called by its PyTorch name, with its arguments as a template.

    aten.convolution(x, w, None, [1, 1], ...)  -->  extern(x, w | target="aten.convolution.default",
        template=(("args", ("operand", 0), ("operand", 1), ("none",), ("list", ("int", 1), ("int", 1)), ...),
                  ("kwargs",)))

The results are the tensors that the op returns, lists and tuples flattened, anything else left out.

Random numbers that are drawn in the order of memory (`DRAWN_IN_MEMORY_ORDER`) need an operand that lies as the traced
one: a permute makes it dense, and the template's entry ("permuted", place, dims) turns it back for the call.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from anyshape.frontend.symbols.node_metadata import UnsupportedNode
from anyshape.ir.build import Builder
from anyshape.ir.graph import Attr, Operand, Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, Size
from anyshape.torch_compat import OpOverload, operator_name
from anyshape.torch_compat.dtypes import DTYPE_NAMES
from anyshape.torch_compat.versions.memory_order import memory_order
from anyshape.torch_compat.versions.side_effects import has_effect

# what `x.uniform_()` and others become in a graph, and what draws into a tensor like the operand
DRAWN_IN_MEMORY_ORDER = frozenset((
    "uniform", "normal_functional", "exponential", "cauchy", "geometric", "log_normal", "random", "rand_like",
    "randn_like", "randint_like", "multinomial"))


def extern(builder: Builder, node: Node, target: OpOverload, given: tuple[Any, ...],
           resolve: Callable[[Any], Any], types: Any, floats: set[str],
           strides: Callable[[Node, Value], tuple[Size, ...] | None], effect: bool = False) -> Any:
    """Appends the call and returns its result in the op's own structure.

    Args:
        given: the positional arguments; those by keyword are the node's.
        types: the traced types: one, a tuple (with None or a number where the op returns one), or None.
        strides: those of a traced tensor, None where it is dense: a custom op gets operands that lie as they were.
        floats: names of values that stand for Python floats; the template has no entry for those.
        effect: the call does more than give its results, whatever is known of the op itself.

    Raises:
        UnsupportedNode: an argument that a template cannot hold.
    """
    operands: list[Operand] = []
    layouts: list[tuple[Size, ...] | None] = []

    def entry(argument: Any) -> tuple[Attr, ...]:
        value = resolve(argument)
        if isinstance(value, Value):
            if value.name in floats:
                raise _cannot(node, "a computed Python float")
            operands.append(value)
            layouts.append(strides(argument, value) if isinstance(argument, Node) else None)
            return ("operand", len(operands) - 1)
        if isinstance(value, Expr):
            operands.append(value)
            layouts.append(None)
            return ("operand", len(operands) - 1)
        if isinstance(value, (list, tuple)):
            return ("list", *(entry(x) for x in argument))
        return _leaf(node, value)

    arguments = tuple(entry(x) for x in given)
    if operands and layouts[0] is not None and _drawn_in_memory_order(target):
        lies = given[0].meta["val"]
        order = memory_order(node.meta["val"] if operator_name(target).endswith("_like") else lies)
        if order is None:
            raise _cannot(node, "an operand of these strides")
        first = operands[0]
        assert isinstance(first, Value)
        operands[0] = builder.op("permute", first, dims=order)
        arguments = (("permuted", 0, *(order.index(d) for d in range(len(order)))), *arguments[1:])
    keywords = tuple((key, entry(x)) for key, x in node.kwargs.items())
    flat = [kind for kind in (types if isinstance(types, tuple) else (types,)) if isinstance(kind, TensorType)]
    custom = not str(target).startswith("aten.") and any(layouts)
    more: dict[str, Any] = {"strides": tuple(layouts)} if custom else {}
    results = iter(builder.multi(
        "extern", *operands, name=operator_name(target).strip("_"), types=tuple(flat), target=str(target),
        template=(("args", *arguments), ("kwargs", *keywords)), effect=effect or has_effect(target), **more))
    if isinstance(types, tuple):
        return tuple(next(results) if isinstance(kind, TensorType) else kind for kind in types)
    return next(results, None)


def _drawn_in_memory_order(target: OpOverload) -> bool:
    name = operator_name(target)
    return name in DRAWN_IN_MEMORY_ORDER or str(target) == "aten.bernoulli.Tensor"


def _leaf(node: Node, value: Any) -> tuple[Attr, ...]:
    if value is None:
        return ("none",)
    for kind, tag in ((bool, "bool"), (int, "int"), (float, "float"), (str, "str")):
        if isinstance(value, kind):
            return (tag, value)
    if isinstance(value, complex):
        return ("complex", value.real, value.imag)
    if isinstance(value, torch.dtype) and value in DTYPE_NAMES:
        return ("dtype", DTYPE_NAMES[value])
    if isinstance(value, torch.device):
        return ("device", str(value))
    if isinstance(value, torch.layout):
        return ("layout", str(value).removeprefix("torch."))
    if isinstance(value, torch.memory_format):
        return ("memory_format", str(value).removeprefix("torch."))
    raise _cannot(node, f"an argument of type {type(value).__name__}")


def _cannot(node: Node, what: str) -> UnsupportedNode:
    return UnsupportedNode(node, f"AnyShape does not compile {node.target} with {what}", node.name)
