"""What a call could drop at given sizes: rung by rung, from everything kept down to the least that works.

    bytes alive, forward then backward, everything kept          a rung lower: h of layer 0 computed again
         __/^^\\__                                                    __/^^\\__
      __/        \\__                                              _/^        \\_/\\_

Rung by rung the value that relieves the fullest step and costs least time for its bytes is dropped, too (a greedy
covering), so that each rung's peak is below that of the one before. What is alive is counted from the very lives and
sizes that the layouts are made of. What does not depend on sizes is worked out once (`Ladders`), and a ladder is
climbed only as far as somebody asks.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anyshape.plan.alloc import saved_entry
from anyshape.plan.hold import births, given_away
from anyshape.plan.plan import Buffer, MemoryStep, Plan
from anyshape.run.alive import named
from anyshape.run.climb import Rung, climb
from anyshape.run.keeping import Keeping
from anyshape.run.moving import USUAL, Clock
from anyshape.run.store import HostStore
from anyshape.run.work import USUAL as USUAL_SPEEDS
from anyshape.run.work import Speeds, Work
from anyshape.sym.expr import Size
from anyshape.sym.formulas import function_of

if TYPE_CHECKING:
    from anyshape.run.executable import Executable

MOST_PARTS = 1 << 14  # sets of dropped values, by segment, of which it is remembered what computes them again
SHORTEST = 1e-9  # seconds, so that nothing is for free


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer alive from step `first` to step `last` of a forward and its backward, in the upper block of the arena
    (`inside`) or elsewhere; `number`: of its bytes."""

    name: str
    number: int
    first: int
    last: int
    inside: bool = False


