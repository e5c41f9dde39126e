"""The solver of strategy search: families are ranked by local search over placements, the best are simulated.

    for a family, and one choice per layer       each shape takes its best mode; its recomputation is a knapsack
    knapsack                                     least seconds first keep everything, then give up bytes at least cost
    bound                                        Lagrangian: sum of min over choices of seconds + price * bytes, the
                                                 price that makes most of it; over shapes, modes and families

The bound is of the simulated time: a step is no shorter than what a rank computes, nor than what it sends. Everett,
"Generalized Lagrange Multiplier Method" (1963); Geoffrion, "Lagrangean Relaxation for Integer Programming" (1974).
"""
from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyshape.base.units import bytes_text
from anyshape.base.errors import InputError, LimitError
from anyshape.dist.cost.parallel import RECOMPUTE, LayerChoice
from anyshape.dist.cost.strategy import LayerPlan, LayerStrategy
from anyshape.dist.cost.workload import Layer
from anyshape.dist.search import integer
from anyshape.dist.search.hand_made import hand_made
from anyshape.dist.search.judge import Verdict, check, cost
from anyshape.dist.search.problem import Plan, Search
from anyshape.dist.search.tables import Family, Floats, Mode, Row, Table, allowed, choices, families, modes, table
from anyshape.dist.simulate.chain import chain_of
from anyshape.dist.simulate.step import RESERVED, costing_of, stages_of

