"""What a call could drop at given sizes: rung by rung, from everything kept down to the least that works.

    bytes alive, forward then backward, everything kept          a rung lower: h of layer 0 computed again
         __/^^\\__                                                    __/^^\\__
      __/        \\__                                              _/^        \\_/\\_

Rung by rung the value that relieves the fullest step and costs least time for its bytes is dropped, too (a greedy
covering, run/climb.py), or moved out where there is a store, so that each rung's peak is below that of the one before.
What is alive is counted from the very lives and sizes that the layouts are made of. What does not depend on sizes is
worked out once (`Ladders`), and a ladder is climbed only as far as somebody asks.

When values are copied depends on how fast the disk was so far. The last rungs do not: their copies are waited for at
once, which takes more time and less memory, at usual costs, and in the end at none. So the least limit that works is
the same in every process.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anyshape.base.align import align
from anyshape.plan.liveness import escaping, first_writes, live_bytes, saved_entry
from anyshape.plan.plan import Buffer, MemoryStep, Plan
from anyshape.run.alive import source_of
from anyshape.run.climb import Choices, Climb, Rung
from anyshape.run.keeping import Keeping
from anyshape.run.moving import USUAL, Clock
from anyshape.run.sizes import Sizes
from anyshape.run.store import HostStore
from anyshape.run.work import USUAL as USUAL_SPEEDS
from anyshape.run.work import Speeds, Work
from anyshape.sym.expr import Size

if TYPE_CHECKING:
    from anyshape.run.executable import Executable


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer alive from step `first` to step `last` of a forward and its backward. number: of its bytes; home: see
    `Buffer`; where: the line of the model that makes it, if it is known."""

    name: str
    number: int
    first: int
    last: int
    home: str
    where: str

    @property
    def inside(self) -> bool:
        """Whether it lies in the upper block of the arena."""
        return self.home in ("arena", "again")

    @property
    def label(self) -> str:
        """What reports and errors call it."""
        return f"{self.name} ({self.where})" if self.where else self.name


@dataclass(frozen=True, slots=True)
class Segment:
    """What can be dropped of a segment (positions among all that can be), the optional steps that compute it again
    (positions among all of those), and the temporary values of these."""

    members: tuple[int, ...]
    steps: tuple[int, ...]
    temporaries: tuple[int, ...]


