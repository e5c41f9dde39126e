"""Greedy search for what to recompute or offload: each move relieves the fullest step at the least cost for its bytes.

    kept -> computed again        costs the work of its steps, and memory for what they make on the way
    kept -> moved out             costs what copying takes from the steps, and waiting once the copies take longer than
    computed again -> moved out   all steps together; memory from when it is fetched on

The loop itself is native (backend/cpu/routines/budget_search.py). Here is what it works on: a frame of words, most of
them addresses. What does not depend on sizes is made once (`SearchTables`); a search adds one block of numbers. Without
a store there are no rows for moves.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from anyshape.backend.cpu.bytecode.budget_frame import Frame
from anyshape.backend.cpu.native.records import size_of
from anyshape.base.align import align
from anyshape.plan.ir.program import step_writes, touched
from anyshape.runtime.budget.tradeoff_problem import TradeoffProblem
from anyshape.runtime.specialize.offload_schedule import Clock
from anyshape.runtime.specialize.saved_policy import OffloadMove, SavePolicy

SHORTEST = 1e-9  # seconds, so that nothing is for free
PICO = 1e12  # the loop counts picoseconds
PER_VALUE = 4  # changes of the arena that a choice has for its own value, at most


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """What is dropped, the bytes that it comes to where nothing is lost between values, and seconds that all threads
    together take to compute it again, by estimate; what is moved out to a store, and its bytes."""

    dropped: frozenset[str]
    live: int
    seconds: float
    moved: tuple[OffloadMove, ...] = ()
    away: int = 0

    @property
    def policy(self) -> SavePolicy:
        """What a call keeps that takes it."""
        return SavePolicy(self.dropped, apart=True, moved=self.moved)


def _table(parts: Iterable[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists one after another, and where each begins and the last one ends: int64."""
    lists = [list(part) for part in parts]
    starts = np.cumsum([0, *(len(part) for part in lists)], dtype=np.int64)
    return starts, np.array([entry for part in lists for entry in part], np.int64)


class Costs(Protocol):
    """What a search needs of a curve: bytes of all formulas, seconds of optional steps, scratch of both halves."""

    bytes: np.ndarray
    seconds: np.ndarray
    scratch: tuple[int, int]


