"""The order of a planning problem as an integer program in MODeL's form, solved by HiGHS (`anyshape[plan]`).

    minimise P;   create[s, t], keep[v, t] are 0 or 1, s a step, v a value, t a moment
    a step runs once                            sum over t of create[s, t] = 1
    kept is what was kept or made before        keep[v, t] <= keep[v, t-1] + create[maker(v), t-1]
    a step runs when what it reads is kept      create[s, t] <= keep[v, t]
    bytes                                       sum of size(v) * (create[maker(v), t] + keep[v, t]) <= P

Steiner and others, MODeL: Memory Optimizations for Deep Learning, 2023, without its second half, the addresses: what it
finds is the least that a layout could need. A step has variables only for moments between the number of steps that must
come before it, and those that must come behind.
"""
from __future__ import annotations

import importlib.util
import itertools
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from anyshape.base.errors import ConfigError, VerifyError
from anyshape.plan.schedule.beam_search import Problem
from anyshape.plan.schedule.divide_and_conquer import bits, part_of

WINDOW = 40  # steps that it is given of a problem at a time
NEARLY = 0.95  # of the most bytes, what a part needs at least to be solved with the fullest one


@dataclass(slots=True)
class IntegerProgram:
    """What the solver found. peak: bytes, or -1; bound: no order needs less; seconds: of processor time; trail:
    (seconds, peak) of each solution in turn."""

    peak: int = -1
    bound: int = 0
    seconds: float = 0.0
    order: list[int] = field(default_factory=list)
    trail: list[tuple[float, int]] = field(default_factory=list)
    variables: int = 0


def check_installed() -> None:
    """Raises ConfigError where there is no HiGHS."""
    if importlib.util.find_spec("highspy") is None:
        raise ConfigError("the integer program needs the package highspy", why="it is not installed",
                          do="pip install anyshape[plan]")


def improved(problem: Problem, order: Sequence[int], seconds: float) -> list[int] | None:
    """A better order than `order`: the parts with its fullest steps as HiGHS would have them, which are solved side by
    side, again and again, as long as that helps and there is time; None: it found none. seconds: of processor time, of
    all threads. It knows nothing of values that are made in the place of others, so what it finds is judged with
    them."""
    end = time.process_time() + seconds
    best: list[int] | None = None
    now = list(order)
    check_installed()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while (left := end - time.process_time()) > 0:
            places = _windows([sum(one) for one in problem.curve(now)])
            parts = [part_of(problem, now[first:last], sum(1 << step for step in now[:first]))
                     for first, last in places]
            other = list(now)
            for (first, last), part, found in zip(
                    places, parts, pool.map(solved, map(plain, parts), itertools.repeat(left / len(parts))),
                    strict=True):
                if found.order and part.peak(found.order) < part.peak(range(last - first)):
                    other[first:last] = (now[first + k] for k in found.order)
            if problem.peak(other) >= problem.peak(now):
                break
            best = now = other
    return best


