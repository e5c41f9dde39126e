"""Python floats of a trace that depend on sizes or data: rank-0 f64 values, computed in the graph.

    torch.sym_float(s0) / 2.0  -->  f = full(s0 | shape=(), dtype=f64); div(f, 2.0)
"""
from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from anyshape.base.errors import Unsupported
from anyshape.frontend.aten.table import Translator
from anyshape.ir.graph import Value

_BINARY: dict[Any, str] = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div", operator.pow: "pow",
    operator.floordiv: "floor_div", operator.mod: "remainder", torch.sym_max: "maximum", torch.sym_min: "minimum",
}
_UNARY: dict[Any, str] = {operator.neg: "neg", abs: "abs", operator.abs: "abs", torch.sym_float: "", float: ""}
for _name, _row in (("sqrt", "sqrt"), ("exp", "exp"), ("log", "log"), ("log2", "log2"), ("sin", "sin"),
                    ("cos", "cos"), ("tan", "tan"), ("tanh", "tanh"), ("sinh", "sinh"), ("cosh", "cosh"),
                    ("asin", "asin"), ("acos", "acos"), ("atan", "atan")):
    for _function in (getattr(math, _name, None), getattr(torch, f"_sym_{_name}", None),
                      getattr(torch, f"sym_{_name}", None)):
        if _function is not None:
            _UNARY[_function] = _row


def float_value(t: Translator, node: Node, arguments: Sequence[Any]) -> Value | float:
    """The value of a node whose result is a Python float.

    Raises:
        Unsupported: a function that is not in the table.
    """
    traced = node.meta["val"]
    if isinstance(traced, float):
        return traced
    operands = [x if isinstance(x, Value) else t.full(x, (), "f64") for x in arguments]
    row = _BINARY.get(node.target) if len(operands) == 2 else _UNARY.get(node.target)
    if row is None:
        raise Unsupported(f"AnyShape does not compile {node.target} of Python floats", where=node.name,
                          do="the program runs as PyTorch would")
    value = t.op(row, *operands) if row else operands[0]
    t.floats.add(value.name)
    return value