SIMULATED = 12  # families that are searched, and whose best plans are simulated
INFINITE = float("inf")
EXACT = 2  # modes that HiGHS is asked about, those with the least bounds
STARTS = 3  # of a family's local search
AGAIN = 3  # times that a plan is made again, with less room, where its simulation takes more than the tables say


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that was tried. predicted: seconds by the tables. why: what is wrong with it; "": it is right."""

    name: str
    plan: Plan
    predicted: float
    verdict: Verdict | None
    why: str


@dataclass(frozen=True, slots=True)
class Found:
    """The answer. bound: seconds that no plan in the space of the search goes below. tried: all simulated candidates,
    the best first. took: seconds of the processor. families: how many were solved."""

    best: Candidate
    bound: float
    tried: tuple[Candidate, ...]
    took: float
    families: int

    @property
    def gap(self) -> float:
        """(best - bound) / best."""
        verdict = self.best.verdict
        assert verdict is not None
        return 1 - self.bound / verdict.seconds


def solve(search: Search, simulated: int = SIMULATED) -> Found:
    """The best plan that was found; never worse than the best plan by hand (dist/search/hand_made.py).

    Raises:
        InputError: the ranks cannot be dealt out.
        LimitError: no plan keeps to the limit; `least` is what the one takes that needs least.
    """
    begun = time.process_time()
    solved = [one for family in families(search) for one in (_Family.of(search, family),) if one is not None]
    if not solved:
        raise _impossible(search)
    bound = min(one.bound() for one in solved)
    tried: list[Candidate] = []
    for one in sorted(solved, key=lambda one: one.quick())[:simulated]:
        best = min((_seconds(other) for other in tried if not other.why), default=float("inf"))
        if one.bound() < best:
            tried += one.judged()
    tried += [_judged(search, name, plan, 0.0) for name, plan in hand_made(search)
              if not search.overrides and _has_degrees(search, plan)]
    right = sorted((one for one in tried if not one.why), key=_seconds)
    if not right:
        raise _too_small(search, solved, tried)
    wrong = sorted((one for one in tried if one.why), key=_seconds)
    return Found(right[0], min(bound, _seconds(right[0])), (*right, *wrong), time.process_time() - begun, len(solved))


def _has_degrees(search: Search, plan: Plan) -> bool:
    """Whether the axes of a plan are as a person has fixed them."""
    return all(size in (0, getattr(plan.strategies[0].degrees, axis)) for axis, size in search.degrees)


def _seconds(one: Candidate) -> float:
    return one.verdict.seconds if one.verdict is not None else float("inf")


def _judged(search: Search, name: str, plan: Plan, predicted: float) -> Candidate:
    """Simulates a plan."""
    verdict = cost(search, plan)
    wrong = check(search, plan, verdict)
    return Candidate(name, plan, predicted, verdict, "; ".join(wrong))


class _Family:
    """One family: its tables, and search over the choices that all shapes share."""

    def __init__(self, search: Search, family: Family, tables: list[list[tuple[Mode, Table]]]) -> None:
        self.search, self.family, self.tables = search, family, tables
        self.choices = choices(search, family)
        self.weights = [shape.weight for shape in search.shapes]
        self.known: dict[tuple[int, ...], tuple[float, list[tuple[Mode, list[list[int]]]]]] = {}
        self.room = search.memory - RESERVED
        self.bounds = [[lower_bound(one, self.room) for _, one in pairs] for pairs in tables]

    @staticmethod
    def of(search: Search, family: Family) -> _Family | None:
        """None where a shape has no mode."""
        tables = []
        for shape in search.shapes:
            found = [(mode, one) for mode in modes(search, family, shape)
                     for one in (table(search, family, mode, shape),) if one is not None]
            found = [(mode, one) for mode, one in found if np.isfinite(one.seconds).any(axis=(1, 2)).all()]
            if not found:
                return None
            tables.append(found)
        return _Family(search, family, tables)

    def bound(self) -> float:
        """Seconds that no plan of this family goes below."""
        return sum(weight * min(bounds) for weight, bounds in zip(self.weights, self.bounds, strict=True))

    def quick(self) -> float:
        """Seconds of the best start of the local search; the bound, where none fits."""
        found = min(self.evaluate(start)[0] for start in self._starts())
        return found if np.isfinite(found) else 1e9 + self.bound()

    def judged(self) -> list[Candidate]:
        """The best plan, simulated; and the best one in less room, where it takes more than there is."""
        found = []
        for _ in range(AGAIN):
            seconds, plan = self.solution()
            if plan is None:
                break
            found.append(_judged(self.search, "searched", plan, seconds))
            verdict = found[-1].verdict
            if not found[-1].why or verdict is None or verdict.memory <= self.search.memory:
                break
            self.room -= (verdict.memory - self.search.memory) * 1.02
            self.known.clear()
        return found

    def evaluate(self, picked: Sequence[int]) -> tuple[float, list[tuple[Mode, list[list[int]]]]]:
        """Seconds of a mean step, and per shape its mode and counts, [layers, recomputations]."""
        key = tuple(picked)
        if key not in self.known:
            total = 0.0
            each: list[tuple[Mode, list[list[int]]]] = []
            for weight, pairs, bounds in zip(self.weights, self.tables, self.bounds, strict=True):
                best: tuple[float, Mode, list[list[int]]] = INFINITE, pairs[0][0], []
                for place in np.argsort(bounds):
                    mode, one = pairs[place]
                    if bounds[place] < best[0]:
                        seconds, counts = knapsack(one, key, self.room)
                        best = min(best, (seconds, mode, counts), key=lambda option: option[0])
                total += weight * best[0]
                each.append(best[1:])
            self.known[key] = total, each
        return self.known[key]

    def solution(self) -> tuple[float, Plan | None]:
        """Local search from several starts: one layer's choice at a time, as long as that helps."""
        best: tuple[float, tuple[int, ...]] = float("inf"), ()
        starts = sorted(self._starts(), key=lambda start: self.evaluate(start)[0])
        for start in starts[:STARTS]:
            here, seconds = list(start), self.evaluate(start)[0]
            moved = True
            while moved:
                moved = False
                for place in range(len(here)):
                    for option in range(len(self.choices)):
                        other = [*here[:place], option, *here[place + 1:]]
                        found = self.evaluate(other)[0]
                        if found < seconds * (1 - 1e-9) or (not np.isfinite(seconds) and np.isfinite(found)):
                            here, seconds, moved = other, found, True
            if seconds < best[0]:
                best = seconds, tuple(here)
        best = min(best, self._exact(best[0]), key=lambda pair: pair[0])
        if not best[1]:
            return float("inf"), None
        return best[0], self.plan(best[1])

    def _exact(self, known: float) -> tuple[float, tuple[int, ...]]:
        """The same by integer programs, one a mode, where there is one shape, few layers, and HiGHS; infinite where it
        is not better than what is known."""
        best: tuple[float, tuple[int, ...]] = INFINITE, ()
        if len(self.tables) > 1 or len(self.search.workload.layers) > integer.LARGEST or not integer.is_installed():
            return best
        for place in np.argsort(self.bounds[0])[:EXACT]:
            mode, one = self.tables[0][place]
            if self.bounds[0][place] >= min(known, best[0]):
                break
            found = integer.solved(one, self.room)
            if found is not None and found[0] < min(known * (1 - 1e-9), best[0]):
                best = found[0], found[1]
                self.known[found[1]] = found[0], [(mode, found[2])]
        return best

    def _starts(self) -> list[tuple[int, ...]]:
        """All layers alike, where they may be; and what is fastest, and smallest, of each for itself."""
        layers, found = len(self.search.workload.layers), []
        one = self.tables[-1][0][1]
        fastest = tuple(int(np.argmin(one.seconds[i].min(1))) for i in range(layers))
        smallest = tuple(int(np.argmin((one.bytes + one.transient)[i].min(1))) for i in range(layers))
        for option in range(len(self.choices)):
            start = [option] * layers
            for place in range(layers):
                if not np.isfinite(one.seconds[place, option]).any():
                    start[place] = smallest[place]
            found.append(tuple(start))
        return list(dict.fromkeys([fastest, smallest, *found]))

    def plan(self, picked: Sequence[int]) -> Plan:
        """The plan of these choices, its stages cut for the shape that most steps have."""
        search, family = self.search, self.family
        found = []
        for mode, counts in self.evaluate(picked)[1]:
            layers = tuple(
                LayerPlan(layer.name, self.choices[option], (int(row[0]), int(row[1]), int(row[2])))
                for layer, option, row in zip(search.workload.layers, picked, counts, strict=True))
            found.append(LayerStrategy(mode.degrees, layers, mode.micro, family.schedule, family.chunks))
        if family.pipe == 1:
            return Plan(tuple(found))
        main = max(range(len(found)), key=lambda place: search.shapes[place].weight * search.shapes[place].length)
        shape = search.shapes[main]
        costing = costing_of(search.workload, search.machine, found[main], shape.batch, shape.length, search.precision)
        stages = stages_of(chain_of(costing, found[main]), found[main]) if costing is not None else None
        return Plan(tuple(one.replace(stages=stages or ()) for one in found))


