"""Sizes as text, such as 4*b*n + (n//2) + 8; `sym/parse.py` reads it back."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyshape.sym.floats import float_of


def call_text(op: str, args: Sequence[Any]) -> str:
    """The text of a call: a floor division with its sign, the others by name."""
    if op == "floordiv":
        a, b = (text if text.isalnum() else f"({text})" for text in map(str, args))
        return f"{a}//{b}"
    if op == "scaled":
        return f"scaled({args[0]}, {float_of(args[1])!r})"
    return f"{op}({', '.join(str(a) for a in args)})"


def text_of(terms: Sequence[tuple[Sequence[tuple[Any, int]], int]]) -> str:
    """The text of a sum: (monomial, coefficient) pairs, a monomial being (atom, power) pairs."""
    out = ""
    for mono, coefficient in terms:
        alone = len(mono) == 1 and mono[0][1] == 1 and (coefficient == 1 or (coefficient == -1 and bool(out)))
        factors = []
        for atom, power in mono:
            text = f"({atom})" if not isinstance(atom, str) and atom.op == "floordiv" and not alone else str(atom)
            factors.append(text if power == 1 else f"{text}**{power}")
        magnitude = abs(coefficient)
        if magnitude != 1 or not factors:
            factors.insert(0, str(magnitude))
        sign = "-" if coefficient < 0 else "+"
        body = "*".join(factors)
        out += f" {sign} {body}" if out else (f"-{body}" if sign == "-" else body)
    return out
