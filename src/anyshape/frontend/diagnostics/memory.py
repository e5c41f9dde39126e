"""Collects what `memory()` says: bytes as formulas and, at given sizes, the curve of bytes alive over the steps."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyshape.base.errors import InputError, LimitError
from anyshape.compiler.link import has_own_sizes
from anyshape.frontend.diagnostics.explain import (
    capture_of,
    given_values,
    native_programs,
    placed,
    program_note,
    step_text,
)
from anyshape.frontend.diagnostics.explain_data import AliveNote, MemoryCurve, WayBack
from anyshape.frontend.diagnostics.memory_text import MemoryNote
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Compilation
from anyshape.runtime.budget.memory_budget import UNLIMITED, MemoryBudget
from anyshape.runtime.budget.tradeoff_curve import TradeoffPoint
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.inspect.memory_timeline import LiveRange, away, scratch, seconds_again, timeline, used
from anyshape.runtime.memory.pools import LiveTapes
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from anyshape.sym.expr import evaluate

NOTHING: frozenset[str] = frozenset()


def memory(compilation: Compilation, sizes: Mapping[str, Any]) -> MemoryNote:
    """The memory of each program. `sizes`: symbol=number, such as ids_0=8; or input=shape, such as ids=(8, 128).

    Raises:
        InputError: a name that no program has.
    """
    programs = [program_note(one, compilation) for one in native_programs(compilation)]
    values = given_values(compilation, sizes)
    notes = tuple((one.name, one.arena, one.saved, one.outputs) for one in programs)
    says: list[tuple[str, str]] = []
    curves: list[MemoryCurve] = []
    for program, limit in pairs(compilation):
        at = known_at(program, compilation, values)
        if at is None:
            continue
        limit = limit_at(limit, at)
        if isinstance(limit.program.limit, MemoryBudget):
            says.append((program.name, limit.program.limit.says(at)))
        curve = curve_of(program, limit, at)
        curves += [] if curve is None else [curve]
    return MemoryNote(notes, tuple(sorted(values.items())), placed(compilation, values), tuple(says), tuple(curves))


def known_at(program: NativeProgram, compilation: Compilation, values: Mapping[str, int]) -> dict[str, int] | None:
    """The symbols of a program's layout at `values`, which have the user's names; None where one is not known."""
    known = {**values, **{old: values[name] for old, _, name in capture_of(program, compilation).sizes
                          if name in values}}
    symbols = program.executable.layout.symbols
    return {name: known[name] for name in symbols} if all(name in known for name in symbols) else None


def pairs(compilation: Compilation) -> list[tuple[NativeProgram, MemoryBudget]]:
    """Every program that is called, with its limit: a forward's has its backward."""
    programs = {program.name: program for program in native_programs(compilation)}
    partners = {name: programs.get(backward_name(name)) if "forward" in name else None for name in programs}
    limits = {name: _limit(program.executable, None if (partner := partners[name]) is None else partner.executable)
              for name, program in programs.items()}
    taken = {backward_name(name) for name, limit in limits.items() if limit.backward is not None}
    return [(program, limits[name]) for name, program in programs.items() if name not in taken]


def backward_name(name: str) -> str:
    """The name of a forward's backward."""
    return name.replace("forward", "backward")


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
    if later is not None and (later.maker.keeps.forward is not program.plan
                              or has_own_sizes(program.maker, later.maker)):
        later = None
    return MemoryBudget(program, later, UNLIMITED, LiveTapes())


def curve_of(program: NativeProgram, limit: MemoryBudget, values: dict[str, int]) -> MemoryCurve | None:
    """What is alive at every step of a program at these sizes; None where the program does not take them."""
    line = timeline(limit)
    try:
        around, whole = scratch(limit, values), limit.needed(values, SAVE_ALL)
    except InputError:
        return None
    room = limit.room() if limit.total < UNLIMITED else limit.bytes
    refused = ""
    try:
        keeping = limit.choose(values, room)
    except LimitError as error:
        keeping, refused = limit.lowest(values), error.do
    rung = None if keeping == SAVE_ALL else next(
        one for one in limit.ladder(values) or () if one.keeping == keeping)
    made, gone = used(limit.ladders, keeping.dropped), away(limit.ladders, keeping.moved)
    kept = line.curve(values, around)
    chosen = line.curve(values, around, keeping.dropped, made, gone)
    peak = int(chosen.argmax())
    alive = [AliveNote(life.name, size, life.kind, life.where) for life, size in line.alive(
        peak, values, keeping.dropped, made, gone)]
    if around[peak >= line.border]:
        alive.append(AliveNote("scratch of all threads", around[peak >= line.border], "temporary", ""))
    parts = [program.name, *([backward_name(program.name)] if limit.backward is not None else [])]
    return MemoryCurve(" and ".join(parts), tuple(kept.tolist()), tuple(chosen.tolist()), line.border,
                       room if room < UNLIMITED else 0, whole, limit.needed(values, keeping), peak,
                       _position(limit, peak), tuple(sorted(alive, key=lambda one: -one.bytes)),
                       _back(limit, line.lives, values, rung), 0.0 if rung is None else limit.seconds(rung), refused)


def _position(limit: MemoryBudget, position: int) -> str:
    """A position of the line in words."""
    border = len(limit.program.plan.steps) + 1
    part, plan = "forward" if limit.backward is not None else "step", limit.program.plan
    if position >= border and limit.backward is not None:
        part, plan, position = "backward", limit.backward.plan, position - border
    what = step_text(plan.steps[position]) if position < len(plan.steps) else "the end"
    return f"{part} {position}: {what}"


def _back(limit: MemoryBudget, lives: tuple[LiveRange, ...], values: dict[str, int],
          rung: TradeoffPoint | None) -> tuple[WayBack, ...]:
    """What is not kept on a rung, the largest first."""
    if rung is None:
        return ()
    again, gone = seconds_again(limit, values, rung.dropped), away(limit.ladders, rung.moved)
    found = []
    for life in lives:
        if life.kind == "saved" and life.name in gone and limit.store is not None:
            bytes_ = evaluate(life.bytes, values)
            copies = limit.store.seconds(bytes_, out=True) + limit.store.seconds(bytes_, out=False)
            found.append(WayBack(life.name, bytes_, "moved out", *gone[life.name], copies, life.where))
        elif life.gap is not None and life.name in again:
            found.append(WayBack(life.name, evaluate(life.bytes, values), "computed again", *life.gap,
                                 again[life.name], life.where))
    return tuple(sorted(found, key=lambda one: -one.bytes))