def knapsack(one: Table, picked: Sequence[int], room: float) -> tuple[float, list[list[int]]]:
    """Seconds of a step, and how many of each layer recompute what, [layers, recomputations], in so many bytes: greedy
    on the lower convex hull of each layer, which is the best but for one layer."""
    rows = one.rows(tuple(picked))
    counts = [[0] * len(RECOMPUTE) for _ in rows]
    for row, (seconds, _, _, count) in zip(counts, rows, strict=True):
        first = min(range(len(seconds)), key=seconds.__getitem__)
        if seconds[first] == INFINITE:
            return INFINITE, counts
        row[first] = count
    while True:
        most = taken = total = 0.0
        for row, (seconds, sizes, transient, _) in zip(counts, rows, strict=True):
            for place, number in enumerate(row):
                if number:
                    most = max(most, transient[place])
                    taken += number * sizes[place]
                    total += number * seconds[place]
        over = taken + most - room
        if over <= 0:
            return total, counts
        best = _cheapest(rows, counts)
        if best is None:
            return INFINITE, counts
        layer, now, other = best
        less = rows[layer][1][now] - rows[layer][1][other]
        number = min(counts[layer][now], max(1, math.ceil(over / less)))
        counts[layer][now] -= number
        counts[layer][other] += number


def _cheapest(rows: Sequence[Row], counts: Sequence[Sequence[int]]) -> tuple[int, int, int] | None:
    """(layer, what it recomputes now, what instead): what gives up bytes for least seconds each."""
    best, price = None, INFINITE
    for layer, (seconds, sizes, _, _) in enumerate(rows):
        for now, number in enumerate(counts[layer]):
            if not number:
                continue
            for other in range(len(seconds)):
                less = sizes[now] - sizes[other]
                if less > 0 and seconds[other] < INFINITE and (seconds[other] - seconds[now]) / less < price:
                    best, price = (layer, now, other), (seconds[other] - seconds[now]) / less
    return best


def lower_bound(one: Table, room: float) -> float:
    """Seconds that no assignment goes below, of computing or of sending: the best dual value of the limit's price."""
    layers = len(one.counts)
    room -= float(np.where(np.isfinite(one.transient), one.transient, np.inf).reshape(layers, -1).min(1).max())
    return max(_dual(one, one.computing, room), _dual(one, 0.5 * one.computing + 0.5 * one.sending, room),
               _dual(one, one.sending, room))


def _dual(one: Table, seconds: Floats, room: float) -> float:
    """max over prices >= 0 of sum of counts * min(seconds + price * bytes) - price * room: concave, by golden section
    on its logarithm."""
    layers = len(one.counts)
    time_, sizes = seconds.reshape(layers, -1), one.bytes.reshape(layers, -1)
    finite = np.isfinite(time_) & np.isfinite(sizes)
    time_, sizes = np.where(finite, time_, 0.0), np.where(finite, sizes, 0.0)

    def value(price: float) -> float:
        each = np.where(finite, time_ + price * sizes, np.inf).min(1)
        return float((one.counts * each).sum() - price * room)

    best = value(0.0)
    low, high = -16.0, -6.0
    for _ in range(24):
        a, b = low + 0.382 * (high - low), low + 0.618 * (high - low)
        left, right = value(10 ** a), value(10 ** b)
        best = max(best, left, right)
        if left > right:
            high = b
        else:
            low = a
    return best


