"""Patterns of attention: the calls of a Dynamo graph that programs write attention with, read as (kind, operands).

    torch.div(scores, 8.0), scores / 8.0, scores.div_(8.0)   -->   over(scores, 8.0)

`FORMS` is the table. A row names torch's parameters in order, with defaults, so that a call reads the same however its
arguments are given. A further way to write a step is one more name in a row.
"""
from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Form:
    """A row. kind: what the call means. parameters: (torch's name, default or REQUIRED), in order."""

    kind: str
    parameters: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class PatternStep:
    """A call that was read: its kind, and its operands in the order of the row."""

    kind: str
    operands: tuple[Any, ...]


# kind, parameters, targets: functions, or names of methods
_ROWS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("product", "input other", (operator.matmul, operator.imatmul, torch.matmul, "matmul", "__matmul__")),
    ("product", "input mat2", (torch.bmm, "bmm", torch.mm, "mm")),
    ("added product", "input batch1 batch2 beta=1 alpha=1", (torch.baddbmm, "baddbmm")),
    ("times", "input other", (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply")),
    ("over", "input other rounding_mode=None",
     (operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", "true_divide")),
    ("plus", "input other alpha=1", (operator.add, operator.iadd, torch.add, "add", "add_")),
    ("minus", "input other alpha=1", (operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_")),
    ("fill", "input mask value", (torch.masked_fill, "masked_fill", "masked_fill_")),
    ("where", "condition input other", (torch.where,)),
    ("chosen", "input condition other", ("where",)),
    ("softmax", "input dim=None _stacklevel=3 dtype=None", (F.softmax,)),
    ("softmax", "input dim dtype=None", (torch.softmax, "softmax")),
    ("cast", "input", ("to", "float", "half", "bfloat16", "double", "type", "type_as")),
    ("same", "input", ("contiguous", "clone", torch.clone)),
    ("dropout", "input p=0.5 training=True inplace=False", (F.dropout,)),
    ("dropout", "input p train", (torch.dropout,)),
    ("shape", "input", ("view", "reshape", torch.reshape)),
    # what masks are made with
    ("lower", "input diagonal=0", (torch.tril, "tril", "tril_")),
    ("upper", "input diagonal=0", (torch.triu, "triu", "triu_")),
    ("not", "input", (operator.invert, torch.logical_not, "logical_not", torch.bitwise_not, "bitwise_not")),
    ("and", "input other", (operator.and_, operator.iand, torch.logical_and, "logical_and", torch.bitwise_and)),
    ("or", "input other", (operator.or_, operator.ior, torch.logical_or, "logical_or", torch.bitwise_or)),
    ("equal", "input other", (operator.eq, torch.eq, "eq")),
    ("less", "input other", (operator.lt, torch.lt, "lt")),
    ("at most", "input other", (operator.le, torch.le, "le")),
    ("more", "input other", (operator.gt, torch.gt, "gt")),
    ("at least", "input other", (operator.ge, torch.ge, "ge")),
    ("ones", "size", (torch.ones,)),
    ("full", "size fill_value", (torch.full,)),
    ("constant", "data", (torch.tensor, torch.scalar_tensor)),
    ("placed", "input", ("unsqueeze", torch.unsqueeze, "expand", "bool", "cpu")),
    ("item", "input index", (operator.getitem,)),
)


def _parameters(text: str) -> tuple[tuple[str, Any], ...]:
    words = [word.partition("=") for word in text.split()]
    return tuple((name, ast.literal_eval(default) if sign else REQUIRED) for name, sign, default in words)


FORMS: dict[Any, Form] = {target: Form(kind, _parameters(text)) for kind, text, targets in _ROWS for target in targets}
EINSUM = (torch.einsum, torch.functional.einsum)
IN_PLACE = frozenset((operator.imatmul, operator.imul, operator.itruediv, operator.iadd, operator.isub, operator.iand,
                      operator.ior))
# kinds of steps between the product and the softmax that may be done in place
CHANGES = frozenset(("times", "over", "plus", "minus", "fill"))


def read(node: Any) -> PatternStep | None:
    """The call as a step; None when it is none of the table, or its arguments are not those of the row."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    if node.target in EINSUM:
        operands = node.args[1:]
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = tuple(operands[0])
        return PatternStep("einsum", (node.args[0], *operands))
    form = FORMS.get(node.target)
    if form is None:
        return None
    if form.kind in ("cast", "same", "shape", "placed", "ones"):
        return PatternStep(form.kind, node.args) if node.args else None
    known = dict(zip((name for name, _ in form.parameters), node.args, strict=False))
    if node.op == "call_method" and "self" in node.kwargs:
        return None
    known.update({name: value for name, value in node.kwargs.items() if name in {name for name, _ in form.parameters}})
    operands = tuple(known.get(name, default) for name, default in form.parameters)
    if REQUIRED in operands or len(node.args) > len(form.parameters):
        return None
    if form.kind == "chosen":
        return PatternStep("where", (operands[1], operands[0], operands[2]))
    return PatternStep(form.kind, operands)


def in_place(node: Node) -> bool:
    """Whether the call changes its first operand: by its name, or as asked for."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    asked = node.kwargs.get("inplace") is True or "out" in node.kwargs or (
        node.target is F.dropout and len(node.args) > 3 and node.args[3] is True)
    return (asked or node.target in IN_PLACE or node.target is operator.setitem
            or (name.endswith("_") and not name.endswith("__")))


def changes_by_schema(node: Node) -> bool:
    """Whether the call is of an operator that says that it changes an operand."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def traced(node: Any) -> torch.Tensor | None:
    """The fake tensor that Dynamo had for a node."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def number(value: Any) -> float | None:
    """A number that the program fixes: written down, or as a tensor of no dims; None for all else."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    step = read(value)
    tensor = traced(value)
    if step is None or tensor is None or tensor.dim() != 0 or tensor.requires_grad:
        return None
    if step.kind == "full":
        return number(step.operands[1])
    return number(step.operands[0]) if step.kind in ("constant", "cast", "same") else None
