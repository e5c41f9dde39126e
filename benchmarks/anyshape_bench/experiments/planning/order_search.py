"""Searches for an order of a plan's steps with a low peak at one shape: what an order for all shapes is compared with.

    best(plan, ...)    beams of states, by their peak         wider and wider, until the time is up
                       beams of states, by bytes alive        the same
                       list scheduling with chance            again and again
                       moves of steps about the fullest one   annealed

The problem is in numbers (plan/schedule/beam_search.py says what a unit and a value are); every step is a unit. The
judge is apart: the most bytes alive at one step, by the lives of the finished plan's buffers, in the arena and beside
it.
"""
from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.liveness import arena_ranges, outside_ranges, peak_bytes
from anyshape.plan.ir.program import Plan
from anyshape.plan.memory.output_as_scratch import alias_buffers
from anyshape.plan.schedule.beam_search import Bytes, Problem
from anyshape.plan.schedule.launch_grouping import group_launches
from anyshape.plan.schedule.reorder import permuted, problem_of
from anyshape.sym.expr import evaluate

FIRST_WIDTH, WIDER = 8, 4  # states of the first beam, and how many times as many the next one has
CHANCE = 0.3  # how often list scheduling takes another unit than the best
WARM, COLD = 0.02, 0.0002  # of the peak, by which a move may be worse: at first and at last
BOUND = "the bound"
Order = list[int]


@dataclass(slots=True)
class Clock:
    """Processor time until a search ends, which it also does where its order needs no more than `least` bytes."""

    begun: float
    seconds: float
    least: int

    def over(self, peak: int) -> bool:
        return peak <= self.least or time.process_time() - self.begun > self.seconds

    def spent(self) -> float:
        """The part of the time that is gone."""
        return min((time.process_time() - self.begun) / max(self.seconds, 1e-9), 1.0)


def best(plan: Plan, ours: Plan, forward: Plan | None, values: Mapping[str, int],
         seconds: float) -> tuple[int, str, float]:
    """The least bytes of all searches, which one found them, and the seconds of processor time that all took.

    Args:
        plan: not allocated, in the order of the model; ours: the same steps in another order.
        forward: of a backward, the allocated plan of its forward.
        values: symbol -> value.
        seconds: for each search.
    """
    begun = time.process_time()
    plan = at(plan, values)
    problem = problem_of(plan, forward, [[k] for k in range(len(plan.steps))])
    place = {id(step): k for k, step in enumerate(plan.steps)}
    order = [place[id(step)] for step in ours.steps]
    least = problem.least(order)
    if problem.peak(order) <= least:
        return alive(at(ours, values), forward, values), BOUND, time.process_time() - begun
    found = []
    for name, search in SEARCHES.items():
        one = search(problem, Clock(time.process_time(), seconds, least), random.Random(name))
        found.append((alive(permuted(plan, one), forward, values), name))
    most, name = min(found, key=lambda pair: pair[0])
    return most, name, time.process_time() - begun


def at(plan: Plan, values: Mapping[str, int]) -> Plan:
    """`plan` with these sizes for its hints."""
    return dataclasses.replace(plan, facts=dataclasses.replace(plan.facts, hints=tuple(values.items())))


def alive(plan: Plan, forward: Plan | None, values: Mapping[str, int]) -> int:
    """The most bytes of a plan, not allocated, that are alive at one step: in the arena, and beside it."""
    plan = group_launches(alias_buffers(plan, PlanContext(forward=forward)))
    kept = 0 if forward is None else evaluate(forward.kept, values)
    arena, others = (peak_bytes([(evaluate(size, values), first, last) for size, first, last in some], len(plan.steps))
                     for some in (arena_ranges(plan, forward), outside_ranges(plan, forward)))
    return max(arena, kept) + others


@dataclass(slots=True)
class _State:
    done: int
    now: Bytes
    peak: Bytes
    ready: tuple[int, ...]
    trail: Any

    @property
    def total(self) -> int:
        return self.peak[0] + self.peak[1]


def _start(problem: Problem) -> _State:
    now = problem.start()
    ready = tuple(unit for unit, before in enumerate(problem.before) if not before)
    return _State(0, now, (max(now[0], problem.floor), now[1]), ready, None)


