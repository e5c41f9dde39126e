"""Capacities of padded branches by dynamic programming over a profile of loads.

    minimise over sets C of capacities   sum over loads l of  h(l) * t(min {c in C: c >= l})  +  price * |C|

h: how often a call's busiest branch had the load l. t(c): seconds of a call at capacity c, measured at a few points and
linear between them. O(L^2) for each number of capacities, L the number of loads that occur. The percentiles 50, 90, 100
(Brainstorm, OSDI'23, section 4.1) are one set among those that are searched, so the result is never worse than they are
under the profile; on new loads that is no promise.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Cost = Callable[[int], float]
CANDIDATES = 256  # loads among which capacities are chosen; where more occur, evenly spaced ones of them


def piecewise(points: Sequence[tuple[float, float]]) -> Cost:
    """The function through these points, linear between and beyond them; of one point, a constant. It does not fall
    beyond the last one."""
    xs, ys = (np.array(values, float) for values in zip(*sorted(points), strict=True))

    def value(x: int) -> float:
        if x > xs[-1] and len(xs) > 1:
            slope = max((ys[-1] - ys[-2]) / (xs[-1] - xs[-2]), 0.0)
            return float(ys[-1] + slope * (x - xs[-1]))
        return float(np.interp(x, xs, ys))

    return value


def expected(loads: Sequence[int], capacities: Sequence[int], cost: Cost, price: float, general: Cost) -> float:
    """Seconds of a call in the mean, and `price` for each capacity; loads beyond all capacities cost general(load)."""
    total = 0.0
    for load in loads:
        capacity = min((one for one in capacities if one >= load), default=None)
        total += general(load) if capacity is None else cost(capacity)
    return total / max(len(loads), 1) + price * len(capacities)


def choose(loads: Sequence[int], cost: Cost, price: float, general: Cost, most: int = 8) -> tuple[int, ...]:
    """The capacities, in ascending order, of least expected cost; () where none pays.

    Args:
        loads: the busiest branch's load in each call of a profile. cost: seconds at a capacity. price: seconds that a
            capacity has to save in each call. general: seconds without padding, by the load. most: capacities.
    """
    values, counts = np.unique(np.maximum(np.asarray(loads, np.int64), 1), return_counts=True)
    if not len(values):
        return ()
    ends = np.arange(len(values)) if len(values) <= CANDIDATES else np.unique(
        np.linspace(0, len(values) - 1, CANDIDATES).round().astype(int))
    before = np.concatenate([[0], np.cumsum(counts)])  # calls with less than values[i]
    padded = np.array([cost(int(values[end])) for end in ends])
    beyond = np.concatenate([np.cumsum((counts * [general(int(value)) for value in values])[::-1])[::-1], [0.0]])
    weight = float(price * counts.sum())
    # best[j]: least cost of all loads up to values[ends[j]], with a capacity there
    best = padded * before[ends + 1] + weight
    history = [np.full(len(ends), -1)]
    found: tuple[float, int, int] = (float(beyond[0]), -1, -1)  # (cost, last capacity, capacities before it)
    for number in range(most):
        totals = best + beyond[ends + 1]
        last = int(totals.argmin())
        if totals[last] < found[0]:
            found = (float(totals[last]), last, number)
        if number + 1 == most:
            break
        # a capacity at j behind one at i < j pays for the loads between
        steps = best[:, None] + padded[None, :] * (before[ends + 1][None, :] - before[ends + 1][:, None]) + weight
        steps[np.tril_indices(len(ends))] = np.inf
        history.append(steps.argmin(0))
        best = steps.min(0)
    _, last, number = found
    chosen = []
    while last >= 0:
        chosen.append(int(values[ends[last]]))
        last = int(history[number][last]) if number else -1
        number -= 1
    return tuple(reversed(chosen))
