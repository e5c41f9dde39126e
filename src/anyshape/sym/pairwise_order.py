"""Pairwise comparison of sizes, by distinct ones: which of many is the larger, decided for every value or not.

    4*b*n <= 2048*b*n       decided: at most
    4*b*n, 262144           decided: either may be the larger one, by two points that the facts allow
    4*b*n, 4*b*(n*n//7)     not decided

Thousands of tensors have a few dozen distinct sizes. All of them are evaluated at a few points first: where two
points disagree, no proof has to be looked for.
"""
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from anyshape.sym.case_split import weight
from anyshape.sym.counterexamples import allowed_points, value_at
from anyshape.sym.expr import Size, symbols_of
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_at_most

_WEIGHTY = 12  # calls in a size beyond which no proof is looked for


@dataclass(frozen=True, slots=True)
class Compared:
    """pairs: of tensors; equal: of those, with equal sizes; ordered: one at most the other for every value; either:
    each may be the larger one; undecided: the rest, as pairs of distinct sizes, with how often each comes."""

    pairs: int
    equal: int
    ordered: int
    either: int
    undecided: tuple[tuple[Size, Size, int], ...]

    @property
    def decided(self) -> float:
        """The share of pairs that are decided."""
        return 1.0 if not self.pairs else 1 - sum(times for *_, times in self.undecided) / self.pairs


def compared(sizes: Iterable[Size], facts: Facts) -> Compared:
    """All pairs of `sizes`, one per tensor."""
    counts = Counter(iter(sizes))
    names = {name for size in counts for name in symbols_of(size)}
    points = allowed_points(facts, names)
    values = {size: [value_at(size, point) for point in points] for size in counts}
    weights = {size: weight(size) for size in counts}
    total = sum(counts.values())
    equal = sum(n * (n - 1) // 2 for n in counts.values())
    ordered = either = 0
    undecided: list[tuple[Size, Size, int]] = []
    for a, b in itertools.combinations(counts, 2):
        times = counts[a] * counts[b]
        signs = {x < y for x, y in zip(values[a], values[b], strict=True)
                 if x is not None and y is not None and x != y}
        ways = [(a, b)] if signs == {True} else [(b, a)] if signs == {False} else [(a, b), (b, a)]
        if len(signs) == 2:
            either += times
        elif max(weights[a], weights[b]) <= _WEIGHTY and any(prove_at_most(facts, *way) for way in ways):
            ordered += times
        else:
            undecided.append((a, b, times))
    return Compared(total * (total - 1) // 2, equal, ordered, either, tuple(undecided))
