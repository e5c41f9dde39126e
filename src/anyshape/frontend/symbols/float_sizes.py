"""Sizes that a trace computes with floats and rounds to whole numbers.

    TruncToInt(0.6*ToFloat(s0))             -->  scaled(s0, 0.6)
    TruncToInt(FloatPow(ToFloat(s0), 0.5))  -->  root(s0)
"""
from __future__ import annotations

import math
from typing import Any, Protocol

import sympy

from anyshape.base.errors import Unsupported
from anyshape.sym import expr
from anyshape.sym.expr import Expr, Size
from anyshape.torch_compat.formulas import functions as ops

_ROUNDED = ops.CeilToInt, ops.FloorToInt, ops.TruncToInt, ops.RoundToInt  # whole, whatever is inside


class SizeReader(Protocol):
    """What reads the sizes of a trace (frontend/symbols/symint.py)."""

    def from_sympy(self, value: Any) -> Size:
        """A whole number of a trace as one of our sizes."""

    def range_of(self, size: Size) -> tuple[int | None, int | None]:
        """The least and the greatest value; None: none is known."""


def cannot(value: Any) -> Unsupported:
    """What is raised for a size that none of ours is."""
    return Unsupported(f"the size {value} has no exact form", why=f"{type(value).__name__} is not a polynomial, a "
                       "division rounded down, a whole square root, or a minimum or maximum",
                       do="compute the size with whole numbers")


def ratio_of(value: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic] | None:
    """Whole numbers (a, b) with value == a/b exactly, also when it is computed in float64 (below 2**53)."""
    if isinstance(value, ops.ToFloat):
        return value.args[0], sympy.Integer(1)
    if isinstance(value, (ops.IntTrueDiv, ops.FloatTrueDiv)):
        top, bottom = (ratio_of(part) for part in value.args)
        if top is None or bottom is None or not (_is_power_of_two(top[1]) and _is_power_of_two(bottom[1])):
            return None
        return top[0] * bottom[1], top[1] * bottom[0]  # of two floats that are exact: rounded once
    if isinstance(value, sympy.Float):
        number = float(value)
        if not math.isfinite(number):
            return None
        top_number, bottom_number = number.as_integer_ratio()
        if bottom_number > 2**20 or abs(top_number) > 2**20:
            return None
        return sympy.Integer(top_number), sympy.Integer(bottom_number)
    if isinstance(value, sympy.Mul):
        result = sympy.Integer(1), sympy.Integer(1)
        for part in value.args:
            ratio = ratio_of(part)
            if ratio is None or not _is_power_of_two(ratio[1]):
                return None
            result = result[0] * ratio[0], result[1] * ratio[1]
        return result
    if value.is_integer and not value.xreplace(dict.fromkeys(value.atoms(*_ROUNDED), sympy.Integer(1))).atoms(
            sympy.Float):
        return value, sympy.Integer(1)
    if isinstance(value, sympy.Add):
        return _sum(value)
    return None


def _is_power_of_two(value: sympy.Basic) -> bool:
    return value.is_Integer and not int(value) & (int(value) - 1)


def _sum(value: sympy.Add) -> tuple[sympy.Basic, sympy.Basic] | None:
    """The ratio of a sum of one quotient and whole numbers. Rounded to float64 it is on the same side of every whole
    number as the exact one, for a quotient that is none is 1/b from it at least (below 2**51)."""
    parts = [ratio_of(part) for part in value.args]
    bottom = sympy.Integer(1)
    for part in parts:
        if part is None or (part[1] != 1 and bottom != 1):
            return None
        bottom = bottom if part[1] == 1 else part[1]
    return sum((part[0] if part[1] != 1 else part[0] * bottom for part in parts if part is not None),
               start=sympy.Integer(0)), bottom


def from_float(sizes: SizeReader, value: sympy.Basic) -> Size:
    """A float that is no ratio of sizes, rounded.

    Raises:
        Unsupported: it is neither a size times a number, rounded down, nor the square root of a size.
    """
    inside = _under_root(value.args[0])
    if inside is not None:
        return _rooted(sizes, value, sizes.from_sympy(inside))
    if isinstance(value, (ops.FloorToInt, ops.TruncToInt)):
        return _scaled(sizes, value)
    raise cannot(value)


def _under_root(value: sympy.Basic) -> sympy.Basic | None:
    """The whole number of which the value is the square root."""
    if isinstance(value, ops.OpaqueUnaryFn_sqrt) or (isinstance(value, ops.FloatPow) and value.args[1] == 0.5):
        ratio = ratio_of(value.args[0])
        return ratio[0] if ratio is not None and ratio[1] == 1 else None
    return None


def _rooted(sizes: SizeReader, value: sympy.Basic, size: Size) -> Size:
    """The square root of a size, rounded as `value` says. Where it may be less than 0, as n - 1 for n = 0, calls with
    such a size are refused (`compiler/shape_preconditions.py`); PyTorch refuses them too."""
    if sizes.range_of(size)[0] is None:
        raise cannot(value)
    exact = _square_root(sizes, size)
    if exact is not None:
        return exact
    if isinstance(value, ops.CeilToInt):
        return expr.minimum(size, expr.root(expr.maximum(size - 1, 0)) + 1)
    if isinstance(value, ops.RoundToInt):  # the root is never in the middle of two whole numbers
        return expr.floordiv(expr.root(4 * size) + 1, 2)
    return expr.root(size)


def _square_root(sizes: SizeReader, size: Size) -> Size | None:
    """h*w of h*h*w*w."""
    if not isinstance(size, Expr) or len(size.terms) != 1:
        return None
    (mono, coefficient), = size.terms
    number = math.isqrt(coefficient)
    half = Expr(((tuple((atom, power // 2) for atom, power in mono), number),))
    return half if number**2 == coefficient and all(power % 2 == 0 for _, power in mono) and all(
        _is_positive(sizes, Expr(((((atom, 1),), 1),))) for atom, _ in mono) else None


def _is_positive(sizes: SizeReader, size: Size) -> bool:
    low, _ = sizes.range_of(size)
    return low is not None and low >= 0


def _scaled(sizes: SizeReader, value: sympy.Basic) -> Size:
    """A size times a float, rounded down, neither below 0."""
    product = value.args[0]
    numbers = [part for part in product.args if isinstance(part, sympy.Float)]
    others = [part.args[0] for part in product.args if isinstance(part, ops.ToFloat)]
    if not isinstance(product, sympy.Mul) or len(numbers) != 1 or len(others) != 1 \
            or len(product.args) != 2:
        raise cannot(value)
    size, factor = sizes.from_sympy(others[0]), float(numbers[0])
    if not _is_positive(sizes, size) or not 0 <= factor < math.inf:
        raise cannot(value)
    return expr.scaled(size, factor)
