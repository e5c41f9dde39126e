"""Collects what `memory()` and the report say: bytes as formulas and, at given sizes, the curve of bytes alive over the
steps."""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyshape.base.errors import InputError, LimitError
from anyshape.base.units import bytes_text
from anyshape.compiler.link import has_own_sizes
from anyshape.frontend.diagnostics.explain import (
    given_values,
    known_symbols,
    native_programs,
    program_notes,
)
from anyshape.frontend.diagnostics.explain_data import AliveNote, Choice, MemoryCurve, Position, Refusal, WayBack
from anyshape.frontend.diagnostics.memory_text import MemoryNote, limit_text
from anyshape.frontend.programs.compile_program import NativeProgram, backward_name
from anyshape.frontend.programs.session import Compilation
from anyshape.plan.ir.step_text import step_text
from anyshape.runtime.budget.memory_budget import UNLIMITED, MemoryBudget
from anyshape.runtime.budget.tradeoff_curve import TradeoffPoint
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.inspect.memory_timeline import MemoryTimeline, away, scratch, state, timeline, work_again
from anyshape.runtime.memory.pools import LiveTapes
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.sym.expr import evaluate


def memory(compilation: Compilation, sizes: Mapping[str, Any]) -> MemoryNote:
    """The memory of each program. `sizes`: symbol=number, such as ids_0=8; or input=shape, such as ids=(8, 128).

    Raises:
        InputError: a name that no program has.
    """
    values = given_values(compilation, sizes)
    programs = program_notes(compilation, values)
    says: list[tuple[str, str]] = []
    curves: list[MemoryCurve] = []
    for program, limit in pairs(compilation):
        known = known_symbols(program, compilation, values)
        symbols = program.executable.layout.symbols
        if not all(name in known for name in symbols):
            continue
        at = {name: known[name] for name in symbols}
        called = called_program(program, compilation, limit, at)
        curve = called.at(at)
        if curve is None:
            continue
        curves.append(curve)
        if isinstance(called.limit.program.limit, MemoryBudget):
            bytes_, total = called.limit.bytes, called.limit.total
            says.append((program.name, limit_text(
                bytes_text(bytes_) if bytes_ <= total else f"{bytes_text(total)} of the whole process", curve)))
    return MemoryNote(tuple((one.name, one.arena, one.saved, one.outputs) for one in programs),
                      tuple(sorted(values.items())), tuple(one.placed for one in programs), tuple(says), tuple(curves))


def pairs(compilation: Compilation) -> list[tuple[NativeProgram, MemoryBudget]]:
    """Every program that is called, with its limit: a forward's has its backward."""
    programs = {program.name: program for program in native_programs(compilation)}
    partners = {name: programs.get(backward_name(name)) if "forward" in name else None for name in programs}
    limits = {name: _limit(program.executable, None if (partner := partners[name]) is None else partner.executable)
              for name, program in programs.items()}
    taken = {backward_name(name) for name, limit in limits.items() if limit.backward is not None}
    return [(program, limits[name]) for name, program in programs.items() if name not in taken]


def limit_at(limit: MemoryBudget, values: dict[str, int]) -> MemoryBudget:
    """The limit of a program in the order of steps that a call at these sizes takes."""
    program, later = limit.program.at(values), limit.backward
    if program is limit.program:
        return limit
    return _limit(program, None if later is None else later.other)


def _limit(program: Executable, later: Executable | None) -> MemoryBudget:
    """A limit that answers questions, and pushes out nothing that calls remember; of nothing, if none is set."""
    if isinstance(program.limit, MemoryBudget):
        return program.limit.apart()
    # what is compiled in parts has backwards that read the tapes of several, or have sizes of their own
    if later is not None and (later.specializer.keeps.forward is not program.plan
                              or has_own_sizes(program.specializer, later.specializer)):
        later = None
    return MemoryBudget(program, later, UNLIMITED, LiveTapes())


