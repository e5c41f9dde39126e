"""Memory-budget arbitration between programs: saved tensors of a forward that waits may be dropped later, and
recomputed in its backward.

    forward of A   keeps h, k     forward of B   has no room: A's tape drops h, too; what stays of its chunk is copied
    backward of B                 backward of A  computes h again

A backward has optional steps for whatever is dropped, so that a tape may take any lower `SavePolicy` until its backward
begins. Who gives how much is one choice among the call and all tapes: again and again what takes the least work for its
bytes. What a tape had to give is remembered, and the next step's forward keeps no more than that.
"""
from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.base.align import align
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, LimitError, StoreError
from anyshape.base.units import bytes_text
from anyshape.plan.ir.program import Window
from anyshape.runtime.budget.calibration import Calibration
from anyshape.runtime.budget.memory_budget import APART, UNLIMITED, MemoryBudget, key_of
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.memory import huge_pages
from anyshape.runtime.memory.offload_store import Reservation
from anyshape.runtime.memory.pools import Block, LiveTapes, SegmentedBlock, TapeMemory, whole
from anyshape.runtime.specialize.offload_schedule import first_read
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.runtime.specialize.specialization import Specialization
from anyshape.sym.expr import Size, evaluate
from anyshape.torch_compat.dtypes import TORCH_DTYPES

REMEMBERED = 256  # choices, for the sizes met last
SHORTEST = 1e-9  # seconds, so that nothing is for free


@dataclass(slots=True)
class PolicyOption:
    """What may be kept, the bytes that this takes, and seconds of work. exact: of the bytes that is known."""

    policy: SavePolicy
    bytes: int
    seconds: float
    exact: bool = True


@dataclass(slots=True)
class Participant:
    """A forward that begins, a backward that begins, or a tape that waits, and what it can choose from: less and less
    bytes. at: what is chosen."""

    limit: MemoryBudget
    values: dict[str, int]
    options: list[PolicyOption]
    tape_memory: TapeMemory | None = None
    at: int = 0

    @property
    def chosen(self) -> PolicyOption:
        """See `at`."""
        return self.options[self.at]

    @property
    def fits(self) -> bool:
        """Whether a tape's own backward takes no more than before, so that its turn comes."""
        limit, values = self.limit, self.values
        if self.tape_memory is None or self.at == 0:
            return True
        before, after = (limit.needs_of(values, one.policy)[1] for one in (self.options[0], self.chosen))
        return after <= max(before, limit.bytes - sum(tape_memory.bytes for tape_memory in limit.held.tapes
                                                      if tape_memory.number < self.tape_memory.number))


class SharedMemoryBudget(MemoryBudget):
    """A limit that calls keep to: what a call takes is decided when it begins, beside the tapes that wait."""

    def fit(self, record: Specialization) -> tuple[Specialization, Reservation | None]:
        """The record of a call at the same sizes that fits beside what earlier forwards keep, and its place in the
        store if it moves values out; memory that nobody uses is given back if it would be beside the limit.

        Raises:
            LimitError: there is none.
        """
        with self.held.lock:
            return self._fit(record, record.values)

    def _fit(self, record: Specialization, values: dict[str, int]) -> tuple[Specialization, Reservation | None]:
        made = self.program.specializer.made
        learnt = self.learnt.get((len(self.held.tapes), key_of(values))) if self.learnt else None
        if learnt is not None and self.needed(values, learnt) <= self.room():
            record = made(values, learnt)
        need, room = self.needed(values, record.policy), self.room()
        if need > room and self.total < UNLIMITED:
            huge_pages.give_back()
            room = self.room()
        if need > room:
            record = made(values, make_room(self, values, room))
            need, room = self.needed(values, record.policy), self.room()
        elif 2 * record.kept > room and record.policy == SAVE_ALL and self.problem is not None and not self.alone \
                and self.needed(values, APART) <= room:
            record = made(values, APART)  # a later call may want some of it
            need = self.needed(values, APART)
        space = None
        if record.stored and self.store is not None:
            try:
                space = self.store.reserve(record.stored)
            except StoreError as error:
                record = made(values, self.choose(values, room, error))
                need = self.needed(values, record.policy)
        kept, temporary = self.program.context.kept, self.program.context.temporary
        idle = kept.idle_after(0 if record.chunks else record.kept) + temporary.idle_after(
            record.temporary + record.scratch * self.threads())
        if idle and need + idle > room:
            kept.release_idle()
            temporary.release_idle()
        note_call(self.held, need)
        return record, space

    def begin(self, tape_memory: TapeMemory) -> None:
        """A backward begins: its tape stays as it is from now on, and other tapes drop more if they would be over the
        limit with it.

        Raises:
            LimitError: they would be whatever they drop. Other backwards may run first.
        """
        with self.held.lock:
            if self.problem is not None and not tape_memory.begun:
                _fit_backward(tape_memory, self)
                if self.alone is None and not tape_memory.beside:
                    self.alone = True
            tape_memory.begun = True