def _impossible(search: Search) -> InputError:
    """Why there is no plan at all: the ranks, or what a person has fixed."""
    free = search.replace(overrides=())
    if any(_Family.of(free, family) is not None for family in families(free)):
        layer = next((layer for layer in search.workload.layers if not _choices_of(search, layer)), None)
        why = f"{len(search.overrides)} overrides ask for placements that no one plan has"
        if layer is not None:
            fixed = search.fixed_of(layer.name)
            words = [word for word in (fixed.tensor, fixed.data, fixed.recompute) if word]
            others = sorted({str(choice) for choice in _choices_of(free, layer)})
            why = f"{layer.name} is to be {' '.join(words)}, and may be {', '.join(others)}"
        return InputError(f"what is fixed of the layers cannot be had on {search.world} ranks", why=why,
                          where="; ".join(f"override({one.pattern!r})" for one in search.overrides),
                          do="fix something else: of several overrides that speak of a layer the last one counts")
    batch = min(shape.batch for shape in search.shapes)
    heads = max((layer.most for layer in search.workload.layers if layer.attentions), default=1)
    able = [one for one in range(search.world - 1, 0, -1)
            if families(search.replace(world=one, degrees=())) and any(
                modes(search.replace(world=one, degrees=()), family, search.shapes[0])
                for family in families(search.replace(world=one, degrees=())))]
    given = "".join(f", {axis}={size}" for axis, size in search.degrees if size)
    return InputError(f"{search.world} ranks cannot be dealt out to {search.workload.name}",
                      where=f"world={search.world}{given}, {batch} sequences a step",
                      why=f"data * context * tensor * pipe is the world; there are {batch} sequences for data, {heads} "
                      f"heads for tensor, and axes but data are powers of 2",
                      do=f"take {able[0] if able else 1} ranks, or at least {search.world} sequences a step")


def _choices_of(search: Search, layer: Layer) -> list[LayerChoice]:
    """What a layer may be in some family of plans."""
    return [choice for family in families(search) for choice in choices(search, family)
            if any(allowed(search, layer, choice, kind, family.tensor) for kind in RECOMPUTE)]


def _too_small(search: Search, solved: Sequence[_Family], tried: Sequence[Candidate]) -> LimitError:
    """Why nothing fits, with what would: the plans that take least, simulated."""
    ample = search.replace(memory=0.0)
    least: tuple[float, Plan] | None = None
    for family in solved:
        for picked in family._starts():
            counts = []
            for pairs in family.tables:
                mode, one = min(pairs, key=lambda pair: _smallest(pair[1], picked))
                rows = np.arange(len(one.counts))
                sizes = np.where(np.isfinite(one.seconds[rows, list(picked)]), one.bytes[rows, list(picked)], np.inf)
                row = np.zeros_like(sizes)
                row[rows, np.argmin(sizes, axis=1)] = one.counts
                counts.append((mode, row.astype(int).tolist()))
            family.known[tuple(picked)] = 0.0, counts
            plan = family.plan(picked)
            verdict = cost(ample, plan)
            if verdict is not None and (least is None or verdict.memory < least[0]):
                least = verdict.memory, plan
    for other in tried:
        if other.verdict is not None and (least is None or other.verdict.memory < least[0]):
            least = other.verdict.memory, other.plan
    assert least is not None
    needed = math.ceil(least[0])
    return LimitError(f"no strategy of {search.world} ranks keeps {search.workload.name} within "
                      f"{bytes_text(search.memory)} a rank",
                      where=f"steps of {search.shapes[-1].batch} x {search.shapes[-1].length}",
                      why=f"the one that takes least takes {bytes_text(least[0])}: "
                      f"{least[1].strategies[-1].summary}",
                      do=f"set memory_limit to {needed} ({bytes_text(needed)}) or more, or take more ranks or a "
                      "smaller batch", least=needed)


def _smallest(one: Table, picked: Sequence[int]) -> float:
    rows = np.arange(len(one.counts))
    sizes = np.where(np.isfinite(one.seconds[rows, list(picked)]), one.bytes[rows, list(picked)], np.inf)
    return float((one.counts * sizes.min(1)).sum())
