"""Term decomposition of sizes for proofs (sym/prover.py): a call's factor in a sum, and a call put out of it.

    n*(m//4) + n - 2       the factor of m//4 is n; with m//4 replaced by 3 it is 4*n - 2
"""
from __future__ import annotations

from anyshape.sym.expr import Call, Expr, Size

Interval = tuple[int | None, int | None]


def only_symbol(size: Size) -> str | None:
    """The name that `size` is, when it is nothing else."""
    if isinstance(size, Expr) and len(size.terms) == 1:
        mono, coefficient = size.terms[0]
        if coefficient == 1 and len(mono) == 1 and mono[0][1] == 1 and isinstance(mono[0][0], str):
            return mono[0][0]
    return None


def call_of(atom: Call) -> Expr:
    return Expr(((((atom, 1),), 1),))


def factor_of(size: Expr, call: Call) -> Size:
    """The factor of `call` in a size in which it stands with power 1 only; 0 where it stands otherwise."""
    factor: Size = 0
    for mono, coefficient in size.terms:
        powers = dict(mono)
        power = powers.pop(call, 0)
        if power > 1:
            return 0
        if power:
            factor = factor + (Expr(((tuple(powers.items()), coefficient),)) if powers else coefficient)
    return factor


def replaced(size: Expr, call: Call, value: Size) -> Size:
    """`size` with `call`, where it is a factor of a term, replaced."""
    result: Size = 0
    for mono, coefficient in size.terms:
        kept = tuple((atom, power) for atom, power in mono if atom != call)
        term: Size = Expr(((kept, coefficient),)) if kept else coefficient
        for atom, power in mono:
            if atom == call:
                for _ in range(power):
                    term = term * value
        result = result + term
    return result


def tighter(a: Interval, b: Interval) -> Interval:
    lows = [x for x in (a[0], b[0]) if x is not None]
    highs = [x for x in (a[1], b[1]) if x is not None]
    return (max(lows) if lows else None), (min(highs) if highs else None)