@dataclass(frozen=True, slots=True)
class BudgetTerms:
    """The limits of `config` on a forward and its backward, or on a program alone; the others: see `MemoryBudget`."""

    backward: Executable | None
    config: Config
    held: LiveTapes
    calibration: Calibration | None
    zeros: Sequence[tuple[Size, int]] = ()

    def bind(self, program: Executable) -> SharedMemoryBudget:
        """The budget of a program, which is being made."""
        config = self.config
        store = program.context.stores.at(config.memory_store, config.memory_store_limit)
        return SharedMemoryBudget(program, self.backward, config.memory_limit or UNLIMITED, self.held,
                                  config.memory_limit_total or UNLIMITED, store, self.calibration, self.zeros)


def make_room(limit: MemoryBudget, values: dict[str, int], room: int) -> SavePolicy:
    """What a call at the symbols' `values` keeps that does not fit in `room` bytes as it is. Tapes that wait drop more
    for it, where that takes less work, or there is no other way.

    Raises:
        LimitError: it does not fit whatever they drop.
    """
    situation = _situation(limit, values, room)
    known = limit.settled.get(situation)
    if known is not None:
        return known
    fixed: set[TapeMemory | None] = set()
    while True:
        sides = [_waiting(tape_memory) for tape_memory in limit.held.tapes if tape_memory not in fixed]
        sides = [side for side in sides if len(side.options) > 1]
        freed = sum(side.options[0].bytes - side.options[-1].bytes for side in sides)
        policy = limit.choose(values, room + freed, freed=freed)
        if not sides:
            return _noted(limit.settled, _situation(limit, values, room), policy)
        own = Participant(limit, values, [PolicyOption(SAVE_ALL, limit.needed(values, SAVE_ALL), 0.0), *_rungs(limit,
                                                                                                               values)])
        if not _settled([own, *sides], room + sum(side.options[0].bytes for side in sides)):
            return limit.choose(values, room)
        fixed |= _lowered(sides)
        if limit.total < limit.bytes:
            huge_pages.give_back()
        room = limit.room()
        if limit.needed(values, own.chosen.policy) <= room:
            return _noted(limit.settled, _situation(limit, values, room), own.chosen.policy)


def _situation(limit: MemoryBudget, values: dict[str, int], room: int) -> tuple[Any, ...]:
    """What a choice depends on."""
    return key_of(values), room, limit.threads(), *(tape_memory.record for tape_memory in limit.held.tapes)


def _noted(table: dict[Any, SavePolicy], key: Any, policy: SavePolicy) -> SavePolicy:
    """Notes a choice, in the place of an old one if there are many."""
    while len(table) >= REMEMBERED:
        table.pop(next(iter(table)))
    table[key] = policy
    return policy


def note_call(held: LiveTapes, need: int) -> None:
    """Notes that a call which takes `need` bytes begins while tapes wait."""
    tapes = held.tapes
    bytes_ = sum(tape_memory.bytes for tape_memory in tapes)
    for tape_memory in tapes:
        if not tape_memory.begun and isinstance(tape_memory.limit, MemoryBudget):
            tape_memory.limit.alone = False
            tape_memory.beside = max(tape_memory.beside, need + bytes_ - tape_memory.bytes)


