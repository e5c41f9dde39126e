"""What a call under a limit does not keep for its backward: decided from its sizes, before it runs.

    bytes alive, forward then backward, everything kept          a rung lower: h of layer 0 computed again
         __/^^\\__                                                    __/^^\\__
      __/        \\__                                              _/^        \\_/\\_

A *ladder* of what to drop is made once per shape that does not fit as it is: rung by rung the value that relieves the
fullest step and costs least time for its bytes is dropped, too (a greedy covering), so that each rung's peak is below
that of the one before. A call takes the first rung that fits into its limit: a lower limit never means a higher peak.
What is alive is counted from the very lives and sizes that the layouts are made of, and the rung that is taken is laid
out before the call begins.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anyshape.base.errors import LimitError
from anyshape.plan.alloc import live_bytes
from anyshape.plan.hold import owned_elsewhere
from anyshape.plan.plan import Buffer, LibraryStep, MemoryStep, Plan, Step, Window, touched
from anyshape.run.arena import Held
from anyshape.run.call import held_bytes
from anyshape.run.keeping import EVERYTHING, Keeping
from anyshape.run.record import Record
from anyshape.sym.expr import evaluate

if TYPE_CHECKING:
    from anyshape.run.executable import Executable

REMEMBERED = 512  # ladders, records and needs, of the shapes met last
# what a step that is run again costs: operations and bytes a second on one core (docs/performance.md)
OPERATIONS, BYTES = 80e9, 10e9
NAMED = 4  # values that an error names


@dataclass(frozen=True, slots=True)
class Rung:
    """What is dropped, the most bytes alive at once, and seconds that computing it again takes, by estimate."""

    dropped: frozenset[str]
    live: int
    seconds: float


class Limit:
    """The limit of one forward with its backward, or of a program alone.

    Args:
        program: the forward, or a program that no backward follows.
        backward: None where there is none.
        bytes_: that both together may take beyond what is alive when they are called.
        held: what tapes of earlier forwards keep of that, of all programs that share the limit.
    """

    def __init__(self, program: Executable, backward: Executable | None, bytes_: int, held: Held) -> None:
        self.program = program
        self.backward = backward
        self.bytes = bytes_
        self.held = held
        self.ladders: dict[tuple[int, ...], list[Rung]] = {}
        self.records: dict[tuple[tuple[int, ...], Keeping], Record] = {}
        self.needs: dict[tuple[tuple[int, ...], Keeping, int], int] = {}
        self.lock = threading.Lock()

    def says(self, values: dict[str, int]) -> str:
        """What a call at these sizes does to stay within the limit, in words."""
        all_kept = self.needed(values, EVERYTHING)
        try:
            keeping = self.choose(values)
        except LimitError as error:
            return f"limit {_mega(self.bytes)}: too low for {_mega(all_kept)}; {error.do}"
        if keeping == EVERYTHING:
            return f"limit {_mega(self.bytes)}: {_mega(all_kept)} are needed, everything is kept"
        rung = next(rung for rung in self.ladder(values) if rung.dropped == keeping.dropped)
        saved = len(self.program.maker.keeps.kept_buffers)
        return (f"limit {_mega(self.bytes)}: {_mega(all_kept)} with everything kept, "
                f"{_mega(self.needed(values, keeping))} with {len(rung.dropped)} of {saved} saved values computed "
                f"again, some {rung.seconds * 1e3:.1f} ms of work")

    def record(self, values: dict[str, int], keeping: Keeping) -> Record:
        """The forward's record, remembered."""
        return self._remembered(self.records, (_key(values), keeping), lambda: self.program.maker.make(values, keeping))

    def fit(self, record: Record) -> Record:
        """The record of a call at the same sizes that fits beside what earlier forwards keep; memory that nobody uses
        is given back if it would be beside the limit.

        Raises:
            LimitError: there is none.
        """
        busy = self.held.bytes
        need = self.needed(record.values, record.keeping)
        if busy + need > self.bytes:
            record = self.record(record.values, self.choose(record.values, busy))
            need = self.needed(record.values, record.keeping)
        kept, temporary = self.program.context.kept, self.program.context.temporary
        idle = kept.idle_after(0 if record.chunks else record.kept) + temporary.idle_after(
            record.temporary + record.scratch * self.threads())
        if idle and busy + need + idle > self.bytes:
            kept.release_idle()
            temporary.release_idle()
        return record

    def threads(self) -> int:
        """How many run a call."""
        return self.program.threads or torch.get_num_threads()

    def choose(self, values: dict[str, int], busy: int = 0) -> Keeping:
        """What a call at the symbols' `values` keeps. `busy`: bytes that earlier forwards still keep.

        Raises:
            LimitError: the call cannot be done within the limit.
        """
        room = self.bytes - busy
        least = self.needed(values, EVERYTHING)
        if least <= room:
            return EVERYTHING
        rungs = self.ladder(values)
        for rung in rungs:
            if rung.live <= room:
                keeping = Keeping(rung.dropped, apart=True)
                found = self.needed(values, keeping)
                if found <= room:
                    return keeping
                least = min(least, found)
        if rungs:
            least = min(least, self.needed(values, Keeping(rungs[-1].dropped, apart=True)))
        raise self._error(values, rungs[-1].dropped if rungs else frozenset(), least, busy)

    def needed(self, values: dict[str, int], keeping: Keeping) -> int:
        """The most bytes that a forward and its backward take, exactly: by the layouts that they will use."""
        threads = self.threads()
        return self._remembered(self.needs, (_key(values), keeping, threads),
                                lambda: self._needed(values, keeping, threads))

    def _remembered(self, table: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
        with self.lock:
            known = table.get(key)
        if known is None:
            known = make()
            with self.lock:
                while len(table) >= REMEMBERED:
                    table.pop(next(iter(table)))
                table[key] = known
        return known

    def _needed(self, values: dict[str, int], keeping: Keeping, threads: int) -> int:
        maker = self.program.maker
        record = self.record(values, keeping)
        found = record.arena + record.scratch * threads + held_bytes(maker.plan, values)
        if self.backward is None:
            return found
        results = sum(evaluate(b.bytes, values) for b in maker.outputs)
        later = self.backward.maker
        values = self.later(values)
        record = later.make(values, keeping)
        plan = later.plan
        end = len(plan.steps)
        used = later.keeps.used(keeping)
        lives = [(evaluate(b.bytes, values), b.first, b.last) for b in plan.buffers
                 if b.home == "output" or (b.home == "extern" and (b.name in used or b.name not in later.keeps.made))]
        lives += [(evaluate(b.bytes, values), 0, last) for b, last in self.beside()]
        if record.chunks:
            gone = {step.chunk: number for number, step in enumerate(plan.steps) if isinstance(step, MemoryStep)}
            lives += [(size, 0, gone.get(chunk, end + 1) - 1) for chunk, size in enumerate(record.chunks)]
        else:
            lives.append((record.kept, 0, end))
        most = live_bytes([one[0] for one in lives], [one[1:] for one in lives], end)
        return max(found, most + record.temporary + record.scratch * threads + results)

    def beside(self) -> list[tuple[Buffer, int]]:
        """Tensors outside the arena that the tape alone keeps, and the backward's step after which each goes."""
        assert self.backward is not None
        plan = self.backward.plan
        elsewhere = owned_elsewhere(plan, self.program.plan)
        dropped = {name: number for number, step in enumerate(plan.steps) if isinstance(step, MemoryStep)
                   for name in step.drop}
        results = {b.name for b in self.program.maker.outputs}
        tape = {i: entry.buffer for i, entry in enumerate(self.program.plan.saved) if isinstance(entry, Window)}
        return [(b, dropped.get(b.name, len(plan.steps))) for b in plan.buffers
                if b.name in elsewhere and b.home == "tape" and tape[b.index] not in results]

    def later(self, values: dict[str, int]) -> dict[str, int]:
        """The backward's sizes: the forward's, and numbers that nothing depends on."""
        assert self.backward is not None
        return {**dict.fromkeys(self.backward.layout.symbols, 0), **values}

    def ladder(self, values: dict[str, int]) -> list[Rung]:
        """The rungs at these sizes, from the first that is below keeping everything on."""
        if self.backward is None or not self.backward.plan.again:
            return []
        return self._remembered(self.ladders, _key(values), lambda: _Curve(
            self.program, self.backward, self.later(values), self.beside()).ladder())  # type: ignore[arg-type]

    def _error(self, values: dict[str, int], dropped: frozenset[str], least: int, busy: int) -> LimitError:
        shape = ", ".join(f"{name}={value}" for name, value in sorted(values.items())[:8])
        if self.backward is None:
            curve = _alone(self.program, values)
        else:
            curve = _Curve(self.program, self.backward, self.later(values), self.beside()).alive(dropped)
        largest = "; ".join(f"{name} {_mega(size)}" for name, size in curve[:NAMED])
        others = f", and {_mega(busy)} are kept for backwards that have not run" if busy else ""
        return LimitError(
            f"{self.program.name} cannot run within {_mega(self.bytes)} at {shape}",
            why=f"it needs {_mega(least)} at least, with all computed again that can be{others}; at its fullest step "
                f"there are {largest}",
            do=f"set memory_limit to {least + busy} ({_mega(least + busy)}) or more, or call with smaller sizes")


def _key(values: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(values[name] for name in sorted(values))


def _mega(bytes_: int) -> str:
    return f"{bytes_ / 1e6:.1f} MB"


def _seconds(step: Step, values: Mapping[str, int]) -> float:
    """What a step takes, by estimate."""
    bytes_ = sum(evaluate(window.type.bytes, values) for window in touched(step))
    operations = 0
    if isinstance(step, LibraryStep):
        first, second = step.inputs[:2]
        operations = 2 * evaluate(first.type.count, values) * evaluate(second.type.shape[-1], values)
        if not step.op.startswith("matmul"):  # scores, and what they weigh
            operations = 4 * evaluate(first.type.count, values) * evaluate(second.type.shape[-2], values)
    return operations / OPERATIONS + bytes_ / BYTES


def _alone(program: Executable, values: dict[str, int]) -> list[tuple[str, int]]:
    """What is alive at the fullest step of a program, the largest first."""
    end = len(program.plan.steps)
    lives = [(b, evaluate(b.bytes, values), b.first, end if b.home in ("saved", "output") else b.last)
             for b in program.plan.buffers if b.home in ("arena", "saved", "output", "extern")]
    curve = np.zeros(end + 2, np.int64)
    for _, size, first, last in lives:
        curve[first:last + 1] += size
    at = int(curve.argmax())
    found = [(_named(b, program.plan), size) for b, size, first, last in lives if first <= at <= last]
    return sorted(found, key=lambda one: -one[1])


def _named(buffer: Buffer, plan: Plan) -> str:
    """The buffer with the line of the model that makes it."""
    step = plan.steps[min(buffer.first, len(plan.steps) - 1)]
    where = getattr(step, "where", "").split("; ")[0]
    return f"{buffer.name} ({where})" if where else buffer.name


class _Curve:
    """Bytes alive at every step of a forward, then of its backward, as a function of what is dropped."""

    def __init__(self, program: Executable, backward: Executable, values: dict[str, int],
                 beside: list[tuple[Buffer, int]]) -> None:
        self.values = values
        self.forward, self.plan = program.plan, backward.plan
        self.maker = backward.maker
        self.border = len(self.forward.steps) + 1
        self.length = self.border + len(self.plan.steps) + 1
        sizes = {b.name: -(-evaluate(b.bytes, values) // 64) * 64 for b in self.forward.buffers if b.home == "saved"}
        self.sizes = sizes
        self.again = {one.saved: one for one in self.plan.again}
        buffers = {b.name: b for b in self.plan.buffers}
        regions = {b.name: region.last for b, region in zip(
            [b for b in self.forward.buffers if b.home == "saved"], self.maker.regions, strict=True)}
        # (name, bytes, first, last) of what is there whatever is dropped; -1: in the forward; dropped or not: self.held
        self.fixed: list[tuple[str, int, int, int]] = []
        self.held: dict[str, tuple[int, int, int]] = {}
        for b in self.forward.buffers:
            size = evaluate(b.bytes, values)
            if b.home == "saved":
                self.held[b.name] = sizes[b.name], b.first, self.border + max(regions[b.name], -1)
            elif b.home in ("arena", "extern"):
                self.fixed.append((_named(b, self.forward), size, b.first, b.last))
            elif b.home == "output":
                self.fixed.append((_named(b, self.forward), size, b.first, self.length - 1))
        for b in self.plan.buffers:
            if b.home in ("arena", "extern", "output") and b.name not in self.maker.keeps.made:
                last = len(self.plan.steps) if b.home == "output" else b.last
                self.fixed.append((_named(b, self.plan), evaluate(b.bytes, values), self.border + b.first,
                                   self.border + last))
        for b, last in beside:
            self.fixed.append((_named(b, self.plan), evaluate(b.bytes, values), self.border, self.border + last))
        self.base = np.zeros(self.length, np.int64)
        for _, size, first, last in (*self.fixed, *(("", *one) for one in self.held.values())):
            self.base[first:last + 1] += size
        for records, part in ((program.maker, slice(0, self.border)), (self.maker, slice(self.border, None))):
            threads = program.threads or torch.get_num_threads()
            self.base[part] += records.make(values).scratch * threads
        # what dropping a value takes away
        self.less = {}
        for name, one in self.again.items():
            change = np.zeros(self.length, np.int64)
            change[program.maker.keeps.ends[name] + 1:self.border + buffers[one.buffer].first] = -sizes[name]
            self.less[name] = change
        self.temporaries = {b.name: b for b in self.plan.buffers if b.name in self.maker.keeps.made}
        self.parts: dict[frozenset[str], tuple[float, np.ndarray]] = {}

    def part(self, dropped: frozenset[str]) -> tuple[float, np.ndarray]:
        """Seconds, and bytes beside, of computing again what is dropped of one segment."""
        known = self.parts.get(dropped)
        if known is None:
            runs = self.maker.keeps.runs(Keeping(dropped))
            used = self.maker.keeps.used(Keeping(dropped))
            more = np.zeros(self.length, np.int64)
            for name in used & self.temporaries.keys():
                b = self.temporaries[name]
                more[self.border + b.first:self.border + b.last + 1] += evaluate(b.bytes, self.values)
            seconds = sum(_seconds(self.plan.steps[number], self.values) for number in runs)
            known = self.parts[dropped] = seconds, more
        return known

    def ladder(self) -> list[Rung]:
        """See the head of this file."""
        names = [name for name in sorted(self.again) if self.sizes[name] > 0]
        segment = np.array([self.again[name].segment for name in names], np.int64)
        taken: dict[int, frozenset[str]] = {int(number): frozenset() for number in segment}
        curve = self.base.copy()
        lowest = int(curve.max())
        rungs = [Rung(frozenset(), lowest, 0.0)]
        # by value: what dropping it next changes, and what it costs; only its own segment changes that
        change = np.zeros((len(names), self.length), np.int64)
        cost = np.zeros(len(names))
        left = np.ones(len(names), bool)

        def look(number: int) -> None:
            before = self.part(taken[number])
            for i in np.flatnonzero(left & (segment == number)):
                after = self.part(taken[number] | {names[i]})
                change[i] = self.less[names[i]] + after[1] - before[1]
                cost[i] = after[0] - before[0]

        for number in taken:
            look(number)
        seconds = 0.0
        while left.any():
            gain = -change[:, int(curve.argmax())]
            score = np.where(left & (gain > 0), gain / np.maximum(cost, 1e-9), 0.0)
            best = int(score.argmax())
            if score[best] <= 0:
                break
            number = int(segment[best])
            curve += change[best]
            seconds += float(cost[best])
            taken[number] |= {names[best]}
            left[best] = False
            look(number)
            peak = int(curve.max())
            if peak < lowest:
                lowest = peak
                rungs.append(Rung(frozenset().union(*taken.values()), peak, seconds))
        return rungs

    def alive(self, dropped: frozenset[str]) -> list[tuple[str, int]]:
        """What is alive at the fullest step, the largest first."""
        lives = [*self.fixed]
        curve = self.base.copy()
        homes = {b.name: b for b in self.forward.buffers}
        for name, one in self.held.items():
            if name not in dropped:
                lives.append((_named(homes[name], self.forward), *one))
        for number in {self.again[name].segment for name in dropped}:
            some = frozenset(name for name in dropped if self.again[name].segment == number)
            curve += self.part(some)[1]
        for name in dropped:
            curve += self.less[name]
        at = int(curve.argmax())
        return sorted(((name, size) for name, size, first, last in lives if first <= at <= last),
                      key=lambda one: -one[1])


def pair(program: Executable, backward: Executable | None, bytes_: int, held: Held) -> Limit:
    """Puts the limit on a forward and its backward, or on a program alone; `held`: see `Limit`."""
    limit = Limit(program, backward, bytes_, held)
    if backward is not None:
        program.maker.keeps.chunks = backward.plan.chunks
    program.limit = limit
    return limit