def _after(problem: Problem, state: _State, unit: int) -> _State:
    during, now = problem.step(unit, state.done, state.now)
    done = state.done | 1 << unit
    ready = (*(one for one in state.ready if one != unit),
             *(one for one in problem.after[unit] if not problem.before[one] & ~done))
    peak = max(state.peak[0], during[0]), max(state.peak[1], during[1])
    return _State(done, now, peak, ready, (state.trail, unit))


def _order(state: _State) -> Order:
    found = []
    trail = state.trail
    while trail is not None:
        trail, unit = trail
        found.append(unit)
    return found[::-1]


def _beams(key: Callable[[_State], tuple[int, int]]) -> Callable[[Problem, Clock, random.Random], Order]:
    def search(problem: Problem, clock: Clock, draw: random.Random) -> Order:
        found = list(range(len(problem.before)))
        peak = problem.peak(found)
        width = FIRST_WIDTH
        while not clock.over(peak):
            state = _beam(problem, width, key, peak, clock, draw)
            if state is not None:
                found, peak = _order(state), state.total
            width *= WIDER
        return found

    return search


def _beam(problem: Problem, width: int, key: Callable[[_State], tuple[int, int]], peak: int, clock: Clock,
          draw: random.Random) -> _State | None:
    """The best of the `width` first states of each size by `key`, the same ones by chance; None: none is below
    `peak`."""
    states = [_start(problem)]
    for _ in problem.before:
        reached: dict[int, _State] = {}
        for state in states:
            if clock.over(peak):
                return None
            for unit in state.ready:
                new = _after(problem, state, unit)
                old = reached.get(new.done)
                if new.total < peak and (old is None or new.total < old.total):
                    reached[new.done] = new
        states = sorted(reached.values(), key=lambda state: (*key(state), draw.random()))[:width]
        if not states:
            return None
    return states[0] if states[0].total < peak else None


def _restarts(problem: Problem, clock: Clock, draw: random.Random) -> Order:
    """Unit by unit the one that raises the peak least and leaves the least alive, but for chance."""
    found = list(range(len(problem.before)))
    peak = problem.peak(found)
    while not clock.over(peak):
        state = _start(problem)
        while state.ready and state.total < peak:
            some = [_after(problem, state, unit) for unit in state.ready]
            some.sort(key=lambda one: (one.total, sum(one.now)))
            state = some[min(int(draw.expovariate(1 / CHANCE)), len(some) - 1)]
        if not state.ready and state.total < peak:
            found, peak = _order(state), state.total
    return found


def _moves(problem: Problem, clock: Clock, draw: random.Random) -> Order:
    """A unit before or at the fullest one is done later, or one after it earlier, as far as chance says."""
    order = list(range(len(problem.before)))
    now = lowest = problem.peak(order)
    found = order
    while len(order) > 1 and not clock.over(lowest):
        new = _moved(problem, order, draw)
        peak = problem.peak(new)
        warmth = lowest * WARM * (COLD / WARM) ** clock.spent()
        if peak <= now or draw.random() < math.exp((now - peak) / max(warmth, 1e-9)):
            order, now = new, peak
        if now < lowest:
            found, lowest = order, now
    return found


def _moved(problem: Problem, order: Sequence[int], draw: random.Random) -> Order:
    curve = problem.curve(order)
    fullest = max(range(len(order)), key=lambda k: sum(curve[k]))
    place = min(max(int(draw.gauss(fullest, max(len(order) / 8, 2))), 0), len(order) - 1)
    unit = order[place]
    # between what it waits for and what waits for it
    low = place
    while low > 0 and not problem.before[unit] >> order[low - 1] & 1:
        low -= 1
    high = place
    while high + 1 < len(order) and not problem.before[order[high + 1]] >> unit & 1:
        high += 1
    rest = [*order[:place], *order[place + 1:]]
    to = draw.randint(low, high)
    return [*rest[:to], unit, *rest[to:]]


def _by_peak(state: _State) -> tuple[int, int]:
    return state.total, sum(state.now)


def _by_alive(state: _State) -> tuple[int, int]:
    return sum(state.now), state.total


SEARCHES: dict[str, Callable[[Problem, Clock, random.Random], Order]] = {
    "a beam, by peak": _beams(_by_peak), "a beam, by bytes alive": _beams(_by_alive), "restarts": _restarts,
    "moves": _moves}
