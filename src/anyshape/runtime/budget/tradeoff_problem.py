"""The rematerialisation problem of a forward with its backward: live ranges, what may be recomputed, and what it costs.

All of it is for all sizes: bytes are formulas. At given sizes it becomes a curve (runtime/budget/tradeoff_curve.py).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyshape.kernel.schedule.hardware_params import Speeds
from anyshape.plan.ir.home import Home, Recomputed, Temp
from anyshape.plan.ir.liveness import escaping, first_writes, saved_entry
from anyshape.plan.ir.program import Buffer, MemoryStep, Plan
from anyshape.runtime.budget.peak_breakdown import source_of
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.cost.step_cost import Work
from anyshape.runtime.memory.offload_store import Store
from anyshape.runtime.memory.size_vectors import SizeTable
from anyshape.runtime.specialize.offload_schedule import Clock
from anyshape.runtime.specialize.saved_policy import SavePolicy
from anyshape.sym.expr import Size


@dataclass(frozen=True, slots=True)
class TradeoffRange:
    """A buffer alive from step `first` to step `last` of a forward and its backward. number: of its bytes; home: see
    `Buffer`; where: the line of the model that makes it, if it is known."""

    name: str
    number: int
    first: int
    last: int
    home: Home
    where: str

    @property
    def inside(self) -> bool:
        """Whether it lies in the upper block of the arena."""
        return isinstance(self.home, (Temp, Recomputed))

    @property
    def label(self) -> str:
        """What reports and errors call it."""
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True, slots=True)
class TapeSegment:
    """What can be dropped of a segment (positions among all that can be), the optional steps that compute it again
    (positions among all of those), and the temporary values of these."""

    members: tuple[int, ...]
    steps: tuple[int, ...]
    temporaries: tuple[int, ...]


class TradeoffProblem:
    """The problem of one forward with its backward: what does not depend on sizes. Lives are counted in steps of the
    forward, then of the backward. beside: tensors outside the arena that the tape alone keeps, of the forward's
    buffers, and the backward's last step that has each."""

    def __init__(self, program: Executable, backward: Executable) -> None:
        self.program, self.backward = program, backward
        self.forward, self.plan = program.plan, backward.plan
        self.keeps = backward.specializer.keeps
        self.border = len(self.forward.steps) + 1
        self.length = self.border + len(self.plan.steps) + 1
        self.bytes: list[Size] = []
        self.beside = _beside(program, self.plan)
        self.outside = {b.name for b, _ in self.beside}
        self.fixed = self._fixed()  # there whatever is dropped
        self.held = self._held()  # saved in the arena, by name
        homes = {b.name: b for b in self.plan.buffers}
        self.again = sorted(self.plan.again, key=lambda one: one.saved)
        self.names = [one.saved for one in self.again]
        # from its last use in the forward to its first use in the backward a value is not there, if it is dropped
        self.gaps = [(program.specializer.keeps.ends[one.saved] + 1, self.border + self.keeps.begins.get(
            one.saved, homes[one.buffer].first)) for one in self.again]
        self.temporaries = [self._life(homes[name], self.plan) for name in sorted(self.keeps.made)]
        # not in the arena, while the backward runs
        self.elsewhere = [life for life in (*self.fixed, *self.temporaries)
                          if not life.inside and life.last >= self.border]
        self.optional = sorted(self.keeps.runs(SavePolicy(frozenset(self.names))))
        self.segments = self._segments()
        # by value: from its first step in the backward to the one after the last, once it is computed again
        self.own = [(self.border + homes[one.buffer].first, self.border + homes[one.buffer].last + 1)
                    for one in self.again]
        self.chunk_ends = self._chunk_ends()
        self.sizes = SizeTable(self.bytes, f"bytes of {self.plan.name}")
        self.costs = Work([self.plan.steps[number] for number in self.optional], f"{self.plan.name}, computed again")
        self.work: Work | None = None  # of all steps that are not optional, made when somebody moves values

    def clocks(self, values: Mapping[str, int], threads: int, store: Store, speeds: Speeds) -> tuple[Clock, ...]:
        """When steps and copies begin, and what copies cost: as fast as the store is; where copies are waited for at
        once; the same where only bytes count."""
        steps = (*self.forward.steps, *self.plan.steps)
        if self.work is None:
            self.work = Work([None if k - len(self.forward.steps) in self.keeps.optional else step
                              for k, step in enumerate(steps)], self.plan.name)
        seconds = self.work.seconds(values, speeds) / threads
        count = len(self.forward.steps)
        usual = self.program.target.hardware.speeds  # a search does not depend on how fast a disk was
        both = self.program.specializer.keeps, self.keeps, seconds[:count], seconds[count:]
        costs = store.each, store.share(threads)
        return (Clock(*both, store.seconds(1, out=True), store.seconds(1, out=False), *costs),
                Clock(*both, 1 / usual.out, 1 / usual.back, *costs, at_once=True),
                Clock(*both, 0.0, 0.0, *costs, at_once=True))

    def _size(self, size: Size) -> int:
        self.bytes.append(size)
        return len(self.bytes) - 1

    def _life(self, buffer: Buffer, plan: Plan, last: int | None = None, first: int | None = None) -> TradeoffRange:
        start = self.border if plan is self.plan else 0
        return TradeoffRange(buffer.name, self._size(buffer.bytes), start + (buffer.first if first is None else first),
                    start + (buffer.last if last is None else last), buffer.home, source_of(buffer, plan))

    def _chunk_ends(self) -> dict[str, int]:
        """Saved buffer -> the last step that its chunk is there."""
        gone = {step.chunk: number for number, step in enumerate(self.plan.steps) if isinstance(step, MemoryStep)}
        end = len(self.plan.steps)
        known = {name: self.border + gone.get(chunk, end + 1) - 1 for chunk, names in enumerate(self.plan.chunks)
                 for name in names}
        return {name: known.get(name, self.border + end) for name in self.held}

    def _fixed(self) -> list[TradeoffRange]:
        end = self.length - 1
        given, first, later = escaping(self.forward), first_writes(self.forward), first_writes(self.plan)
        found = [self._life(b, self.forward, end if b in given else None, first.get(b.name)) for b in
                 self.forward.buffers if b.is_allocated and not b.is_saved and b.name not in self.outside]
        for b in self.plan.buffers:
            if b.is_allocated and not b.is_saved and b.name not in self.keeps.made:
                last = len(self.plan.steps) if b.is_output else None
                found.append(self._life(b, self.plan, last, later.get(b.name)))
        return found

    def _held(self) -> dict[str, TradeoffRange]:
        saved = [b for b in self.forward.buffers if b.is_saved]
        lasts = [(b, region.last) for b, region in zip(saved, self.backward.specializer.regions, strict=True)]
        return {b.name: self._life(b, self.forward, self.border + max(last, -1)) for b, last in (*lasts, *self.beside)}

    def _segments(self) -> list[TapeSegment]:
        members: dict[int, list[int]] = {}
        for i, one in enumerate(self.again):
            members.setdefault(one.segment, []).append(i)
        places = {number: i for i, number in enumerate(self.optional)}
        temporaries = {life.name: i for i, life in enumerate(self.temporaries)}
        found = []
        for some in members.values():
            policy = SavePolicy(frozenset(self.names[i] for i in some))
            made = sorted(temporaries[name] for name in self.keeps.used(policy) if name in temporaries)
            steps = tuple(places[number] for number in sorted(self.keeps.runs(policy)))
            found.append(TapeSegment(tuple(some), steps, tuple(made)))
        return found


def _beside(program: Executable, plan: Plan) -> list[tuple[Buffer, int]]:
    """See `TradeoffProblem`; `plan`: the backward's."""
    dropped = {name: number - 1 for number, step in enumerate(plan.steps) if isinstance(step, MemoryStep)
               for name in step.drop}
    last: dict[str, int] = {}
    for b in plan.buffers:
        entry = saved_entry(program.plan, b.index) if b.is_restored else None
        if entry is not None:
            last[entry[0].name] = max(last.get(entry[0].name, 0), dropped.get(b.name, len(plan.steps)))
    return [(b, last[b.name]) for b in program.specializer.keeps.outside]
