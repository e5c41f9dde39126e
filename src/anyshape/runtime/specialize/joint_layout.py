"""The joint memory layout of forward and backward: one block for both halves of a whole step.

What a forward keeps lies at the bottom of its arena until its backward has run. The rest of either half lies above
that border, or where something kept is not there yet, or no more; but nothing crosses the border, which is the end of a
block of memory. So what is wider than the room below lies above, however much of it is free by then:

    kept 120 MB, of which 90 are free: a gradient of 94 MB   -->   214 MB, where 124 would do

Both halves of a whole step run in one call, and nothing else between them. So the kept block is all of the arena, and
there is no border: where that takes less, all values of both are placed together. One block for both also is the most
that any call needs, where two would be the most that any call keeps beside the most that any call has above that:

    kept, above by shape: 78 + 65 MB, 199 + 20 MB   -->   143 MB, 219 MB; held from then on: 219 MB, not 264
"""
from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from anyshape.base.align import align
from anyshape.plan.ir.liveness import arena_ranges
from anyshape.plan.memory.offset_problem import OffsetProblem
from anyshape.runtime.memory.offset_assignment import GOOD_ENOUGH, ArenaLayout, assign_offsets
from anyshape.runtime.memory.size_vectors import LiveBytes, SizeTable
from anyshape.runtime.specialize.specialization import Specializer
from anyshape.sym.expr import evaluate

REMEMBERED = 32  # sizes
WORTH = 0.99  # of two blocks, what one has to come to


class ProgramLifetimes:
    """The forward or the backward: what lies in its arena."""

    def __init__(self, specializer: Specializer) -> None:
        self.specializer = specializer
        plan = specializer.plan
        self.inside = LiveBytes(arena_ranges(plan, specializer.keeps.forward), len(plan.steps),
                                f"values in the arena of {plan.name}")

    def peak(self, values: Mapping[str, int]) -> int:
        """The most bytes that are alive at a step."""
        return self.inside.peak(values)


class JointLayout:
    """Finds the layouts of a forward and its backward. May be used from several threads."""

    def __init__(self, forward: Specializer, backward: Specializer) -> None:
        self.forward, self.backward = forward, backward
        self.halves = ProgramLifetimes(forward), ProgramLifetimes(backward)
        # both in a row: what moves in the forward, what it keeps, and what moves in the backward
        end = len(forward.plan.steps)
        self.lives = np.array([*(forward.lives[i] for i in forward.moving),
                               *((b.first, max(end, end + 1 + region.last))
                                 for b, region in zip(forward.keeps.kept_buffers, backward.regions, strict=True)),
                               *((end + 1 + first, end + 1 + last)
                                 for first, last in (backward.lives[i] for i in backward.moving))], np.int64)
        self.sizes = SizeTable([*([*forward.homes.values()][i].bytes for i in forward.moving),
                            *(region.bytes for region in backward.regions),
                            *([*backward.homes.values()][i].bytes for i in backward.moving)],
                           f"values of {forward.plan.name} and its backward")
        self.known: dict[tuple[int, ...], tuple[ArenaLayout, ArenaLayout]] = {}
        self.lock = threading.Lock()

    def of(self, specializer: Specializer, values: Mapping[str, int]) -> ArenaLayout | None:
        """The layout of one half; None: some sizes are not known."""
        key = tuple([values.get(name, -1) for name in self.forward.layout.symbols])
        if -1 in key:
            return None
        with self.lock:
            found = self.known.get(key)
        if found is None:
            found = self._found({**dict.fromkeys(self.backward.layout.symbols, 0), **values})
            with self.lock:
                while len(self.known) >= REMEMBERED:
                    self.known.pop(next(iter(self.known)))
                self.known[key] = found
        return found[specializer.plan is self.backward.plan]

    def _found(self, values: dict[str, int]) -> tuple[ArenaLayout, ArenaLayout]:
        bound = max(half.peak(values) for half in self.halves)
        forward, backward = self.forward.apart(values), self.backward.apart(values)
        most = max(forward.top, backward.top)
        apart = (ArenaLayout(forward.offsets, most, most, bound), ArenaLayout(backward.offsets, most, most, bound))
        if most <= GOOD_ENOUGH * bound:
            return apart
        sizes = align(self.sizes(values))
        items = np.column_stack((sizes, self.lives, np.zeros(len(sizes), np.int64)))
        top, offsets = assign_offsets(self.forward.host, OffsetProblem(items), bound, most)
        if top > WORTH * most:
            return apart
        moved, kept = len(self.forward.moving), len(self.backward.regions)
        places = dict(zip([b.name for b in self.forward.keeps.kept_buffers], offsets[moved:moved + kept], strict=True))
        halves = (self.forward, offsets[:moved]), (self.backward, offsets[moved + kept:])
        one, other = (ArenaLayout(self._offsets(half, part, places, values), top, top, bound) for half, part in halves)
        return one, other

    def _offsets(self, specializer: Specializer, moving: list[int], kept: dict[str, int], values: dict[str,
                                                                                                 int]) -> list[int]:
        """Those of all that has a place in a half."""
        offsets = [0] * len(specializer.lives)
        for i, offset in zip(specializer.moving, moving, strict=True):
            offsets[i] = offset
        for i, (name, before) in specializer.keeps.shown.items():
            offsets[i] = kept[name] + evaluate(before, values)
        return offsets


def joined(forward: Specializer, backward: Specializer) -> tuple[Specializer, Specializer]:
    """Both, in one block where that takes less; the backward has no sizes of its own. Where there is no tape, there is
    no block that both have."""
    if not (forward.plan.saved and backward.plan.restored):
        return forward, backward
    layout = JointLayout(forward, backward)
    return forward.with_joint_layout(layout), backward.with_joint_layout(layout)
