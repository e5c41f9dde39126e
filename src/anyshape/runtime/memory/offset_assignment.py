"""Offset assignment at given sizes: the engine for problems of numbers (plan/memory/offset_problem.py), by the host's
own search (backend/cpu/routines/offset_assignment.py)."""
from __future__ import annotations

import itertools
import sys
from array import array
from dataclasses import dataclass, field

import numpy as np

from anyshape.backend.interface import HostRoutines
from anyshape.base.int64_array import int64_array
from anyshape.plan.memory.offset_problem import OffsetProblem

GOOD_ENOUGH = 1.02  # a layout within this factor of the bound is not improved
MUCH = 1 << 20  # bytes of arena that are worth a search whenever they could be gained


@dataclass(slots=True)
class ArenaLayout:
    """Offsets of all placed buffers, in a lower block up to `border` and an upper one up to `top`; bound: no layout has
    a lower top (or, in the end, needs fewer bytes of arena). lower: what the lower block is: "kept", the "output" (a
    result's memory), or the call's own, given back "early". starts: where the chunks of the kept block begin, and its
    end. moved: offset and bytes of the values that are moved out and back, in order. moving, placed: the buffers that
    were placed for these sizes, and their offsets, with those of values that come back. phases: of an upper block whose
    top is one piece of memory after another: from which step on each is there, and its bytes. Each has offsets of its
    own, one after the other from `middle` on."""

    offsets: list[int]
    border: int
    top: int
    bound: int
    lower: str = "kept"
    starts: list[int] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    phases: tuple[tuple[int, int], ...] = ()
    middle: int = 0


FEW = 128  # items among which those that are alive with one are found by looking at all


def columns_of(problem: OffsetProblem) -> array[int]:
    """The items of a problem of numbers, column by column."""
    items = problem.items
    if isinstance(items, np.ndarray):
        return array("q", np.ascontiguousarray(items.T, np.int64).tobytes())
    return int64_array([*itertools.chain.from_iterable(zip(*items, strict=True))])


def assign_offsets(host: HostRoutines, problem: OffsetProblem, bound: int, top: int = sys.maxsize,
                   few: int = FEW) -> tuple[int, list[int]]:
    """An `OffsetAssignment` in numbers: the lowest top of some ways to place the items, and their offsets; no offsets
    where none is below `top`. bound: as of `OffsetProblem.bound`; a top close to it is not improved."""
    assert isinstance(problem.wall, int)
    return assign_columns(host, columns_of(problem), len(problem.items), problem.fixed, problem.wall, bound, top, few)


def assign_columns(host: HostRoutines, columns: array[int], count: int, fixed: int, wall: int, bound: int,
                   top: int = sys.maxsize, few: int = FEW,
                   useless: set[tuple[int, int]] | None = None) -> tuple[int, list[int]]:
    """As `assign_offsets`, of `count` items by columns. useless: of the same items at other sizes, how many there are
    and have their places where repairs gained nothing to speak of; they are done where much could be gained."""
    if count == 0:
        return min(top, wall), []
    room = array("q", bytes(8 * (1 + 9 * count)))
    starts, near = array("q", [0]), array("q")
    if count > few:
        order = array("q", sorted(range(count), key=columns[count:2 * count].__getitem__))
        starts = array("q", bytes(8 * (count + 1)))
        near = array("q", bytes(8 * host.neighbours(columns, count, fixed, order, starts, None)))
        if near:
            host.neighbours(columns, count, fixed, order, starts, near)
    good = int(GOOD_ENOUGH * bound)
    found = host.search(columns, count, fixed, wall, bound, good, top, room, starts, near or None, False)
    if found > good and (useless is None or (count, fixed) not in useless or found - bound >= MUCH):
        greedy = found
        found = host.search(columns, count, fixed, wall, bound, good, found, room, starts, near or None, True)
        if useless is not None and GOOD_ENOUGH * found >= greedy:
            useless.add((count, fixed))
    return found, room[1 + fixed:1 + count].tolist() if room[0] else []
