"""Pointwise rows: result element i from the operands' elements at i, after broadcasting.

A row says what scalar instructions make an element, and of what dtypes. A scalar instruction (ir/scalar.py) with
`kinds` is a row by itself; other rows are lines of COMPOSED. From a row follow the type rule, the loop body, the
reference interpreter, the cost, the translation of PyTorch's operator (frontend/aten/table.py), and tests.
"""
from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyshape.ir.graph import Literal, Node, Operand, Value
from anyshape.ir.op import DIVISOR, Arithmetic, Body, Index
from anyshape.ir.rewrite_rules import Apply, Number, Pattern, Variable, pattern_of, subterms
from anyshape.ir.scalar import ANY, BITS, FLOAT, INTEGER, SCALAR, Ranges, Scalar
from anyshape.ir.types import TensorType, kind_of
from anyshape.ops.type_rules import (
    Attrs,
    Inputs,
    Types,
    add_row,
    broadcast_index,
    broadcast_shapes,
    check_scalar,
    constant,
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

OPERANDS = ("x", "y", "z")


@dataclass(frozen=True, slots=True)
class Pointwise:
    """One row.

    name: of the op in graphs.
    kinds: of dtypes (float, int, uint, bool), or dtypes, on which it is defined.
    body: one element: scalar instructions of the operands x, y, z and of literals, which are of the operands' dtype.
    torch: the function of torch that it is, such as "special.erfcx", or "ops.library.name" of a library's operator: the
        reference interpreter calls it, and the front-end translates the operator. "" where PyTorch has none: then its
        meaning is its body's.
    divides: see Scalar.
    ranges: see Scalar.
    """

    name: str
    kinds: tuple[str, ...]
    body: str
    torch: str = ""
    divides: bool = False
    ranges: Ranges = ()

    @property
    def pattern(self) -> Pattern:
        """The body, read."""
        return pattern_of(self.body)

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len({term for term in subterms(self.pattern) if isinstance(term, Variable)})


def of_scalar(row: Scalar) -> Pointwise:
    """A scalar instruction as a row."""
    return Pointwise(row.name, row.kinds, f"{row.name}({', '.join(OPERANDS[:row.arity])})", row.meaning, row.divides,
                     row.ranges)


COMPOSED = (
    # one instruction, of another name
    Pointwise("bit_and", BITS, "and(x, y)", "bitwise_and"),
    Pointwise("bit_or", BITS, "or(x, y)", "bitwise_or"),
    Pointwise("bit_xor", BITS, "xor(x, y)", "bitwise_xor"),
    Pointwise("bit_not", BITS, "not(x)", "bitwise_not"),
    # several
    Pointwise("xlogy", FLOAT, "where(isnan(y), y, where(eq(x, 0), 0, mul(x, log(y))))", "xlogy"),
    Pointwise("xlog1py", FLOAT, "where(isnan(y), y, where(eq(x, 0), 0, mul(x, log1p(y))))", "special.xlog1py"),
    Pointwise("logaddexp", FLOAT, "where(and(isinf(maximum(x, y)), eq(x, y)), maximum(x, y), "
              "add(maximum(x, y), log1p(exp(neg(abs(sub(x, y)))))))", "logaddexp"),
    Pointwise("logaddexp2", FLOAT, "where(and(isinf(maximum(x, y)), eq(x, y)), maximum(x, y), "
              "add(maximum(x, y), mul(log1p(exp2(neg(abs(sub(x, y))))), 1.4426950408889634)))", "logaddexp2"),
    Pointwise("heaviside", ANY, "where(eq(x, 0), y, where(gt(x, 0), 1, 0))", "heaviside"),
)

POINTWISE: dict[str, Pointwise] = {}
BY_TORCH: dict[str, str] = {}  # function of torch -> row


def result_dtype(pattern: Pattern, dtype: str) -> str:
    """Of a body whose operands are `dtype`."""
    if isinstance(pattern, Apply):
        return "bool" if SCALAR[pattern.op].test else result_dtype(pattern.args[-1], dtype)
    return "bool" if isinstance(pattern, Number) and isinstance(pattern.value, bool) else dtype


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


def _infer(kinds: tuple[str, ...], pattern: Pattern, name: str, inputs: Inputs, attrs: Attrs) -> Types:
    types = _operand_types(name, inputs)
    dtype = _common_dtype(name, types, [item for item in inputs if not isinstance(item, Value)])
    if kind_of(dtype) not in kinds and dtype not in kinds:
        fail(name, f"it is defined on {', '.join(kinds)}, and the operands are {dtype}", "insert a cast")
    shape = broadcast_shapes(name, [kind.shape for kind in types])
    return (TensorType(result_dtype(pattern, dtype), shape, None, same_device(name, types)),)


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


def _operands(body: Body[Any], node: Node, index: Index) -> list[tuple[Any, str]]:
    """Each operand's element at its broadcast index, with its dtype."""
    dtype = operand_dtype(node)
    found: list[tuple[Any, str]] = []
    for position, item in enumerate(node.inputs):
        if isinstance(item, Value):
            found.append((body.read(item, broadcast_index(item.tensor.shape, index)), item.tensor.dtype))
            continue
        if node.output.tensor.dtype == "bool" and not isinstance(item, Expr):
            # a comparison sees the literal as an element of the dtype; arithmetic keeps it exact, as PyTorch does
            item = rounded(item, dtype)
        kind = "bool" if node.op == "where" and position == 0 else dtype
        found.append((scalar(body, item, kind), kind))
    return found


def _pointwise_body(pattern: Pattern, body: Body[Any], node: Node, index: Index) -> object:
    """Apply the scalar instructions of `pattern` to the operands."""
    operands = dict(zip(OPERANDS, _operands(body, node, index)))
    return applied(pattern, body, operands, operand_dtype(node))[0]


def applied(pattern: Pattern, body: Arithmetic[Any], operands: Mapping[str, tuple[Any, str]],
            dtype: str) -> tuple[Any, str]:
    """The register of a body, and its dtype; literals are of `dtype`."""
    if isinstance(pattern, Variable):
        return operands[pattern.name]
    if isinstance(pattern, Number):
        kind = result_dtype(pattern, dtype)
        return constant(body, pattern.value, kind), kind
    args = [applied(argument, body, operands, dtype) for argument in pattern.args]
    kind = "bool" if SCALAR[pattern.op].test else args[-1][1]
    return body.apply(pattern.op, *(register for register, _ in args), dtype=kind), kind


def _cast_body(body: Body[Any], node: Node, index: Index) -> object:
    """Read the operand and convert it."""
    return body.apply("cast", _operands(body, node, index)[0][0], dtype=node.output.tensor.dtype)


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


def add_pointwise(row: Pointwise) -> Pointwise:
    """Add a row to the op table; a body of other than x, y, z and scalar instructions is a bug."""
    pattern = row.pattern
    terms = [term for term in subterms(pattern) if isinstance(term, Apply)]
    assert all(len(term.args) == SCALAR[term.op].arity for term in terms), row
    assert {term.name for term in subterms(pattern) if isinstance(term, Variable)} == {*OPERANDS[:row.arity]}, row
    used = [term.op for term in terms]
    add_row(row.name, "pointwise", ", ".join(OPERANDS[:row.arity]), partial(_infer, row.kinds, pattern),
            body=partial(_pointwise_body, pattern), cost=sum(SCALAR[op].cost for op in used), torch=row.torch,
            scalars=frozenset(used), commutes=len(used) == 1 and SCALAR[used[0]].commutes)
    POINTWISE[row.name] = row
    if row.torch:
        BY_TORCH[row.torch] = row.name
    return row


for _row in (*(of_scalar(one) for one in SCALAR.values() if one.kinds), *COMPOSED):
    add_pointwise(_row)
add_row("where", "pointwise", "condition, x, y", _infer_where,
        body=partial(_pointwise_body, pattern_of("where(x, y, z)")), torch="where", scalars=frozenset(("where",)))
add_row("cast", "pointwise", "x | dtype", _infer_cast, body=_cast_body)
# stored, for eager divides by all of it, whatever is read of the quotient
add_row("divisor", "pointwise", "y | count", _infer_divisor, body=_divisor_body, cost=2, checks=True, stored=True)
add_row("store", "pointwise", "x | dtype", _infer_cast, body=_cast_body, stored=True)
