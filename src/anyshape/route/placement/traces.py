"""Traces: which branches each cell took, layer after layer, call after call; split, counted, and used to judge.

A trace says what a placement really costs on calls that nobody planned with.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyshape.route.placement.judge import busiest, per_cell, share
from anyshape.route.placement.problem import Floats, Ints, Placement, PlacementProblem
from anyshape.route.profile.profile import Profile


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """branches: of each layer. calls: per call and layer, ids [cells, choices], -1 for a dropped one; the cells of a
    call are the same in all layers."""

    branches: tuple[int, ...]
    calls: tuple[tuple[Ints, ...], ...]

    @staticmethod
    def of(profile: Profile, routers: Sequence[str]) -> RoutingTrace:
        """The calls of a profile in which all these routers' decisions were sampled, with the same cells."""
        decided = [{number: ids.astype(np.int64) for number, ids in profile.of(name).decided} for name in routers]
        numbers = sorted(set.intersection(*(set(one) for one in decided))) if decided else []
        calls = [tuple(one[number] for one in decided) for number in numbers]
        return RoutingTrace(tuple(profile.of(name).branches for name in routers),
                     tuple(call for call in calls if len({len(ids) for ids in call}) == 1))

    def split(self, share_: float = 0.5) -> tuple[RoutingTrace, RoutingTrace]:
        """What is planned with, the earlier calls, and what is held out, the later ones."""
        at = int(len(self.calls) * share_)
        return RoutingTrace(self.branches, self.calls[:at]), RoutingTrace(self.branches, self.calls[at:])

    def loads(self) -> tuple[Floats, ...]:
        """Per layer, cells of each branch in a mean call, [branches]."""
        whole = max(len(self.calls), 1)
        return tuple(sum((_counts(call[layer], count) for call in self.calls), np.zeros(count)) / whole
                     for layer, count in enumerate(self.branches))

    def joint(self) -> tuple[Floats, ...]:
        """Per pair of layers, pairs of choices in a mean call, [Ea, Eb]."""
        found = [np.zeros(shape) for shape in itertools.pairwise(self.branches)]
        for call in self.calls:
            for layer, counts in enumerate(found):
                np.add.at(counts, _pairs(call[layer], call[layer + 1]), 1)
        return tuple(one / max(len(self.calls), 1) for one in found)

    def costs(self, problem: PlacementProblem, placement: Placement) -> tuple[Floats, Floats]:
        """(traffic, balance) of each call in bytes, [calls]: those of the judge, on what the call really did."""
        apart = [per_cell(problem, placement, layer) for layer in range(len(self.branches) - 1)]
        shares = [share(placement, layer) for layer in range(len(self.branches))]
        traffic, over = np.zeros(len(self.calls)), np.zeros(len(self.calls))
        for number, call in enumerate(self.calls):
            traffic[number] = sum(float(one[_pairs(call[layer], call[layer + 1])].sum())
                                  for layer, one in enumerate(apart))
            over[number] = sum(busiest(one, _counts(ids, count))
                               for one, ids, count in zip(shares, call, self.branches, strict=True))
        return traffic * problem.cell_bytes, over * problem.balance * problem.cell_bytes


def _counts(ids: Ints, branches: int) -> Floats:
    return np.bincount(ids[ids >= 0], minlength=branches).astype(np.float64)


def _pairs(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """All pairs of a cell's choices in two layers, without dropped ones."""
    i, j = np.broadcast_arrays(first[:, :, None], second[:, None, :])
    kept = (i >= 0) & (j >= 0)
    return i[kept], j[kept]


def markov(branches: int, layers: int, cells: int, calls: int, follow: float, seed: int = 0,
           popular: float = 0.0, chain: int = 0, stay: float = 0.0) -> RoutingTrace:
    """A synthetic trace: a Markov chain over layers.

    Args:
        follow: P(a cell takes the branch that follows its last one); else any branch. popular: exponent of Zipf's
            law of branches where a cell chooses anew. chain: seed of which branch follows which; seed: of what cells
            do. stay: P(a cell begins at the branch at which it began in the call before), as in decoding.
    """
    laws, draw = np.random.default_rng(chain), np.random.default_rng(seed)
    after = [laws.permutation(branches) for _ in range(layers)]
    odds = [laws.permutation(np.arange(1, branches + 1) ** -popular) for _ in range(layers)]
    found = []
    first = draw.choice(branches, cells, p=odds[0] / odds[0].sum())
    for _ in range(calls):
        anew = draw.choice(branches, cells, p=odds[0] / odds[0].sum())
        first = np.where(draw.random(cells) < stay, first, anew)
        ids = [first]
        for layer in range(1, layers):
            anew = draw.choice(branches, cells, p=odds[layer] / odds[layer].sum())
            ids.append(np.where(draw.random(cells) < follow, after[layer][ids[-1]], anew))
        found.append(tuple(one[:, None] for one in ids))
    return RoutingTrace((branches,) * layers, tuple(found))
