"""The table of translations, one row per ATen overload, and what a translation may ask for.

An operator that a row of ops/pointwise.py names as its function of torch needs no translation.

A translation is a function `(t, *arguments)` that has the parameters of the op's schema. Tensors arrive as values,
sizes as sizes, and it returns a value or a tuple of values (None for a result that is not made). It appends equations
to `t.builder`; when it cannot carry a case it raises `Decline`, and the op becomes an extern call.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from anyshape.backend.interface import Target
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.ir.build import Builder
from anyshape.ir.graph import Attr, Operand, Value
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import TensorType, kind_of
from anyshape.ops.pointwise import BY_TORCH, POINTWISE, Pointwise, result_dtype
from anyshape.passes.constant_folding import round_to
from anyshape.sym.expr import Expr, Size, product
from anyshape.sym.prover import prove_nonnegative
from anyshape.torch_compat import OpOverload, OpOverloadPacket, arity, operator_name, schema_text
from anyshape.torch_compat.dtypes import DTYPE_NAMES, TORCH_DTYPES

Translation = Callable[..., Any]
TABLE: dict[Any, Translation] = {}
BY_SCHEMA: dict[str, Translation] = {}  # of operators that other packages define, by their whole schema


class Decline(Exception):
    """A translation does not carry this case; the message says why."""


class Mismatch(Exception):
    """Two dimensions that the trace takes as equal have different sizes in our form."""

    def __init__(self, a: Size, b: Size) -> None:
        super().__init__(f"{a} and {b}")
        self.a = a
        self.b = b


def translates(*ops: Any) -> Callable[[Translation], Translation]:
    """Makes the function the translation of these overloads (a packet stands for all its overloads)."""
    def add(function: Translation) -> Translation:
        for op in ops:
            if isinstance(op, OpOverloadPacket):
                for name in op.overloads():
                    if not name.endswith("out"):
                        TABLE.setdefault(getattr(op, name), function)
            else:
                TABLE[op] = function
        return function
    return add


def translates_schema(schema: str) -> Callable[[Translation], Translation]:
    """Makes the function the translation of the operator of this schema, which need not be there when this runs."""
    def add(function: Translation) -> Translation:
        BY_SCHEMA[schema] = function
        return function
    return add


def translation_of(op: OpOverload) -> Translation | None:
    """The row of an operator."""
    found = TABLE.get(op)
    if found is None and op.namespace not in ("aten", "prims"):
        found = BY_SCHEMA.get(schema_text(op))
    row = pointwise_row(op) if found is None else None
    return found if row is None else functools.partial(_translate_row, row)


def pointwise_row(op: OpOverload) -> Pointwise | None:
    """The row of ops/pointwise.py that names this operator as its function of torch."""
    name = operator_name(op)
    names = [f"ops.{op.namespace}.{name}"]
    if op.namespace in ("aten", "prims"):
        names = [name, name.replace("special_", "special.", 1), name.removeprefix("special_")]
    row = next((POINTWISE[BY_TORCH[one]] for one in names if one in BY_TORCH), None)
    return None if row is None or arity(op) != row.arity else row


def is_composed(op: OpOverload) -> bool:
    """Is the operator a pointwise row that is not one scalar instruction?"""
    row = pointwise_row(op)
    return row is not None and row.name not in SCALAR


def _translate_row(row: Pointwise, t: Translator, *operands: Any) -> Value:
    """The pointwise op in the dtype of the result; in that of the operands, where the result is bool."""
    if result_dtype(row.pattern, "f32") == "bool":
        return t.compare(row.name, *operands)
    given = [t.bound(x) for x in operands]
    return t.pointwise(row.name, *given[:-1], t.divisor(given[-1]) if row.divides else given[-1])


@functools.cache
def promote_types(a: str, b: str) -> str:
    """The dtype that torch promotes two dtypes to."""
    return DTYPE_NAMES[torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b])]


_CLASS = {"bool": 0, "int": 1, "uint": 1, "float": 2, "complex": 3}


def is_float(dtype: str) -> bool:
    """True for floating-point dtypes."""
    return kind_of(dtype) == "float"


def wide(dtype: str) -> str:
    """The dtype in which torch computes on elements of `dtype`: f32 for the half precisions."""
    return "f32" if dtype in ("f16", "bf16") else dtype


def is_literal(operand: Any) -> bool:
    """True for Python numbers and sizes."""
    return not isinstance(operand, Value)


CREATED = frozenset(("full", "iota"))  # rows without an operand, whose results are where they are asked for


class Translator:
    """The state of one walk over a graph, as translations see it.

    builder: where equations go. sizes: converts symbolic numbers. target: what the graph will be compiled for.
    result: the traced types of the current node's results, dense (a tuple for an op with several results, None in the
        place of results that are not made).
    node: the traced node, for what only the trace knows (strides).
    floats: names of rank-0 values that stand for Python floats; they do not take part in promotion as tensors do.
    device: of the graph's tensors, as PyTorch calls it: what is made from numbers is there too.
    """

    def __init__(self, builder: Builder, sizes: SymIntImporter, target: Target) -> None:
        self.builder = builder
        self.target = target
        self.sizes = sizes
        self.result: Any = None
        self.node: Node | None = None
        self.floats: set[str] = set()
        self.device = "cpu"

    @property
    def out(self) -> TensorType:
        """The traced type of the only result."""
        return self.result[0] if isinstance(self.result, tuple) else self.result

    def op(self, name: str, *inputs: Operand, **attrs: Attr) -> Value:
        """Append an equation with one result."""
        if self.device != "cpu" and name in CREATED:
            attrs.setdefault("device", self.device)
        return self.builder.op(name, *inputs, **attrs)  # type: ignore[arg-type]

    def cast(self, x: Any, dtype: str) -> Any:
        """`x` as `dtype`; scalars become literals that the dtype can hold."""
        if isinstance(x, Value):
            return x if x.tensor.dtype == dtype else self.op("cast", x, dtype=dtype)
        return literal(x, dtype)

    def bound(self, x: Any) -> Any:
        """`x`; a float rounded to the dtype of the result, in which most operators on half precision have their numbers
        (products, and quotients by a number, take it as it is)."""
        return round_to(x, self.out.dtype) if isinstance(x, float) and is_float(self.out.dtype) else x

    def pointwise(self, name: str, *inputs: Any, dtype: str | None = None) -> Value:
        """An elementwise op over operands cast to `dtype` (default: the result's), broadcast together.

        Raises:
            Mismatch: two dimensions have different symbolic sizes.
        """
        kind = dtype or self.out.dtype
        operands = [self.cast(x, kind) for x in inputs]
        if all(is_literal(x) for x in operands):
            operands[0] = self.full(operands[0], (), kind)
        self.check_broadcast(operands)
        return self.op(name, *operands)

    def check_broadcast(self, operands: Sequence[Operand]) -> None:
        """Raises Mismatch when dimensions that meet are neither equal nor 1."""
        shapes = [x.tensor.shape for x in operands if isinstance(x, Value)]
        if len(shapes) < 2 or all(shape == shapes[0] for shape in shapes):
            return
        for position in range(1, max(map(len, shapes)) + 1):
            seen: Size = 1
            for shape in shapes:
                if len(shape) < position or shape[-position] == 1:
                    continue
                if seen != 1 and shape[-position] != seen:
                    raise Mismatch(seen, shape[-position])
                seen = shape[-position]

    def compare(self, name: str, *operands: Any) -> Value:
        """A comparison, in the dtype that the operands promote to."""
        return self.pointwise(name, *operands, dtype=self.promoted(*operands))

    def divisor(self, y: Any) -> Any:
        """What a division or remainder divides by. One of whole numbers fails where a tensor has a 0 there; numbers and
        sizes are looked at before the program runs (`divided_sizes` in compiler/shape_preconditions.py)."""
        if isinstance(y, Value) and not is_float(self.out.dtype):
            return self.op("divisor", self.cast(y, self.out.dtype), count=self.out.count)
        return y

    def where(self, condition: Value, x: Any, y: Any, dtype: str | None = None) -> Value:
        """Elements of x where the condition holds, of y elsewhere, as `dtype` (default: the result's)."""
        kind = dtype or self.out.dtype
        operands = [self.cast(condition, "bool"), self.cast(x, kind), self.cast(y, kind)]
        if is_literal(operands[1]) and is_literal(operands[2]):
            operands[1] = self.full(operands[1], (), kind)
        self.check_broadcast(operands)
        return self.op("where", *operands)

    def promoted(self, *operands: Any) -> str:
        """The dtype that torch.result_type gives: tensors with dimensions count before rank-0 tensors, those before
        Python numbers, unless a later class is of a higher kind."""
        levels: list[str | None] = [None, None, None]
        for x in operands:
            if isinstance(x, Value) and x.name not in self.floats:
                level, dtype = (0 if x.tensor.shape else 1), x.tensor.dtype
            else:
                level, dtype = 2, scalar_dtype(x)
            known = levels[level]
            levels[level] = dtype if known is None else promote_types(known, dtype)
        return _combine(levels[0], _combine(levels[1], levels[2])) or "f32"

    def full(self, value: Any, shape: Sequence[Size], dtype: str) -> Value:
        """A tensor filled with a number or a rank-0 value."""
        if isinstance(value, Value):
            return self.broadcast(self.cast(value, dtype), shape)
        return self.op("full", literal(value, dtype), shape=tuple(shape), dtype=dtype)

    def broadcast(self, x: Value, shape: Sequence[Size]) -> Value:
        """`x` stretched to `shape`; itself when it has that shape."""
        target = tuple(shape)
        if x.tensor.shape == target:
            return x
        for have, want in zip(reversed(x.tensor.shape), reversed(target)):
            if have != 1 and have != want:
                raise Mismatch(have, want)
        return self.op("broadcast", x, shape=target)

    def reshape(self, x: Value, shape: Sequence[Size]) -> Value:
        """The same elements in row-major order under another shape; itself when it has that shape.

        Raises:
            VerifyError: the numbers of elements differ, or nothing shows that they are equal.
        """
        target = tuple(shape)
        if x.tensor.shape == target:
            return x
        count = product(target)
        if x.tensor.count != count:
            x = self._refilled(x, count)
        if x.tensor.count != count and self._equal_by_guard(x.tensor.count, count):
            # a*b == c*d leaves no dimension to rewrite: the flat run of elements takes the other formula
            x = self.window(self.op("reshape", x, shape=(x.tensor.count,)), 0, 0, count)
        return self.op("reshape", x, shape=target)

    def _equal_by_guard(self, a: Size, b: Size) -> bool:
        """Both counts hold at the traced sizes; PyTorch traced this reshape, so a guard keeps them equal."""
        if not (isinstance(a, Expr) and isinstance(b, Expr)):
            return False
        hint = self.builder.facts.hint
        return hint(a) == hint(b)

    def _refilled(self, x: Value, count: Size) -> Value:
        """`x` with one dimension written as an equal size, where that makes `count` elements."""
        shape = x.tensor.shape
        for dim, size in enumerate(shape):
            for other in self.sizes.equal_to(size) if isinstance(size, Expr) else ():
                if product(shape[:dim] + (other,) + shape[dim + 1:]) == count:
                    return self.window(x, dim, 0, other)
        return x

    def permute(self, x: Value, dims: Sequence[int]) -> Value:
        """Dimension i of the result is dimension dims[i] of `x`."""
        order = tuple(dims)
        return x if order == tuple(range(x.tensor.rank)) else self.op("permute", x, dims=order)

    def reduce(self, name: str, x: Value, dims: Sequence[int], keep: bool = False) -> Value:
        """A reduction; over no dimension it is the operand."""
        if not dims:
            return x
        return self.op(name, x, dims=tuple(dims), keep=keep)

    def window(self, x: Value, dim: int, start: Size, count: Size, step: Size = 1) -> Value:
        """Elements start, start + step, ... of one dimension; itself when that is all of it."""
        if start == 0 and step == 1 and x.tensor.shape[dim] == count:
            return x
        return self.op("slice", x, dim=dim, start=start, count=count, step=step)

    def iota(self, count: Size, start: Any = 0, step: Any = 1, dtype: str = "i64") -> Value:
        """start, start + step, ...: `count` elements, rank 1."""
        return self.op("iota", count=count, start=start, step=step, dtype=dtype)

    def dims(self, rank: int, dims: Any) -> tuple[int, ...]:
        """Sorted non-negative dims; None or an empty list means all."""
        if dims is None or (isinstance(dims, (list, tuple)) and not dims):
            return tuple(range(rank))
        chosen = [dims] if isinstance(dims, int) else list(dims)
        return tuple(sorted({d % rank for d in chosen})) if rank else ()

    def at_most(self, a: Size, b: Size) -> bool | None:
        """Is a <= b for every size in range? None when it cannot be told."""
        difference = b - a
        return difference >= 0 if isinstance(difference, int) else prove_nonnegative(self.sizes.facts(), difference)


def _combine(higher: str | None, lower: str | None) -> str | None:
    # c10's combine_categories (ATen/native/TypeProperties.cpp)
    if higher is None or lower is None:
        return higher or lower
    if _CLASS[kind_of(higher)] >= _CLASS[kind_of(lower)]:
        return higher
    return promote_types(higher, lower)


def scalar_dtype(x: Any) -> str:
    """The dtype that a Python number or a size has when it meets tensors."""
    if isinstance(x, Value):
        return DTYPE_NAMES[torch.get_default_dtype()]
    if isinstance(x, bool):
        return "bool"
    if isinstance(x, (int, Expr)):
        return "i64"
    return DTYPE_NAMES[torch.get_default_dtype()]


def literal(x: Any, dtype: str) -> Any:
    """A Python number or a size as a literal of `dtype`: truncated for whole-number dtypes, as torch does."""
    if isinstance(x, Expr):
        return x
    kind = kind_of(dtype)
    if kind == "float":
        return float(x)
    if kind == "bool":
        return bool(x)
    if isinstance(x, float) and not math.isfinite(x):
        raise Decline(f"{x} as {dtype} has no defined value")
    return int(x)
