"""Symbolic offset assignment: offsets of a plan's buffers, as formulas that are valid at every shape.

The arena has a bottom, the *kept* block: saved values, one after another, alive until the backward program has run.
Above it lie *slots*, one after another; the buffers of a slot are never alive together, and the slot is as large as
its largest buffer. A buffer may also use the place of a saved value that is not made yet, or, in a backward program,
of one that is not needed any more, where its size is provably no larger.

before:
    plan three  arena 0
      where 1 <= n, n near 512
      in      x: f32[n]  4*n bytes  steps 0-0
      buffer  a: f32[n, 4]  16*n bytes  steps 0-1  arena
      buffer  b: f32[n]  4*n bytes  steps 1-2  arena
      buffer  c: f32[n, 2]  8*n bytes  steps 2-3  arena
      buffer  s: f32[n]  4*n bytes  steps 0-4  saved 0
      buffer  y: f32[n]  4*n bytes  steps 3-4  output 0
      0  kernel k0(x, &a, &s; n)
      1  kernel k1(a, &b; n)
      2  kernel k2(b, &c; n)
      3  kernel k3(c, &y; n)
      out     y
      saved   s
after allocate:
    plan three  arena 128*((n + 15)//16) + 64*((n + 3)//4)  kept 64*((n + 15)//16)
      where 1 <= n, n near 512
      in      x: f32[n]  4*n bytes  steps 0-0
      buffer  a: f32[n, 4]  16*n bytes  steps 0-1  arena @ 64*((n + 15)//16)
      buffer  b: f32[n]  4*n bytes  steps 1-2  arena @ 64*((n + 15)//16) + 64*((n + 3)//4)
      buffer  c: f32[n, 2]  8*n bytes  steps 2-3  arena @ 64*((n + 15)//16)
      buffer  s: f32[n]  4*n bytes  steps 0-4  saved 0 @ 0
      buffer  y: f32[n]  4*n bytes  steps 3-4  output 0
      0  kernel k0(x, &a, &s; n)
      1  kernel k1(a, &b; n)
      2  kernel k2(b, &c; n)
      3  kernel k3(c, &y; n)
      out     y
      saved   s

Buffers are taken by size at the hints, largest first, into the smallest slot that is free during their life: first
one that provably holds them at every shape, else one that grows to the maximum of the two formulas (never worse than
a slot more). Where this layout is far from the bound at some shape, the run time places the buffers anew for it
(runtime/specialize/specialization.py); both layouts respect the same lifetimes and the same border.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.liveness import kept_regions, tape_entry
from anyshape.plan.ir.program import Buffer, Plan
from anyshape.sym.expr import Size, maximum
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_at_most


@dataclass(slots=True)
class _Slot:
    size: Size
    hint: int
    lives: list[tuple[int, int]]
    members: list[str]
    offset: Size | None = None  # of a fixed place in the kept block, which cannot grow

    def free(self, buffer: Buffer) -> bool:
        return all(last < buffer.first or buffer.last < first for first, last in self.lives)


def allocate(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` with offsets, arena and kept filled in.

    Args:
        plan: buffers with lifetimes; those with home arena and saved receive offsets.
        context: of a backward program, tape buffers that lie in the kept block of `context.forward` receive their
            places, and the block's dead places are used.
    """
    forward = context.forward
    end = len(plan.steps)
    saved = [b for b in plan.buffers if b.is_saved]
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
    moving = [b for b in plan.buffers if b.is_temp]
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
    places = tuple((b.name, offsets[b.name]) for b in plan.buffers if b.name in offsets)
    return dataclasses.replace(plan, offsets=places, arena=top, kept=kept)


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
            answer = prove_at_most(self.facts, a, b) is True
            self.known[a, b] = answer
        return answer


def tape_offsets(plan: Plan, forward: Plan) -> dict[str, Size]:
    """Where the tape buffers of a backward plan lie in the forward's kept block, in bytes."""
    places = dict(forward.offsets)
    result: dict[str, Size] = {}
    for buffer in plan.buffers:
        entry = tape_entry(forward, buffer.index) if buffer.has_tape_entry else None
        if entry is not None:
            home, window = entry
            before = window.offset * size_of(window.type.dtype) if buffer.is_restored else 0
            result[buffer.name] = places[home.name] + before
        elif buffer.is_recomputed:
            result[buffer.name] = 0  # placed when sizes are known, if its steps run at all
    return result