def _fit_backward(tape_memory: TapeMemory, limit: MemoryBudget) -> None:
    """Has a backward fit, and gives memory back that nobody uses if it would be beside the limit."""
    values = tape_memory.record.values
    kept, temporary = limit.program.context.kept, limit.program.context.temporary
    others = limit.held.bytes - tape_memory.bytes
    if limit.learnt:
        _forget(tape_memory, limit, others)
    if _needed(tape_memory, limit) + others + kept.idle_after(0) + temporary.idle_after(0) <= limit.bytes:
        return
    if _needed(tape_memory, limit) + others > limit.bytes:
        _make_room_for_backward(tape_memory, limit)
        others = limit.held.bytes - tape_memory.bytes
    assert limit.backward is not None
    threads = limit.threads()
    record = limit.backward.specializer.made(limit.later(values), tape_memory.record.policy)
    block = whole(record.temporary + record.scratch * threads)
    # that of the forward is part of what the backward needs
    larger = max(whole(tape_memory.record.temporary + tape_memory.record.scratch * threads) - block, 0)
    idle = kept.idle_after(0) + max(temporary.idle_after(block) - larger, 0)
    if idle and _needed(tape_memory, limit) + others + idle > limit.bytes:
        kept.release_idle()
        temporary.release_idle()


def _forget(tape_memory: TapeMemory, limit: MemoryBudget, others: int) -> None:
    """Forgets what a tape had to drop, if nobody needed it this time."""
    values = tape_memory.record.values
    key = tape_memory.number, key_of(values)
    if limit.learnt.get(key) == tape_memory.record.policy:
        everything = _kept(limit, _sizes(limit, values), SAVE_ALL)
        if tape_memory.beside + everything <= limit.bytes and others + limit.needed(values, SAVE_ALL) <= limit.bytes:
            limit.learnt.pop(key)


def _needed(tape_memory: TapeMemory, limit: MemoryBudget) -> int:
    """What the backward of a tape takes."""
    more = tape_memory.block.bytes - whole(tape_memory.record.kept) if isinstance(tape_memory.block, Block) else 0
    return limit.needs_of(tape_memory.record.values, tape_memory.record.policy)[1] + more


def _make_room_for_backward(tape_memory: TapeMemory, limit: MemoryBudget) -> None:
    """Has a backward fit. Errors as of `begin`."""
    values = tape_memory.record.values
    fixed: set[TapeMemory | None] = set()
    while True:
        need, others = _needed(tape_memory, limit), limit.held.bytes - tape_memory.bytes
        if need + others <= limit.bytes:
            return
        own = Participant(limit, values, [PolicyOption(tape_memory.record.policy, need, 0.0)], tape_memory)
        if tape_memory not in fixed:
            own.options += [PolicyOption(one.policy, limit.needs_of(values, one.policy)[1], one.seconds)
                            for one in _waiting(tape_memory).options[1:]]
        sides = [own, *(_waiting(other) for other in limit.held.tapes if other is not tape_memory)]
        for side in sides[1:]:
            if side.tape_memory in fixed:
                side.options = side.options[:1]
        if not _settled(sides, limit.bytes):
            least = sum(min(option.bytes for option in side.options) for side in sides)
            raise LimitError(
                f"the backward of {limit.program.name} cannot run within {bytes_text(limit.bytes)} now",
                why=f"it needs {bytes_text(need)}, and {bytes_text(others)} are kept for other backwards that have "
                    "not run; dropping all that can be computed again does not make room",
                do=f"set memory_limit to {least} ({bytes_text(least)}) or more, or run the backward of the last "
                   "forward first")
        fixed |= _lowered(sides)


def _rungs(limit: MemoryBudget, values: dict[str, int]) -> list[PolicyOption]:
    """What a call may choose from beside keeping everything; bytes by estimate."""
    return [PolicyOption(one.policy, one.live, one.seconds, exact=False) for one in limit.tradeoff(values) or ()]