class Ladders:
    """The ladders of one forward with its backward: what does not depend on sizes. Lives are counted in steps of the
    forward, then of the backward. beside: tensors outside the arena that the tape alone keeps, of the forward's
    buffers, and the backward's last step that has each."""

    def __init__(self, program: Executable, backward: Executable) -> None:
        self.program, self.backward = program, backward
        self.forward, self.plan = program.plan, backward.plan
        self.keeps = backward.maker.keeps
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
        self.gaps = [(program.maker.keeps.ends[one.saved] + 1, self.border + self.keeps.begins.get(
            one.saved, homes[one.buffer].first)) for one in self.again]
        self.temporaries = [self._life(homes[name], self.plan) for name in sorted(self.keeps.made)]
        # not in the arena, while the backward runs
        self.elsewhere = [life for life in (*self.fixed, *self.temporaries)
                          if not life.inside and life.last >= self.border]
        self.optional = sorted(self.keeps.runs(Keeping(frozenset(self.names))))
        self.segments = self._segments()
        # by value: from its first step in the backward to the one after the last, once it is computed again
        self.own = [(self.border + homes[one.buffer].first, self.border + homes[one.buffer].last + 1)
                    for one in self.again]
        self.chunk_ends = self._chunk_ends()
        self.sizes = Sizes(self.bytes, f"bytes of {self.plan.name}")
        self.costs = Work([self.plan.steps[number] for number in self.optional], f"{self.plan.name}, computed again")
        self.choices: dict[bool, Choices] = {}  # without moves and with them, made when somebody asks
        self.work: Work | None = None  # of all steps that are not optional, made when somebody moves values

    def at(self, values: Mapping[str, int], scratch: tuple[int, int], threads: int = 1,
           store: HostStore | None = None, speeds: Speeds = USUAL_SPEEDS) -> Ladder:
        """The ladder at the backward's sizes. scratch: bytes that all threads take in the forward, in the backward;
        store: where values may be moved out to; speeds: of one of the threads."""
        moving = store is not None
        clocks = (None,) if store is None else self._clocks(values, threads, store, speeds)
        choices = self.choices.get(moving)
        if choices is None:
            choices = self.choices[moving] = Choices(self, moving)
        return Ladder(choices, self.sizes(values), self.costs.seconds(values, speeds), scratch, clocks, threads,
                      0 if store is None else store.limit)

    def _clocks(self, values: Mapping[str, int], threads: int, store: HostStore, speeds: Speeds
                ) -> tuple[Clock, ...]:
        """When steps and copies begin: as fast as the store is; where copies are waited for at once; the same where
        only bytes count."""
        steps = (*self.forward.steps, *self.plan.steps)
        if self.work is None:
            self.work = Work([None if k - len(self.forward.steps) in self.keeps.optional else step
                              for k, step in enumerate(steps)], self.plan.name)
        seconds = self.work.seconds(values, speeds) / threads
        count = len(self.forward.steps)
        both = self.program.maker.keeps, self.keeps, seconds[:count], seconds[count:]
        return (Clock(*both, store.seconds(1, out=True), store.seconds(1, out=False)),
                Clock(*both, *USUAL, at_once=True), Clock(*both, 0.0, 0.0, at_once=True))

    def _size(self, size: Size) -> int:
        self.bytes.append(size)
        return len(self.bytes) - 1

    def _life(self, buffer: Buffer, plan: Plan, last: int | None = None, first: int | None = None) -> Life:
        start = self.border if plan is self.plan else 0
        return Life(buffer.name, self._size(buffer.bytes), start + (buffer.first if first is None else first),
                    start + (buffer.last if last is None else last), buffer.home, source_of(buffer, plan))

    def _chunk_ends(self) -> dict[str, int]:
        """Saved buffer -> the last step that its chunk is there."""
        gone = {step.chunk: number for number, step in enumerate(self.plan.steps) if isinstance(step, MemoryStep)}
        end = len(self.plan.steps)
        known = {name: self.border + gone.get(chunk, end + 1) - 1 for chunk, names in enumerate(self.plan.chunks)
                 for name in names}
        return {name: known.get(name, self.border + end) for name in self.held}

    def _fixed(self) -> list[Life]:
        end = self.length - 1
        given, first, later = escaping(self.forward), first_writes(self.forward), first_writes(self.plan)
        found = [self._life(b, self.forward, end if b in given else None, first.get(b.name)) for b in
                 self.forward.buffers if b.home in ("arena", "extern", "output") and b.name not in self.outside]
        for b in self.plan.buffers:
            if b.home in ("arena", "extern", "output") and b.name not in self.keeps.made:
                last = len(self.plan.steps) if b.home == "output" else None
                found.append(self._life(b, self.plan, last, later.get(b.name)))
        return found

    def _held(self) -> dict[str, Life]:
        saved = [b for b in self.forward.buffers if b.home == "saved"]
        lasts = [(b, region.last) for b, region in zip(saved, self.backward.maker.regions, strict=True)]
        return {b.name: self._life(b, self.forward, self.border + max(last, -1)) for b, last in (*lasts, *self.beside)}

    def _segments(self) -> list[Segment]:
        members: dict[int, list[int]] = {}
        for i, one in enumerate(self.again):
            members.setdefault(one.segment, []).append(i)
        places = {number: i for i, number in enumerate(self.optional)}
        temporaries = {life.name: i for i, life in enumerate(self.temporaries)}
        found = []
        for some in members.values():
            keeping = Keeping(frozenset(self.names[i] for i in some))
            made = sorted(temporaries[name] for name in self.keeps.used(keeping) if name in temporaries)
            steps = tuple(places[number] for number in sorted(self.keeps.runs(keeping)))
            found.append(Segment(tuple(some), steps, tuple(made)))
        return found