@dataclass(frozen=True, slots=True)
class _Segment:
    """What can be dropped of a segment (positions among all that can be), the optional steps that compute it again
    (positions among all of those), and the temporary values of these, with the numbers of their bytes.

    inside: one row per temporary value, one column per step from `start` on, 1 where it is alive and in the arena;
    beside: the same of what is elsewhere; own: of the members, once they are computed again.
    """

    members: tuple[int, ...]
    steps: tuple[int, ...]
    temporaries: tuple[int, ...]
    numbers: list[int]
    start: int
    inside: np.ndarray
    beside: np.ndarray
    own: np.ndarray


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
        self.temporaries = [self._life(homes[name], name, self.border) for name in sorted(self.keeps.made)]
        # not in the arena, while the backward runs
        self.elsewhere = [life for life in (*self.fixed, *self.temporaries)
                          if not life.inside and life.last >= self.border]
        self.optional = sorted(self.keeps.runs(Keeping(frozenset(self.names))))
        self.segments = self._segments(homes)
        # those that have values elsewhere, and those that change the arena at the same steps as another
        self.outer = [number for number, segment in enumerate(self.segments) if segment.beside.any()]
        windows = [(segment.start, segment.start + segment.own.shape[1]) for segment in self.segments]
        self.overlaps = [[other for other, (first, last) in enumerate(windows) if first < end and start < last]
                         for start, end in windows]
        # by value: from where to where the forward needs it, and the backward's last step that has what was kept
        ends = program.maker.keeps.ends
        self.spans = np.array([(self.held[name].first, max(ends[name], self.held[name].first) + 1)
                               for name in self.names], np.int64).reshape(-1, 2)
        self.chunk_ends = self._chunk_ends()
        self.last = np.array([gap[1] - 1 if name in self.outside else self.chunk_ends[name]
                              for name, gap in zip(self.names, self.gaps, strict=True)], np.int64)
        self.sizes = function_of(self.bytes, f"bytes of {self.plan.name}")
        self.costs = Work([self.plan.steps[number] for number in self.optional], f"{self.plan.name}, computed again")
        self.parts: dict[tuple[int, frozenset[int]], tuple[np.ndarray, np.ndarray]] = {}
        self.work: Work | None = None  # of all steps that are not optional, made when somebody moves values

    def at(self, values: Mapping[str, int], scratch: tuple[int, int], threads: int = 1,
           store: HostStore | None = None, speeds: Speeds = USUAL_SPEEDS) -> Ladder:
        """The ladder at the backward's sizes. scratch: bytes that all threads take in the forward, in the backward;
        store: where values may be moved out to; speeds: of one of the threads."""
        bytes_ = np.array(self.sizes(values), np.int64)
        ladder = Ladder(self, bytes_, self.costs.seconds(values, speeds), scratch)
        if store is not None:
            ladder.climbing = climb(ladder, self._clocks(values, threads, store, speeds), threads, store.limit)
        return ladder

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

    def part(self, number: int, dropped: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """Which of a segment's steps and of its temporary values computing `dropped` again takes: two rows of 0 and
        1."""
        known = self.parts.get((number, dropped))
        if known is None:
            segment = self.segments[number]
            keeping = Keeping(frozenset(self.names[i] for i in dropped))
            runs, used = self.keeps.runs(keeping), self.keeps.used(keeping)
            known = (np.array([self.optional[i] in runs for i in segment.steps], np.int64),
                     np.array([self.temporaries[i].name in used for i in segment.temporaries], np.int64))
            if len(self.parts) >= MOST_PARTS:
                self.parts.clear()
            self.parts[number, dropped] = known
        return known

    def _size(self, size: Size) -> int:
        self.bytes.append(size)
        return len(self.bytes) - 1

    def _life(self, buffer: Buffer, name: str, start: int = 0, last: int | None = None,
              first: int | None = None) -> Life:
        return Life(name, self._size(buffer.bytes), start + (buffer.first if first is None else first),
                    start + (buffer.last if last is None else last), buffer.home in ("arena", "again"))

    def _chunk_ends(self) -> dict[str, int]:
        """Saved buffer -> the last step that its chunk is there."""
        gone = {step.chunk: number for number, step in enumerate(self.plan.steps) if isinstance(step, MemoryStep)}
        end = len(self.plan.steps)
        known = {name: self.border + gone.get(chunk, end + 1) - 1 for chunk, names in enumerate(self.plan.chunks)
                 for name in names}
        return {name: known.get(name, self.border + end) for name in self.held}

    def _fixed(self) -> list[Life]:
        end = self.length - 1
        given, first, later = given_away(self.forward), births(self.forward), births(self.plan)
        found = [self._life(b, named(b, self.forward), 0, end if b in given else None, first.get(b.name)) for b in
                 self.forward.buffers if b.home in ("arena", "extern", "output") and b.name not in self.outside]
        for b in self.plan.buffers:
            if b.home in ("arena", "extern", "output") and b.name not in self.keeps.made:
                last = len(self.plan.steps) if b.home == "output" else None
                found.append(self._life(b, named(b, self.plan), self.border, last, later.get(b.name)))
        return found

    def _held(self) -> dict[str, Life]:
        saved = [b for b in self.forward.buffers if b.home == "saved"]
        lasts = [(b, region.last) for b, region in zip(saved, self.backward.maker.regions, strict=True)]
        return {b.name: self._life(b, b.name, 0, self.border + max(last, -1)) for b, last in (*lasts, *self.beside)}

    def _segments(self, homes: Mapping[str, Buffer]) -> list[_Segment]:
        members: dict[int, list[int]] = {}
        for i, one in enumerate(self.again):
            members.setdefault(one.segment, []).append(i)
        places = {number: i for i, number in enumerate(self.optional)}
        temporaries = {life.name: i for i, life in enumerate(self.temporaries)}
        found = []
        for some in members.values():
            keeping = Keeping(frozenset(self.names[i] for i in some))
            made = sorted(temporaries[name] for name in self.keeps.used(keeping) if name in temporaries)
            lives = [self.temporaries[i] for i in made]
            own = [Life(self.names[i], 0, self.gaps[i][1], self.gaps[i][1]) if self.names[i] in self.outside else
                   self._life(homes[self.again[i].buffer], self.names[i], self.border) for i in some]
            start = min(life.first for life in (*lives, *own))
            width = max(life.last + 1 for life in (*lives, *own)) - start
            inside, beside, mine = (np.zeros((len(rows), width), np.int64) for rows in (lives, lives, own))
            for i, life in enumerate(lives):
                (inside if life.inside else beside)[i, life.first - start:life.last + 1 - start] = 1
            for i, life in enumerate(own):
                mine[i, life.first - start:life.last + 1 - start] = life.name not in self.outside
            steps = tuple(places[number] for number in sorted(self.keeps.runs(keeping)))
            numbers = [life.number for life in lives]
            found.append(_Segment(tuple(some), steps, tuple(made), numbers, start, inside, beside, mine))
        return found


class Ladder:
    """See the head of this file. May be climbed from several threads.

    Args:
        bytes_: what the formulas of `ladders` say; seconds: of its optional steps.
    """

    def __init__(self, ladders: Ladders, bytes_: np.ndarray, seconds: np.ndarray, scratch: tuple[int, int]) -> None:
        self.ladders = ladders
        self.bytes = bytes_
        self.seconds = seconds
        self.kept = {name: -(-int(bytes_[life.number]) // 64) * 64 for name, life in ladders.held.items()}
        self.scratch = scratch
        self.base = self._base()
        self.lock = threading.Lock()
        self.rungs: list[Rung] = []
        self.climbing = self._climb()

    def __iter__(self) -> Iterator[Rung]:
        number = 0
        while True:
            with self.lock:
                if number == len(self.rungs):
                    rung = next(self.climbing, None)
                    if rung is None:
                        return
                    self.rungs.append(rung)
            yield self.rungs[number]
            number += 1

    def alive(self, keeping: Keeping) -> list[tuple[str, int]]:
        """What is alive at the fullest step, with its bytes, the largest first."""
        ladders = self.ladders
        curve = self.curve(keeping)
        at = int(curve.argmax())
        found = [(life.name, int(self.bytes[life.number])) for life in ladders.fixed if life.first <= at <= life.last]
        homes = {b.name: b for b in ladders.forward.buffers}
        gaps = {name: gap for name, gap in zip(ladders.names, ladders.gaps, strict=True)
                if name in keeping.dropped}
        gaps |= {move.saved: (move.gone + 1, ladders.border + move.back) for move in keeping.moved}
        for name, life in ladders.held.items():
            gone = name in gaps and gaps[name][0] <= at < gaps[name][1]
            if life.first <= at <= life.last and not gone:
                found.append((named(homes[name], ladders.forward), self.kept[name]))
        return sorted(found, key=lambda one: -one[1])

    def curve(self, keeping: Keeping) -> np.ndarray:
        """Bytes alive at each step of the forward, then of the backward."""
        curve = self.base.copy()
        for number, segment in enumerate(self.ladders.segments):
            here = frozenset(i for i in segment.members if self.ladders.names[i] in keeping.dropped)
            if here:
                _, used = self.ladders.part(number, here)
                curve[segment.start:segment.start + segment.own.shape[1]] += (
                    used * self.bytes[segment.numbers]) @ (segment.inside + segment.beside)
            for i in here:
                first, last = self.ladders.gaps[i]
                curve[first:last] -= self.kept[self.ladders.names[i]]
        for move in keeping.moved:
            curve[move.gone + 1:self.ladders.border + move.back] -= self.kept[move.saved]
        return curve

    def _base(self) -> np.ndarray:
        """With everything kept."""
        ladders = self.ladders
        change = np.zeros(ladders.length + 1, np.int64)
        lives = [(life.first, life.last, int(self.bytes[life.number])) for life in ladders.fixed]
        lives += [(life.first, life.last, self.kept[name]) for name, life in ladders.held.items()]
        for first, last, size in lives:
            if first <= last:
                change[first] += size
                change[last + 1] -= size
        curve = np.cumsum(change[:-1])
        curve[:ladders.border] += self.scratch[0]
        curve[ladders.border:] += self.scratch[1]
        return curve

    def _climb(self) -> Iterator[Rung]:
        """The rungs, the first of which drops nothing."""
        ladders, border = self.ladders, self.ladders.border
        count = len(ladders.names)
        sizes = np.array([self.kept[name] for name in ladders.names], np.int64)
        homes = np.zeros(count, np.int64)
        for number, segment in enumerate(ladders.segments):
            homes[list(segment.members)] = number
        left = sizes > 0
        taken = [frozenset[int]() for _ in ladders.segments]
        outside = np.array([name in ladders.outside for name in ladders.names], bool)
        gone = np.array([first for first, _ in ladders.gaps], np.int64)  # in the forward
        arena, rest, kept = self.separate()
        rows: dict[int, tuple[list[int], np.ndarray, np.ndarray]] = {}
        cost, inner = np.zeros(count), np.zeros(count, np.int64)

        def look(number: int) -> None:
            """What dropping each value that is left of a segment would add, and cost."""
            segment = ladders.segments[number]
            members = [i for i in segment.members if left[i]]
            parts = [ladders.part(number, taken[number] | {i}) for i in members]
            ran, used = ladders.part(number, taken[number])
            if members:
                cost[members] = (np.array([part[0] for part in parts]) - ran) @ self.seconds[list(segment.steps)]
                more = (np.array([part[1] for part in parts]) - used) * self.bytes[segment.numbers]
                own = [segment.members.index(i) for i in members]
                rows[number] = members, more @ segment.inside + sizes[members, None] * segment.own[own], \
                    more @ segment.beside
            else:
                rows.pop(number, None)

        def refresh(number: int) -> None:
            """The top of the arena there, with each of them dropped."""
            if number in rows:
                members, more, _ = rows[number]
                start = ladders.segments[number].start
                inner[members] = (arena[start:start + more.shape[1]] + more).max(axis=1, initial=0)

        for number in range(len(ladders.segments)):
            look(number)
            refresh(number)
        seconds, lowest = 0.0, sys.maxsize
        while True:
            top = int(arena[border:].max())
            at = border + int(rest[border:].argmax())
            forward = kept + int(arena[:border].max()) + int(rest[:border].max()) + self.scratch[0]
            backward = int(rest[at]) + top + self.scratch[1]
            if max(forward, backward) < lowest:
                lowest = max(forward, backward)
                yield Rung(frozenset(ladders.names[i] for some in taken for i in some), lowest, seconds)
            if not left.any():
                return
            if backward >= forward:
                share = sizes * (ladders.last >= at)
                gain = share - self._beside_at(at, rows)
                gain -= np.maximum(self._outside(arena)[homes], inner) - top
            else:
                # a value that is dropped lies in the arena as long as the forward needs it
                inside = np.maximum.reduceat(arena, ladders.spans.ravel())[::2] + sizes
                gain = np.where(outside, sizes * (gone <= int(rest[:border].argmax())),
                                sizes - np.maximum(inside - int(arena[:border].max()), 0))
                share = np.where(outside, gain, sizes)
            score = np.where(left & (gain > 0), gain / np.maximum(cost, SHORTEST), 0.0)
            best = int(score.argmax())
            if score[best] <= 0:  # none helps by itself: what the first takes to be computed again serves the next ones
                score = np.where(left & (share > 0), share / np.maximum(cost, SHORTEST), 0.0)
                best = int(score.argmax())
                if score[best] <= 0:
                    return
            number = int(homes[best])
            members, more, beside = rows[number]
            place, start = members.index(best), ladders.segments[number].start
            arena[start:start + more.shape[1]] += more[place]
            rest[start:start + more.shape[1]] += beside[place]
            if outside[best]:
                rest[gone[best]:ladders.last[best] + 1] -= sizes[best]
            else:
                rest[border:ladders.last[best] + 1] -= sizes[best]
                arena[ladders.spans[best, 0]:ladders.spans[best, 1]] += sizes[best]
                kept -= int(sizes[best])
            seconds += float(cost[best])
            taken[number] |= {best}
            left[best] = False
            look(number)
            for other in ladders.overlaps[number]:
                refresh(other)

    def separate(self) -> tuple[np.ndarray, np.ndarray, int]:
        """With nothing dropped and the kept block in chunks: what lies in the upper block of the arena at each step,
        what lies elsewhere, in the backward with the chunks, and the bytes of these."""
        ladders = self.ladders
        curves = np.zeros((2, ladders.length + 1), np.int64)
        lives = [(0 if life.inside else 1, life.first, life.last, int(self.bytes[life.number]))
                 for life in ladders.fixed]
        chunks = {name: size for name, size in self.kept.items() if name not in ladders.outside}
        lives += [(1, ladders.border, ladders.chunk_ends[name], size) for name, size in chunks.items()]
        lives += [(1, ladders.held[name].first, ladders.held[name].last, self.kept[name]) for name in ladders.outside]
        for which, first, last, size in lives:
            if first <= last:
                curves[which, first] += size
                curves[which, last + 1] -= size
        arena, rest = np.cumsum(curves[:, :-1], axis=1)
        return arena, rest, sum(chunks.values())

    def _outside(self, arena: np.ndarray) -> np.ndarray:
        """By segment, the top of the backward's arena at steps where it changes nothing."""
        border = self.ladders.border
        before = np.maximum.accumulate(arena[border:])
        after = np.maximum.accumulate(arena[:border - 1:-1])[::-1]
        found = np.zeros(len(self.ladders.segments), np.int64)
        for number, segment in enumerate(self.ladders.segments):
            start, end = segment.start - border, segment.start - border + segment.own.shape[1]
            found[number] = max(int(before[start - 1]) if start > 0 else 0, int(after[end]) if end < len(after) else 0)
        return found

    def _beside_at(self, at: int, rows: Mapping[int, tuple[list[int], np.ndarray, np.ndarray]]) -> np.ndarray:
        """What dropping each value adds beside the arena at a step."""
        found = np.zeros(len(self.ladders.names), np.int64)
        for number in self.ladders.outer:
            if number in rows:
                members, _, beside = rows[number]
                place = at - self.ladders.segments[number].start
                if 0 <= place < beside.shape[1]:
                    found[members] = beside[:, place]
        return found


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