def _waiting(tape_memory: TapeMemory) -> Participant:
    """A tape that waits. The seconds of each option are those that it adds; copying is left out, for it is done once.
    """
    record = tape_memory.record
    assert isinstance(tape_memory.limit, MemoryBudget)
    limit, now = tape_memory.limit, record.policy
    found = [PolicyOption(now, tape_memory.bytes, 0.0)]
    if tape_memory.begun or tape_memory.tape is None or tape_memory.tape() is None or limit.problem is None:
        return Participant(limit, record.values, found, tape_memory)
    choices = [(point.dropped, point.seconds) for point in limit.tradeoff(record.values, moving=False) or ()]
    done = max((seconds for dropped, seconds in choices if dropped <= now.dropped), default=0.0)
    most = choices[-1][1] if choices else 0.0
    sizes = _sizes(limit, record.values)
    for dropped, seconds in (*choices, (frozenset(limit.problem.names), 2 * most)):
        policy = _with(limit, now, dropped)
        bytes_ = _kept(limit, sizes, policy)
        if bytes_ < found[-1].bytes:
            found.append(PolicyOption(policy, bytes_, max(seconds - done, 0.0)))
    return Participant(limit, record.values, found, tape_memory)


def _with(limit: MemoryBudget, policy: SavePolicy, dropped: frozenset[str]) -> SavePolicy:
    """`policy` with more dropped; what is moved out stays there."""
    moved = {move.saved for move in policy.moved}
    found = SavePolicy(policy.dropped | (dropped - moved), True, policy.moved)
    if moved and limit.backward is not None:
        keeps = limit.backward.specializer.keeps
        runs = keeps.runs(found)
        found = dataclasses.replace(found, moved=tuple(
            dataclasses.replace(move, back=min(move.back, first_read(keeps, move.saved, runs)))
            for move in policy.moved))
    return found


def _sizes(limit: MemoryBudget, values: dict[str, int]) -> tuple[list[int], dict[str, int]]:
    """Bytes of what a forward saves in the arena, padded, and outside it."""
    keeps = limit.program.specializer.keeps
    return ([align(evaluate(b.bytes, values)) for b in keeps.kept_buffers],
            {b.name: evaluate(b.bytes, values) for b in keeps.outside})


def _kept(limit: MemoryBudget, sizes: tuple[list[int], dict[str, int]], policy: SavePolicy) -> int:
    """Bytes that a tape keeps."""
    _, starts = limit.program.specializer.keeps.kept(sizes[0], policy)
    return whole(starts[-1]) + sum(bytes_ for name, bytes_ in sizes[1].items() if name not in policy.dropped)


def _settled(sides: Sequence[Participant], room: int) -> bool:
    """Chooses so that all together take `room` bytes at most, with little work; False: they cannot."""
    while _chosen(sides, room):
        wrong = [side for side in sides if not side.fits]
        for side in wrong:
            side.options.pop(side.at)
        if not wrong:
            return True
        for side in sides:
            side.at = 0
    return False


def _chosen(sides: Sequence[Participant], room: int) -> bool:
    while True:
        over = sum(side.chosen.bytes for side in sides) - room
        if over <= 0:
            guess = next((side for side in sides if not side.chosen.exact), None)
            if guess is None:
                return True
            guess.chosen.bytes = guess.limit.needed(guess.values, guess.chosen.policy)
            guess.chosen.exact = True
            continue
        best, chosen, number = 0.0, None, 0
        for side in sides:
            now = side.chosen
            for k, option in enumerate(side.options[side.at + 1:], side.at + 1):
                gain = min(now.bytes - option.bytes, over) / max(option.seconds - now.seconds, SHORTEST)
                if gain > best:
                    best, chosen, number = gain, side, k
        if chosen is None:
            return False
        chosen.at = number


def _lowered(sides: Sequence[Participant]) -> set[TapeMemory | None]:
    """Has the tapes drop what was chosen. Returns those for which there is no room to copy what stays.

    Ctrl-C waits: what is done in between would leave a tape that is neither the old one nor the new one.
    """
    stuck: set[TapeMemory | None] = set()
    for side in sorted((side for side in sides if side.at), key=lambda side: not _is_apart(side)):
        if side.tape_memory is None:
            continue
        move = _Move(side.tape_memory, side.limit, side.chosen.policy)
        if not move.has_room():
            stuck.add(side.tape_memory)
            continue
        worker = threading.Thread(target=move.run, name="anyshape tape")
        worker.start()
        interrupt: KeyboardInterrupt | None = None
        while worker.is_alive():
            try:
                worker.join()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if move.error is not None:
            raise move.error
    return stuck


def _is_apart(side: Participant) -> bool:
    return side.tape_memory is not None and isinstance(side.tape_memory.block, SegmentedBlock)


