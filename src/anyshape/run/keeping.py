"""What a forward keeps for its backward where that is not everything, and the layouts that follow from it.

    kept block, whole         a  b  c  d
    b, d dropped, in chunks   a | c            the backward gives back the chunk of c, then that of a

Saved buffers that are dropped lie in the forward's upper block as long as it needs them, and in the backward's from the
step on that computes them again. Those that are moved out lie there until they are copied, and from the step on that
begins to bring them back.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.ir.types import size_of
from anyshape.plan.again import written
from anyshape.plan.alloc import Region, live_bytes, tape_entry
from anyshape.plan.hold import kept_outside
from anyshape.plan.plan import ExternStep, MemoryStep, Plan, touched
from anyshape.run.arena import PAGE
from anyshape.run.context import Context
from anyshape.run.layout import Layout
from anyshape.run.placement import Item, Places, best
from anyshape.sym.expr import Size, evaluate
from anyshape.sym.formulas import function_of


@dataclass(frozen=True, slots=True)
class Move:
    """A saved buffer that is moved out to a store. `gone`: the forward's last step during which it is still in memory;
    `back`: the backward's first step during which it is there again."""

    saved: str
    gone: int
    back: int


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a call keeps for its backward. dropped: saved buffers of the forward that are not kept, for the backward
    computes them again. moved: those that are moved out meanwhile (run/moving.py). apart: the kept block is in chunks,
    which the backward gives back one after another."""

    dropped: frozenset[str] = frozenset()
    apart: bool = False
    moved: tuple[Move, ...] = ()

    @property
    def away(self) -> frozenset[str]:
        """What is not in the kept block."""
        return self.dropped.union(move.saved for move in self.moved)


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

    outside: of a forward, what its tape keeps outside the arena. begins: of a backward, which step makes that again.
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
        # their bytes and offsets, in turn
        self.region_sizes = function_of([size for region in regions for size in (region.bytes, region.offset)],
                                        f"saved by the forward of {plan.name}")
        by_name = {b.name: b for b in plan.buffers}
        self.homes = homes = {name: by_name[name] for name in layout.placed}
        self.kept_buffers = [b for b in (forward or plan).buffers if b.home == "saved"]
        self.chunks = plan.chunks  # of a forward: those of its backward, once that is known
        self.optional = frozenset(plan.optional)
        # what only optional steps make: in the arena, or by PyTorch
        self.made = frozenset(window.buffer for number in plan.optional for window in written(plan.steps[number])
                              if by_name[window.buffer].home in ("again", "extern"))
        self.outside = kept_outside(plan)
        self.begins = {one.saved: min(number for number in plan.optional
                                      if one.buffer in {window.buffer for window in written(plan.steps[number])})
                       for one in plan.again if by_name[one.buffer].home == "tape"}
        # where saved buffers, and what shows them in a backward, lie: index -> (the forward's buffer, first byte there)
        self.shown: dict[int, tuple[str, Size]] = {i: (layout.placed[i], 0) for i in self.saved}
        for i, buffer in enumerate(homes.values()):
            entry = tape_entry(forward, buffer.index) if forward and buffer.home in ("tape", "kept") else None
            if entry is not None:
                home, window = entry
                before = window.offset * size_of(window.type.dtype) if buffer.home == "tape" else 0
                self.shown[i] = home.name, before
        self.reads = self._reads()
        last = {window.buffer: number for number, step in enumerate(plan.steps) for window in touched(step)}
        self.ends = {b.name: last.get(b.name, 0)
                     for b in (*(b for b in plan.buffers if b.home == "saved"), *self.outside)}

    def _reads(self) -> dict[str, list[int]]:
        """The steps of a backward that touch each of the forward's saved buffers, in order."""
        names = list(self.homes)
        of = {names[i]: name for i, (name, _) in self.shown.items()}
        found: dict[str, list[int]] = {b.name: [] for b in self.kept_buffers}
        for number, step in enumerate(self.plan.steps):
            for name in {of[window.buffer] for window in touched(step) if window.buffer in of}:
                found[name].append(number)
        return found

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

    def spilled(self, keeping: Keeping) -> list[tuple[str, int]]:
        """What PyTorch makes beside what is wanted of it, or to be copied into its place: (buffer, step)."""
        wanted = {one.buffer for one in self.plan.again if one.saved in keeping.dropped and one.saved in self.begins}
        return [(window.buffer, number) for number in sorted(self.runs(keeping))
                for step in (self.plan.steps[number],) if isinstance(step, ExternStep) for window in step.outputs
                if window is not None and window.buffer not in self.made and window.buffer not in wanted]

    def kept(self, sizes: Sequence[int], keeping: Keeping) -> tuple[dict[str, int], list[int]]:
        """Where saved buffers lie in the kept block, and where its chunks begin and end. sizes: of the buffers in the
        forward's order, padded."""
        places: dict[str, int] = {}
        starts = [0]
        away = keeping.away
        padded = dict(zip((b.name for b in self.kept_buffers), sizes, strict=True))
        for chunk in (self.chunks if keeping.apart else ()) or [tuple(padded)]:
            border = starts[-1]
            for name in chunk:
                if name not in away:
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
        back: list[tuple[str, Item]] = []  # what a backward brings back
        if self.forward is None:
            places, starts = self.kept([padded[i] for i in self.saved], keeping)
            ends = {**{name: self.ends[name] for name in dropped}, **{one.saved: one.gone for one in keeping.moved}}
            for i in self.saved:
                name = self.layout.placed[i]
                if name in ends:
                    moving.append(i)
                    lives[i] = lives[i][0], ends[name]
            spans = {self.layout.placed[i]: (padded[i], *lives[i]) for i in self.saved}
        else:
            bytes_ = [-(-size // 64) * 64 for size in self.region_sizes(values)[::2]]
            places, starts = self.kept(bytes_, keeping)
            used = {window.buffer for number in runs for window in touched(self.plan.steps[number])}
            moving += [i for i, b in enumerate(self.homes.values())
                       if b.name in used and (b.home == "again" or (b.home == "kept" and self.shown[i][0] in dropped))]
            spans = {b.name: (size, 0, region.last)
                     for b, size, region in zip(self.kept_buffers, bytes_, self.regions, strict=True)}
            back = [(one.saved, (spans[one.saved][0], one.back, spans[one.saved][2], 0)) for one in keeping.moved]
        border = starts[-1]
        if keeping.apart:  # nothing else lies in the chunks
            items: list[Item] = [(border, 0, len(self.plan.steps), 0)]
        else:
            items = [(*spans[name], place) for name, place in places.items()]
        fixed = len(items)
        items += [(padded[i], *lives[i], 0) for i in moving]
        items += [item for _, item in back]
        bound = max(self.live(items), border)
        top, placed = best(self.context, items, fixed, border, bound, sys.maxsize)
        places |= {name: offset for (name, _), offset in zip(back, placed[len(moving):], strict=True)}
        for i, offset in zip(moving, placed, strict=False):
            offsets[i] = offset
            if i in self.shown:
                places[self.shown[i][0]] = offset
        for i, (name, before) in self.shown.items():
            if name in places:
                offsets[i] = places[name] + evaluate(before, values)
        return Places(offsets, border, max(top, border), bound, starts=starts if keeping.apart else [],
                      moved=[(places[one.saved], spans[one.saved][0]) for one in keeping.moved])

    def live(self, items: Sequence[Item]) -> int:
        """The most bytes of items at one step."""
        return live_bytes([i[0] for i in items], [i[1:3] for i in items], len(self.plan.steps))
