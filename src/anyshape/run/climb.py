"""The rungs of a ladder where values may also be moved out: rung by rung the cheaper of two ways to get a value back.

    kept -> computed again        costs the work of its steps, and memory for what they make on the way
    kept -> moved out             costs what copying takes from the steps, and waiting once the copies take longer than
    computed again -> moved out   all steps together; memory from when it is fetched on

When values are copied depends on how fast the disk was so far. The last rungs do not: their copies are waited for at
once, which takes more time and less memory, at usual costs, and in the end at none. So the least limit that works is
the same in every process.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anyshape.run.keeping import Keeping, Move
from anyshape.run.moving import Clock

if TYPE_CHECKING:
    from anyshape.run.ladder import Ladder

EACH = 1e-4  # seconds that one move takes whatever its size: two calls from native code, four of the system
BESIDE = 0.25  # what a second of copying on a core that has nothing else to do costs those that compute: memory traffic
SHORTEST = 1e-9  # seconds, so that nothing is for free


@dataclass(frozen=True, slots=True)
class Rung:
    """What is dropped, the most bytes alive at once, and seconds that all threads together take to compute it again, by
    estimate; what is moved out to a store, and its bytes."""

    dropped: frozenset[str]
    live: int
    seconds: float
    moved: tuple[Move, ...] = ()
    away: int = 0

    @property
    def keeping(self) -> Keeping:
        """What a call keeps that takes it."""
        return Keeping(self.dropped, apart=True, moved=self.moved)


def climb(ladder: Ladder, clocks: Sequence[Clock], threads: int, most: int) -> Iterator[Rung]:
    """The rungs, by one clock after another: each one's peak is below that of the one before.

    Args:
        threads: how many compute.
        most: bytes that may be moved out; 0: any number.
    """
    lowest = sys.maxsize
    for clock in clocks:
        for rung in Climb(ladder, clock, threads, most).rungs():
            if rung.live < lowest:
                lowest = rung.live
                yield rung


@dataclass(slots=True)
class Change:
    """What a choice adds: bytes of the kept block, bytes at each step in the upper block of the arena, the same
    elsewhere, in the backward with the kept block; seconds that steps take."""

    kept: int
    arena: np.ndarray
    rest: np.ndarray
    seconds: float


class Climb:
    """The climb of one ladder by one clock; see `climb`."""

    def __init__(self, ladder: Ladder, clock: Clock, threads: int, most: int) -> None:
        ladders = ladder.ladders
        self.ladder, self.ladders, self.clock, self.threads, self.most = ladder, ladders, clock, threads, most
        keeps = ladders.keeps
        self.count = len(ladders.names)  # of those that can be computed again; the others follow
        self.names = [*ladders.names, *sorted(ladders.held.keys() - set(ladders.names) - ladders.outside)]
        self.bytes = [ladder.kept[name] for name in self.names]
        self.home = {i: number for number, segment in enumerate(ladders.segments) for i in segment.members}
        # by value: how it is moved, if no step that computes another one again reads it, and if one does
        self.moves: list[tuple[Move, Move] | None] = []
        self.readers: list[np.ndarray] = []
        for i, name in enumerate(self.names):
            reads = [] if name in ladders.outside else keeps.reads[name]  # tensors of PyTorch stay where they are
            if not reads or not self.bytes[i]:
                self.moves.append(None)
            else:
                late = next((n for n in reads if n not in keeps.optional), reads[0]) if i in self.home else reads[0]
                self.moves.append((clock.move(name, self.bytes[i], late), clock.move(name, self.bytes[i], reads[0])))
            steps = ladders.segments[self.home[i]].steps if i in self.home else ()
            self.readers.append(np.array([ladders.optional[k] in reads for k in steps], bool))
        self.share = BESIDE if threads < (os.cpu_count() or 1) else 1.0
        self.dropped = [frozenset[int]() for _ in ladders.segments]
        self.moved = [frozenset[int]() for _ in ladders.segments]
        self.alone: set[int] = set()  # moved ones that are in no segment
        # by choice, dropping each value that can be, then moving each: what it adds
        rows = self.count + len(self.names)
        self.kept = np.zeros(rows, np.int64)
        self.arena = np.zeros((rows, ladders.length), np.int64)
        self.rest = np.zeros((rows, ladders.length), np.int64)
        self.cost = np.zeros(rows)

    def rungs(self) -> Iterator[Rung]:
        """The rungs, the first of which keeps everything: those whose peak is below all before."""
        count, border, clock = self.count, self.ladders.border, self.clock
        may = np.array([*(size > 0 for size in self.bytes[:count]), *(move is not None for move in self.moves)], bool)
        copying = np.array([0.0] * count + [EACH + clock.seconds(size) for size in self.bytes])
        sizes = np.array([0] * count + self.bytes)
        for number in range(len(self.ladders.segments)):
            self.look(number)
        for i in range(count, len(self.names)):
            if self.moves[i] is not None:
                change = self.nothing()
                self.take(change, i, self.move(i, None))
                self.note(count + i, change)
        arena, rest, kept = self.ladder.separate()
        seconds = busy = 0.0
        away, lowest = 0, sys.maxsize
        while True:
            top = int(arena[border:].max())
            at = border + int(rest[border:].argmax())
            before = int(arena[:border].max())
            forward = kept + before + int(rest[:border].max()) + self.ladder.scratch[0]
            backward = int(rest[at]) + top + self.ladder.scratch[1]
            if max(forward, backward) < lowest:
                lowest = max(forward, backward)
                yield Rung(frozenset(self.names[i] for some in self.dropped for i in some), lowest, seconds,
                           tuple(self.chosen()), away)
            if backward >= forward:
                share = -self.rest[:, at]
                gain = top - (arena[border:] + self.arena[:, border:]).max(axis=1) + share
            else:
                share = -self.kept
                gain = before - (arena[:border] + self.arena[:, :border]).max(axis=1) - self.kept
            # beside what is computed meanwhile, so much copying costs nobody's time
            waiting = np.maximum(busy + copying - clock.hidden, 0) - max(busy - clock.hidden, 0)
            costs = self.cost + copying * self.share + waiting * self.threads
            can = may & (away + sizes <= self.most) if self.most else may
            if not (can & (gain > 0)).any():  # none helps by itself; see Ladder
                gain = share
            can = can & (gain > 0)
            if not can.any():
                return
            best = int(np.where(can, gain / np.maximum(costs, SHORTEST), 0.0).argmax())
            arena += self.arena[best]
            rest += self.rest[best]
            kept += int(self.kept[best])
            seconds += float(costs[best])
            busy += float(copying[best])
            away += int(sizes[best])
            may[best] = False
            self.choose(best, may)

    def choose(self, best: int, may: np.ndarray) -> None:
        """Takes a choice, and looks what it changes for the others."""
        i = best if best < self.count else best - self.count
        if i not in self.home:
            self.alone.add(i)
            return
        number = self.home[i]
        if best < self.count:
            self.dropped[number] |= {i}
        else:
            may[i] = False  # what is moved out is not computed again
            self.dropped[number] -= {i}
            self.moved[number] |= {i}
        self.look(number)

    def chosen(self) -> Iterator[Move]:
        """The moves of all values that are moved."""
        for number, some in enumerate(self.moved):
            ran = self.ladders.part(number, self.dropped[number])[0]
            for i in sorted(some):
                yield self.move(i, ran)
        for i in sorted(self.alone):
            yield self.move(i, None)

    def move(self, i: int, ran: np.ndarray | None) -> Move:
        """How value `i` is moved while those of its segment's steps run."""
        moves = self.moves[i]
        assert moves is not None
        return moves[0] if ran is None or not (self.readers[i] & (ran != 0)).any() else moves[1]

    def look(self, number: int) -> None:
        """What the next choice in a segment adds, by choice."""
        dropped, moved = self.dropped[number], self.moved[number]
        now = self.effect(number, dropped, moved)
        for i in self.ladders.segments[number].members:
            if i in moved or not self.bytes[i]:
                continue
            if i not in dropped:
                self.note(i, self.effect(number, dropped | {i}, moved), now)
            if self.moves[i] is not None:
                self.note(self.count + i, self.effect(number, dropped - {i}, moved | {i}), now)

    def note(self, row: int, after: Change, before: Change | None = None) -> None:
        """Notes what a choice adds."""
        self.kept[row], self.arena[row], self.rest[row], self.cost[row] = (
            after.kept, after.arena, after.rest, after.seconds)
        if before is not None:
            self.kept[row] -= before.kept
            self.arena[row] -= before.arena
            self.rest[row] -= before.rest
            self.cost[row] -= before.seconds

    def nothing(self) -> Change:
        """No change."""
        return Change(0, np.zeros(self.ladders.length, np.int64), np.zeros(self.ladders.length, np.int64), 0.0)

    def effect(self, number: int, dropped: frozenset[int], moved: frozenset[int]) -> Change:
        """What a segment adds to the ladder with everything kept."""
        ladders, segment = self.ladders, self.ladders.segments[number]
        change = self.nothing()
        ran, used = ladders.part(number, dropped)
        if dropped:
            part = slice(segment.start, segment.start + segment.own.shape[1])
            more = used * self.ladder.bytes[segment.numbers]
            change.arena[part] += more @ segment.inside
            change.rest[part] += more @ segment.beside
            for k, i in enumerate(segment.members):
                if i in dropped:
                    change.arena[part] += self.bytes[i] * segment.own[k]
                    self.leave(change, i, int(ladders.spans[i, 1]))
        for i in moved:
            self.take(change, i, self.move(i, ran))
        change.seconds = float(ran @ self.ladder.seconds[list(segment.steps)])
        return change

    def take(self, change: Change, i: int, move: Move) -> None:
        """Adds that a value is moved."""
        border, size = self.ladders.border, self.bytes[i]
        self.leave(change, i, move.gone + 1)
        change.arena[border + move.back:self.ladders.held[self.names[i]].last + 1] += size

    def leave(self, change: Change, i: int, until: int) -> None:
        """Adds that a value is not in the kept block: in the arena, in the forward until before step `until`."""
        name, size = self.names[i], self.bytes[i]
        if name in self.ladders.outside:
            change.rest[self.ladders.gaps[i][0]:self.ladders.last[i] + 1] -= size
            return
        change.kept -= size
        change.rest[self.ladders.border:self.ladders.chunk_ends[name] + 1] -= size
        change.arena[self.ladders.held[name].first:until] += size
