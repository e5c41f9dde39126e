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
from anyshape.plan.ir.program import Plan
from anyshape.plan.memory.offset_problem import Item, OffsetAssignment, OffsetProblem
from anyshape.sym.expr import Size, maximum
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_at_most


@dataclass(slots=True)
class _Slot:
    size: Size
    hint: int
    lives: list[tuple[int, int]]
    members: list[int]  # numbers of items
    offset: Size | None = None  # of a fixed place in the kept block, which cannot grow

    def free(self, first: int, last: int) -> bool:
        return all(end < first or last < begin for begin, end in self.lives)


def allocate(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` with offsets, arena and kept filled in.

    Args:
        plan: buffers with lifetimes; those with home arena and saved receive offsets.
        context: of a backward program, tape buffers that lie in the kept block of `context.forward` receive their
            places, and the block's dead places are used.
    """
    forward = context.forward
    end = len(plan.steps)
    offsets: dict[str, Size] = {}
    items: list[Item] = []
    kept: Size = 0
    for buffer in [b for b in plan.buffers if b.is_saved]:
        offsets[buffer.name] = kept
        items.append((buffer.bytes, buffer.first, end, kept))
        kept = kept + align(buffer.bytes)
    if forward is not None:
        assert not items, "a backward program saves nothing"
        offsets.update(tape_offsets(plan, forward))
        kept = forward.kept
        items += [(region.bytes, 0, region.last, region.offset) for region in kept_regions(plan, forward)]
    fixed = len(items)
    moving = sorted([b for b in plan.buffers if b.is_temp], key=lambda b: b.name)
    items += [(b.bytes, b.first, b.last, 0) for b in moving]
    top, found = assign_for_all_sizes(OffsetProblem(items, fixed, kept), plan.facts)
    offsets.update(zip([b.name for b in moving], found, strict=True))
    places = tuple((b.name, offsets[b.name]) for b in plan.buffers if b.name in offsets)
    return dataclasses.replace(plan, offsets=places, arena=top, kept=kept)


def assign_for_all_sizes(problem: OffsetProblem, facts: Facts) -> OffsetAssignment:
    """Offsets that are valid wherever `facts` hold. What lies above the wall is in slots, one after another."""
    items, fixed = problem.items, problem.fixed
    slots = [_Slot(size, facts.hint(size), [(first, last)], [], offset) for size, first, last, offset in items[:fixed]]
    prover = _Prover(facts)
    moving = [(number, *items[number][:3]) for number in range(fixed, len(items))]
    moving.sort(key=lambda one: (-facts.hint(one[1]), one[2] - one[3], one[2], one[0]))
    for number, size, first, last in moving:
        slot = _slot_of(size, [slot for slot in slots if slot.free(first, last)], slots, prover)
        slot.lives.append((first, last))
        slot.members.append(number)
    offsets: dict[int, Size] = {}
    top = problem.wall
    for slot in slots:
        start = slot.offset
        if start is None:
            start = top
            top = top + align(slot.size)
        offsets.update(dict.fromkeys(slot.members, start))
    return OffsetAssignment(top, [offsets[number] for number in range(fixed, len(items))])


def _slot_of(size: Size, free: list[_Slot], slots: list[_Slot], prover: _Prover) -> _Slot:
    """The best of the `free` ones for so many bytes, grown where it has to, or a new one of `slots`."""
    holding = [slot for slot in free if prover.at_most(size, slot.size)]
    growing = [slot for slot in free if slot.offset is None]
    if holding:
        # a place in the kept block costs nothing; among the others the smallest
        return min(holding, key=lambda s: (s.offset is None, s.hint))
    if growing:
        slot = min(growing, key=lambda s: s.hint)
        slot.size = maximum(slot.size, size)
        slot.hint = max(slot.hint, prover.facts.hint(size))
        return slot
    slots.append(_Slot(size, prover.facts.hint(size), [], []))
    return slots[-1]


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


