"""Guards as facts: which size is at most which, and which is a number, by the guards of a trace.

    Eq(Min(512, s0), s0)  -->  s0 is at most 512        Eq(Min(3, s0) - Min(2, s0), 1)  -->  that is 1
"""
from __future__ import annotations

from typing import Any

import sympy

from anyshape.torch_compat.formulas import functions as ops

LEAST, EXTREMES = (ops.Min, sympy.Min), (ops.Min, ops.Max, sympy.Min, sympy.Max)


def ordered(shape_env: Any) -> list[tuple[sympy.Basic, sympy.Basic]]:
    """Pairs of which the first is at most the second, by guards that say which side a minimum or maximum is."""
    found = []
    for guard in _equations(shape_env):
        sides = [shape_env.replace(side) for side in guard.args]
        for extreme, chosen in (sides, sides[::-1]):
            if isinstance(extreme, EXTREMES) and chosen in extreme.args:
                others = [part for part in extreme.args if part != chosen]
                least = isinstance(extreme, LEAST)
                found += [(chosen, other) if least else (other, chosen) for other in others]
    return found


def fixed(shape_env: Any) -> dict[sympy.Basic, int]:
    """Formulas that a guard fixes at a number."""
    return {shape_env.replace(guard.args[0]): int(guard.args[1]) for guard in _equations(shape_env)
            if isinstance(guard.args[1], sympy.Integer)}


def is_of_several(guard: sympy.Basic) -> bool:
    """Whether a guard compares polynomials of several sizes: no range says that, and a fact does."""
    return len(guard.free_symbols) > 1 and isinstance(guard, sympy.core.relational.Relational) \
        and all(side.is_polynomial() for side in guard.args)


def compared(shape_env: Any) -> list[tuple[sympy.Basic, sympy.Basic, bool]]:
    """Sides of guards of several sizes, and whether they are equal, or else unequal."""
    return [(*guard.expr.args, isinstance(guard.expr, sympy.Eq)) for guard in getattr(shape_env, "guards", ())
            if isinstance(guard.expr, (sympy.Eq, sympy.Ne)) and is_of_several(guard.expr)]


def _equations(shape_env: Any) -> list[sympy.Eq]:
    return [guard.expr for guard in getattr(shape_env, "guards", ()) if isinstance(guard.expr, sympy.Eq)]