class SearchTables:
    """What does not depend on sizes in the searches of one problem.

    names: of the values, first those that can be computed again; with moves the others that are saved in the arena,
    too. rows: how many choices there are. numbers: of the bytes of temporary values, of values, and of lives, among
    those of the problem; padded: which of these are rounded up; chunked: which of the lives are in the kept block.
    work: the optional step of each entry of a segment.
    """

    def __init__(self, problem: TradeoffProblem, moving: bool) -> None:
        self.problem = problem
        self.moving = moving
        count = len(problem.names)
        others = sorted(problem.held.keys() - set(problem.names) - problem.outside) if moving else []
        self.names = [*problem.names, *others]
        self.rows = count + (len(self.names) if moving else 0)
        held = [problem.held[name] for name in self.names]
        lives = self._lives()
        self.numbers = np.array([*(life.number for life in problem.temporaries), *(life.number for life in held),
                                 *(number for *_, number, _ in lives)], np.int64)
        self.padded = np.array([*(False for _ in problem.temporaries), *(True for _ in held),
                                *(padded for *_, padded in lives)], bool)
        self.chunked = np.array([life[4] and life[1] == problem.border for life in lives], bool)
        columns = np.array([life[:3] for life in lives], np.int64).reshape(-1, 3)
        static = self._segments() | self._values() | {
            Frame.life_place: columns[:, 0].copy(), Frame.life_first: columns[:, 1].copy(),
            Frame.life_end: columns[:, 2].copy(),
            Frame.turns: np.array([problem.border + k for k in problem.keeps.turns], np.int64)}
        self.arrays = [np.append(array, 0).astype(np.int64) for array in static.values()]  # kept alive
        self.frame = np.zeros(size_of(Frame) // 8, np.int64)
        for field, array in zip(static, self.arrays, strict=True):
            self.frame[field // 8] = array.ctypes.data
        for field, number in ((Frame.length, problem.length), (Frame.border, problem.border), (Frame.names, count),
                              (Frame.segments, len(problem.segments)), (Frame.rows, self.rows),
                              (Frame.moving, moving), (Frame.lives, len(lives)),
                              (Frame.turn_count, len(problem.keeps.turns)), (Frame.lowest, sys.maxsize),
                              (Frame.shortest, round(SHORTEST * PICO))):
            self.frame[field // 8] = number
        self._block(len(lives))

    def _lives(self) -> list[tuple[int, int, int, int, bool]]:
        """What is there whatever is chosen, and the kept block in chunks: in the arena (0) or not (1), first step and
        the one after the last, number of its bytes, and whether these are padded."""
        problem = self.problem
        found = [(0 if life.inside else 1, life.first, life.last + 1, life.number, False) for life in problem.fixed]
        for name, life in problem.held.items():
            first, last = (life.first, life.last) if name in problem.outside else (
                problem.border, problem.chunk_ends[name])
            found.append((1, first, last + 1, life.number, True))
        return found

    def _segments(self) -> dict[int, np.ndarray]:
        """The members of segments, their steps with what these read and write, and their temporary values."""
        problem, keeps = self.problem, self.problem.keeps
        buffers = {life.name: i for i, life in enumerate(problem.temporaries)}
        for one in problem.again:
            buffers.setdefault(one.buffer, len(buffers))
        made = len(problem.temporaries)
        steps = [problem.plan.steps[problem.optional[k]] for segment in problem.segments for k in segment.steps]
        self.work = np.array([k for segment in problem.segments for k in segment.steps], np.int64)
        writes = _table(sorted({buffers[w.buffer] for w in step_writes(step) if w.buffer in buffers}) for step in steps)
        touches = _table(sorted({buffers[w.buffer] for w in touched(step) if buffers.get(w.buffer, made) < made})
                         for step in steps)
        readers: dict[int, list[int]] = {}
        for i, name in enumerate(problem.names):
            for number in keeps.reads.get(name, ()):
                readers.setdefault(number, []).append(i)
        reads = _table([i for i in readers.get(problem.optional[k], ()) if i in segment.members]
                       for segment in problem.segments for k in segment.steps)
        members = _table(segment.members for segment in problem.segments)
        temporaries = _table(segment.temporaries for segment in problem.segments)
        homes = np.full(len(self.names), -1, np.int64)
        room = np.zeros((2, self.rows), np.int64)  # for changes in the arena, and elsewhere
        room += [[PER_VALUE], [1]]
        for number, segment in enumerate(problem.segments):
            some = list(segment.members)
            homes[some] = number
            rows = some + [len(problem.names) + i for i in some] * self.moving
            inside = sum(problem.temporaries[i].inside for i in segment.temporaries)
            room[:, rows] += [[inside + 2 * len(some) * self.moving], [len(segment.temporaries) - inside]]
        self.room = room.sum(axis=1)
        changes, rests = (np.concatenate(([0], np.cumsum(some))) for some in room)
        lives = problem.temporaries
        return {Frame.segment: homes, Frame.members_from: members[0], Frame.members: members[1],
                Frame.steps_from: _table(segment.steps for segment in problem.segments)[0],
                Frame.made_from: temporaries[0], Frame.made: temporaries[1],
                Frame.writes_from: writes[0], Frame.writes: writes[1], Frame.touches_from: touches[0],
                Frame.touches: touches[1], Frame.reads_from: reads[0], Frame.reads: reads[1],
                Frame.made_first: np.array([life.first for life in lives]),
                Frame.made_end: np.array([life.last + 1 for life in lives]),
                Frame.made_inside: np.array([life.inside for life in lives]),
                Frame.buffer: np.array([buffers[one.buffer] for one in problem.again]),
                Frame.changes_from: changes, Frame.rests_from: rests}

    def _values(self) -> dict[int, np.ndarray]:
        """Where values are, by value: in the forward, in the kept block, and computed again."""
        problem = self.problem
        count = len(problem.names)
        ends = problem.program.specializer.keeps.ends
        found = []
        for i, name in enumerate(self.names):
            held = problem.held[name]
            saved = held.first, max(ends[name], held.first) + 1
            if name in problem.outside:
                first, last = problem.gaps[i]
                found.append((1, 0, 0, first, last, 0, 0, held.last + 1))
                continue
            own = problem.own[i] if i < count else (0, 0)
            found.append((0, *saved, problem.border, problem.chunk_ends[name] + 1, *own, held.last + 1))
        fields = (Frame.outside, Frame.saved_first, Frame.saved_end, Frame.leaves, Frame.leaves_end,
                  Frame.own_first, Frame.own_end, Frame.held_end)
        columns = np.array(found, np.int64).reshape(-1, len(fields)).T
        return dict(zip(fields, columns, strict=True))

    def _block(self, lives: int) -> None:
        """Where each array of a search's own block begins."""
        problem, rows, values = self.problem, self.rows, len(self.names)
        made, steps = len(problem.temporaries), problem.length + 2
        buffers = made + len(problem.again)
        sizes: dict[int, int] = {Frame.made_bytes: made, Frame.bytes: values, Frame.life_bytes: lives}  # as `numbers`
        sizes[Frame.work] = len(self.work)
        sizes |= dict.fromkeys((Frame.gone, Frame.late, Frame.early, Frame.state, Frame.read, Frame.read_now),
                               values)
        sizes |= dict.fromkeys((Frame.left, Frame.cost, Frame.copying, Frame.copy_cost, Frame.changes_count,
                                Frame.rests_count, Frame.kept_change, Frame.first, Frame.end, Frame.top,
                                Frame.later_first, Frame.later_end, Frame.later_top), rows)
        sizes |= {Frame.changes: 3 * int(self.room[0]), Frame.rests: 3 * int(self.room[1])}
        sizes |= dict.fromkeys((Frame.wanted, Frame.now), buffers)
        sizes |= dict.fromkeys((Frame.arena, Frame.rest, Frame.delta, Frame.before, Frame.after), steps)
        sizes |= dict.fromkeys((Frame.strip_arena, Frame.strip_rest), len(problem.keeps.turns) + 2)
        sizes |= dict.fromkeys((Frame.taken, Frame.point_live, Frame.point_bound, Frame.point_choices,
                                Frame.point_picoseconds, Frame.point_away), rows + 1)
        starts = np.cumsum([0, *sizes.values()])
        self.words = int(starts[-1])
        self.fields = np.array([*sizes])
        self.offsets = 8 * starts[:-1].astype(np.int64)
        self.slices = {field: slice(int(a), int(b)) for field, a, b in zip(sizes, starts[:-1], starts[1:], strict=True)}


class GreedySearch:
    """One search along a trade-off curve. Not safe to share between threads.

    Args:
        clock: says when values are moved; None: none is.
        threads: how many compute.
        most: bytes that may be moved out; 0: any number.
    """

    def __init__(self, choices: SearchTables, tradeoff: Costs, clock: Clock | None, threads: int = 1,
                 most: int = 0) -> None:
        self.choices, self.tradeoff, self.clock = choices, tradeoff, clock
        problem = choices.problem
        self.block = np.zeros(choices.words, np.int64)
        frame = self.frame = choices.frame.copy()
        frame[choices.fields // 8] = choices.offsets + self.block.ctypes.data
        record = self.record = Frame(frame.ctypes.data)
        self.search = problem.program.context.host.budget_search
        bytes_ = tradeoff.bytes[choices.numbers]
        bytes_[choices.padded] = align(bytes_[choices.padded])
        self.block[:len(bytes_)] = bytes_
        self.at(Frame.work)[:] = np.rint(tradeoff.seconds[choices.work] * PICO)
        sizes = self.at(Frame.bytes)
        self.at(Frame.left)[:len(problem.names)] = sizes[:len(problem.names)] > 0
        record.scratch, record.later_scratch = tradeoff.scratch
        record.kept = self.at(Frame.life_bytes)[choices.chunked].sum()
        # the most bytes that a choice frees, shifted by so much, are a word
        record.shift = 61 - (int(self.at(Frame.life_bytes).sum()) + int(sizes.sum())).bit_length()
        if clock is not None:
            self._moves(clock, threads, most)
        self.search.begin(self.record)

    def at(self, field: int) -> np.ndarray:
        """An array of the block."""
        return self.block[self.choices.slices[field]]

    def _moves(self, clock: Clock, threads: int, most: int) -> None:
        """By value: how it is moved, if no step that computes another one again reads it, and if one does."""
        problem, keeps = self.choices.problem, self.choices.problem.keeps
        count = len(problem.names)
        sizes = self.at(Frame.bytes).tolist()
        for i, name in enumerate(self.choices.names):
            reads = [] if name in problem.outside else keeps.reads[name]  # tensors of PyTorch stay where they are
            if not reads or not sizes[i]:
                continue
            late = next((n for n in reads if n not in keeps.optional), reads[0]) if i < count else reads[0]
            self.at(Frame.gone)[i] = clock.gone(name, sizes[i])
            self.at(Frame.late)[i] = clock.there(late, sizes[i])
            self.at(Frame.early)[i] = clock.there(reads[0], sizes[i])
            self.at(Frame.left)[count + i] = 1
            copying = clock.each + clock.seconds(sizes[i])
            self.at(Frame.copying)[count + i] = round(copying * PICO)
            self.at(Frame.copy_cost)[count + i] = round(copying * clock.share * PICO)
        self.record.threads, self.record.most = threads, most
        self.record.hidden = round(clock.hidden * PICO)

    def advance(self, until: int) -> list[int]:
        """The peaks of all points up to one that may need at most `until` bytes, or to the last."""
        self.record.stop = until
        self.search.advance(self.record)
        return self.at(Frame.point_live)[:self.record.points].tolist()  # type: ignore[no-any-return]

    def bounds(self, first: int, end: int) -> list[int]:
        """What no layouts of some points need less than."""
        return self.at(Frame.point_bound)[first:end].tolist()  # type: ignore[no-any-return]

    def seconds(self, number: int) -> float:
        """What a point takes longer, by estimate, of all threads."""
        return float(self.at(Frame.point_picoseconds)[number]) / PICO

    @property
    def done(self) -> bool:
        """Whether nothing is left to choose."""
        return bool(self.record.done)

    def point(self, number: int) -> TradeoffPoint:
        """One of the points that `advance` has found."""
        count = len(self.choices.problem.names)
        taken = self.at(Frame.taken)[:self.at(Frame.point_choices)[number]].tolist()
        moved = [row - count for row in taken if row >= count]
        dropped = {row for row in taken if row < count}.difference(moved)
        names = self.choices.names
        return TradeoffPoint(frozenset(names[i] for i in dropped), int(self.at(Frame.point_live)[number]),
                    self.seconds(number), tuple(self._moved(dropped, moved)),
                    int(self.at(Frame.point_away)[number]))

    def _moved(self, dropped: set[int], moved: Sequence[int]) -> Iterator[OffloadMove]:
        """How each of some values is moved, segment by segment, while those are dropped."""
        if not moved:
            return
        problem = self.choices.problem
        runs = problem.keeps.runs(SavePolicy(frozenset(self.choices.names[i] for i in dropped)))
        homes = {i: number for number, segment in enumerate(problem.segments) for i in segment.members}
        gone, late, early = (self.at(field).tolist() for field in (Frame.gone, Frame.late, Frame.early))
        for i in sorted(moved, key=lambda i: (homes.get(i, len(homes)), i)):
            name = self.choices.names[i]
            steps = {problem.optional[k] for k in problem.segments[homes[i]].steps} if i in homes else set()
            read = not steps.isdisjoint(runs.intersection(problem.keeps.reads[name]))
            yield OffloadMove(name, gone[i], early[i] if read else late[i])

