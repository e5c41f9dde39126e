"""How formulas of bytes are said to people."""
from __future__ import annotations

from collections.abc import Mapping

from anyshape.base.units import bytes_text
from anyshape.sym.expr import Size, evaluate, symbols_of

LONGEST = 200  # characters of a formula that is shown
Sizes = tuple[tuple[str, int], ...]  # of symbols, by name


def number(size: Size, values: Mapping[str, int]) -> int | None:
    """`size` at `values`, or None when a symbol is missing."""
    return evaluate(size, values) if symbols_of(size) <= values.keys() else None


def said(size: Size, values: Sizes = (), likely: Sizes = ()) -> str:
    """Bytes as a formula, and in numbers where the sizes are known; nobody reads a long formula, so that one is said in
    numbers at `likely` sizes, such as those of the trace."""
    formula = str(size)
    value = number(size, dict(values))
    if value is None and len(formula) > LONGEST:
        near = {**dict(likely), **dict(values)}
        value = number(size, near)
        at = ", ".join(f"{name}={near[name]}" for name in sorted(symbols_of(size)) if name in near)
        return (f"a formula of {len(formula):,} characters" if value is None else
                f"{bytes_text(value)} at {at} (by a formula of {len(formula):,} characters)")
    if value is None:
        return f"{formula} B"
    known = isinstance(size, int) or len(formula) > LONGEST
    return bytes_text(value) if known else f"{formula} B = {bytes_text(value)}"


def arena_text(formula: Size, placed: int | None, values: Sizes, likely: Sizes = ()) -> str:
    """The arena's formula, in numbers where the sizes are known, and what a call there takes if that is less."""
    less = placed is not None and placed != number(formula, dict(values))
    return said(formula, values, likely) + (f" at most, {bytes_text(placed)} here" if less and placed is not None
                                            else "")
