"""Constant folding of small tensors over sizes: what a model computes about its own shapes, as our size expressions.

    Shape -> Gather(0) -> Mul(2) -> Concat  -->  Known([2*n, ...])

A `Known` is an array of which every element is known when compiling, as a number or as a formula over sizes.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyshape.frontend.symbols.numpy_arrays import dtype_of, numpy_dtype
from anyshape.sym.expr import Expr, Size, divide, floordiv, maximum, minimum, mod
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_equal, prove_nonnegative

MOST = 4096  # elements that are folded


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An array known when compiling. dtype: ours. array: of numbers, or of objects where formulas are among them."""

    array: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dims, numbers."""
        return self.array.shape

    @property
    def symbolic(self) -> bool:
        """Whether formulas are in it."""
        return self.array.dtype == object and self.dtype != "string"

    def items(self) -> list[Any]:
        """The elements in order, as Python numbers or formulas."""
        return self.array.reshape(-1).tolist()


class Comparison:
    """An element of a Known: a comparison of sizes that is not known when compiling. way: EQ, NE, LT, LE, GT, GE."""

    def __init__(self, way: str, a: Size, b: Size) -> None:
        self.way, self.a, self.b = way, a, b


@dataclass(frozen=True, slots=True)
class Ratio:
    """An element of a Known of floats: a formula over a whole number above 1 that does not divide it."""

    over: Expr
    under: int


class Unknown(Exception):
    """A fold that has no formula: the tensor is computed by the program."""


def known(array: Any, dtype: str | None = None) -> Known:
    """An array as a Known; one of objects without formulas becomes one of numbers."""
    found = np.asarray(array)
    if found.dtype == object and dtype not in (None, "string"):
        if not any(isinstance(item, (Expr, Comparison, Ratio)) for item in found.reshape(-1)):
            found = found.astype(numpy_dtype(str(dtype)))
    return Known(found, dtype_of(found) if dtype is None else dtype)


def sizes(values: Sequence[Size], dtype: str = "i64") -> Known:
    """A line of sizes."""
    line = np.empty(len(values), object)
    line[:] = list(values)
    return known(line, dtype)


def objects(one: Known) -> np.ndarray:
    """The array with Python numbers and formulas for elements."""
    return one.array if one.array.dtype == object else one.array.astype(object)


def each(function: Callable[..., Any], *operands: Known, dtype: str) -> Known:
    """An elementwise function of broadcast operands."""
    arrays = np.broadcast_arrays(*(objects(one) for one in operands))
    result = np.empty(arrays[0].shape, object)
    for index in np.ndindex(*result.shape):
        result[index] = function(*(array[index] for array in arrays))
    return known(result, dtype)


# ---- arithmetic of floats


MOST_UNDER = 1024  # of a factor, which is then one that floats hold: 0.5, not 0.1


def rational(item: Any) -> tuple[Size, int]:
    """A float of sizes as a quotient: what is over the line, and what is under it, at least 1."""
    if isinstance(item, Expr):
        return item, 1
    if isinstance(item, Ratio):
        return item.over, item.under
    if not math.isfinite(item):
        raise Unknown
    over, under = float(item).as_integer_ratio()
    if under > MOST_UNDER:
        raise Unknown
    return over, under


def quotient(over: Size, under: int) -> Any:
    """`over / under`, under != 0, as an element of floats."""
    if under < 0:
        over, under = -over, -under
    if not isinstance(over, Expr):
        return over / under
    whole, rest = divide(over, under)
    if rest == 0:
        return whole if isinstance(whole, Expr) else float(whole)
    if under > MOST_UNDER:
        raise Unknown
    return Ratio(over, under)


def rational_arithmetic(name: str, a: Any, b: Any) -> Any:
    """Add, Sub, Mul or Div of floats of sizes."""
    (over, under), (other, below) = rational(a), rational(b)
    if name in ("Add", "Sub"):
        return quotient(over * below + (other if name == "Add" else -other) * under, under * below)
    if name == "Mul":
        return quotient(over * other, under * below)
    if isinstance(other, Expr) or other == 0:
        raise Unknown
    return quotient(over * below, under * other)


# ---- arithmetic of whole numbers


def divided(facts: Facts, a: Any, b: Any) -> Any:
    """a / b as ONNX has it for whole numbers: toward zero; b > 0."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise Unknown
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    if prove_nonnegative(facts, a) and prove_nonnegative(facts, b - 1):
        return floordiv(a, b)
    if prove_nonnegative(facts, b - 1) and isinstance(a, Expr) and prove_nonnegative(facts, -a):
        return -floordiv(-a, b)
    raise Unknown


def remainder(facts: Facts, a: Any, b: Any) -> Any:
    """a modulo b, with the sign of b."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise Unknown
        return a % b
    if prove_nonnegative(facts, b - 1):
        return mod(a, b)
    raise Unknown


def holds(name: str, a: Any, b: Any) -> bool:
    """A comparison of numbers."""
    return bool({"eq": a == b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[name])


def compared(facts: Facts, name: str, a: Any, b: Any) -> bool:
    """Whether a comparison holds; Unknown where it depends on sizes."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return holds(name, a, b)
    if isinstance(a, float) or isinstance(b, float):
        raise Unknown
    if name == "eq":
        found = prove_equal(facts, a, b)
        if found is None and (prove_nonnegative(facts, a - b - 1) or prove_nonnegative(facts, b - a - 1)):
            found = False
    elif name in ("gt", "lt"):
        found = _less(facts, *((b, a) if name == "gt" else (a, b)))
    else:
        other = _less(facts, *((a, b) if name == "ge" else (b, a)))
        found = None if other is None else not other
    if found is None:
        raise Unknown
    return found


def _less(facts: Facts, a: Size, b: Size) -> bool | None:
    if prove_nonnegative(facts, b - a - 1):
        return True
    return False if prove_nonnegative(facts, a - b) else None


def power(a: Any, b: Any) -> Any:
    """a to a small whole power."""
    if isinstance(b, float) and b.is_integer():
        b = int(b)
    if not isinstance(b, int) or not 0 <= b <= 8:
        raise Unknown
    result: Any = 1
    for _ in range(b):
        result = result * a
    return result


def largest(a: Any, b: Any) -> Any:
    """The larger one."""
    return maximum(a, b) if isinstance(a, Expr) or isinstance(b, Expr) else max(a, b)


def smallest(a: Any, b: Any) -> Any:
    """The smaller one."""
    return minimum(a, b) if isinstance(a, Expr) or isinstance(b, Expr) else min(a, b)


def product_of(one: Known, axes: tuple[int, ...], keep: bool, what: Callable[[Any, Any], Any], first: Any) -> Known:
    """A reduction."""
    array = objects(one)
    moved = np.moveaxis(array, axes, range(len(axes)))
    lines = moved.reshape(math.prod(moved.shape[:len(axes)]), -1)
    result = np.empty(lines.shape[1], object)
    for column in range(lines.shape[1]):
        total = first
        for row in range(lines.shape[0]):
            total = lines[row, column] if total is None else what(total, lines[row, column])
        if total is None:
            raise Unknown
        result[column] = total
    shape = [1 if d in axes else n for d, n in enumerate(array.shape) if keep or d not in axes]
    return known(result.reshape(shape), one.dtype)
