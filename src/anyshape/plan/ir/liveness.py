"""Liveness: the steps of a plan between which each buffer is in memory, and the bytes that are live at every step.

    buffer  bytes  live range      step   0   1   2   3
    a       8      0..1                   8   8
    b       4      1..3                       4   4   4
                        live bytes        8  12   4   4      peak 12

A live range is (bytes, first step, last step), both inclusive; where the last one is before the first, it is empty. A
plan of n steps has n + 1 points: what its caller gets, or its backward, is live at the point after the last step, too.
Bytes are numbers, or formulas (`live_bytes`), or many numbers at once, as arrays (`LiveRanges`).
"""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from anyshape.plan.ir.program import Buffer, MemoryStep, Plan, Window
from anyshape.sym.expr import Size

S = TypeVar("S", int, Size)


class LiveRange(NamedTuple):
    """Bytes, at a place that this does not say, from one step to another, both inclusive."""

    bytes: Size
    first: int
    last: int


def live_bytes(ranges: Iterable[tuple[S, int, int]], steps: int) -> list[S]:
    """The sum of what is live at each of the points 0 .. steps: numbers of numbers, formulas of formulas."""
    change: list[Any] = [0] * (steps + 2)
    for size, first, last in ranges:
        if first <= last:
            change[first] += size
            change[last + 1 if last < steps else steps + 1] -= size
    change.pop()
    return list(itertools.accumulate(change))


def peak_bytes(ranges: Iterable[tuple[int, int, int]], steps: int) -> int:
    """The largest sum of bytes that are live at one point: no layout needs less."""
    return max(live_bytes(ranges, steps))


class LiveRanges:
    """Live ranges without their bytes, as arrays of int64: where bytes are many numbers, found anew for each call."""

    def __init__(self, ranges: Sequence[tuple[int, int]] | np.ndarray, steps: int) -> None:
        columns = np.array(ranges, np.int64).reshape(-1, 2)
        self.first, self.last, self.steps = columns[:, 0].copy(), columns[:, 1].copy(), steps

    def ending(self, ends: Mapping[int, int]) -> LiveRanges:
        """The same, but that some, by number, end at another step."""
        other = LiveRanges((), self.steps)
        other.first, other.last = self.first, self.last.copy()
        other.last[[*ends]] = [*ends.values()]
        return other

    def live_bytes(self, sizes: np.ndarray) -> np.ndarray:
        """int64[steps + 1]: the sum of `sizes` (int64, one per range) that are live at each point."""
        there = np.where(self.first <= self.last, sizes, 0)
        change = np.zeros(self.steps + 2, np.int64)
        np.add.at(change, self.first, there)
        np.subtract.at(change, np.minimum(self.last, self.steps) + 1, there)
        return np.cumsum(change[:-1])

    def peak(self, sizes: np.ndarray) -> int:
        """The largest sum of sizes that are live at one point."""
        return int(self.live_bytes(sizes).max(initial=0))


# --- live ranges of a plan's buffers


def arena_ranges(plan: Plan, forward: Plan | None) -> list[LiveRange]:
    """What lies in the arena: what is saved is live to the end. forward: of a backward program, whose arena begins with
    what that forward saved."""
    end = len(plan.steps)
    found = [LiveRange(b.bytes, b.first, end if b.is_saved else b.last) for b in plan.buffers
             if b.in_arena]
    if forward is not None:
        found += [LiveRange(b.bytes, 0, last) for b, last in last_reads(plan.buffers, forward)]
    return found


def outside_ranges(plan: Plan, forward: Plan | None) -> list[LiveRange]:
    """Tensors outside the arena that only the call need hold: results, and what `caller_owned` says."""
    owned = caller_owned(plan, forward)
    return [LiveRange(b.bytes, 0 if b.is_parameter else b.first, b.last) for b in plan.buffers
            if b.is_output or b.name in owned]


