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
    count = len(problem.before)
    infinity = highspy.kHighsInf
    spans = [(problem.behind(step).bit_count(), count - 1 - problem.ahead(step).bit_count()) for step in range(count)]
    unit = max(max(problem.sizes, default=1), 1) / 1000  # so that numbers are of ordinary size
    create: dict[tuple[int, int], int] = {}
    keep: dict[tuple[int, int], int] = {}
    rows: list[tuple[float, float, list[int], list[float]]] = []
    makers = {value: min(bits(users)) for value, users in enumerate(problem.users) if users}
    for step, (first, last) in enumerate(spans):
        for moment in range(first, last + 1):
            create[step, moment] = len(create)
        rows.append((1.0, 1.0, [create[step, moment] for moment in range(first, last + 1)], [1.0] * (last + 1 - first)))
    number = len(create)
    bytes_: list[dict[int, float]] = [{} for _ in range(count)]  # by moment: variable -> bytes
    for value, maker in makers.items():
        is_early = value in problem.early
        first = 0 if is_early else spans[maker][0] + 1
        last = count - 1 if value in problem.late else max(spans[step][1] for step in bits(problem.users[value]))
        size = problem.sizes[value] / unit
        for moment in range(first, last + 1):
            keep[value, moment] = number
            number += 1
        for moment in range(first, last + 1):
            at, weights = [keep[value, moment]], [1.0]
            for known in (keep.get((value, moment - 1)), None if is_early else create.get((maker, moment - 1))):
                if known is not None:
                    at.append(known)
                    weights.append(-1.0)
            if not (is_early and moment == first):
                rows.append((-infinity, 0.0, at, weights))
            bytes_[moment][keep[value, moment]] = size
        for step in bits(problem.users[value]):
            for moment in range(spans[step][0], spans[step][1] + 1):
                if step == maker and not is_early:
                    made = create[step, moment]
                    bytes_[moment][made] = bytes_[moment].get(made, 0.0) + size
                elif (value, moment) in keep:
                    rows.append((-infinity, 0.0, [create[step, moment], keep[value, moment]], [1.0, -1.0]))
                else:
                    rows.append((0.0, 0.0, [create[step, moment]], [1.0]))
        if value in problem.late:
            ends = [keep[value, count - 1]] if (value, count - 1) in keep else []
            ends += [create[maker, count - 1]] if not is_early and (maker, count - 1) in create else []
            rows.append((1.0, infinity, ends, [1.0] * len(ends)))
    for step in range(count):
        for other in bits(problem.before[step]):
            for moment in range(spans[step][0], spans[step][1] + 1):
                at = [create[step, moment]]
                at += [create[other, earlier] for earlier in range(spans[other][0], min(moment, spans[other][1] + 1))]
                rows.append((-infinity, 0.0, at, [1.0] + [-1.0] * (len(at) - 1)))
    solver.addVars(number + 1, [0.0] * (number + 1), [1.0] * number + [infinity])
    solver.changeColsIntegrality(number, np.arange(number, dtype=np.int32),
                                 np.full(number, highspy.HighsVarType.kInteger.value, np.uint8))
    solver.changeColCost(number, 1.0)
    for some in bytes_:
        rows.append((-infinity, 0.0, [*some, number], [*some.values(), -1.0]))
    for low, high, at, weights in rows:
        if solver.addRow(low, high, len(at), at, weights) != highspy.HighsStatus.kOk:
            raise VerifyError("HiGHS refuses a row of the integer program", do="report it: a bug of the benchmark")
    found = IntegerProgram(variables=number)

    def improved(event: object) -> None:
        found.trail.append((time.process_time() - begun,
                            round(event.data_out.mip_primal_bound * unit)))  # type: ignore[attr-defined]

    solver.cbMipImprovingSolution.subscribe(improved)
    solver.run()
    found.seconds = time.process_time() - begun
    info = solver.getInfo()
    found.bound = max(round(info.mip_dual_bound * unit), 0) if abs(info.mip_dual_bound) < infinity else 0
    if info.primal_solution_status == 2:
        values = solver.getSolution().col_value
        when = {step: moment for (step, moment), at in create.items() if values[at] > 0.5}
        found.order = sorted(range(count), key=lambda step: (when[step], step))
        found.peak = problem.peak(found.order)
    return found
