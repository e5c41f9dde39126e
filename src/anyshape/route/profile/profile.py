"""The profile, a noun: per router its loads as distributions and a sample of its decisions."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.profile import histogram
from anyshape.route.profile.routers import Signature, signature

Ints = NDArray[np.int64]
SAMPLES = 4096  # load vectors that are kept of a router
SPACE = 1 << 44  # numbers of calls of one recording are below it


@dataclass(frozen=True, slots=True, eq=False)
class RouterProfile:
    """What one router decided.

    branches, choices: as in its routes. calls: how many were counted. lost: calls that were not (the ring overflowed).
    totals [branches]: choices for each branch over all counted calls. histogram [branches, BUCKETS]: how often a branch
    had a load, over all counted calls (profile/histogram.py). loads [samples, branches], cells [samples], numbers
    [samples]: load vectors, numbers of cells and call numbers of a uniform sample of the calls, in their order.
    decided: (call number, ids [cells, choices]) of some calls, in their order.
    """

    branches: int
    choices: int
    calls: int
    lost: int
    totals: Ints
    histogram: Ints
    loads: Ints
    cells: Ints
    numbers: Ints
    decided: tuple[tuple[int, NDArray[np.int16]], ...] = ()

    def percentiles(self, percents: Sequence[float]) -> Ints:
        """[percents, branches], exact while the sample has all calls, else at most an eighth too large."""
        wanted = np.asarray(percents, np.float64)
        if len(self.loads) == self.calls and self.calls:
            return np.percentile(self.loads, wanted, axis=0, method="inverted_cdf").astype(np.int64)
        return histogram.percentile(self.histogram, wanted)


class ProfileView:
    """What can be asked of a profile, and of one that is being recorded."""

    model: Signature  # of the model (routers.signature)
    records: Mapping[str, RouterProfile]

    def taken(self) -> Profile:
        """The profile as it is now."""
        return Profile(self.model, self.records, getattr(self, "overhead", None))

    @property
    def routers(self) -> tuple[str, ...]:
        """Names, in the order of the model."""
        return tuple(name for name, _ in self.model)

    def of(self, name: str) -> RouterProfile:
        """Raises InputError where there is no such router."""
        if name not in self.records:
            raise InputError(f"the profile has no router {name!r}", why=f"it has {', '.join(self.routers) or 'none'}",
                             do="give one of these names")
        return self.records[name]

    def loads(self, name: str) -> Ints:
        """[sampled calls, branches]: choices for each branch in each call of a uniform sample, in their order."""
        return self.of(name).loads

    def cells(self, name: str) -> Ints:
        """[sampled calls]: how many cells each had."""
        return self.of(name).cells

    def percentiles(self, name: str, percents: Sequence[float] = (50, 90, 100)) -> Ints:
        """[percents, branches]: loads that so many of a hundred calls do not exceed."""
        return self.of(name).percentiles(percents)

    def rates(self, name: str) -> NDArray[np.float64]:
        """[branches]: the share of all choices (those dropped left out) that each branch had; zeros where none was."""
        totals = self.of(name).totals
        return totals / max(int(totals.sum()), 1)

    def decisions(self, name: str) -> tuple[NDArray[np.int16], ...]:
        """ids [cells, choices] of each sampled call, -1 for dropped choices."""
        return tuple(ids for _, ids in self.of(name).decided)

    def joint(self, first: str, second: str, cell_map: Ints | None = None,
              sources: int = 0) -> NDArray[np.float64]:
        """How often a cell takes branch i of the first router and branch j of the second: counts [branches, branches].

        Of calls of which both routers' decisions were sampled. A pair of a cell's choices counts 1; dropped choices
        count nothing. Call n of one router belongs to call n of the other: where one was called more often (a loop, an
        early exit) there is no telling, and all counts are 0; where several threads called the model at once, calls of
        two threads may be taken for one.

        Args:
            cell_map: for each cell of the second router, which cell of the first it is, or -1 (flow.between), where the
                first has `sources` cells; calls of other sizes are left out. Without a map cells are the same: calls
                whose numbers of cells differ are left out.
        """
        one, other = self.of(first), self.of(second)
        found = np.zeros((one.branches, other.branches))
        often, seldom = sorted((one.calls + one.lost, other.calls + other.lost), reverse=True)
        if often - seldom > max(2, often // 100):  # so many may be under way while a profile is taken
            return found
        before = dict(one.decided)
        for number, ids in other.decided:
            if number not in before:
                continue
            earlier = before[number]
            if len(earlier) != (len(ids) if cell_map is None else sources) \
                    or (cell_map is not None and len(cell_map) != len(ids)):
                continue
            if cell_map is not None:
                earlier, ids = earlier[cell_map[cell_map >= 0]], ids[cell_map >= 0]
            for i in range(earlier.shape[1]):
                for j in range(ids.shape[1]):
                    kept = (earlier[:, i] >= 0) & (ids[:, j] >= 0)
                    np.add.at(found, (earlier[kept, i], ids[kept, j]), 1)
        return found

    def check(self, model: nn.Module) -> None:
        """Raises InputError where this is the profile of another model."""
        own = signature(model)
        if own == self.model:
            return
        raise InputError(f"the profile is of a model with {words(self.model)}",
                         why=f"this one has {words(own)}", do="record a profile of this model with route.profile")


@dataclass(frozen=True, eq=False)
class Profile(ProfileView):
    """What the routers of a model decided while it was recorded.

    overhead: share of time that recording took, (least, middle, most) of a 95 % confidence interval, where it was
    measured (profile/overhead.py).
    """

    model: Signature
    records: Mapping[str, RouterProfile]
    overhead: tuple[float, float, float] | None = None

    def taken(self) -> Profile:
        return self

    def merge(self, *others: ProfileView) -> Profile:
        """One profile of the calls of all.

        Raises:
            InputError: they are of other models.
        """
        taken = [self, *(one.taken() for one in others)]
        for one in taken[1:]:
            if one.model != self.model:
                raise InputError(f"profiles of different models do not merge: {words(self.model)}",
                                 why=f"another is of {words(one.model)}", do="merge profiles of one model")
        return Profile(self.model, {name: _merged([one.of(name) for one in taken]) for name in self.routers})


def _merged(records: list[RouterProfile]) -> RouterProfile:
    """Sums, and a sample of the calls of all: as many of each as it has a share in all calls."""
    calls = sum(one.calls for one in records)
    most = max(len(one.loads) for one in records)
    whole = all(len(one.loads) == one.calls for one in records) and calls <= SAMPLES
    chosen = []
    for number, one in enumerate(records):
        count = len(one.loads) if whole else min(len(one.loads), round(most * one.calls / max(calls, 1)))
        chosen.append(np.sort(np.random.default_rng(number).permutation(len(one.loads))[:count]))
    decided = tuple((name + number * SPACE, ids) for number, one in enumerate(records) for name, ids in one.decided)
    return RouterProfile(
        records[0].branches, max(one.choices for one in records), calls, sum(one.lost for one in records),
        np.sum([one.totals for one in records], 0), np.sum([one.histogram for one in records], 0),
        np.concatenate([one.loads[own] for one, own in zip(records, chosen, strict=True)]),
        np.concatenate([one.cells[own] for one, own in zip(records, chosen, strict=True)]),
        np.concatenate([one.numbers[own] + number * SPACE
                        for number, (one, own) in enumerate(zip(records, chosen, strict=True))]), decided)


def words(model: Signature) -> str:
    """A model's routers, in words."""
    if not model:
        return "no routers"
    some = ", ".join(f"{name} ({branches} branches)" for name, branches in model[:4])
    return f"{len(model)} router{'s' * (len(model) > 1)}: {some}{', ...' if len(model) > 4 else ''}"
