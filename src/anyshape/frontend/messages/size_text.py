"""How sizes and numbers of bytes are said to people."""
from __future__ import annotations

from collections.abc import Mapping

from anyshape.sym.expr import Size, evaluate, symbols_of


def number(size: Size, values: Mapping[str, int]) -> int | None:
    """`size` at `values`, or None when a symbol is missing."""
    return evaluate(size, values) if symbols_of(size) <= values.keys() else None


def said(size: Size, values: tuple[tuple[str, int], ...] = ()) -> str:
    """Bytes as a formula, and in numbers where the sizes are known."""
    value = number(size, dict(values))
    if value is None:
        return f"{size} B"
    return bytes_text(value) if isinstance(size, int) else f"{size} B = {bytes_text(value)}"


def arena_text(formula: Size, placed: int | None, values: tuple[tuple[str, int], ...]) -> str:
    """The arena's formula, in numbers where the sizes are known, and what a call there takes if that is less."""
    less = placed is not None and placed != number(formula, dict(values))
    return said(formula, values) + (f" at most, {bytes_text(placed)} here" if less and placed is not None else "")


def decimal_text(count: int) -> str:
    """A number of bytes with a unit of 1000, as limits are said."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def bytes_text(count: int) -> str:
    """A number of bytes with a unit of 1024."""
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
