"""Places of buffers at given sizes, by the host's own search (backend/host_offset_assignment.py)."""
from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

WORD = ctypes.c_int64
GOOD_ENOUGH = 1.02  # a layout within this factor of the bound is not improved


@dataclass(slots=True)
class Places:
    """Offsets of all placed buffers, in a lower block up to `border` and an upper one up to `top`; bound: no layout has
    a lower top (or, in the end, needs fewer bytes of arena). lower: what the lower block is: "kept", the "room" (a
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


Item = tuple[int, int, int, int]  # bytes, first, last, offset
Life = tuple[int, int, int]  # bytes, first, last
FEW = 128  # items among which those that are alive with one are found by looking at all


class Searches(Protocol):
    """The native routines of a search; both are in backend/host_offset_assignment.py."""

    def search(self, *words: int | None) -> int:
        """The lowest top of some layouts."""

    def neighbours(self, *words: int | None) -> int:
        """Which items are alive with which, and how many pairs there are."""


def best(context: Searches, items: Sequence[Item] | np.ndarray, fixed: int, wall: int, bound: int, top: int,
         few: int = FEW) -> tuple[int, list[int]]:
    """The lowest top of some ways to place the items from `fixed` on, and their offsets; none below `top`."""
    count = len(items)
    if count == 0:
        return min(top, wall), []
    columns = array("q")
    if isinstance(items, np.ndarray):
        columns.frombytes(np.ascontiguousarray(items.T, np.int64).tobytes())
    else:
        for column in zip(*items, strict=True):
            columns.extend(column)
    address = columns.buffer_info()[0]
    room = array("q", bytes(8 * (1 + 9 * count)))
    starts, near = array("q", [0]), array("q")
    if count > few:
        order = array("q", sorted(range(count), key=columns[count:2 * count].__getitem__))
        starts = array("q", bytes(8 * (count + 1)))
        given = (count, fixed, order.buffer_info()[0], address + 8 * count, address + 16 * count,
                 starts.buffer_info()[0])
        near = array("q", bytes(8 * context.neighbours(*given, None)))
        if near:
            context.neighbours(*given, near.buffer_info()[0])
    found = context.search(count, fixed, address, wall, bound, int(GOOD_ENOUGH * bound), top, room.buffer_info()[0],
                           starts.buffer_info()[0], near.buffer_info()[0] if near else None)
    return found, room[1 + fixed:1 + count].tolist() if room[0] else []
