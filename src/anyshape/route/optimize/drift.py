"""Drift detection: whether present loads are others than the profile's, and what the plan loses by it (regret).

A window of calls passes the *noise gate* where the Jensen-Shannon divergence between its shares of branches and the
profile's is larger than between blocks of the profile itself and the whole of it, or its number of cells is further
off: the gate calibrates itself. Only then is *regret* computed: what a call costs by the plan, over what it costs by
the best plan for the loads of the window, less one. Loads that change without regret change nothing.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anyshape.route.optimize.decision import Decision, Optimisation
from anyshape.route.profile.profile import Profile, RouterProfile

Floats = NDArray[np.float64]
ENOUGH = 512  # calls from which a gate learns no more
LEAST_DIVERGENCE, LEAST_SIZE = 1e-4, 0.05  # what is noise whatever the profile says: bits; a logarithm of cells


@dataclass(frozen=True, slots=True)
class DriftPolicy:
    """How a plan is watched.

    seconds, least_calls: a window is over after so long, when it has so many calls. patience: windows in a row that
    must pass the gate. regret: from which on a new plan is made. quantile: of the gate. rounds: timed calls of each way
    in a trial, at least; the ways take turns. margin: share of time that a way must save to replace the present one.
    opening: the first calls are a trial of the plan against the general path, which is compiled beside them where the
    plan compiles. thread: a daemon thread looks; without, `Watched.look` must be called.
    """

    seconds: float = 0.1
    least_calls: int = 8
    patience: int = 2
    regret: float = 0.10
    quantile: float = 0.999
    rounds: int = 8
    margin: float = 0.02
    opening: bool = True
    thread: bool = True


class Planned(Protocol):
    """What is asked of a plan."""

    @property
    def decisions(self) -> tuple[Decision, ...]: ...

    @property
    def passes(self) -> tuple[Optimisation, ...]: ...

    def refused(self) -> Planned:
        """The plan that takes nothing: the general path."""


def divergence(first: Floats, second: Floats) -> Floats:
    """Jensen-Shannon divergence in bits, 0 to 1, between distributions along the last dim (Lin 1991)."""
    middle = (first + second) / 2

    def towards(one: Floats) -> Floats:
        ratio = np.divide(one, middle, out=np.ones_like(middle), where=one > 0)
        return np.asarray((one * np.log2(ratio)).sum(-1))

    return (towards(first) + towards(second)) / 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What a window of a router may have without drift: divergence in bits, logarithm of the ratio of cells."""

    divergence: float
    size: float


class NoiseGate:
    """The noise gate of a profile; for each length of windows it is calibrated once."""

    def __init__(self, profile: Profile, quantile: float, draws: int = 500) -> None:
        self.profile, self.quantile, self.draws = profile, quantile, draws
        self.known: dict[tuple[str, int], Limits] = {}

    def learned(self, window: Profile) -> NoiseGate:
        """The gate of one window more, which passed as noise; this one where the profile has enough calls. So a gate
        that was made of few calls is soon calibrated, and does not follow loads that change slowly."""
        if min((one.calls for one in self.profile.records.values()), default=0) >= ENOUGH:
            return self
        both = self.profile.merge(window)
        records = {name: replace(one, decided=()) for name, one in both.records.items()}
        return NoiseGate(Profile(both.model, records), self.quantile, self.draws)

    def limits(self, name: str, calls: int) -> Limits:
        """From blocks of consecutive calls of the profile's sample. Windows longer than a quarter of it are judged by
        blocks of a quarter, which vary more."""
        length = max(1, min(1 << (calls.bit_length() - 1), len(self.profile.loads(name)) // 4))
        if (name, length) not in self.known:
            self.known[name, length] = self._calibrated(self.profile.of(name), length)
        return self.known[name, length]

    def _calibrated(self, record: RouterProfile, length: Any) -> Limits:
        samples = len(record.loads)
        sums = np.concatenate([np.zeros((1, record.branches)), np.concatenate([record.loads] * 2).cumsum(0)])
        sizes = np.concatenate([[0.0], np.concatenate([record.cells] * 2).cumsum()])
        begin = np.arange(samples)
        if samples > self.draws:
            begin = np.random.default_rng(0).integers(0, samples, self.draws)
        length = length + begin % min(2, samples - length + 1)  # odd and even: loads may come in turns
        found = divergence(shares(sums[begin + length] - sums[begin]), shares(record.totals))
        apart = np.abs(np.log1p((sizes[begin + length] - sizes[begin]) / length) - np.log1p(record.cells.mean()))
        return Limits(max(float(np.quantile(found, self.quantile)), LEAST_DIVERGENCE),
                      max(float(np.quantile(apart, self.quantile)), LEAST_SIZE))

    def passed(self, window: Profile) -> str:
        """Which router's loads are others than noise explains, in words; empty where none's are."""
        for name in self.profile.routers:
            own, base = window.of(name), self.profile.of(name)
            if not own.calls or not len(base.loads):
                continue
            limits = self.limits(name, own.calls)
            found = float(divergence(shares(own.totals), shares(base.totals)))
            if found > limits.divergence:
                return f"the shares of {name}'s branches are {found:.2g} bits from the profile's, of which noise " \
                       f"makes {limits.divergence:.2g}"
            ratio = float(np.log1p(own.cells.mean()) - np.log1p(base.cells.mean()))
            if abs(ratio) > limits.size:
                return f"{name} has {np.exp(ratio):.2g} times the profile's cells, of which noise makes " \
                       f"{np.exp(limits.size):.2g}"
        return ""


def shares(totals: Any) -> Floats:
    """Totals as a distribution along the last dim; uniform where nothing was counted."""
    whole = np.asarray(totals, np.float64)
    total = whole.sum(-1, keepdims=True)
    return np.where(total > 0, whole / np.maximum(total, 1), 1 / whole.shape[-1])


def cost(plan: Planned, profile: Profile) -> float:
    """Expected seconds of a call under the loads of a profile, of those parts whose optimisations know their cost."""
    known = {one.NAME: one for one in plan.passes if hasattr(one, "cost")}
    return sum(known[one.optimisation].cost(one, profile)  # type: ignore[attr-defined]
               for one in plan.decisions if one.optimisation in known)


def adapted(plan: Planned, profile: Profile) -> tuple[Decision, ...]:
    """The decisions for other loads, by what was measured when they were first made: no model is run.

    Optimisations that know their cost decide again (`adapt`). Those of all others stay, whether they still pay or not:
    their guards hold for every load, and speculation judges itself by its own calls. What another optimisation has
    taken since stays with that one.
    """
    known: dict[str, Any] = {one.NAME: one for one in plan.passes if hasattr(one, "adapt")}
    taken = {(one.router, one.optimisation) for one in plan.decisions if one.applied}
    found = []
    for one in plan.decisions:
        new = known[one.optimisation].adapt(one, profile) if one.optimisation in known else one
        others = any(router == one.router and name != one.optimisation for router, name in taken)
        found.append(one if new.applied and not one.applied and others else new)
    return tuple(found)


def regret(plan: Planned, best: Planned, profile: Profile) -> float:
    """By how much the plan is more expensive than the best one under these loads; 0 where no cost is known."""
    costs = cost(plan, profile), cost(best, profile)
    return costs[0] / costs[1] - 1 if min(costs) > 0 else 0.0


def together(windows: Iterable[Profile]) -> Profile:
    """One profile of several windows."""
    first, *others = windows
    return first.merge(*others)