def _windows(curve: Sequence[int]) -> list[tuple[int, int]]:
    """(first step, one past the last) of the parts that have a step nearly as full as the fullest one: windows side by
    side, one of them about that step."""
    peak, count = max(curve), len(curve)
    start = min(max(curve.index(peak) - WINDOW // 2, 0), max(count - WINDOW, 0))
    borders = [0, *range(start % WINDOW or WINDOW, count, WINDOW), count]
    return [(first, last) for first, last in itertools.pairwise(borders) if max(curve[first:last]) >= NEARLY * peak]


def plain(problem: Problem) -> Problem:
    """The same problem without values made in the place of others, which the form does not have."""
    return Problem(problem.before, problem.after, problem.touches, problem.users, problem.sizes, problem.kinds,
                   problem.early, problem.late, [[] for _ in problem.over], problem.floor, problem.rows)


class _Rows:
    """The form of a problem. create, keep: by (step, moment) and (value, moment), the variable; bytes: by moment, what
    each variable weighs, in units; rows: (least, most, variables, weights); number: of variables, the most bytes aside,
    which come last."""

    def __init__(self, problem: Problem) -> None:
        count = len(problem.before)
        self.problem = problem
        self.spans = [(problem.behind(step).bit_count(), count - 1 - problem.ahead(step).bit_count())
                      for step in range(count)]
        self.unit = max(max(problem.sizes, default=1), 1) / 1000  # so that numbers are of ordinary size
        self.create: dict[tuple[int, int], int] = {}
        self.keep: dict[tuple[int, int], int] = {}
        self.bytes: list[dict[int, float]] = [{} for _ in range(count)]
        self.rows: list[tuple[float, float, list[int], list[float]]] = []
        for step in range(count):
            self._step(step)
        for value, users in enumerate(problem.users):
            if users:
                self._kept(value, min(bits(users)))
                self._read(value, min(bits(users)))
        for step in range(count):
            self._order(step)
        self.number = len(self.create) + len(self.keep)
        for some in self.bytes:
            self.rows.append((-math.inf, 0.0, [*some, self.number], [*some.values(), -1.0]))

    def _moments(self, step: int) -> range:
        first, last = self.spans[step]
        return range(first, last + 1)

    def _step(self, step: int) -> None:
        """A step runs once."""
        for moment in self._moments(step):
            self.create[step, moment] = len(self.create)
        some = [self.create[step, moment] for moment in self._moments(step)]
        self.rows.append((1.0, 1.0, some, [1.0] * len(some)))

    def _kept(self, value: int, maker: int) -> None:
        """A value that is kept was kept or made before."""
        problem, count = self.problem, len(self.problem.before)
        is_early = value in problem.early
        first = 0 if is_early else self.spans[maker][0] + 1
        last = count - 1 if value in problem.late else max(self.spans[step][1] for step in bits(problem.users[value]))
        for moment in range(first, last + 1):
            at = self.keep[value, moment] = len(self.create) + len(self.keep)
            before = [self.keep.get((value, moment - 1)), None if is_early else self.create.get((maker, moment - 1))]
            known = [one for one in before if one is not None]
            if not (is_early and moment == first):
                self.rows.append((-math.inf, 0.0, [at, *known], [1.0] + [-1.0] * len(known)))
            self.bytes[moment][at] = problem.sizes[value] / self.unit

    def _read(self, value: int, maker: int) -> None:
        """Where a value is read it is kept; a late one is there at the end."""
        problem = self.problem
        is_made = value not in problem.early
        for step in bits(problem.users[value]):
            for moment in self._moments(step):
                at = self.create[step, moment]
                if step == maker and is_made:
                    self.bytes[moment][at] = self.bytes[moment].get(at, 0.0) + problem.sizes[value] / self.unit
                elif (value, moment) in self.keep:
                    self.rows.append((-math.inf, 0.0, [at, self.keep[value, moment]], [1.0, -1.0]))
                else:
                    self.rows.append((0.0, 0.0, [at], [1.0]))
        if value in problem.late:
            last = len(problem.before) - 1
            ends = [self.keep[value, last]] if (value, last) in self.keep else []
            ends += [self.create[maker, last]] if is_made and (maker, last) in self.create else []
            self.rows.append((1.0, math.inf, ends, [1.0] * len(ends)))

    def _order(self, step: int) -> None:
        """A step runs after those that it waits for."""
        for other in bits(self.problem.before[step]):
            first, last = self.spans[other]
            for moment in self._moments(step):
                at = [self.create[other, earlier] for earlier in range(first, min(moment, last + 1))]
                self.rows.append((-math.inf, 0.0, [self.create[step, moment], *at], [1.0] + [-1.0] * len(at)))


def solved(problem: Problem, seconds: float) -> IntegerProgram:
    """What HiGHS finds in that time.

    Raises:
        ConfigError: highspy is not installed.
    """
    check_installed()
    import highspy

    begun = time.process_time()
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", float(seconds))
    solver.setOptionValue("threads", 1)
    form = _Rows(problem)
    number = form.number
    solver.addVars(number + 1, [0.0] * (number + 1), [1.0] * number + [math.inf])
    solver.changeColsIntegrality(number, np.arange(number, dtype=np.int32),
                                 np.full(number, highspy.HighsVarType.kInteger.value, np.uint8))
    solver.changeColCost(number, 1.0)
    for low, high, at, weights in form.rows:
        if solver.addRow(low, high, len(at), at, weights) != highspy.HighsStatus.kOk:
            raise VerifyError("HiGHS refuses a row of the integer program", do="report it: a bug of the benchmark")
    found = IntegerProgram(variables=number)

    def improved(event: object) -> None:
        found.trail.append((time.process_time() - begun,
                            round(event.data_out.mip_primal_bound * form.unit)))  # type: ignore[attr-defined]

    solver.cbMipImprovingSolution.subscribe(improved)
    solver.run()
    found.seconds = time.process_time() - begun
    info = solver.getInfo()
    found.bound = max(round(info.mip_dual_bound * form.unit), 0) if abs(info.mip_dual_bound) < math.inf else 0
    if info.primal_solution_status == 2:
        values = solver.getSolution().col_value
        when = {step: moment for (step, moment), at in form.create.items() if values[at] > 0.5}
        found.order = sorted(range(len(problem.before)), key=lambda step: (when[step], step))
        found.peak = problem.peak(found.order)
    return found
