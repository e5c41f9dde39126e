"""Counterexample sampling: no proof can settle what a few points that the facts allow disagree about.

    4*n - b*n       8 at b = 2, n = 4, and -4 at b = 5, n = 4: neither at least 0 at every value, nor below at every one
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable

from anyshape.sym.expr import Size, evaluate, symbols_of
from anyshape.sym.facts import Facts

_FAR = (256, 500, 4096, 1 << 24)  # how far above its least value a symbol is tried


def signs(size: Size, points: Iterable[dict[str, int]]) -> tuple[bool, bool]:
    """Is the size at least 0 at one of the points, and is it below at one?"""
    above = below = False
    for point in points:
        value = value_at(size, point)
        if value is not None:
            above = above or value >= 0
            below = below or value < 0
            if above and below:
                break
    return above, below


def allowed_points(facts: Facts, names: Iterable[str], most: int | None = None) -> list[dict[str, int]]:
    """A few values of the symbols that the facts allow, of at most `most` that are tried."""
    wanted = sorted(names)
    every = list(dict.fromkeys([*wanted, *sorted(name for size in _conditions(facts) for name in symbols_of(size))]))
    steps = {name: divisor for size, divisor in facts.divisible for name in symbols_of(size) if str(size) == name}
    hints = dict(facts.hints)
    bases: list[dict[str, int]] = [{} for _ in range(3 + len(_FAR))]
    for name in every:
        least, greatest = facts.range_of(name)
        step = steps.get(name, 1)
        tried = least, least + 1, hints.get(name, 64), *(least + far for far in _FAR)
        for base, value in zip(bases, tried, strict=True):
            value = max(value, least)
            base[name] = -(-(value if greatest is None else min(value, greatest)) // step) * step
    # one symbol at another value than the others: the least of one beside great ones says most
    pairs = sorted(itertools.permutations(range(len(bases)), 2), key=lambda pair: (min(pair), max(pair)))
    mixed = ({**bases[i], name: bases[j][name]} for i, j in pairs for name in every)
    return [point for point in itertools.islice(itertools.chain(bases, mixed), most) if _allowed(facts, point)]


def _conditions(facts: Facts) -> list[Size]:
    return [*facts.known, *(size for size, _ in facts.divisible)]


def _allowed(facts: Facts, point: dict[str, int]) -> bool:
    try:
        return (all(low <= point[name] and (high is None or point[name] <= high)
                    for name, low, high in facts.ranges if name in point)
                and all(evaluate(size, point) >= 0 for size in facts.known)
                and all(evaluate(size, point) % divisor == 0 for size, divisor in facts.divisible))
    except ZeroDivisionError:
        return False


def value_at(size: Size, point: dict[str, int]) -> int | None:
    """The value of the size there; None where it divides by 0."""
    try:
        return evaluate(size, point)
    except ZeroDivisionError:
        return None
