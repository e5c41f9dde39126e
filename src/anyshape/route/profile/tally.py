"""Running statistics of one router: reservoir sampling of load vectors, histograms, totals, a sample of decisions."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.profile import histogram
from anyshape.route.profile.profile import SAMPLES, Ints, Profile, RouterProfile
from anyshape.route.profile.routers import routers_of, signature

DECISIONS = 1 << 22  # choices that are kept of a router, two bytes each


class Tally:
    """Counts calls of one router. Memory is bounded; not thread-safe."""

    def __init__(self, branches: int, samples: int = SAMPLES, decisions: int = DECISIONS) -> None:
        self.branches, self.samples, self.capacity = branches, samples, decisions
        self.choices, self.calls, self.lost, self.kept = 1, 0, 0, 0
        self.totals = np.zeros(branches, np.int64)
        self.histogram = np.zeros((branches, histogram.BUCKETS), np.int64)
        self.sample: list[tuple[int, int, Ints]] = []  # (call number, cells, loads)
        self.decided: list[tuple[int, NDArray[np.int16]]] = []
        self.random = np.random.default_rng(0)

    def count(self, numbers: Sequence[int], cells: Sequence[int], loads: Ints) -> None:
        """Calls with these numbers had so many cells and these loads [calls, branches]."""
        self.totals += loads.sum(0)
        histogram.add(self.histogram, loads)
        for number, many, own in zip(numbers, cells, loads, strict=True):
            self.calls += 1
            if len(self.sample) < self.samples:
                self.sample.append((int(number), int(many), own))
            elif (place := int(self.random.integers(self.calls))) < self.samples:  # Vitter's algorithm R
                self.sample[place] = (int(number), int(many), own)

    def decide(self, number: int, ids: NDArray[np.integer]) -> None:
        """The call of this number decided ids [cells, choices]; the oldest decisions go where there are too many."""
        kept = ids.astype(np.int16)
        self.choices = max(self.choices, kept.shape[1])
        self.decided.append((int(number), kept))
        self.kept += kept.size
        while self.kept > self.capacity and len(self.decided) > 1:
            self.kept -= self.decided.pop(0)[1].size

    def frozen(self) -> RouterProfile:
        """What was counted so far."""
        ordered = sorted(self.sample, key=lambda one: one[0])
        loads = np.array([one[2] for one in ordered], np.int64).reshape(len(ordered), self.branches)
        return RouterProfile(self.branches, self.choices, self.calls, self.lost, self.totals.copy(),
                             self.histogram.copy(), loads, np.array([one[1] for one in ordered], np.int64),
                             np.array([one[0] for one in ordered], np.int64), tuple(self.decided))


def profile_of_loads(model: nn.Module, loads: Mapping[str, NDArray[np.integer]] | None = None,
                     decisions: Mapping[str, Iterable[NDArray[np.integer]]] | None = None) -> Profile:
    """The profile that a model would have whose routers have these loads [calls, branches], or decide these ids
    [cells, choices] in each call; routers that are not named were never called. For tuning and tests.

    Raises:
        InputError: a name or a number of branches that the model does not have.
    """
    routers = routers_of(model)
    tallies = {name: Tally(router.branch_count) for name, router in routers.items()}
    for name in [*(loads or ()), *(decisions or ())]:
        if name not in tallies:
            raise InputError(f"the model has no router {name!r}", why=f"it has {', '.join(tallies) or 'none'}",
                             do="give one of these names")
    for name, ids in (decisions or {}).items():
        for number, own in enumerate(ids):
            tally, shaped = tallies[name], np.asarray(own).reshape(len(own), -1)
            counts = np.bincount(shaped[shaped >= 0], minlength=tally.branches)
            _check(name, len(counts), tally.branches)
            tally.count([number], [len(shaped)], counts[None])
            tally.decide(number, shaped)
    for name, own in (loads or {}).items():
        if name not in (decisions or ()):
            array = np.asarray(own, np.int64)
            _check(name, array.shape[-1], tallies[name].branches)
            tallies[name].count(range(len(array)), array.sum(1).tolist(), array)
    return Profile(signature(model), {name: tally.frozen() for name, tally in tallies.items()})


def _check(name: str, given: int, branches: int) -> None:
    if given != branches:
        raise InputError(f"loads of router {name!r} are for {given} branches", why=f"it has {branches}",
                         do="give a load for each branch")
