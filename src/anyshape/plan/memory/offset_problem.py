"""The offset-assignment problem: items with bytes and live ranges that are to lie in one arena, of which some have
their places, and the border (wall) of the arena's two blocks, which no item crosses.

    bytes   live range   offset              wall 192
    128     0..9         0        fixed
    64      0..4         128      fixed
    64      5..7         ?        --> 128    what is fixed there is not needed any more
    256     2..3         ?        --> 192    above the wall

Bytes, offsets and wall are formulas, or numbers. Two engines solve it: for all sizes plan/memory/symbolic_allocator.py,
which proves that one formula is at most another, and at given sizes runtime/memory/offset_assignment.py, which searches
(docs/adr/027-places-by-formula-and-number.md says why there are two).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anyshape.plan.ir.liveness import LiveRanges, peak_bytes
from anyshape.sym.expr import Size

Item = tuple[Size, int, int, Size]  # bytes, first step, last step, offset (of one that has no place yet: any)


@dataclass(frozen=True, slots=True)
class OffsetProblem:
    """What is to be placed. items: int64[items, 4], or `Item`s; the first `fixed` have their offsets. wall: bytes."""

    items: Sequence[Item] | np.ndarray
    fixed: int = 0
    wall: Size = 0

    def bound(self, steps: int) -> int:
        """Of numbers: bytes that no top is below, in a plan of so many steps."""
        items, wall = self.items, self.wall
        assert isinstance(wall, int)
        if isinstance(items, np.ndarray):
            return max(LiveRanges(items[:, 1:3], steps).peak(items[:, 0]), wall)
        return max(peak_bytes([item[:3] for item in items], steps), wall)  # type: ignore[misc]


class OffsetAssignment(NamedTuple):
    """A solution: where the arena ends, and the offsets of the items that had none, in their order."""

    top: Size
    offsets: list[Size]
