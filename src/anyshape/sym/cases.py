"""Proofs about rounded sizes, where bounds of each part by itself say too little.

    x*((y + 3)//4) <= x*((y + 1)//2)       term by term: each factor is at most one of the other term
    (y + 3)//4 <= (y + 1)//2               the first values of y one by one, and bounds for the others
    min((x*y + 31)//32, 32) <= x*y         0 by itself, and bounds from 1 on
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol

from anyshape.sym.apart import Interval
from anyshape.sym.expr import Atom, Call, Expr, Monomial, Size, product, substitute, symbol, symbols_of
from anyshape.sym.facts import Facts

_FIRST = 32  # values of a size's only symbol that are tried one by one
_MOST = 3  # symbols of a size of which 0 (the least value) is a case by itself
_TERMS = 4


class Bounds(Protocol):
    """What these proofs are made of: `sym.prover.Prover`."""

    facts: Facts

    def bounds(self, size: Size) -> Interval:
        """An interval that holds `size`, None for an open end."""

    def nonnegative(self, size: Size, depth: int) -> bool | None:
        """Is `size >= 0`? `depth`: how many proofs may stand on each other."""

    def under(self, facts: Facts) -> Bounds:
        """The same with other facts."""


def by_terms(size: Expr, prover: Bounds, depth: int) -> bool:
    """Is each negative term at most a part of a positive one, by its factors?"""
    room = [[mono, c] for mono, c in size.terms if c > 0]
    owed = [(mono, -c) for mono, c in size.terms if c < 0]
    if not 0 < len(owed) <= _TERMS or len(room) > _TERMS or not all(_positive(m, prover) for m, _ in size.terms):
        return False
    for mono, amount in owed:
        for place in room:
            larger, left = place
            assert isinstance(larger, tuple) and isinstance(left, int)
            taken = min(left, amount)
            if taken and _covers(_factors(larger), _factors(mono), prover, depth):
                place[1] = left - taken
                amount -= taken
        if amount:
            return False
    return True


def by_cases(size: Expr, prover: Bounds, depth: int) -> bool:
    """Is the size at least 0 at the least values of its symbols, and, by bounds, above them?"""
    names = sorted(symbols_of(size))
    if len(names) > _MOST:
        return False
    first = _FIRST if len(names) == 1 else 1
    lows = {name: prover.facts.range_of(name)[0] for name in names}
    try:
        for name in names:
            for value in range(lows[name], lows[name] + first):
                here = substitute(size, {name: value})
                if not prover.nonnegative(here, depth):
                    return False
    except ZeroDivisionError:
        return False
    ranges = tuple((name, low + first if name in lows else low, high) for name, low, high in prover.facts.ranges)
    named = {name for name, _, _ in prover.facts.ranges}
    ranges += tuple((name, low + first, None) for name, low in lows.items() if name not in named)
    low = prover.under(dataclasses.replace(prover.facts, ranges=ranges)).bounds(size)[0]
    return low is not None and low >= 0


def limits_of(known: Iterable[Size]) -> dict[Call, tuple[int | None, int | None]]:
    """The least and greatest values of calls that sizes known to be at least 0 say: 32 - n//16 has n//16 at most 32."""
    found: dict[Call, tuple[int | None, int | None]] = {}
    for size in known:
        terms = [term for term in size.terms if term[0]] if isinstance(size, Expr) else []
        if len(terms) != 1 or len(terms[0][0]) != 1:
            continue
        (((atom, power),), factor), = terms
        rest = size - factor * _of(atom)
        if power != 1 or not isinstance(atom, Call) or not isinstance(rest, int):
            continue
        low, high = found.get(atom, (None, None))
        if factor < 0:
            most = rest // -factor
            high = most if high is None else min(high, most)
        else:
            least = -(rest // factor)
            low = least if low is None else max(low, least)
        found[atom] = low, high
    return found


def above_root(size: Expr, call: Call, prover: Bounds) -> Size:
    """At most the size: the square of root(a) is at most a, and so is root(a), where terms subtract them."""
    found: Size = 0
    for mono, coefficient in size.terms:
        powers = dict(mono)
        power = powers.pop(call, 0)
        term: Size = Expr(((mono, coefficient),)) if mono else coefficient
        if power and coefficient < 0 and _positive(tuple(powers.items()), prover):
            term = product([Expr(((tuple(powers.items()), coefficient),)) if powers else coefficient,
                            *[call.args[0]] * ((power + 1) // 2)])
        found = found + term
    return found


@lru_cache(maxsize=1 << 14)
def weight(size: Size) -> int:
    """How many calls stand in the size, inside of calls too."""
    if isinstance(size, int):
        return 0
    return sum(1 + sum(map(weight, atom.args)) for mono, _ in size.terms for atom, _ in mono if isinstance(atom, Call))


def _positive(mono: Monomial, prover: Bounds) -> bool:
    lows = [prover.bounds(_of(atom))[0] for atom, _ in mono]
    return all(low is not None and low >= 0 for low in lows)


def _factors(mono: Monomial) -> list[Atom]:
    return [atom for atom, power in mono for _ in range(power)]


def _covers(large: list[Atom], small: list[Atom], prover: Bounds, depth: int) -> bool:
    """Is each factor of `small` at most one of `large`, and what is left of those at least 1?"""
    if len(small) > len(large) or len(large) > _TERMS:
        return False
    if not small:
        return all((prover.bounds(_of(atom))[0] or 0) >= 1 for atom in large)
    same = small[0] in large
    for k, atom in enumerate(large):
        if (atom == small[0] if same else prover.nonnegative(_of(atom) - _of(small[0]), depth)) and _covers(
                large[:k] + large[k + 1:], small[1:], prover, depth):
            return True
    return False


def _of(atom: Atom) -> Size:
    return symbol(atom) if isinstance(atom, str) else Expr(((((atom, 1),), 1),))
