"""Offsets of a plan's buffers, as formulas that are valid at every shape.

The arena has a bottom, the *kept* block: saved values, one after another, alive until the backward program has run.
Above it lie *slots*, one after another; the buffers of a slot are never alive together, and the slot is as large as
its largest buffer. A buffer may also use the place of a saved value that is not made yet, or, in a backward program,
of one that is not needed any more, where its size is provably no larger.

    kept          | slot 0            | slot 1
    a 4*b*n  s 4*b| x 16*b*n, then y  | z

Buffers are taken by size at the hints, largest first, into the smallest slot that is free during their life: first
one that provably holds them at every shape, else one that grows to the maximum of the two formulas (never worse than
a slot more). Where this layout is far from the bound at some shape, the run time places the buffers anew for it
(run/record.py); both layouts respect the same lifetimes and the same border.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.plan.plan import Buffer, Plan, Window
from anyshape.sym.expr import Size, maximum
from anyshape.sym.facts import Facts


@dataclass(frozen=True, slots=True)
class Region:
    """A place in the kept block that is taken from the first step to step `last` (-1: free from the start)."""

    offset: Size
    bytes: Size
    last: int


@dataclass(slots=True)
class _Slot:
    size: Size
    hint: int
    lives: list[tuple[int, int]]
    members: list[str]
    offset: Size | None = None  # of a fixed place in the kept block, which cannot grow

    def free(self, buffer: Buffer) -> bool:
        return all(last < buffer.first or buffer.last < first for first, last in self.lives)


def allocate(plan: Plan, forward: Plan | None = None) -> Plan:
    """`plan` with offsets, arena and kept filled in.

    Args:
        plan: buffers with lifetimes; those with home arena and saved receive offsets.
        forward: for a backward program, the allocated plan of its forward: tape buffers that lie in its kept block
            receive their places, and the block's dead places are used.
    """
    end = len(plan.steps)
    saved = [b for b in plan.buffers if b.home == "saved"]
    offsets: dict[str, Size] = {}
    slots: list[_Slot] = []
    kept: Size = 0
    for buffer in saved:
        offsets[buffer.name] = kept
        slots.append(_Slot(buffer.bytes, plan.facts.hint(buffer.bytes), [(buffer.first, end)], [], kept))
        kept = kept + align(buffer.bytes)
    if forward is not None:
        assert not saved, "a backward program saves nothing"
        offsets.update(tape_offsets(plan, forward))
        kept = forward.kept
        for region in kept_regions(plan, forward):
            slots.append(_Slot(region.bytes, plan.facts.hint(region.bytes), [(0, region.last)], [], region.offset))
    prover = _Prover(plan.facts)
    moving = [b for b in plan.buffers if b.home == "arena"]
    moving.sort(key=lambda b: (-plan.facts.hint(b.bytes), b.first - b.last, b.first, b.name))
    for buffer in moving:
        _assign(buffer, slots, prover)
    top = kept
    for slot in slots:
        start = slot.offset
        if start is None:
            start = top
            top = top + align(slot.size)
        for name in slot.members:
            offsets[name] = start
    return dataclasses.replace(plan, offsets=tuple(offsets.items()), arena=top, kept=kept)


def _assign(buffer: Buffer, slots: list[_Slot], prover: _Prover) -> None:
    """Puts `buffer` into the best of `slots`, or a new one."""
    free = [slot for slot in slots if slot.free(buffer)]
    holding = [slot for slot in free if prover.at_most(buffer.bytes, slot.size)]
    growing = [slot for slot in free if slot.offset is None]
    if holding:
        # a place in the kept block costs nothing; among the others the smallest
        slot = min(holding, key=lambda s: (s.offset is None, s.hint))
    elif growing:
        slot = min(growing, key=lambda s: s.hint)
        slot.size = maximum(slot.size, buffer.bytes)
        slot.hint = max(slot.hint, prover.facts.hint(buffer.bytes))
    else:
        slot = _Slot(buffer.bytes, prover.facts.hint(buffer.bytes), [], [])
        slots.append(slot)
    slot.lives.append((buffer.first, buffer.last))
    slot.members.append(buffer.name)


class _Prover:
    """Remembers answers: a plan has few different sizes and asks for the same pairs again and again."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.known: dict[tuple[Size, Size], bool] = {}

    def at_most(self, a: Size, b: Size) -> bool:
        if a == b:
            return True
        answer = self.known.get((a, b))
        if answer is None:
            answer = self.facts.prove_at_most(a, b) is True
            self.known[a, b] = answer
        return answer


def saved_entry(forward: Plan, index: int) -> tuple[Buffer, Window] | None:
    """The buffer and the window of tape entry `index`, or None when the entry is a size."""
    window = forward.saved[index]
    if not isinstance(window, Window):
        return None
    return next(((buffer, window) for buffer in forward.buffers if buffer.name == window.buffer), None)


def tape_entry(forward: Plan, index: int) -> tuple[Buffer, Window] | None:
    """The kept buffer and the window of tape entry `index`, or None when the entry is a size or a held tensor."""
    entry = saved_entry(forward, index)
    return entry if entry is not None and entry[0].home == "saved" else None


def tape_offsets(plan: Plan, forward: Plan) -> dict[str, Size]:
    """Where the tape buffers of a backward plan lie in the forward's kept block, in bytes."""
    places = dict(forward.offsets)
    result: dict[str, Size] = {}
    for buffer in plan.buffers:
        entry = tape_entry(forward, buffer.index) if buffer.home in ("tape", "kept") else None
        if entry is not None:
            home, window = entry
            before = window.offset * size_of(window.type.dtype) if buffer.home == "tape" else 0
            result[buffer.name] = places[home.name] + before
        elif buffer.home == "again":
            result[buffer.name] = 0  # placed when sizes are known, if its steps run at all
    return result


def kept_regions(plan: Plan, forward: Plan) -> list[Region]:
    """The forward's saved buffers, with the last step of the backward `plan` that reads each (-1: none does)."""
    places = dict(forward.offsets)
    last: dict[str, int] = {}
    for buffer in plan.buffers:
        entry = tape_entry(forward, buffer.index) if buffer.home in ("tape", "kept") else None
        if entry is not None:
            last[entry[0].name] = max(last.get(entry[0].name, -1), buffer.last)
    return [Region(places[b.name], b.bytes, last.get(b.name, -1)) for b in forward.buffers if b.home == "saved"]


def least_bytes(plan: Plan, forward: Plan | None) -> int:
    """Bytes at the hints that every layout of the arena needs, and that layouts for given sizes come close to."""
    hint = plan.facts.hint
    items = [(hint(b.bytes), b.first, len(plan.steps) if b.home == "saved" else b.last) for b in plan.buffers
             if b.home in ("arena", "saved")]
    kept = 0
    if forward is not None:
        kept = hint(forward.kept)
        items += [(hint(region.bytes), 0, region.last) for region in kept_regions(plan, forward)]
    return max(kept, live_bytes([item[0] for item in items], [item[1:] for item in items], len(plan.steps)))


def live_bytes(sizes: Iterable[int], lives: Iterable[tuple[int, int]], steps: int) -> int:
    """The largest sum of sizes alive at one step: no layout needs less. `lives` are (first, last), inclusive."""
    change = [0] * (steps + 3)
    for size, (first, last) in zip(sizes, lives, strict=True):
        if first <= last:
            change[first] += size
            change[last + 1] -= size
    now = best = 0
    for amount in change:
        now += amount
        if now > best:
            best = now
    return best
