"""Pointwise rows: result element i from the operands' elements at i, after broadcasting.

All rows share one type rule and one body; a row is its name, the kinds of dtype it takes, and its cost.
"""
from __future__ import annotations

import struct
from functools import partial
from typing import Any

from anyshape.ir.graph import Literal, Node, Operand, Value
from anyshape.ir.op import DIVISOR, Body, Index
from anyshape.ir.types import TensorType, kind_of
from anyshape.ops.type_rules import (
    Attrs,
    Inputs,
    Types,
    add_row,
    broadcast_index,
    broadcast_shapes,
    check_scalar,
    dtype_of,
    fail,
    native,
    same_device,
    scalar,
    size,
    size_attr,
    tensor,
)
from anyshape.sym.expr import Expr

FLOAT = ("float",)
NUMBER = ("float", "int", "uint")
INTEGER = ("int", "uint")
BITS = ("int", "uint", "bool")
ANY = ("float", "int", "uint", "bool")

# rows whose result is bool
TESTS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "signbit"))

# the loop language writes these in another way
SCALAR_NAMES = {"store": "cast", "bit_and": "and", "bit_or": "or", "bit_xor": "xor", "bit_not": "not"}

# name, dtype kinds, cost (in additions), torch function ("": runtime/torch_ops/reference_interpreter.py has its own
# line)
UNARY: tuple[tuple[str, tuple[str, ...], int, str], ...] = (
    ("neg", NUMBER, 1, "neg"), ("abs", NUMBER, 1, "abs"), ("sign", NUMBER, 2, "sign"),
    ("floor", FLOAT, 1, "floor"), ("ceil", FLOAT, 1, "ceil"), ("round", FLOAT, 1, "round"),
    ("trunc", FLOAT, 1, "trunc"),
    ("exp", FLOAT, 8, "exp"), ("exp2", FLOAT, 8, "exp2"), ("expm1", FLOAT, 12, "expm1"),
    ("log", FLOAT, 10, "log"), ("log2", FLOAT, 10, "log2"), ("log10", FLOAT, 10, "log10"),
    ("log1p", FLOAT, 12, "log1p"),
    ("sqrt", FLOAT, 4, "sqrt"), ("rsqrt", FLOAT, 6, "rsqrt"), ("reciprocal", FLOAT, 4, "reciprocal"),
    ("sin", FLOAT, 14, "sin"), ("cos", FLOAT, 14, "cos"), ("tan", FLOAT, 20, "tan"), ("tanh", FLOAT, 14, "tanh"),
    ("sigmoid", FLOAT, 12, "sigmoid"), ("erf", FLOAT, 20, "erf"), ("erfc", FLOAT, 24, "erfc"),
    ("asin", FLOAT, 16, "asin"), ("acos", FLOAT, 16, "acos"), ("atan", FLOAT, 16, "atan"),
    ("sinh", FLOAT, 16, "sinh"), ("cosh", FLOAT, 16, "cosh"),
    ("asinh", FLOAT, 20, "asinh"), ("acosh", FLOAT, 20, "acosh"), ("atanh", FLOAT, 20, "atanh"),
    ("lgamma", FLOAT, 60, "lgamma"), ("digamma", FLOAT, 60, "digamma"), ("erfinv", FLOAT, 40, "erfinv"),
    ("bit_not", BITS, 1, "bitwise_not"),
    ("isnan", FLOAT, 1, "isnan"), ("isinf", FLOAT, 1, "isinf"), ("signbit", NUMBER, 1, "signbit"),
)  # fmt: skip

BINARY: tuple[tuple[str, tuple[str, ...], int, str], ...] = (
    ("add", NUMBER, 1, "add"), ("sub", NUMBER, 1, "sub"), ("mul", NUMBER, 1, "mul"), ("div", FLOAT, 4, "div"),
    ("floor_div", NUMBER, 8, "floor_divide"), ("trunc_div", NUMBER, 8, ""), ("remainder", NUMBER, 8, "remainder"),
    ("fmod", NUMBER, 12, "fmod"), ("maximum", NUMBER, 1, "maximum"), ("minimum", NUMBER, 1, "minimum"),
    ("pow", NUMBER, 24, ""), ("atan2", FLOAT, 24, "atan2"), ("copysign", FLOAT, 1, "copysign"),
    ("hypot", FLOAT, 8, "hypot"), ("nextafter", FLOAT, 6, "nextafter"),
    ("eq", ANY, 1, "eq"), ("ne", ANY, 1, "ne"), ("lt", ANY, 1, "lt"), ("le", ANY, 1, "le"), ("gt", ANY, 1, "gt"),
    ("ge", ANY, 1, "ge"),
    ("bit_and", BITS, 1, "bitwise_and"), ("bit_or", BITS, 1, "bitwise_or"), ("bit_xor", BITS, 1, "bitwise_xor"),
    ("shift_left", INTEGER, 1, "bitwise_left_shift"), ("shift_right", INTEGER, 1, "bitwise_right_shift"),
)  # fmt: skip


def _operand_types(name: str, inputs: Inputs) -> list[TensorType]:
    """The types of the operands that are values; at least one."""
    types = [tensor(name, inputs, position) for position, item in enumerate(inputs) if isinstance(item, Value)]
    if not types:
        fail(name, "no operand is a tensor", "make a literal a tensor with full")
    return types