class Ladder:
    """See the head of this file. May be climbed from several threads.

    Args:
        bytes_: what the formulas of the ladders say, int64; seconds: of their optional steps, float64.
        clocks: when steps and copies begin, first as fast as the store is; None: nothing is moved.
        threads: how many compute.
        most: bytes that may be moved out; 0: any number.
    """

    def __init__(self, choices: Choices, bytes_: np.ndarray, seconds: np.ndarray, scratch: tuple[int, int],
                 clocks: Sequence[Clock | None] = (None,), threads: int = 1, most: int = 0) -> None:
        self.choices, self.ladders = choices, choices.ladders
        self.bytes = bytes_
        self.seconds = seconds
        self.scratch = scratch
        self.clocks = clocks
        self.threads, self.most = threads, most
        self.lock = threading.Lock()
        # one after another, of which so many are at their end; of the next one so many rungs are among the found
        self.climbs: list[Climb] = []
        self.done = self.read = 0
        # the least bytes that it may need, by which climb, and its rung
        self.found: list[tuple[int, Climb, int]] = []
        self.lowest = sys.maxsize
        self.rungs: dict[int, Rung] = {}

    def __iter__(self) -> Iterator[Rung]:
        number = self.next(0, sys.maxsize)
        while number >= 0:
            yield self.rung(number)
            number = self.next(number + 1, sys.maxsize)

    def next(self, number: int, bytes_: int) -> int:
        """The first rung from `number` on that may need at most so many bytes; -1: there is none."""
        with self.lock:
            while True:
                while number < len(self.found):
                    if self.found[number][0] <= bytes_:
                        return number
                    number += 1
                if not self._climb(bytes_):
                    return -1

    def rung(self, number: int) -> Rung:
        """A rung that `next` has found."""
        with self.lock:
            if number not in self.rungs:
                _, climb, at = self.found[number]
                self.rungs[number] = climb.rung(at)
            return self.rungs[number]

    def bound(self, number: int) -> int:
        """The least bytes that it may need."""
        return self.found[number][0]

    def cost(self, number: int) -> float:
        """The seconds that it takes, as `Rung` has them."""
        _, climb, at = self.found[number]
        return climb.seconds(at)

    def upwards(self) -> Iterator[int]:
        """All rungs from the last to the first."""
        self.next(0, -1)
        return reversed(range(len(self.found)))

    def _climb(self, bytes_: int) -> bool:
        """Climbs on, up to a rung that may need at most so many bytes; whether there may be more."""
        if not self.climbs:
            self.climbs = [Climb(self.choices, self, clock, self.threads, self.most) for clock in self.clocks]
        if self.done == len(self.climbs):
            return False
        climb = self.climbs[self.done]
        lives = climb.climb(bytes_)
        # below what usual speeds come to, measured ones choose nothing: so the last rung does not depend on them
        floor = min((other.climb(-1)[-1] for other in self.climbs[1:] if self.done == 0), default=-1)
        for number, bound in enumerate(climb.bounds(self.read, len(lives)), self.read):
            if floor < lives[number] < self.lowest:
                self.lowest = lives[number]
                self.found.append((bound, climb, number))
        self.read = len(lives)
        if climb.done:
            self.done, self.read = self.done + 1, 0
        return True

    def alive(self, keeping: Keeping) -> list[tuple[str, int]]:
        """What is alive at the fullest step, with its bytes, the largest first."""
        ladders = self.ladders
        curve = self.curve(keeping)
        at = int(curve.argmax())
        found = [(life.label, int(self.bytes[life.number])) for life in ladders.fixed if life.first <= at <= life.last]
        gaps = {name: gap for name, gap in zip(ladders.names, ladders.gaps, strict=True)
                if name in keeping.dropped}
        gaps |= {move.saved: (move.gone + 1, ladders.border + move.back) for move in keeping.moved}
        for name, life in ladders.held.items():
            gone = name in gaps and gaps[name][0] <= at < gaps[name][1]
            if life.first <= at <= life.last and not gone:
                found.append((life.label, self.kept(name)))
        return sorted(found, key=lambda one: -one[1])

    def curve(self, keeping: Keeping) -> np.ndarray:
        """Bytes alive at each step of the forward, then of the backward."""
        ladders = self.ladders
        used = ladders.keeps.used(keeping)
        lives = [(int(self.bytes[life.number]), life.first, life.last)
                 for life in (*ladders.fixed, *(life for life in ladders.temporaries if life.name in used))]
        lives += [(self.kept(name), life.first, life.last) for name, life in ladders.held.items()]
        lives += [(-self.kept(name), first, end - 1)
                  for name, (first, end) in zip(ladders.names, ladders.gaps, strict=True) if name in keeping.dropped]
        lives += [(-self.kept(move.saved), move.gone + 1, ladders.border + move.back - 1) for move in keeping.moved]
        curve = np.array(live_bytes(lives, ladders.length - 1), np.int64)
        curve[:ladders.border] += self.scratch[0]
        curve[ladders.border:] += self.scratch[1]
        return curve

    def kept(self, name: str) -> int:
        """Bytes of a saved value, as the kept block has it."""
        return align(int(self.bytes[self.ladders.held[name].number]))


def _beside(program: Executable, plan: Plan) -> list[tuple[Buffer, int]]:
    """See `Ladders`; `plan`: the backward's."""
    dropped = {name: number - 1 for number, step in enumerate(plan.steps) if isinstance(step, MemoryStep)
               for name in step.drop}
    last: dict[str, int] = {}
    for b in plan.buffers:
        entry = saved_entry(program.plan, b.index) if b.home == "tape" else None
        if entry is not None:
            last[entry[0].name] = max(last.get(entry[0].name, 0), dropped.get(b.name, len(plan.steps)))
    return [(b, last[b.name]) for b in program.maker.keeps.outside]
