"""Places of buffers at given sizes: greedy searches by the host's own routine, each in another order."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from anyshape.run.context import Context

WORD = ctypes.c_int64
REPAIRS = 12  # orders that are tried from one start to mend what is at the top
MOST_REPAIRED = 4000  # values that are placed for it in all: the more there are, the longer each order takes
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
Weight = Callable[[np.ndarray], np.ndarray]  # items -> their positions in the order in which they are placed


def _size(items: np.ndarray) -> np.ndarray:
    lasting = items[:, 2] - items[:, 1]
    # one number for both; bytes and steps together are far below a word
    return np.argsort(-items[:, 0] * (int(np.abs(lasting).max(initial=0)) * 2 + 1) - lasting, kind="stable")


def _area(items: np.ndarray) -> np.ndarray:
    return np.argsort(-items[:, 0] * (items[:, 2] - items[:, 1] + 1), kind="stable")


def _about(items: np.ndarray) -> np.ndarray:
    """By the power of two of the area, so that one layer's values come after those of the layer before."""
    return _by_power(items, items[:, 0] * (items[:, 2] - items[:, 1] + 1))


def _between(items: np.ndarray) -> np.ndarray:
    """The same, with the borders between the powers elsewhere."""
    return _by_power(items, (3 * items[:, 0] * (items[:, 2] - items[:, 1] + 1) + 1) // 2)


def _by_power(items: np.ndarray, areas: np.ndarray) -> np.ndarray:
    return np.lexsort((-items[:, 0], items[:, 1], -np.frexp(areas.astype(np.float64))[1]))


def _birth(items: np.ndarray) -> np.ndarray:
    return np.lexsort((-items[:, 0], items[:, 1]))


class Greedy:
    """Greedy placement by the host's routine `place`; the first `fixed` items have their offsets already."""

    def __init__(self, context: Context, items: np.ndarray, fixed: int, wall: int) -> None:
        self.context = context
        self.items = items
        self.fixed = fixed
        self.wall = wall
        self.columns = np.ascontiguousarray(items.T)
        self.room = np.empty(2 * len(items), np.int64)
        address, step = self.columns.ctypes.data, 8 * len(items)
        self.addresses = [address, address + step, address + 2 * step]
        self.starts, self.near = self._neighbours()
        # the order, of which the beginning is fixed, and the offsets: what each placing fills in
        self.sequence, self.offsets = np.arange(len(items)), np.empty(len(items), np.int64)
        self.given = self.sequence.ctypes.data, *self.addresses, self.offsets.ctypes.data, self.room.ctypes.data

    def _neighbours(self) -> tuple[np.ndarray, np.ndarray]:
        """Which items are alive together, as the host's routine lists it; empty: too many are."""
        count = len(self.items)
        order = np.argsort(self.columns[1], kind="stable")
        starts = np.empty(count + 1, np.int64)
        given = count, self.fixed, order.ctypes.data, self.addresses[1], self.addresses[2], starts.ctypes.data
        near = np.empty(self.context.neighbours(*given, None), np.int64)
        if len(near):
            self.context.neighbours(*given, near.ctypes.data)
        return starts, near

    def order(self, weight: Weight) -> np.ndarray:
        """The items that are not fixed, in an order."""
        return np.asarray(weight(self.items[self.fixed:]) + self.fixed)

    def placed(self, moving: np.ndarray, lowest: bool, ceiling: int) -> tuple[int, np.ndarray]:
        """The top, and the offsets of the items that are not fixed, placed in the order `moving` into the gaps that fit
        best, or the lowest ones, or down from a ceiling (see the host's routine)."""
        self.sequence[self.fixed:] = moving
        self.offsets[:] = self.columns[3]
        top = self.context.place(len(self.items), self.fixed, *self.given, self.wall, lowest, ceiling // 64 * 64,
                                 self.starts.ctypes.data, self.near.ctypes.data if len(self.near) else None)
        return top, self.offsets[self.fixed:].copy()


def best(context: Context, items: Sequence[Item] | np.ndarray, fixed: int, wall: int, bound: int,
         top: int) -> tuple[int, list[int]]:
    """The lowest top of some ways to place the items from `fixed` on, and their offsets; none below `top`."""
    place = Greedy(context, np.asarray(items, np.int64).reshape(-1, 4), fixed, wall)
    least = np.zeros(0, np.int64)
    for weight, lowest, ceiling in ((_size, False, 0), (_area, False, 0), (_about, False, bound),
                                    (_between, False, bound), (_birth, False, 0), (_birth, True, 0),
                                    (_size, True, 0)):
        found, places = place.placed(place.order(weight), lowest, ceiling)
        if found < top:
            top, least = found, places
        if top <= GOOD_ENOUGH * bound:
            return top, least.tolist()
    top, least = _repaired(place, bound, top, least)
    return top, least.tolist()


def _repaired(place: Greedy, bound: int, top: int, least: np.ndarray) -> tuple[int, np.ndarray]:
    """The same, or better: what lies at the top comes first, again and again."""
    fixed, sizes = place.fixed, place.columns[0]
    for first, lowest in ((_size, False), (_size, True), (_area, False), (_birth, True)):
        order = place.order(first)
        for _ in range(min(REPAIRS, MOST_REPAIRED // (4 * len(sizes)))):
            found, places = place.placed(order, lowest, 0)
            if found < top:
                top, least = found, places
            if top <= GOOD_ENOUGH * bound:
                return top, least
            highest = (places + sizes[fixed:] >= found)[order - fixed]
            count = int(highest.sum())
            if not count or highest[:count].all():
                break
            order = np.concatenate((order[highest], order[~highest]))
    return top, least