def hints(ranges: Iterable[LiveRange], plan: Plan) -> list[tuple[int, int, int]]:
    """Live ranges with the bytes that they have at the hints."""
    return [(plan.facts.hint(size), first, last) for size, first, last in ranges]


def arena_bytes_at_hints(plan: Plan, forward: Plan | None) -> int:
    """Bytes at the hints that every layout of the arena needs, and that layouts for given sizes come close to."""
    kept = 0 if forward is None else plan.facts.hint(forward.kept)
    return max(kept, peak_bytes(hints(arena_ranges(plan, forward), plan), len(plan.steps)))


def first_writes(plan: Plan) -> dict[str, int]:
    """Results, and what PyTorch makes, with the step that allocates each; 0 for what is there from the start."""
    taken = {name for step in plan.steps if isinstance(step, MemoryStep) for name in step.take}
    return {b.name: b.first if b.is_external or b.name in taken else 0 for b in plan.buffers
            if b.is_allocated_tensor}


def escaping(plan: Plan) -> list[Buffer]:
    """Tensors that the caller gets."""
    results = {entry.buffer for entry in plan.outputs if isinstance(entry, Window)}
    return [b for b in plan.buffers if b.is_output or (b.is_external and b.name in results)]


def saved_external(plan: Plan) -> list[Buffer]:
    """Tensors made by PyTorch that nobody but the tape of this forward keeps after the call."""
    saved = {entry.buffer for entry in plan.saved if isinstance(entry, Window)}
    given = escaping(plan)
    return [b for b in plan.buffers if b.is_external and b.name in saved and b not in given]


def caller_owned(plan: Plan, forward: Plan | None) -> set[str]:
    """Tensors outside the arena that nobody but the call need hold: what PyTorch made, a gradient that comes in, or a
    result that only the tape kept."""
    made = {b.name for b in forward.buffers if b.is_allocated_tensor} if forward is not None else set()
    gradients = forward is not None and not forward.whole
    found = set()
    for buffer in plan.buffers:
        saved = forward.saved[buffer.index] if forward is not None and buffer.is_restored else None
        if buffer.is_external or (buffer.is_input and gradients) or (
                isinstance(saved, Window) and saved.buffer in made):
            found.add(buffer.name)
    return found


# --- what a backward reads of its forward


@dataclass(frozen=True, slots=True)
class KeptRegion:
    """A place in the kept block that is taken from the first step to step `last` (-1: free from the start)."""

    offset: Size
    bytes: Size
    last: int


def saved_entry(forward: Plan, index: int) -> tuple[Buffer, Window] | None:
    """The buffer and the window of tape entry `index`, or None when the entry is a size."""
    window = forward.saved[index]
    if not isinstance(window, Window):
        return None
    return next(((buffer, window) for buffer in forward.buffers if buffer.name == window.buffer), None)


def tape_entry(forward: Plan, index: int) -> tuple[Buffer, Window] | None:
    """The kept buffer and the window of tape entry `index`, or None when the entry is a size or a held tensor."""
    entry = saved_entry(forward, index)
    return entry if entry is not None and entry[0].is_saved else None


def last_reads(buffers: Iterable[Buffer], forward: Plan) -> list[tuple[Buffer, int]]:
    """The forward's saved buffers, with the last step that reads each by one of the `buffers` of its backward (-1: none
    does)."""
    last: dict[str, int] = {}
    for buffer in buffers:
        entry = tape_entry(forward, buffer.index) if buffer.has_tape_entry else None
        if entry is not None:
            last[entry[0].name] = max(last.get(entry[0].name, -1), buffer.last)
    return [(b, last.get(b.name, -1)) for b in forward.buffers if b.is_saved]


def kept_regions(plan: Plan, forward: Plan) -> list[KeptRegion]:
    """The places of the forward's saved buffers, with the last step of the backward `plan` that reads each."""
    places = dict(forward.offsets)
    return [KeptRegion(places[b.name], b.bytes, last) for b, last in last_reads(plan.buffers, forward)]
