"""What a forward keeps for its backward where that is not everything, and the layouts that follow from it.

    kept block, whole         a  b  c  d
    b, d dropped, in chunks   a | c            the backward gives back the chunk of c, then that of a

Saved buffers that are dropped lie in the forward's upper block as long as it needs them, and in the backward's from the
step on that computes them again.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.ir.types import size_of
from anyshape.plan.again import written
from anyshape.plan.alloc import Region, live_bytes, tape_entry
from anyshape.plan.plan import MemoryStep, Plan, touched
from anyshape.run.arena import PAGE
from anyshape.run.context import Context
from anyshape.run.layout import Layout
from anyshape.run.placement import Item, Places, best
from anyshape.sym.expr import Size, evaluate


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a call keeps for its backward. dropped: saved buffers of the forward that are not kept, for the backward
    computes them again. apart: the kept block is in chunks, which the backward gives back one after another."""

    dropped: frozenset[str] = frozenset()
    apart: bool = False


EVERYTHING = Keeping()


def without(steps: Sequence[int], left_out: frozenset[int]) -> list[int]:
    """The words of the steps but for some."""
    words: list[int] = []
    at = 0
    while at < len(steps):
        if steps[at + 2] not in left_out:
            words += steps[at:at + steps[at + 1]]
        at += steps[at + 1]
    return words


class Keeps:
    """The layouts of one plan, a forward's or a backward's, under any `Keeping`.

    Args:
        lives: first and last step of each buffer that has a place; moving, saved: which of them are free to move, and
            which are saved.
        regions: of a backward, the forward's saved buffers.
    """

    def __init__(self, plan: Plan, forward: Plan | None, layout: Layout, context: Context,
                 lives: Sequence[tuple[int, int]], moving: Sequence[int], saved: Sequence[int],
                 regions: Sequence[Region]) -> None:
        self.plan = plan
        self.forward = forward
        self.layout = layout
        self.context = context
        self.lives = lives
        self.moving = moving
        self.saved = saved
        self.regions = regions
        by_name = {b.name: b for b in plan.buffers}
        self.homes = homes = {name: by_name[name] for name in layout.placed}
        self.kept_buffers = [b for b in (forward or plan).buffers if b.home == "saved"]
        self.chunks = plan.chunks  # of a forward: those of its backward, once that is known
        self.optional = frozenset(plan.optional)
        # what only optional steps make: in the arena, or by PyTorch
        self.made = frozenset(window.buffer for number in plan.optional for window in written(plan.steps[number])
                              if by_name[window.buffer].home in ("again", "extern"))
        # where saved buffers, and what shows them in a backward, lie: index -> (the forward's buffer, first byte there)
        self.shown: dict[int, tuple[str, Size]] = {i: (layout.placed[i], 0) for i in self.saved}
        for i, buffer in enumerate(homes.values()):
            entry = tape_entry(forward, buffer.index) if forward and buffer.home in ("tape", "kept") else None
            if entry is not None:
                home, window = entry
                before = window.offset * size_of(window.type.dtype) if buffer.home == "tape" else 0
                self.shown[i] = home.name, before
        self.ends = {b.name: max((number for number, step in enumerate(plan.steps)
                                  for window in touched(step) if window.buffer == b.name), default=0)
                     for b in plan.buffers if b.home == "saved"}

    def runs(self, keeping: Keeping) -> frozenset[int]:
        """The optional steps that compute what was dropped, from what was not, and that give chunks back."""
        dropped = keeping.dropped
        wanted = {one.buffer for one in self.plan.again if one.saved in dropped}
        made = self.made | wanted
        found = set()
        for number in sorted(self.optional, reverse=True):
            step = self.plan.steps[number]
            if isinstance(step, MemoryStep):
                if keeping.apart:
                    found.add(number)
            elif {window.buffer for window in written(step)} & wanted:
                found.add(number)
                wanted |= {window.buffer for window in touched(step)} & made
        return frozenset(found)

    def used(self, keeping: Keeping) -> set[str]:
        """What the optional steps that run touch."""
        return {window.buffer for number in self.runs(keeping) for window in touched(self.plan.steps[number])}

    def kept(self, sizes: Sequence[int], keeping: Keeping) -> tuple[dict[str, int], list[int]]:
        """Where saved buffers lie in the kept block, and where its chunks begin and end. sizes: of the buffers in the
        forward's order, padded."""
        places: dict[str, int] = {}
        starts = [0]
        padded = dict(zip((b.name for b in self.kept_buffers), sizes, strict=True))
        for chunk in self.chunks if keeping.apart else [tuple(padded)]:
            border = starts[-1]
            for name in chunk:
                if name not in keeping.dropped:
                    places[name] = border
                    border += padded[name]
            starts.append(-(-border // PAGE) * PAGE if keeping.apart else border)
        return places, starts

    def places(self, sizes: list[int], offsets: list[int], values: dict[str, int], keeping: Keeping,
                 runs: frozenset[int]) -> Places:
        """The layout of a forward that does not keep everything, or not in one piece, or of its backward."""
        padded = [-(-size // 64) * 64 for size in sizes]
        lives = [*self.lives]
        dropped = keeping.dropped
        moving = [*self.moving]
        if self.forward is None:
            places, starts = self.kept([padded[i] for i in self.saved], keeping)
            for i in self.saved:
                if self.layout.placed[i] in dropped:
                    moving.append(i)
                    lives[i] = lives[i][0], self.ends[self.layout.placed[i]]
            spans = {self.layout.placed[i]: (padded[i], *lives[i]) for i in self.saved}
        else:
            bytes_ = [-(-evaluate(region.bytes, values) // 64) * 64 for region in self.regions]
            places, starts = self.kept(bytes_, keeping)
            used = {window.buffer for number in runs for window in touched(self.plan.steps[number])}
            moving += [i for i, b in enumerate(self.homes.values())
                       if b.name in used and (b.home == "again" or (b.home == "kept" and self.shown[i][0] in dropped))]
            spans = {b.name: (size, 0, region.last)
                     for b, size, region in zip(self.kept_buffers, bytes_, self.regions, strict=True)}
        border = starts[-1]
        if keeping.apart:  # nothing else lies in the chunks
            items: list[Item] = [(border, 0, len(self.plan.steps), 0)]
        else:
            items = [(*spans[name], place) for name, place in places.items()]
        fixed = len(items)
        items += [(padded[i], *lives[i], 0) for i in moving]
        bound = max(self.live(items), border)
        top, placed = best(self.context, items, fixed, border, bound, sys.maxsize)
        for i, offset in zip(moving, placed, strict=True):
            offsets[i] = offset
            if i in self.shown:
                places[self.shown[i][0]] = offset
        for i, (name, before) in self.shown.items():
            if name in places:
                offsets[i] = places[name] + evaluate(before, values)
        return Places(offsets, border, max(top, border), bound, starts=starts if keeping.apart else [])

    def live(self, items: Sequence[Item]) -> int:
        """The most bytes of items at one step."""
        return live_bytes([i[0] for i in items], [i[1:3] for i in items], len(self.plan.steps))