class _Move:
    """Has a tape keep less: copies what stays of the chunks that change, one after another."""

    def __init__(self, tape_memory: TapeMemory, limit: MemoryBudget, policy: SavePolicy) -> None:
        self.tape_memory, self.limit = tape_memory, limit
        self.tape = None if tape_memory.tape is None else tape_memory.tape()
        self.program = limit.program
        self.old, self.new = tape_memory.record, self.program.specializer.made(tape_memory.record.values, policy)
        self.apart = isinstance(tape_memory.block, SegmentedBlock)
        keeps = self.program.specializer.keeps
        chunks = keeps.chunks or (tuple(b.name for b in keeps.kept_buffers),)
        self.stays = [[name for name in chunk if name not in policy.away] for chunk in chunks]
        before = [[name for name in chunk if name not in self.old.policy.away] for chunk in chunks]
        # of chunks that change, those that become smallest first
        self.order = sorted((number for number in range(len(chunks))
                             if not self.apart or before[number] != self.stays[number]),
                            key=lambda number: self.new.chunks[number])
        self.error: AnyShapeError | None = None

    def has_room(self) -> bool:
        """Whether the copies may lie beside what is held; memory that nobody uses is given back for that."""
        now = most = 0
        for number in self.order:
            now += self.new.chunks[number]
            most = max(most, now)
            if self.apart:
                now -= self.old.chunks[number]
        kept, temporary = self.program.context.kept, self.program.context.temporary
        if most + kept.idle_after(0) + temporary.idle_after(0) > self.limit.room():
            kept.release_idle()
            temporary.release_idle()
        return most <= self.limit.room()

    def run(self) -> None:
        """Does it. A tape that is released meanwhile, by another thread or the collector of garbage, finds no block:
        its memory goes when the move is done."""
        tape_memory = self.tape_memory
        block = None if self.tape is None else tape_memory.taken()
        if block is None:
            return
        try:
            found = self._moved(block)
        except AnyShapeError as error:  # there is no memory
            self.error = error
            tape_memory.put(block)
            if self.apart and self.tape is not None:
                self.tape.release()  # some of its chunks are gone
            return
        self._describe()
        tape_memory.record, tape_memory.bytes = self.new, sum(self.new.chunks) + self.new.outside
        tape_memory.put(found)
        if isinstance(block, Block):
            tape_memory.pool.give(block)
        _noted(self.limit.learnt, (tape_memory.number, key_of(self.new.values)), self.new.policy)

    def _moved(self, block: Block | SegmentedBlock) -> SegmentedBlock:
        """What the tape keeps, out of what it kept so far."""
        pool, new = self.tape_memory.pool, self.new
        sizes = {b.name: evaluate(b.bytes, new.values) for b in self.program.specializer.keeps.kept_buffers}
        before = list(itertools.accumulate(self.old.chunks, initial=0))
        found = SegmentedBlock(pool, [0] * len(new.chunks), block.space if isinstance(block, SegmentedBlock) else None)
        found.starts = list(itertools.accumulate(new.chunks, initial=0))
        if isinstance(block, SegmentedBlock):
            found.blocks, found.addresses = [*block.blocks], [*block.addresses]
        for number in self.order:
            fresh = pool.fresh(new.chunks[number]) if new.chunks[number] else None
            target = 0 if fresh is None else fresh.address
            source = block.addresses[number] - before[number] if isinstance(block, SegmentedBlock) else block.address
            for name in self.stays[number]:
                pool.copy(target - found.starts[number] + new.offsets[name], source + self.old.offsets[name],
                          sizes[name])
            found.blocks[number], found.addresses[number] = fresh, target
            if isinstance(block, SegmentedBlock):
                block.blocks[number] = None
        return found

    def _describe(self) -> None:
        """Has the tape hold what is not kept, and what lies in the chunks, as what says what it is."""
        assert self.tape is not None
        values = self.tape.values  # none, if it has been released
        for i, entry in enumerate(self.program.plan.saved[:len(values)]):
            if isinstance(entry, Window) and (entry.buffer in self.new.offsets
                                              or entry.buffer in self.new.policy.dropped):
                shape, strides, _ = self.new.saved[i]
                values[i] = torch.empty_strided(shape, strides, dtype=TORCH_DTYPES[entry.type.dtype],
                                                          device="meta")
