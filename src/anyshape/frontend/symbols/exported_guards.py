"""Guards of an exported program as what its compiled program and its file ask: conditions of sizes, which a file checks
where a call has new ones, and ranges where no size says what a guard does.

    Eq(Mod(s0, 3), 1)      -->  s0 - 3*(s0//3) - 1 >= 0, 3*(s0//3) - s0 + 1 >= 0
    0.3*ToFloat(s0) < 5.0  -->  s0 <= 16
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy

from anyshape.frontend.symbols.guard_facts import EXTREMES
from anyshape.frontend.symbols.symint import SymIntImporter
from anyshape.sym.expr import Size
from anyshape.torch_compat.formulas import functions as ops

MOST_TRIED = 1024  # values on either side of the trace's, of a guard that may hold, fail and hold again
MOST_DOUBLINGS = 40
GROWS = (ops.ToFloat, ops.TruncToInt, ops.FloorToInt, ops.CeilToInt, ops.RoundToInt, ops.OpaqueUnaryFn_sqrt)


def conditions(guards: Sequence[Any], env: Any, hints: Mapping[Any, int], equal: Mapping[str, Size]) -> list[Size]:
    """Sizes that are at least 0 where the guards hold, but for those of which `limits` makes ranges. equal: the size of
    the compiled program that stands for a symbol, by its name."""
    return _importer(env, equal).conditions(_relations(guards, hints))[0]


def limits(guards: Sequence[Any], env: Any, hints: Mapping[Any, int]) -> dict[Any, tuple[int, int | None]]:
    """Ranges of symbols in which the guards hold that are no conditions of sizes: around the trace's value, which
    `hints` tells. Of a guard of several symbols it is that value alone."""
    found: dict[Any, tuple[int, int | None]] = {}
    relations = list(dict.fromkeys(_relations(guards, hints)))
    # what is equal to a number at a few sizes in a row is a range, too, which says more to a reader
    equal = [one for one in relations if isinstance(one, sympy.Eq) and len(one.free_symbols) == 1
             and any(side.is_number and (other.atoms(sympy.Float) or _grows(other))
                     for side, other in (one.args, one.args[::-1]))]
    for guard in [*equal, *_importer(env, {}).conditions(one for one in relations if one not in equal)[1]]:
        symbols = sorted(guard.free_symbols & hints.keys(), key=str)
        for symbol in symbols:
            own = _interval(guard, symbol, hints[symbol]) if len(guard.free_symbols) == 1 else \
                (hints[symbol], hints[symbol])
            low, high = found.get(symbol, (0, None))
            high = own[1] if high is None else high if own[1] is None else min(high, own[1])
            found[symbol] = max(low, own[0]), high
    return found


def value_at(guard: Any, values: Mapping[Any, Any]) -> Any:
    """What a guard is at these values of its symbols; None where it is computed of no such numbers, as Mod(a, 0)."""
    try:
        return guard.xreplace(values)
    except (ArithmeticError, ValueError):
        return None


def _relations(guards: Iterable[Any], hints: Mapping[Any, int]) -> Iterator[Any]:
    """The relations that guards are made of; of several of which one is enough, the first that held in the trace."""
    for guard in guards:
        if isinstance(guard, sympy.And):
            yield from _relations(guard.args, hints)
        elif isinstance(guard, sympy.Or):
            held = [part for part in guard.args if part.xreplace(hints) == True]  # noqa: E712 of sympy
            yield from _relations(sorted(held, key=str)[:1], hints) if held else (guard,)
        else:
            yield guard


def _importer(env: Any, equal: Mapping[str, Size]) -> SymIntImporter:
    sizes = SymIntImporter(dict(equal))
    sizes.shape_env = env
    return sizes


def _interval(guard: Any, symbol: Any, traced: int) -> tuple[int, int | None]:
    """The numbers around the trace's at which a guard of one symbol holds, as far as it can be shown."""
    if _changes_once(guard):
        most = _last(guard, symbol, traced, 1)
        return (0 if (least := _last(guard, symbol, traced, -1)) is None else least), most
    least = most = traced
    while least > 0 and traced - least < MOST_TRIED and _holds(guard, symbol, least - 1):
        least -= 1
    while most - traced < MOST_TRIED and _holds(guard, symbol, most + 1):
        most += 1
    return least, most


def _last(guard: Any, symbol: Any, traced: int, sign: int) -> int | None:
    """The last number in a direction at which a guard holds that changes once; None: at all of them."""
    good, step = traced, 1
    for _ in range(MOST_DOUBLINGS):
        bad = max(-1, traced + sign * step)
        if bad == -1 or not _holds(guard, symbol, bad):
            break
        good, step = bad, 2 * step
    else:
        return None
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _holds(guard, symbol, middle) else (good, middle)
    return good


def _holds(guard: Any, symbol: Any, number: int) -> bool:
    return bool(value_at(guard, {symbol: sympy.Integer(number)}) == True)  # noqa: E712 of sympy


def _changes_once(guard: Any) -> bool:
    """Whether a guard is true up to some number and false beyond, or the other way around: what does not fall as the
    size grows, beside a number; or that the larger of both is one of them."""
    if not isinstance(guard, sympy.core.relational.Relational):
        return False
    if isinstance(guard, sympy.Eq):
        for extreme, chosen in (guard.args, guard.args[::-1]):
            if isinstance(extreme, EXTREMES) and chosen in extreme.args and len(extreme.args) == 2:
                other = next(part for part in extreme.args if part != chosen)
                return (other.is_number and _grows(chosen)) or (chosen.is_number and _grows(other))
        return False
    if isinstance(guard, sympy.Ne):
        return False
    first, second = guard.args
    return (first.is_number and _grows(second)) or (second.is_number and _grows(first))


def _grows(value: Any) -> bool:
    """Whether a formula of one size, none of whose parts is below 0, does not fall as it grows."""
    if isinstance(value, sympy.Symbol):
        return True
    if value.is_number:
        return bool(value >= 0)
    if isinstance(value, (*GROWS, *EXTREMES, sympy.Add, sympy.Mul)):
        return all(map(_grows, value.args))
    if isinstance(value, (ops.IntTrueDiv, ops.FloatTrueDiv, ops.FloorDiv, ops.FloatPow, ops.PowByNatural)):
        return _grows(value.args[0]) and value.args[1].is_number and bool(value.args[1] > 0)
    return False
