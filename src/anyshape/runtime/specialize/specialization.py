"""Specialisation: one plan at one set of sizes, in local names a record. Made once per new shape, in well under a
millisecond; runs only read it.

Where the plan's layout is far from the bound, the arena is laid out anew for these sizes. A program that keeps nothing
for a backward may reuse an output as scratch: the memory of its largest result, which is free until that is first
written. What fits there does not lie in the arena, which is held to the end of the call; it is then the lower block.

    matmul -> h;  matmul(h) -> k;  matmul(k) -> logits      arena: k          in logits: h

The result is then there from the start. Where that is worse, as beside large tensors of PyTorch that go before it is
written, what dies before it lies in a lower block of its own, which is given back right before the result is taken.
"""
from __future__ import annotations

import bisect
import copy
import itertools
import operator
import struct
import sys
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from anyshape.backend.interface import HostRoutines, Payload, PlacedPlan, PlanRunner
from anyshape.base import counters
from anyshape.base.align import ALIGNMENT, align
from anyshape.base.errors import InputError, Unsupported
from anyshape.base.int64_array import int64_array
from anyshape.ir.types import size_of
from anyshape.plan.ir.home import Input, Restored
from anyshape.plan.ir.liveness import kept_regions
from anyshape.plan.ir.program import Buffer, MemoryStep, Plan, Window
from anyshape.plan.ir.size_function import StepWindows
from anyshape.plan.memory.offset_problem import Item, OffsetProblem
from anyshape.runtime.memory import huge_pages
from anyshape.runtime.memory.offset_assignment import GOOD_ENOUGH, ArenaLayout, assign_columns, columns_of
from anyshape.runtime.memory.size_vectors import SizeTable
from anyshape.runtime.specialize.offload_schedule import CallAction, actions
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavedLayout, SavePolicy
from anyshape.runtime.specialize.shape_binding import check_inside, renamed, with_addresses
from anyshape.sym.expr import Size, evaluate, symbols_of

ROOMY = 1.1  # of the bytes that values need at once, those they may lie in without being crowded
PADDING = ALIGNMENT - 1
LAID = 32  # layouts that are remembered: some points of some shapes, until one of them is a record
REMEMBERED = 128  # records that somebody asked about, those of a limit
LEAST_REUSED = 65536  # bytes of arena and of a result below which nothing is moved there
SMALL_PART = 16  # of the arena, the part of which a smaller result saves less than the search for its places costs
View = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Specialization:
    """A plan at one set of sizes, which runs only read. Bytes and strides are numbers; views are (sizes, strides,
    offset in elements).

    values: symbol -> value. payload: what the runner made of it. offsets: buffer -> byte offset in the two blocks.
    kept, temporary: bytes of the lower and the upper block, without scratch; phases: bytes of pieces above that, one
    after the other in time, each but the first from its step of `turns` on; scratch: bytes per thread, at `spare_at`
    in the lower block where that of all threads is at most `spare` bytes, else at `temporary` in the upper one.
    reused_output: the output, by slot, whose memory is the lower block; -1: that is the kept block. given: the lower
    block is the call's own, and is given back before results are taken at this step; or -1. bound: no layout of the
    arena needs fewer bytes. overwrites: steps write into the kept block of a backward's tape, so that it cannot run
    again. outside: bytes of PyTorch's tensors that its tape keeps, too. is_other: it is of the second of two orders
    of steps. policy: see there; chunks: bytes of each chunk of the kept block, and parts: (slot, chunk, byte) of
    what lies in them, where it is in chunks, and after them of what lies in the first phase; late: (slot, byte) of
    what lies in each of the others. actions: what moves values out or back, of `stored` bytes. allocations: (sizes,
    strides) of each output buffer, by slot; exact: these are the outputs' own; large: (slot, bytes) of those on large
    pages. native: no step is Python's, and results are what is allocated.
    """

    values: dict[str, int]
    payload: Payload
    offsets: dict[str, int]
    kept: int
    temporary: int
    phases: tuple[int, ...]
    turns: tuple[int, ...]
    reused_output: int
    given: int
    scratch: int
    spare: int
    spare_at: int
    bound: int
    overwrites: bool
    outside: int
    is_other: bool
    policy: SavePolicy
    chunks: tuple[int, ...]
    parts: tuple[tuple[int, int, int], ...]
    late: tuple[tuple[tuple[int, int], ...], ...]
    actions: tuple[CallAction, ...]
    stored: int
    inputs: tuple[View | None, ...]
    input_strides: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[Any, ...]
    allocations: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    exact: bool
    native: bool
    large: tuple[tuple[int, int], ...]
    saved: tuple[Any, ...]
    windows: StepWindows | None

    @property
    def arena(self) -> int:
        """Bytes of the arena: the predicted peak."""
        return self.temporary + max(self.phases, default=0) + (self.kept if self.reused_output < 0 else 0)


