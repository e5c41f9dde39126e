"""Places of buffers at given sizes: greedy searches by the host's own routine, each in another order."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
    end. moved: offset and bytes of the values that are moved out and back, in order."""

    offsets: list[int]
    border: int
    top: int
    bound: int
    lower: str = "kept"
    starts: list[int] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)


Item = tuple[int, int, int, int]  # bytes, first, last, offset
Life = tuple[int, int, int]  # bytes, first, last


def _size(item: Item) -> tuple[int, ...]:
    return -item[0], item[1] - item[2]


def _area(item: Item) -> tuple[int, ...]:
    return (-item[0] * (item[2] - item[1] + 1),)


def _about(item: Item) -> tuple[int, ...]:
    """By the power of two of the area, so that one layer's values come after those of the layer before."""
    return -_area(item)[0].bit_length(), item[1], -item[0]


def _between(item: Item) -> tuple[int, ...]:
    """The same, with the borders between the powers elsewhere."""
    return -(3 * _area(item)[0] // 2).bit_length(), item[1], -item[0]


def _birth(item: Item) -> tuple[int, ...]:
    return item[1], -item[0]


class _Greedy:
    """Greedy placement by the host's routine `place`; the first `fixed` items have their offsets already."""

    def __init__(self, context: Context, items: Sequence[Item], fixed: int, wall: int) -> None:
        self.context = context
        self.items = items
        self.fixed = fixed
        self.wall = wall
        self.array = WORD * len(items)
        self.columns = [self.array(*column) for column in zip(*[item[:3] for item in items], strict=True)]

    def run(self, weight: Any, lowest: bool, ceiling: int) -> tuple[int, list[int]]:
        """The top, and the offsets of the items that are not fixed, placed in the order of `weight` into the gaps that
        fit best, or the lowest ones, or down from a ceiling (see the host's routine)."""
        items = self.items
        return self.placed(sorted(range(self.fixed, len(items)), key=lambda i: weight(items[i])), lowest, ceiling)

    def placed(self, moving: Sequence[int], lowest: bool, ceiling: int) -> tuple[int, list[int]]:
        """The same, of the items that are not fixed in the order `moving`."""
        count = len(self.items)
        order = self.array(*range(self.fixed), *moving)
        offsets = self.array(*[item[3] for item in self.items])
        placed = self.array()
        top = self.context.place(count, self.fixed, order, *self.columns, offsets, placed, self.wall, lowest,
                                 ceiling // 64 * 64)
        return top, offsets[self.fixed:]


def best(context: Context, items: Sequence[Item], fixed: int, wall: int, bound: int,
         top: int) -> tuple[int, list[int]]:
    """The lowest top of some ways to place the items from `fixed` on, and their offsets; none below `top`."""
    place = _Greedy(context, items, fixed, wall)
    least: list[int] = []
    for weight, lowest, ceiling in ((_size, False, 0), (_area, False, 0), (_about, False, bound),
                                    (_between, False, bound), (_birth, False, 0), (_birth, True, 0),
                                    (_size, True, 0)):
        found, places = place.run(weight, lowest, ceiling)
        if found < top:
            top, least = found, places
        if top <= GOOD_ENOUGH * bound:
            return top, least
    return _repaired(place, bound, top, least)


def _repaired(place: _Greedy, bound: int, top: int, least: list[int]) -> tuple[int, list[int]]:
    """The same, or better: what lies at the top comes first, again and again."""
    fixed, items = place.fixed, place.items
    for first, lowest in ((_size, False), (_size, True), (_area, False), (_birth, True)):
        order = sorted(range(fixed, len(items)), key=lambda i: first(items[i]))  # noqa: B023
        for _ in range(min(REPAIRS, MOST_REPAIRED // (4 * len(items)))):
            found, places = place.placed(order, lowest, 0)
            if found < top:
                top, least = found, places
            if top <= GOOD_ENOUGH * bound:
                return top, least
            highest = {i for i in order if places[i - fixed] + items[i][0] >= found}
            if not highest or order[:len(highest)] == [i for i in order if i in highest]:
                break
            order = [*(i for i in order if i in highest), *(i for i in order if i not in highest)]
    return top, least