def _common_dtype(name: str, types: list[TensorType], scalars: list[Operand]) -> str:
    """The one dtype of `types`, which `scalars` can take too."""
    dtype = types[0].dtype
    for kind in types[1:]:
        if kind.dtype != dtype:
            fail(name, f"operands have dtypes {dtype} and {kind.dtype}", "insert a cast")
    native(name, dtype)
    for item in scalars:
        check_scalar(name, item, dtype)
    return dtype


def _infer(kinds: tuple[str, ...], name: str, inputs: Inputs, attrs: Attrs) -> Types:
    types = _operand_types(name, inputs)
    dtype = _common_dtype(name, types, [item for item in inputs if not isinstance(item, Value)])
    if kind_of(dtype) not in kinds:
        fail(name, f"it is defined on {', '.join(kinds)}, and the operands are {dtype}", "insert a cast")
    if name == "nextafter" and dtype not in ("f32", "f64"):
        fail(name, f"the neighbour of a {dtype} is not that of the f32 register that holds it")
    shape = broadcast_shapes(name, [kind.shape for kind in types])
    return (TensorType("bool" if name in TESTS else dtype, shape, None, same_device(name, types)),)


def _infer_where(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    types = _operand_types(name, inputs)
    values = _operand_types(name, inputs[1:]) if any(isinstance(x, Value) for x in inputs[1:]) else []
    if not values:
        fail(name, "neither choice is a tensor, so the dtype is unknown", "make one a tensor with full")
    dtype = _common_dtype(name, values, [item for item in inputs[1:] if not isinstance(item, Value)])
    condition = inputs[0]
    if isinstance(condition, Value) and types[0].dtype != "bool":
        fail(name, f"the condition is {types[0].dtype}, not bool", "compare with 0 by ne")
    if not isinstance(condition, (Value, bool)):
        fail(name, f"the condition {condition} is not bool", "compare with 0 by ne")
    shape = broadcast_shapes(name, [kind.shape for kind in types])
    return (TensorType(dtype, shape, None, same_device(name, types)),)


def _infer_cast(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    source = tensor(name, inputs, 0)
    native(name, source.dtype)
    return (TensorType(dtype_of(name, attrs), source.shape, None, source.device),)


def operand_dtype(node: Node) -> str:
    """The dtype that the value operands of a pointwise node share (for `where`: of its two choices)."""
    inputs = node.inputs[1:] if node.op == "where" else node.inputs
    return next(item.tensor.dtype for item in inputs if isinstance(item, Value))


def rounded(value: Literal, dtype: str) -> Literal:
    """A literal as an element of `dtype` bf16 or f16 would hold it; other dtypes are left to the constant."""
    if not isinstance(value, float) or value != value or value in (float("inf"), float("-inf")):
        return value
    if dtype == "f16":
        try:
            return float(struct.unpack("<e", struct.pack("<e", value))[0])
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    if dtype == "bf16":
        try:
            bits = int.from_bytes(struct.pack("<f", value), "little")
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])
    return value


def pointwise_body(body: Body[Any], node: Node, index: Index) -> object:
    """Read each operand at its broadcast index and apply the scalar operation."""
    dtype = operand_dtype(node)
    result = node.output.tensor.dtype
    registers = []
    for position, item in enumerate(node.inputs):
        if isinstance(item, Value):
            registers.append(body.read(item, broadcast_index(item.tensor.shape, index)))
            continue
        if node.op in TESTS and not isinstance(item, Expr):
            # a comparison sees the literal as an element of the dtype; arithmetic keeps it exact, as PyTorch does
            item = rounded(item, dtype)
        registers.append(scalar(body, item, "bool" if node.op == "where" and position == 0 else dtype))
    return body.apply(SCALAR_NAMES.get(node.op, node.op), *registers, dtype=result)


def _infer_divisor(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    kind = tensor(name, inputs, 0)
    if kind_of(kind.dtype) not in INTEGER:
        fail(name, f"{kind} is not of whole numbers")
    size(name, attrs, "count")
    return (kind.dense(),)


def _divisor_body(body: Body[Any], node: Node, index: Index) -> object:
    """The divisor as it is. Where it is 0 eager PyTorch refuses the division, if that has any element."""
    kind, count = node.output.tensor, size_attr(node, "count")
    register = body.read(node.inputs[0], index)
    holds = body.apply("ne", register, body.constant(0, kind.dtype), dtype="bool")
    if count != kind.count:
        empty = body.apply("eq", body.index(count), body.constant(0, "i64"), dtype="bool")
        holds = body.apply("or", holds, empty, dtype="bool")
    body.check(holds, DIVISOR)
    return register


for _name, _kinds, _cost, _torch in UNARY:
    add_row(_name, "pointwise", "x", partial(_infer, _kinds), body=pointwise_body, cost=_cost, torch=_torch)
for _name, _kinds, _cost, _torch in BINARY:
    add_row(_name, "pointwise", "x, y", partial(_infer, _kinds), body=pointwise_body, cost=_cost, torch=_torch)
add_row("where", "pointwise", "condition, x, y", _infer_where, body=pointwise_body, torch="where")
add_row("cast", "pointwise", "x | dtype", _infer_cast, body=pointwise_body)
# stored, for eager divides by all of it, whatever is read of the quotient
add_row("divisor", "pointwise", "y | count", _infer_divisor, body=_divisor_body, cost=2, checks=True, stored=True)
add_row("store", "pointwise", "x | dtype", _infer_cast, body=pointwise_body, stored=True)