@dataclass(frozen=True, slots=True)
class CalledProgram:
    """A program that is called, with its backward where one follows. parts: the names of both; names: its sizes, symbol
    -> what people call it; limit: that of both; line: what is in memory at every position of both; positions: what
    happens there."""

    parts: tuple[str, ...]
    names: Mapping[str, str]
    limit: MemoryBudget
    line: MemoryTimeline
    positions: tuple[Position, ...]

    @property
    def room(self) -> int:
        """Bytes that a call may take now."""
        return self.limit.room() if self.limit.total < UNLIMITED else self.limit.bytes

    def at(self, values: dict[str, int]) -> MemoryCurve | None:
        """What is alive at every step at these sizes; None where the program does not take them."""
        limit, line, room = self.limit, self.line, self.room
        try:
            around, whole = scratch(limit, values), limit.needed(values, SAVE_ALL)
        except InputError:
            return None
        refusal = None
        try:
            policy = limit.choose(values, room)
        except LimitError as error:
            policy = limit.lowest(values)
            refusal = Refusal(*(re.sub(r"\b\w+\b", lambda word: self.names.get(word[0], word[0]), text)
                                for text in (error.what, error.why, error.do)))
        choice, point = None, None
        if policy != SAVE_ALL:
            number, point = next((i, one) for i, one in enumerate(limit.tradeoff(values) or ()) if one.policy == policy)
            saved = limit.program.specializer.keeps
            choice = Choice(number, len(saved.kept_buffers) + len(saved.outside), len(point.dropped), len(point.moved),
                            point.away)
        what = state(limit.problem, policy)
        chosen = line.curve(values, around, *what)
        peak = int(chosen.argmax())
        alive = [AliveNote(life.name, size, life.kind, life.where)
                 for life, size in line.alive(peak, values, *what)]
        if around[peak >= line.border]:
            alive.append(AliveNote("scratch of all threads", around[peak >= line.border], "temporary", ""))
        return MemoryCurve(" and ".join(self.parts), tuple(line.curve(values, around).tolist()), tuple(chosen.tolist()),
                           line.border, room if room < UNLIMITED else 0, whole, limit.needed(values, policy),
                           peak, str(self.positions[peak]), tuple(sorted(alive, key=lambda one: -one.bytes)),
                           self._back(values, point), 0.0 if point is None else limit.seconds(point), refusal, around,
                           choice)

    def _back(self, values: dict[str, int], point: TradeoffPoint | None) -> tuple[WayBack, ...]:
        """What is not kept on a point, the largest first."""
        if point is None:
            return ()
        again = work_again(self.limit, values, point.dropped)
        gone = away(self.limit.problem, point.moved)
        found = []
        for life in self.line.lives:
            bytes_ = evaluate(life.bytes, values)
            if life.kind == "saved" and life.name in gone:
                found.append(WayBack(life.name, bytes_, "moved out", *gone[life.name], copying(self.limit, bytes_),
                                     life.where))
            elif life.gap is not None and life.name in again:
                found.append(WayBack(life.name, bytes_, "computed again", *life.gap, again[life.name][1],
                                     life.where))
        return tuple(sorted(found, key=lambda one: -one.bytes))


def called_program(program: NativeProgram, compilation: Compilation, limit: MemoryBudget,
                   values: dict[str, int]) -> CalledProgram:
    """One of `pairs`, in the order of steps that a call at these sizes takes."""
    limit = limit_at(limit, values)
    backward = [] if limit.backward is None else [backward_name(program.name)]
    return CalledProgram((program.name, *backward), compilation.names_of(program.name), limit, timeline(limit),
                         _positions(limit))


def _positions(limit: MemoryBudget) -> tuple[Position, ...]:
    found: list[Position] = []
    for part, one in (("forward" if limit.backward is not None else "", limit.program), ("backward", limit.backward)):
        if one is not None:
            optional = set(one.plan.optional)
            found += [Position(part, i, step_text(step), step.where, i in optional)
                      for i, step in enumerate(one.plan.steps)]
            found.append(Position(part, len(one.plan.steps), "the end", "", False))
    return tuple(found)


def copying(limit: MemoryBudget, bytes_: int) -> float:
    """Seconds that copying a value out and back takes."""
    assert limit.store is not None
    return limit.store.seconds(bytes_, out=True) + limit.store.seconds(bytes_, out=False)