class _Items:
    """Some of what lies in the arena, with what is known of it at all sizes: lives are (first step, last step)."""

    def __init__(self, lives: Sequence[tuple[int, int]]) -> None:
        self.count = len(lives)
        self.spans = int64_array([*(first for first, _ in lives), *(last for _, last in lives), *[0] * len(lives)])

    def columns(self, bytes_: Sequence[int]) -> array[int]:
        """Bytes, steps and offsets side by side, as a search takes them."""
        return int64_array(bytes_) + self.spans


class JointPlacement(Protocol):
    """Layouts of a forward and its backward in one block of memory: runtime/specialize/joint_layout.py."""

    def of(self, specializer: Specializer, values: dict[str, int]) -> ArenaLayout | None:
        """That of one of the two at some sizes; None: that of its plan is good."""


class Specializer:
    """Makes the records of one plan.

    Args:
        forward: of a backward, the forward's plan.
        chunks: of a forward whose backward is known, see `Plan`.
        is_other: the plan has the second of two orders of steps (runtime/budget/order_selection.py).
        names: symbol -> what errors call it.
    """

    def __init__(self, plan: Plan, runner: PlanRunner, host: HostRoutines, forward: Plan | None = None,
                 chunks: Sequence[tuple[str, ...]] = (), is_other: bool = False,
                 names: Mapping[str, str] = MappingProxyType({})) -> None:
        self.plan = plan
        self.runner = runner
        self.host = host
        layout = self.layout = runner.sizes
        end = len(plan.steps)
        by_name = {b.name: b for b in plan.buffers}
        homes = self.homes = {name: by_name[name] for name in layout.placed}
        self.given, self.restored = (with_addresses(plan, homes, home) for home in (Input, Restored))
        self.moving = [i for i, name in enumerate(layout.placed) if homes[name].is_temp]
        self.saved = [i for i, name in enumerate(layout.placed) if homes[name].is_saved]
        self.slots = [layout.slots[name] for name in layout.placed]
        self.lives = [(b.first, end if b.is_saved else b.last) for b in homes.values()]
        self.outputs = sorted((b for b in plan.buffers if b.is_output), key=lambda b: layout.slots[b.name])
        self.regions = kept_regions(plan, forward) if forward is not None else []
        self.keeps = SavedLayout(plan, forward, layout, host, self.lives, self.moving, self.saved, self.regions,
                                 chunks)
        # of a plan that keeps nothing, all that has a place
        self.all = _Items(self.lives) if len(self.moving) == len(self.lives) and not self.regions else None
        self.useless: set[tuple[int, int]] | None = None  # see `assign_columns`; None: what is asked twice is the same
        self.beside = [b for b in plan.buffers if b.is_external]
        self.specializations: dict[Any, Specialization] = {}
        self.sizes = SizeTable([b.bytes for b in homes.values()], f"values of {plan.name}")
        self.offsets: SizeTable | None = None  # the plan's, kept and arena, made when a limit asks
        self.laid: dict[Any, ArenaLayout] = {}
        self.latest: tuple[tuple[int, ...], tuple[Any, ...]] | None = None
        self.lock = threading.Lock()
        self.joined: JointPlacement | None = None  # of half of a whole step
        self.is_other = is_other
        self.names = names
        # the largest result that is not written from the start on; of a call that a backward follows, none
        free = [] if plan.saved or forward is not None or self.all is None else [
            b for b in self.outputs if b.first > 0]
        self.reused_output = max(free, key=lambda b: plan.facts.hint(b.bytes), default=None)
        self.reused_slot = -1 if self.reused_output is None else self.outputs.index(self.reused_output)
        # the step that takes it; -1: it is there from the start
        self.taken = next((i for i, step in enumerate(plan.steps) if isinstance(step, MemoryStep)
                           and self.reused_output is not None and self.reused_output.name in step.take), -1)
        if self.reused_output is not None:
            self._look_at_reuse(self.reused_output.first, end)

    def _look_at_reuse(self, first: int, end: int) -> None:
        """What layouts in the memory of a result, which is first written in step `first`, need at all sizes."""
        lives = self.lives
        self.before = [i for i, (begin, _) in enumerate(lives) if begin < first]
        self.early = [i for i, (_, last) in enumerate(lives) if last < self.taken]
        self.late = [i for i, (_, last) in enumerate(lives) if last >= self.taken]
        self.items_before, self.items_early, self.items_late = (
            _Items([lives[i] for i in part]) for part in (self.before, self.early, self.late))
        # the result itself, and in one of the ways what lies above it before it is written
        self.beside_result = _Items([(first, end), *lives])
        self.above_result = _Items([(first, end), (0, first - 1), *lives])

    def with_joint_layout(self, joined: JointPlacement) -> Specializer:
        """The same plan as half of a whole step. It has made nothing yet."""
        found = copy.copy(self)
        found.joined, found.lock, found.specializations, found.laid = joined, threading.Lock(), {}, {}
        return found

    def made(self, values: dict[str, int], policy: SavePolicy = SAVE_ALL) -> Specialization:
        """The record at the symbols' `values`, remembered: what is only asked about is made ready for its call. Errors
        as of `make`."""
        key = *[values.get(name) for name in self.layout.symbols], policy
        with self.lock:
            record = self.specializations.get(key)
        if record is None:
            record = self.make(values, policy)
            with self.lock:
                while len(self.specializations) >= REMEMBERED:
                    self.specializations.pop(next(iter(self.specializations)))
                self.specializations[key] = record
        return record

    def places(self, values: dict[str, int], policy: SavePolicy) -> ArenaLayout:
        """The layout of a call that reuses no output. Those of the last ones are at hand: what a limit lays out
        is what its call uses. Offsets are filled in when there is a record (`SavedLayout.complete`)."""
        key = *[values[name] for name in self.layout.symbols], policy
        with self.lock:
            known = self.laid.get(key)
        if known is None:
            if policy == SAVE_ALL:
                known = self._place(*self._formulas(values), values, 0)
            else:
                known = self.keeps.places(self.sizes(values), values, policy)
            with self.lock:
                while len(self.laid) >= LAID:
                    self.laid.pop(next(iter(self.laid)))
                self.laid[key] = known
        return known

    def make(self, values: dict[str, int], policy: SavePolicy = SAVE_ALL) -> Specialization:
        """The record at the symbols' `values`.

        Raises:
            VerifyError: no version of a kernel fits these sizes: a bug of the compiler.
            Unsupported: a symbol has no value: a backward was given a tape of another program.
            InputError: a tensor inside would have a size below 0: eager PyTorch goes another way at these sizes.
            IndexRangeError: an index selects from a dim without elements.
        """
        layout = self.layout
        missing = [name for name in layout.symbols if name not in values]
        if missing:
            raise Unsupported(f"{self.plan.name} computes with the size {renamed(', '.join(missing), self.names)}",
                              why="neither its inputs nor its tape say what it is",
                              do="run the forward that was compiled with this backward")
        numbers = tuple([values[name] for name in layout.symbols])
        (encoded, sizes, offsets, kept, arena, inputs, outputs, saved, output_bytes, uncertain,
         selected) = self._shape(numbers)
        check_inside(self.plan, uncertain, selected, self.names)
        reused = 0 if self.reused_output is None else output_bytes[self.reused_output.index]
        runs = self.keeps.runs(policy)
        if policy != SAVE_ALL or (*numbers, policy) in self.laid:
            place = self.places(values, policy)
            if not place.offsets:
                self.keeps.complete(place, self.sizes(values), values, policy)
        else:
            place = self._place(list(sizes), list(offsets), kept, arena, values, reused)
        acts = actions(self.keeps, policy, runs, [(at - place.border, bytes_) for at, bytes_ in place.moved])
        pairs, parts, late = self._bindings(place, policy)
        phases = [bytes_ for _, bytes_ in place.phases]
        middle = place.middle if phases else place.top
        given, hollow = map(operator.add, self.given, self.restored if policy == SAVE_ALL else (0, []))
        until = -1 if self.reused_output is None or place.lower == "kept" else (
            self.taken if place.lower == "early" else self.reused_output.first)
        payload = self.runner.specialize(PlacedPlan(
            encoded, values, pairs, place.border, self.keeps.optional - runs, tuple([one.step for one in acts]), given,
            sum(0 in inputs[i][0] for i in hollow), until))
        spare_at, spare = self._spare(place, sizes) if payload.scratch_below else (0, 0)
        counters.count("plans")
        allocations = tuple(self._allocation(b, outputs[b.index], output_bytes[b.index]) for b in self.outputs)
        large = tuple((i, output_bytes[b.index]) for i, b in enumerate(self.outputs)
                      if output_bytes[b.index] >= huge_pages.WORTH and self.runner.on_host)
        exact = all(allocated == outputs[b.index][:2]
                    for allocated, b in zip(allocations, self.outputs, strict=True))
        return Specialization(
            values=values, payload=payload, offsets=dict(zip(layout.placed, place.offsets, strict=True)),
            kept=place.border, temporary=middle - place.border, phases=tuple(phases),
            turns=tuple(first for first, _ in place.phases[1:]),
            reused_output=self.reused_slot if place.lower == "output" else -1,
            given=self.taken if place.lower == "early" else -1,
            scratch=payload.scratch, spare=spare, spare_at=spare_at, bound=place.bound,
            overwrites=bool(self.regions) and not policy.apart and any(
                place.offsets[i] < place.border for i in self.moving),
            outside=sum(evaluate(b.bytes, values) for b in self.keeps.outside if b.name not in policy.dropped),
            is_other=self.is_other, policy=policy, chunks=tuple(b - a for a, b in itertools.pairwise(place.starts)),
            parts=tuple(parts), late=tuple(map(tuple, late)),
            actions=acts, stored=sum(bytes_ for _, bytes_ in place.moved),
            inputs=inputs, input_strides=tuple([view and view[1] for view in inputs]),
            outputs=outputs, allocations=allocations, exact=exact, native=exact and not payload.calls, large=large,
            saved=saved, windows=layout.windows(*numbers) if payload.calls else None)

    def _shape(self, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """What the layout says of these sizes. That of the last ones is at hand: a limit tries several layouts."""
        known = self.latest
        if known is None or known[0] != sizes:
            try:
                known = self.latest = sizes, self.layout.shape(*sizes)
            except struct.error as error:
                at = ", ".join(f"{self.names.get(name, name)} is {n}" for name, n in zip(
                    self.layout.symbols, sizes, strict=True))
                raise InputError(f"{self.plan.name} does not take these sizes", where=self.plan.name,
                                 why=f"a number of bytes or elements does not fit in 64 bits: {at}",
                                 do="call it with smaller sizes") from error
        return known[1]

    def _bindings(self, place: ArenaLayout, policy: SavePolicy
                  ) -> tuple[list[int], list[tuple[int, int, int]], list[list[tuple[int, int]]]]:
        """Where buffers lie, by slot: slots and offsets in the two blocks in turn; what lies in chunks or in the first
        phase; and what lies in each of the other phases. See `Specialization`."""
        parts: list[tuple[int, int, int]] = []
        late: list[list[tuple[int, int]]] = [[] for _ in place.phases[1:]]
        phases = [bytes_ for _, bytes_ in place.phases]
        if not phases and not policy.apart:
            pairs = [0] * (2 * len(self.slots))
            pairs[::2], pairs[1::2] = self.slots, place.offsets
            return pairs, parts, late
        pairs = []
        middle = place.middle if phases else place.top
        begins = [middle + before for before in itertools.accumulate(phases[:-1], initial=0)]
        for slot, offset in zip(self.slots, place.offsets, strict=True):
            if phases and offset >= middle:
                phase = bisect.bisect_right(begins, offset) - 1
                if phase:
                    late[phase - 1].append((slot, offset - begins[phase]))
                else:
                    parts.append((slot, len(place.starts) - 1, offset - begins[phase]))
            elif policy.apart and offset < place.border:
                chunk = bisect.bisect_right(place.starts, offset) - 1
                parts.append((slot, chunk, offset - place.starts[chunk]))
            else:
                pairs += [slot, offset]
        return pairs, parts, late

    def arena(self, values: dict[str, int]) -> int | None:
        """Bytes of the arena of a call at the symbols' `values`, from the plan's formulas, without making its record;
        None while a symbol that they need is missing."""
        plan = self.plan
        used = [*(b.bytes for b in self.homes.values()), *(offset for _, offset in plan.offsets), plan.kept, plan.arena,
                *(size for r in self.regions for size in (r.bytes, r.offset))]
        reused: Size = 0
        if self.reused_output is not None:
            reused = self.reused_output.bytes
            used += [b.bytes for b in (*self.outputs, *self.beside)]
        if not set().union(*(symbols_of(size) for size in used)) <= values.keys():
            return None
        place = self._place(*self._formulas(values), values, evaluate(reused, values))
        return place.top - (place.border if place.lower == "output" else 0)

    def _allocation(self, buffer: Buffer, view: View, bytes_: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What to allocate for an output: its own sizes and strides, or something flat when they do not span it."""
        shape, strides, offset = view
        window = self.plan.outputs[buffer.index]
        assert isinstance(window, Window)
        item = size_of(window.type.dtype)
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if offset == 0 and span * item >= bytes_:
            return shape, strides
        return (-(-bytes_ // item),), (1,)

    def apart(self, values: dict[str, int]) -> ArenaLayout:
        """Of half of a whole step, the layout with what is kept in a block of its own."""
        sizes, offsets, kept, arena = self._formulas(values)
        return self._own([align(size) for size in sizes], offsets, kept, arena, values)

    def _formulas(self, values: dict[str, int]) -> tuple[list[int], list[int], int, int]:
        """Sizes and offsets by the plan, bytes of its kept block and of its arena."""
        if self.offsets is None:
            plan, places = self.plan, dict(self.plan.offsets)
            self.offsets = SizeTable([*(places[name] for name in self.homes), plan.kept, plan.arena],
                                 f"offsets of {plan.name}")
        *offsets, kept, arena = self.offsets(values).tolist()
        return self.sizes(values).tolist(), offsets, kept, arena

    def _place(self, sizes: list[int], offsets: list[int], kept: int, arena: int, values: dict[str, int],
               reused: int) -> ArenaLayout:
        """The best of the plan's layout, one made for these sizes, one in the `reused` bytes of a result, and one
        whose lower block is given back before that result is taken. Of half of a whole step, that of both. A way whose
        bound says that it cannot be the best is not searched."""
        if self.joined is not None and (both := self.joined.of(self, values)) is not None:
            return both
        padded = [(size + PADDING) & -ALIGNMENT for size in sizes]  # as `align`, without a call for each
        if self.reused_output is None or min(reused, arena) < LEAST_REUSED or reused * SMALL_PART < arena:
            return self._own(padded, offsets, kept, arena, values)
        end = len(self.plan.steps)
        others = [evaluate(b.bytes, values) for b in (*self.outputs, *self.beside)]
        best = self._inside(padded, reused // ALIGNMENT * ALIGNMENT)
        least = self._peak(others, [(best.top - best.border, 0, end)], 0)
        columns, count, fixed = self._columns(padded, offsets, values)
        found = ArenaLayout(offsets, kept, arena, self._bound(columns, count, kept))
        if self._peak(others, [(found.bound, 0, end)], self.taken) <= least:
            found = self._improved(columns, count, fixed, kept, found)
            peak = self._peak(others, [(found.top, 0, end)], self.taken)
            if peak <= least:
                best, least = found, peak
        # a block that is taken and given back in every call has to be worth it
        early = self._early(padded, others, least - LEAST_REUSED)
        return best if early is None else early

    def _own(self, padded: list[int], offsets: list[int], kept: int, arena: int, values: dict[str, int]) -> ArenaLayout:
        """The better of the plan's layout and one made for these sizes."""
        return self._improved(*self._columns(padded, offsets, values), kept, ArenaLayout(offsets, kept, arena, -1))

    def _columns(self, padded: list[int], offsets: list[int], values: dict[str, int]) -> tuple[array[int], int, int]:
        """What lies in the arena by columns, how much that is, and how many, the first ones, have their places."""
        if self.all is not None:
            return self.all.columns(padded), len(padded), 0
        items, fixed = self._items(padded, offsets, values)
        return columns_of(OffsetProblem(items)), len(items), fixed

    def _items(self, padded: list[int], offsets: list[int], values: dict[str, int]) -> tuple[list[Item], int]:
        """What lies in the arena, and how many of it, the first ones, have their places."""
        items: list[Item] = [(padded[i], *self.lives[i], offsets[i]) for i in self.saved]
        regions = iter(self.keeps.region_sizes(values))
        for region, size, offset in zip(self.regions, regions, regions, strict=True):
            if region.last >= 0:
                items.append((align(size), 0, region.last, offset))
        fixed = len(items)
        items += [(padded[i], *self.lives[i], 0) for i in self.moving]
        return items, fixed

    def _inside(self, padded: list[int], border: int) -> ArenaLayout:
        """What fits in the memory of the result; low there, so that scratch has room above it, or anywhere if that
        takes less arena."""
        # what the result itself takes, from its first step on, is fixed at the bottom of its memory
        columns = self.beside_result.columns([border, *padded])
        bound = self._bound(columns, self.beside_result.count, border)
        low = align(int(self._bound(self.items_before.columns([padded[i] for i in self.before]),
                                    self.items_before.count) * ROOMY))
        found = ArenaLayout([0] * len(self.lives), border, sys.maxsize, bound, "output")
        if low < border:
            above = self.above_result.columns([border, border - low, *padded])
            above[3 * self.above_result.count + 1] = low
            layout = self._improved(above, self.above_result.count, 2, border, found)
            if layout.top <= GOOD_ENOUGH * bound:
                layout.bound = max(bound - border, 0)
                return layout
            found = ArenaLayout([0] * len(self.lives), border, sys.maxsize, bound, "output")
        layout = self._improved(columns, self.beside_result.count, 1, border, found)
        layout.bound = max(bound - border, 0)
        return layout

    def _early(self, padded: list[int], others: list[int], most: int) -> ArenaLayout | None:
        """What dies before the output is allocated in the lower block, everything else in the upper one; None where
        the peak would not be below `most` bytes. others: see `_peak`."""
        if not self.early:
            return None
        end = len(self.plan.steps)
        parts = [(part, items.columns([padded[i] for i in part]))
                 for part, items in ((self.early, self.items_early), (self.late, self.items_late))]
        below, above = (self._bound(columns, len(part)) for part, columns in parts)
        if self._peak(others, [(below, 0, self.taken - 1), (above, 0, end)], self.taken) >= most:
            return None
        assert self.all is not None
        layout = ArenaLayout([0] * len(padded), 0, 0, self._bound(self.all.columns(padded), self.all.count), "early")
        for (part, columns), bound in zip(parts, (below, above), strict=True):
            top, places = assign_columns(self.host, columns, len(part), 0, 0, bound, useless=self.useless)
            for i, offset in zip(part, places, strict=True):
                layout.offsets[i] = layout.top + offset
            layout.border, layout.top = layout.top, layout.top + top
        blocks = [(layout.border, 0, self.taken - 1), (layout.top - layout.border, 0, end)]
        return layout if self._peak(others, blocks, self.taken) < most else None

    def _spare(self, place: ArenaLayout, sizes: Sequence[int]) -> tuple[int, int]:
        """Where scratch may lie in the lower block, which no step that needs any comes after: (offset, bytes)."""
        if place.lower == "early":
            return place.border, sys.maxsize
        ends = [offset + size for offset, size in zip(place.offsets, sizes, strict=True) if offset < place.border]
        used = align(max(ends, default=0))
        return used, place.border - used

    def _peak(self, others: list[int], blocks: list[tuple[int, int, int]], taken: int) -> int:
        """The most bytes of results, tensors of PyTorch and `blocks` at one step; the reused output is
        there from step `taken` on. others: bytes of the outputs and of those tensors."""
        lives = [*blocks]
        reused, count, end = self.reused_output, len(self.outputs), len(self.plan.steps)
        lives += [(size, max(taken, 0) if b is reused else b.first, end)
                  for size, b in zip(others, self.outputs, strict=False)]
        lives += [(size, b.first, b.last) for size, b in zip(others[count:], self.beside, strict=True)]
        return self._bound(int64_array([*itertools.chain(*zip(*lives, strict=True))]), len(lives))

    def _bound(self, columns: array[int], count: int, wall: int = 0) -> int:
        """Bytes that no layout of `count` items is below."""
        return max(self.host.live_peak(columns, count, len(self.plan.steps)), wall)

    def _improved(self, columns: array[int], count: int, fixed: int, wall: int, found: ArenaLayout) -> ArenaLayout:
        """`found`, with the moving buffers placed for these sizes if that is lower. columns: of `count` items, of which
        the first `fixed` have their places. A bound below 0 is not known yet."""
        if found.bound < 0:
            found.bound = self._bound(columns, count, wall)
        if found.top > GOOD_ENOUGH * found.bound and self.moving:
            found.top, places = assign_columns(self.host, columns, count, fixed, wall, found.bound, found.top,
                                               useless=self.useless)
            for i, offset in zip(self.moving, places, strict=False):  # there are none where that is no lower
                found.offsets[i] = offset
        return found
