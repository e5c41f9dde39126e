"""The memory budget: what a call under a limit recomputes or offloads for its backward, decided from its sizes before
it runs.

A call that does not fit as it is takes the first point of its sizes' tradeoff (runtime/budget/tradeoff_curve.py) that
does: a lower limit never means a higher peak. The point that is taken is laid out before the call begins.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anyshape.base.errors import LimitError, StoreError
from anyshape.base.units import bytes_text
from anyshape.kernel.schedule.hardware_params import Speeds
from anyshape.plan.ir.liveness import LiveRange, live_bytes
from anyshape.plan.ir.program import MemoryStep
from anyshape.runtime.budget.footprint import FootprintEstimator
from anyshape.runtime.budget.greedy_search import TradeoffPoint
from anyshape.runtime.budget.peak_breakdown import peak_breakdown
from anyshape.runtime.budget.tradeoff_curve import TradeoffCurve, TradeoffCurves
from anyshape.runtime.budget.tradeoff_problem import TradeoffProblem
from anyshape.runtime.cost.library_workspace import LibraryWorkspace
from anyshape.runtime.memory.offload_store import Store
from anyshape.runtime.memory.pools import LiveTapes, whole
from anyshape.runtime.memory.size_vectors import LiveBytes
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.sym.expr import Size, evaluate

if TYPE_CHECKING:
    from anyshape.runtime.budget.calibration import Calibration
    from anyshape.runtime.call.executable import Executable

REMEMBERED = 512  # problem and needs, of the shapes met last
UNLIMITED = sys.maxsize
APART = SavePolicy(apart=True)
OFTEN = 0.99  # of the room, what the bound of a point comes to that mostly fits
CHEAPER = 0.97  # of what a point that fits takes, what one before it takes that is laid out in any case
CLEARLY = 1.001  # of the room, more than what a point needs by estimate that is not laid out
NAMED = 4  # values that an error names
NAMED_SIZES = 8


def key_of(values: Mapping[str, int]) -> tuple[int, ...]:
    """By which sizes are told apart."""
    return tuple(values[name] for name in sorted(values))


class MemoryBudget:
    """The limit of one forward with its backward, or of a program alone.

    Args:
        program: the forward, or a program that no backward follows.
        backward: None where there is none.
        bytes_: that both together may take beyond what is alive when they are called.
        held: what tapes of earlier forwards keep of that, of all programs that share the limit.
        total: bytes that the whole process may have meanwhile.
        store: where values may be moved out to; None: nowhere.
        calibration: how fast the machine is; None: as usual.
        zeros: that are made for the backward, for outputs that nobody uses: bytes, and the last step there.
    """

    def __init__(self, program: Executable, backward: Executable | None, bytes_: int, held: LiveTapes,
                 total: int = UNLIMITED, store: Store | None = None,
                 calibration: Calibration | None = None, zeros: Sequence[tuple[Size, int]] = ()) -> None:
        self.store = store
        self.zeros = zeros
        self.calibration = calibration
        self.program = program
        self.backward = backward
        self.bytes = bytes_
        self.held = held
        self.total = total
        self.problem = None if backward is None else TradeoffProblem(program, backward)
        self.curves = None if self.problem is None else TradeoffCurves(self.problem)
        self.sizing = FootprintEstimator(program)
        self.later_sizing = None if backward is None else FootprintEstimator(backward)
        # tensors that are not in the arena while the backward runs, with their first and last steps there; some are
        # there only if they are needed to compute something again
        lives = [] if self.problem is None else self.problem.elsewhere
        self.elsewhere = LiveBytes([
            LiveRange(self.problem.bytes[life.number], max(life.first - self.problem.border, 0),
                      life.last - self.problem.border) for life in lives] if self.problem is not None else [],
            0 if backward is None else len(backward.plan.steps), f"results of {program.name}")
        self.only = [(i, life.name) for i, life in enumerate(lives)
                     if backward is not None and life.name in backward.specializer.keeps.made]
        self.library = None if backward is None else LibraryWorkspace(backward.plan)
        # by chunk of the kept block, the step of the backward that gives it back
        self.gone = {} if backward is None else {step.chunk: number for number, step in enumerate(backward.plan.steps)
                                                 if isinstance(step, MemoryStep)}
        self.known: dict[tuple[tuple[int, ...], int, bool], TradeoffCurve] = {}
        self.needs: dict[tuple[tuple[int, ...], SavePolicy, int], tuple[int, int]] = {}
        self.alone: bool | None = None  # no other call came before the backward; None: not known
        self.learnt: dict[tuple[int, tuple[int, ...]], SavePolicy] = {}  # what tapes had to drop for later calls
        self.settled: dict[tuple[Any, ...], SavePolicy] = {}  # what calls keep that began beside certain tapes
        self.lock = threading.Lock()

    def apart(self, bytes_: int = 0) -> MemoryBudget:
        """The same limit (of `bytes_` if there are any) as an object of its own, so that questions to it do not push
        out what calls remember."""
        return MemoryBudget(self.program, self.backward, bytes_ or self.bytes, LiveTapes(), self.total, self.store,
                     self.calibration, self.zeros)

    def room(self) -> int:
        """Bytes that a call may take now, blocks that idle included."""
        room = self.bytes - self.held.bytes
        if self.total < UNLIMITED:
            context = self.program.context
            idle = context.kept.idle_after(0) + context.temporary.idle_after(0)
            room = min(room, self.total - context.temporary.resident() + idle)
        return room

    def move(self, bytes_: int) -> None:
        """Calls that begin from now on keep to another limit."""
        self.bytes = bytes_
        self.learnt.clear()
        self.settled.clear()
        with self.program.lock:
            self.program.specializations.clear()

    def forget(self) -> None:
        """Forgets what is known of sizes."""
        with self.lock:
            self.known.clear()
            self.needs.clear()
            self.learnt.clear()
            self.settled.clear()

    def threads(self) -> int:
        """How many run a call."""
        return self.program.threads or torch.get_num_threads()

    def workers(self) -> int:
        """How many compute, each with the speeds of `speeds`: threads, or a device as a whole."""
        return self.threads() if self.program.target.streams is None else 1

    def seconds(self, point: TradeoffPoint) -> float:
        """What computing again and moving takes longer, by estimate, for those that compute."""
        return point.seconds / self.workers()

    def choose(self, values: dict[str, int], room: int | None = None, full: StoreError | None = None,
               freed: int = 0) -> SavePolicy:
        """What a call at the symbols' `values` keeps. `room`: bytes that it may take; left out, the whole limit.
        `full`: why nothing can be moved out, if something could. `freed`: of the room, what tapes can still drop.

        Raises:
            LimitError: the call cannot be done within that.
        """
        given, room = room, min(self.bytes, self.total) if room is None else room
        if self.needed(values, SAVE_ALL) <= room:
            return SAVE_ALL
        tradeoff = self.tradeoff(values, full is None)
        point = None if tradeoff is None else self._fits(tradeoff, values, room)
        if point is not None:
            return point.policy
        if given is None and self.total < UNLIMITED:
            room = min(room, self.room())  # what is alive by now counts in what is named
        raise self._error(values, room, full, freed)

    def _fits(self, tradeoff: TradeoffCurve, values: dict[str, int], room: int) -> TradeoffPoint | None:
        """The first point that fits into `room` bytes, or one that takes hardly more to compute again; None: none fits.

        A layout needs some more than the curve's bound, and of points that follow each other about as much. A point
        is laid out first that mostly fits, and then others that may by what the last one needed more: on from it until
        one fits, and then those before that, and any that is clearly cheaper."""
        first = tradeoff.next(0, room)
        number = max(first, tradeoff.next(first, int(OFTEN * room))) if first >= 0 else -1
        while number >= 0:
            need = self.needed(values, tradeoff.point(number).policy)
            if need <= room:
                break
            number = tradeoff.next(number + 1, room - (need - tradeoff.bound(number)))
        else:
            while first >= 0:  # near the least that works, nothing is left out
                if self.needed(values, tradeoff.point(first).policy) <= room:
                    return tradeoff.point(first)
                first = tradeoff.next(first + 1, room)
            return None
        more, cheap = need - tradeoff.bound(number), CHEAPER * tradeoff.cost(number)
        for before in range(first, number):
            may_need = tradeoff.bound(before)
            if may_need <= room and (may_need + more <= CLEARLY * room or tradeoff.cost(before) < cheap):
                point = tradeoff.point(before)
                if self.needed(values, point.policy) <= room:
                    return point
        return tradeoff.point(number)

    def least(self, values: dict[str, int], moving: bool = True) -> int:
        """The smallest limit that works at these sizes; `moving`: with values moved out, if there is a store."""
        return min(self.needed(values, policy) for policy in (SAVE_ALL, self.lowest(values, moving)))

    def lowest(self, values: dict[str, int], moving: bool = True) -> SavePolicy:
        """What needs least of all that the curve offers: mostly its last point."""
        tradeoff = self.tradeoff(values, moving)
        found, least = SAVE_ALL, sys.maxsize
        for number in () if tradeoff is None else tradeoff.upwards():
            if tradeoff is not None and tradeoff.bound(number) < least:
                policy = tradeoff.point(number).policy
                need = self.needed(values, policy)
                if need < least:
                    found, least = policy, need
        return found

    def needed(self, values: dict[str, int], policy: SavePolicy) -> int:
        """The most bytes that a forward and its backward take, exactly: by the layouts that they will use."""
        return max(self.needs_of(values, policy))

    def needs_of(self, values: dict[str, int], policy: SavePolicy) -> tuple[int, int]:
        """The most bytes that the forward takes, and its backward with what is kept and the forward's results."""
        threads = self.threads()
        return self._remembered(self.needs, (key_of(values), policy, threads),  # type: ignore[no-any-return]
                                lambda: self._needed(values, policy, threads))

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

    def _needed(self, values: dict[str, int], policy: SavePolicy, threads: int) -> tuple[int, int]:
        specializer = self.program.specializer
        blocks = self.sizing.at(values, policy)
        kept = whole(blocks.kept) if blocks.reused_output < 0 else 0
        temporary = whole(blocks.temporary + blocks.scratch * threads)
        found = kept + temporary + self.sizing.held.most(values, policy.dropped, specializer.keeps.ends)
        if self.backward is None or self.problem is None or self.later_sizing is None or self.library is None:
            return found, 0
        later = self.backward.specializer
        values = self.later(values)
        blocks = self.later_sizing.at(values, policy)
        end = len(later.plan.steps)
        there = self.elsewhere.sizes(values)
        if self.only:
            used = later.keeps.used(policy)
            there[[i for i, name in self.only if name not in used]] = 0
        begins = later.keeps.begins
        lives = [(evaluate(b.bytes, values), begins[b.name] if b.name in policy.dropped else 0, last)
                 for b, last in self.problem.beside]
        lives += [(evaluate(size, values), number, number) for size, number in later.keeps.spilled(policy)]
        lives += [(evaluate(size, values), 0, last) for size, last in self.zeros]
        lives += [(bytes_, number, number) for number, bytes_ in self.library.at(values)
                  if number not in later.keeps.optional or number in later.keeps.runs(policy)]
        if blocks.chunks:
            lives += [(size, 0, self.gone.get(chunk, end + 1) - 1) for chunk, size in enumerate(blocks.chunks)]
        else:
            lives.append((whole(blocks.kept), 0, end))
        curve = self.elsewhere.ranges.live_bytes(there) + np.array(live_bytes(lives, end), np.int64)
        # the backward takes the forward's temporary block, if that is large enough
        upper = whole(blocks.temporary + blocks.scratch * threads)
        phases = [whole(bytes_) for bytes_ in blocks.phases]
        if any(phases[:1]):
            phases[0] = max(phases[0], temporary)
        else:
            upper = max(upper, temporary)
        for first, last, bytes_ in zip((0, *blocks.turns), (*blocks.turns, len(curve)), phases, strict=False):
            curve[first:last] += bytes_
        return found, upper + int(curve.max(initial=0))

    def later(self, values: dict[str, int]) -> dict[str, int]:
        """The backward's sizes: the forward's, and numbers that nothing depends on."""
        assert self.backward is not None
        return {**dict.fromkeys(self.backward.layout.symbols, 0), **values}

    def tradeoff(self, values: dict[str, int], moving: bool = True) -> TradeoffCurve | None:
        """The curve at these sizes, with values that are moved out if they may be; None where no backward follows."""
        if self.backward is None or self.curves is None:
            return None
        curves, threads = self.curves, self.threads()
        assert self.later_sizing is not None
        scratch = (self.sizing.at(values, SAVE_ALL).scratch * threads,
                   self.later_sizing.at(self.later(values), SAVE_ALL).scratch * threads)
        store = self.store if moving and self.store is not None and self.store.works() else None
        return self._remembered(self.known, (key_of(values), threads, store is not None),  # type: ignore[no-any-return]
                                lambda: curves.at(self.later(values), scratch, self.workers(), store,
                                                  self.speeds(threads)))

    def speeds(self, threads: int) -> Speeds:
        """What each of so many threads does in a second; measured when it is first asked for."""
        if self.calibration is None or self.problem is None:
            return self.program.target.hardware.speeds
        return self.calibration.speeds(self.problem.costs.dtypes, threads)

    def _error(self, values: dict[str, int], room: int, full: StoreError | None, freed: int) -> LimitError:
        names = self.program.specializer.names
        shape = ", ".join(f"{name}={value}" for name, value in sorted(
            (names.get(old, old), value) for old, value in values.items())[:NAMED_SIZES])
        tradeoff, lowest = self.tradeoff(values, full is None), self.lowest(values, full is None)
        curve = peak_breakdown(self.program, values) if tradeoff is None else tradeoff.alive(lowest)
        least = self.least(values, full is None)
        largest = "; ".join(f"{name} {bytes_text(size)}" for name, size in curve[:NAMED])
        name, bytes_ = ("memory_limit", self.bytes) if self.bytes - self.held.bytes <= room - freed else (
            "memory_limit_total", self.total)
        taken = bytes_ - room
        why = "kept for backwards that have not run" if name == "memory_limit" else "taken by what is alive"
        why += ", with all dropped that can be" if freed else ""
        moved = "moved out or " if lowest.moved else ""
        nowhere = "" if full is None else f"; nothing can be moved out: {full.what} ({full.why})"
        others = f", and {bytes_text(taken)} are {why}" if taken else ""
        return LimitError(
            f"{self.program.name} cannot run within {bytes_text(bytes_)} at {shape}",
            why=f"it needs {bytes_text(least)} at least, with all {moved}computed again that can be{others}; at its "
                f"fullest step there are {largest}{nowhere}",
            do=f"set {name} to {least + taken} ({bytes_text(least + taken)}) or more, or call with smaller sizes",
            least=least + taken)
