"""At which sizes a report computes: where each size begins and ends, where the sliders stand first, and the points.

A point is a set of sizes for which the compiler says what it would keep. Elsewhere a page has the formulas.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.base.errors import InputError

POINTS = 25  # sets of sizes, if not told otherwise
Point = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A size by name (such as x_0) and place in words: its least and greatest value, and where its slider stands."""

    name: str
    place: str
    least: int
    greatest: int
    start: int


def taken_apart(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """What a user gives for sizes: numbers and shapes, and the ranges among them by name.

        x_0=range(1, 9), y=(4, range(1, 100))  ->  x_0=4, y=(4, 50)  and  x_0: 1 to 8, y_1: 1 to 99

    Raises:
        InputError: a range is empty, or begins below 0.
    """
    sizes: dict[str, Any] = {}
    ranges: dict[str, tuple[int, int]] = {}

    def middle(name: str, one: Any) -> int:
        if not isinstance(one, range):
            return int(one)
        if not one or one[0] < 0 or one.step != 1:
            raise InputError(f"{name} goes over {one}", why="a slider goes from a least to a greatest size, by ones",
                             do="give for example range(1, 65)")
        ranges[name] = one[0], one[-1]
        return (one[0] + one[-1] + 1) // 2

    for name, value in given.items():
        if isinstance(value, (tuple, list)):
            sizes[name] = tuple(middle(f"{name}_{dim}", one) for dim, one in enumerate(value))
        else:
            sizes[name] = middle(name, value)
    return sizes, ranges


def points(spans: Sequence[Span], most: int) -> tuple[Point, ...]:
    """At most `most` points (but the starting one): over all spans in equal ratios, the start first."""
    start = tuple(one.start for one in spans)
    moving = [one for one in spans if one.least < one.greatest]
    if not moving:
        return (start,)
    steps = 1
    while (steps + 1) ** len(moving) <= most:
        steps += 1
    if steps < 2:  # too many sizes for a grid: each one's ends, the others at the start
        found = [tuple(end if i == j else other for j, other in enumerate(start)) for i, one in enumerate(spans)
                 for end in (one.least, one.greatest)]
        return tuple(dict.fromkeys([start, *found]))[:max(most, 1)]
    axes = [_positions(one, steps) for one in spans]
    return tuple(dict.fromkeys([start, *itertools.product(*axes)]))


def _positions(span: Span, steps: int) -> list[int]:
    """The span's ends and what lies between them in equal ratios; the nearest to the start is the start."""
    if span.least == span.greatest:
        return [span.least]
    low = max(span.least, 1)
    found = [round(low * (span.greatest / low) ** (i / (steps - 1))) for i in range(steps)]
    found[0] = span.least
    inner = range(1, steps - 1)
    if inner and span.start not in found and span.least < span.start < span.greatest:
        found[min(inner, key=lambda i: abs(found[i] - span.start))] = span.start
    return sorted(dict.fromkeys(found))
