"""Rematerialisation: puts the steps that compute saved values again into a backward, each where what it makes is needed
first.

    forward saves x, h                 3 kernel(kept x) -> again n          optional: run if h was not kept
    backward: 3 kernel(tape h) -> g    4 matmul(again n, tape w) -> kept h  optional
                                       5 kernel(tape h) -> g

Before the first of a segment stands a memory step, which is optional, too: where the kept block is in chunks, what no
later step reads is given back there. Nothing else in the backward changes. A call whose forward kept h leaves the
optional steps out; otherwise h lies in the arena from step 4 on. What a call keeps is decided when its sizes are known
(runtime/budget/memory_budget.py). How long a step waits says plan/remat/recompute_placement.py; what reads an input
stands before the step that writes it, and what reads weights that came from other ranks behind the wait for them, which
comes early enough where they have been sent for by then.

What PyTorch made in the forward (a convolution) lies outside the arena, and PyTorch makes it again: the tensor that the
optional step gets takes the place of the tape's.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from anyshape.ir.graph import Graph, Value
from anyshape.ir.op import base_of
from anyshape.ir.types import TensorType, size_of
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.home import External, Recomputed, RestoredBase, Saved
from anyshape.plan.ir.launch_groups import unbroken
from anyshape.plan.ir.liveness import last_reads, live_bytes, saved_entry
from anyshape.plan.ir.program import (
    Buffer,
    ExternStep,
    MemoryStep,
    Plan,
    RecomputeStep,
    Step,
    Window,
    is_launch,
    is_wait,
    step_writes,
    touched,
)
from anyshape.plan.ir.renaming import renamed_step
from anyshape.plan.memory.mutation_copy_elision import permuted
from anyshape.plan.remat.recompute_placement import places
from anyshape.sym.expr import Size


@dataclass(frozen=True, slots=True)
class Kept:
    """What a forward keeps: stored value by name -> (buffer, tape entry that is a window of it), and how it is stored.
    outside: those buffers that PyTorch made; their tape entry begins where they begin."""

    buffers: Mapping[str, tuple[str, int]]
    types: Mapping[str, TensorType]
    outside: frozenset[str]

    def names(self, plan: Plan) -> dict[str, str]:
        """Stored value -> the buffer of the backward `plan` that it is."""
        tape = {b.index: b.name for b in plan.buffers if b.is_restored}
        return {value: tape[index] if name in self.outside else _kept(name)
                for value, (name, index) in self.buffers.items() if name not in self.outside or index in tape}


def kept_values(graph: Graph, plan: Plan, views: Container[str]) -> Kept:
    """What the forward `plan` of `graph` keeps. views: names of those that are stored (`Compiled.stored`)."""
    producers = graph.producers()
    saved, external = ({b.name for b in plan.buffers if isinstance(b.home, one)} for one in (Saved, External))
    stored = {window.buffer: window.type for step in plan.steps for window in step_writes(step) if window.offset == 0}
    buffers: dict[str, tuple[str, int]] = {}
    types: dict[str, TensorType] = {}
    for index, (operand, window) in enumerate(zip(graph.saved, plan.saved, strict=True)):
        if isinstance(operand, Value) and isinstance(window, Window) and (
                window.buffer in saved or (window.buffer in external and window.offset == 0)):
            base = base_of(operand, producers, views)
            kind = stored.get(window.buffer)
            if kind is not None and kind.dtype == base.tensor.dtype and kind.shape == base.tensor.shape:
                buffers[base.name] = window.buffer, index
                types[base.name] = kind
    outside = frozenset(name for name, _ in buffers.values() if name in external)
    return Kept(buffers, types, outside)


def insert_recomputation(plan: Plan, context: PlanContext) -> Plan:
    """`plan` (not allocated) with the steps of the graphs in `context.recomputed`, if it is a backward under a
    limit."""
    forward, source, parts = context.forward, context.source, context.recomputed
    if forward is None or source is None or not context.config.limited:
        return plan
    kept = kept_values(source.graph, forward, source.stored)
    borrowed = _borrowed(plan, source.graph)
    gathered = _gathered(plan)
    plan = _with_early_waits(plan, parts, gathered, kept, _windows(plan, forward))
    windows = _windows(plan, forward)
    stored = kept.names(plan)
    placed = _placed(plan, parts, kept, windows, {**gathered, **stored, **borrowed})
    merged = _merged(plan, placed)
    touches, added = _buffers_of_parts(placed, merged, frozenset(stored.values()))
    again = []
    for segment, one in enumerate(placed):
        for value in one.graph.outputs:
            assert isinstance(value, Value)
            name, _ = kept.buffers[value.name]
            again.append(RecomputeStep(name, stored[value.name], segment, tuple(windows.get(name, ()))))
    buffers = []
    for buffer in plan.buffers:
        begin, end = merged.moved[buffer.first], merged.moved[buffer.last]
        old = touches.get(buffer.name, (begin, end))
        buffers.append(dataclasses.replace(buffer, first=min(begin, old[0]), last=max(end, old[1])))
    ends = {b.name: b.last for b in buffers}
    for name, index in kept.buffers.values():
        if _kept(name) in touches:
            begin, end = touches[_kept(name)]
            size, device = next((b.bytes, b.device) for b in forward.buffers if b.name == name)
            end = max([end, *(ends[tape] for tape, _ in windows.get(name, ()))])
            added[_kept(name)] = Buffer(_kept(name), size, RestoredBase(index), begin, end, device)
    everything = (*buffers, *added.values())
    return dataclasses.replace(
        plan, steps=merged.steps, buffers=everything, again=tuple(again),
        optional=tuple(sorted((*merged.optional, *merged.borders))),
        chunks=_chunks(everything, forward, merged.borders),
        together=tuple(part for run in plan.together for part in unbroken(plan, merged.moved, *run)))


def mark_spent(plan: Plan, context: PlanContext) -> Plan:
    """`plan` (of the forward of a whole step, allocated) with what its one backward may write over: all that is saved
    but what is needed to compute something again."""
    source = context.source
    if not plan.whole or source is None:
        return plan
    kept = kept_values(source.graph, plan, source.stored)
    anchors = {kept.buffers[name][0] for name in source.anchors if name in kept.buffers}
    return dataclasses.replace(plan, spent=tuple(b.name for b in plan.buffers if b.is_saved and b.name not in anchors))


def _borrowed(plan: Plan, forward: Graph) -> dict[str, str]:
    """Input of the forward -> the buffer of the tape's entry that it is. An input of a whole step is an input of both
    halves, by one name, and may be written in this one."""
    tape = {b.index: b.name for b in plan.buffers if b.is_restored}
    found = {value.name: tape[index] for index, value in enumerate(forward.saved)
             if isinstance(value, Value) and value in forward.inputs and index in tape}
    return found | {b.name: b.name for b in plan.buffers if b.is_parameter and b.name in found}


@dataclass(frozen=True, slots=True)
class _Part:
    """A graph that computes values again and its plan; which buffers of the backward the plan's are; by step, the one
    of the backward that it stands in front of."""

    graph: Graph
    plan: Plan
    names: Mapping[str, str]
    places: Sequence[int]


def _placed(plan: Plan, parts: Sequence[tuple[Graph, Plan]], kept: Kept,
            windows: Mapping[str, Sequence[tuple[str, Size]]], known: Mapping[str, str]) -> list[_Part]:
    """Those of `parts` that give what `plan` needs, in the order of their first steps. known: value of the forward ->
    the buffer of `plan` that it is."""
    uses = _uses(plan)
    overwritten = _first_writes(plan)
    alive, across = _alive(plan)
    coming = frozenset(_gathered(plan).values())
    found = []
    for graph, part in parts:
        if not _fits(graph, part, kept, known):
            continue
        names = _names(graph, part, known)
        inputs = [(b.name, graph.inputs[b.index].name) for b in part.buffers if b.is_input]
        results = [(window.buffer, value) for value, window in _results(graph, part)]
        # what shows each saved value in the backward
        shown = {name: [tape for tape, _ in windows.get(kept.buffers[value][0], ())]
                 for name, value in (*inputs, *results) if value in kept.buffers}
        needed = {name: [use for tape in tapes for use in uses.get(tape, ())] for name, tapes in shown.items()}
        first = {name: min(needed[name]) for name, _ in results if needed[name]}
        if not first:
            continue
        last = {name: max(some, default=-1) for name, some in needed.items()}
        before = {}
        for name, own in names.items():
            writes = [overwritten[one] for one in (own, *shown.get(name, ())) if one in overwritten]
            if writes:
                before[name] = min(writes)
        ready = {name: _maker(plan, own) + 1 for name, own in names.items() if own in coming}
        last |= {name: uses[names[name]][1] for name in ready}
        latest = places(part, first, last, before, alive, across, plan.facts.hint)
        where = _behind(part, latest, ready, {**before, **first})
        if where is not None:
            found.append(_Part(graph, part, names, where))
    return sorted(found, key=lambda one: min(one.places))


def _gathered(plan: Plan) -> dict[str, str]:
    """What the plan waits for from other ranks: by the name of the value, its buffer, which has that name."""
    return {name: name for step in plan.steps if is_wait(step) for name in _made(step)}


def _made(step: Step) -> set[str]:
    return {window.buffer for window in step_writes(step)}


def _maker(plan: Plan, buffer: str) -> int:
    """The first step that writes a buffer."""
    return next(number for number, step in enumerate(plan.steps) if buffer in _made(step))


def _with_early_waits(plan: Plan, parts: Sequence[tuple[Graph, Plan]], gathered: Mapping[str, str], kept: Kept,
                      windows: Mapping[str, Sequence[tuple[str, Size]]]) -> Plan:
    """`plan` with waits for what `parts` read before the first step that needs what a part makes, where the message is
    under way by then. Launches stay where they are, in the order of all ranks."""
    if not gathered:
        return plan
    uses = _uses(plan)
    wanted: dict[int, int] = {}  # wait -> the step that it is to stand before
    for graph, _ in parts:
        tapes = [tape for value in graph.outputs if isinstance(value, Value)
                 for tape, _ in windows.get(kept.buffers[value.name][0], ())]
        first = min((uses[tape][0] for tape in tapes if tape in uses), default=len(plan.steps))
        for value in graph.inputs:
            if value.name in gathered:
                wait = _maker(plan, value.name)
                wanted[wait] = min(wanted.get(wait, first), first)
    launches = {name: number for number, step in enumerate(plan.steps) if is_launch(step) for name in _made(step)}
    early: dict[int, list[int]] = {}
    for wait, before in sorted(wanted.items()):
        step = plan.steps[wait]
        assert isinstance(step, ExternStep)
        launch = max(launches.get(window.buffer, -1) for window in touched(step))
        if before < wait and launch < before:
            early.setdefault(before, []).append(wait)
    moved = {wait for waits in early.values() for wait in waits}
    order = [number for step in range(len(plan.steps) + 1)
             for number in (*early.get(step, ()), *((step,) if step < len(plan.steps) and step not in moved else ()))]
    if not moved:
        return plan
    place = {number: at for at, number in enumerate(order)}
    runs = tuple(part for run in plan.together
                 for part in unbroken(plan, [place[number] for number in range(len(order))], *run))
    return dataclasses.replace(permuted(plan, order), together=runs)


def _behind(part: Plan, latest: Sequence[int], ready: Mapping[str, int],
            bounds: Mapping[str, int]) -> Sequence[int] | None:
    """The places of a part's steps, none before what it reads is there; None where one would come too late.

    Args:
        latest: where they may wait until.
        ready: by buffer of the part that comes from other ranks, the first place behind the wait for it.
        bounds: by buffer of the part, the last place of a step that makes it, or reads it before it is written.
    """
    if not ready:
        return latest
    found: list[int] = []
    made: dict[str, int] = {}
    for step, place in zip(part.steps, latest, strict=True):
        names = {window.buffer for window in touched(step)}
        place = max([place, *(at[name] for at in (ready, made) for name in names if name in at)])
        if any(place > bounds[name] for name in names if name in bounds):
            return None
        made |= dict.fromkeys(_made(step), place)
        found.append(place)
    return found


@dataclass(frozen=True, slots=True)
class _Merged:
    """The steps of a backward and of its parts. optional, borders: the numbers of the parts' steps, and of the memory
    steps before them; moved: by step of the backward, its number; spans: by part and buffer of it, the first and the
    last step that touches it."""

    steps: tuple[Step, ...]
    optional: Sequence[int]
    borders: Sequence[int]
    moved: Sequence[int]
    spans: Sequence[Mapping[str, tuple[int, int]]]


def _merged(plan: Plan, placed: Sequence[_Part]) -> _Merged:
    """The steps of `plan`, with those of the parts each in front of its place."""
    steps: list[Step] = []
    borders: list[int] = []
    moved: list[int] = []
    optional: list[int] = []
    waiting: dict[int, list[tuple[int, int]]] = {}  # by position, parts and their steps
    for number, one in enumerate(placed):
        for k, position in enumerate(one.places):
            waiting.setdefault(position, []).append((number, k))
    begins = {min(one.places) for one in placed}
    spans: list[dict[str, tuple[int, int]]] = [{} for _ in placed]
    for position in range(len(plan.steps) + 1):
        if position in begins:
            steps.append(MemoryStep((), (), chunk=len(borders)))
            borders.append(len(steps) - 1)
        for number, k in waiting.get(position, ()):
            step = placed[number].plan.steps[k]
            for window in touched(step):
                begin, _ = spans[number].get(window.buffer, (len(steps), 0))
                spans[number][window.buffer] = begin, len(steps)
            optional.append(len(steps))
            steps.append(renamed_step(step, placed[number].names))
        moved.append(len(steps))
        if position < len(plan.steps):
            steps.append(plan.steps[position])
    return _Merged(tuple(steps), optional, borders, moved, spans)


def _buffers_of_parts(placed: Sequence[_Part], merged: _Merged,
                      stored: Container[str]) -> tuple[dict[str, tuple[int, int]], dict[str, Buffer]]:
    """When parts touch buffers that the backward has anyway, and the buffers that they add to it. stored: the
    buffers of the values that are kept or computed again."""
    touches: dict[str, tuple[int, int]] = {}
    added: dict[str, Buffer] = {}
    for one, span in zip(placed, merged.spans, strict=True):
        for buffer in one.plan.buffers:
            if buffer.name not in span:
                continue
            name = one.names[buffer.name]
            begin, end = span[buffer.name]
            if name in touches or name in stored or buffer.is_input:
                old = touches.get(name, (begin, end))
                touches[name] = min(old[0], begin), max(old[1], end)
            else:
                home = Recomputed() if buffer.is_temp else buffer.home
                added[name] = Buffer(name, buffer.bytes, home, begin, end, buffer.device)
    return touches, added


def _chunks(buffers: Sequence[Buffer], forward: Plan, borders: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The forward's saved buffers by the first border behind their last use."""
    chunks: list[list[str]] = [[] for _ in range(len(borders) + 1)]
    for buffer, last in last_reads(buffers, forward):
        chunks[sum(border <= last for border in borders)].append(buffer.name)
    return tuple(tuple(chunk) for chunk in chunks)


def _kept(name: str) -> str:
    return f"kept {name}"


def _windows(plan: Plan, forward: Plan) -> dict[str, list[tuple[str, Size]]]:
    """Buffer of the forward -> the tape buffers that lie in it, with their first bytes there."""
    found: dict[str, list[tuple[str, Size]]] = {}
    for buffer in plan.buffers:
        entry = saved_entry(forward, buffer.index) if buffer.is_restored else None
        if entry is not None:
            home, window = entry
            found.setdefault(home.name, []).append((buffer.name, window.offset * size_of(window.type.dtype)))
    return found


def _uses(plan: Plan) -> dict[str, tuple[int, int]]:
    """The first and the last step that touches each buffer."""
    found: dict[str, tuple[int, int]] = {}
    for position, step in enumerate(plan.steps):
        for window in touched(step):
            found[window.buffer] = found.get(window.buffer, (position, 0))[0], position
    return found


def _alive(plan: Plan) -> tuple[list[int], list[int]]:
    """By step, the bytes at the hints of the plan's own values that are there, and of those that are before it and
    still needed."""
    own = [(plan.facts.hint(b.bytes), b.first, b.last) for b in plan.buffers if not b.is_parameter]
    count = len(plan.steps)
    across = [(size, first + 1, last) for size, first, last in own]
    return live_bytes(own, count)[:count], live_bytes(across, count)[:count]


def _first_writes(plan: Plan) -> dict[str, int]:
    """Input, or entry of the tape -> the first step that writes it: from there on it is not what the forward had."""
    inputs = {b.name for b in plan.buffers if b.is_parameter}
    first: dict[str, int] = {}
    for position, step in enumerate(plan.steps):
        for window in step_writes(step):
            if window.buffer in inputs:
                first.setdefault(window.buffer, position)
    return first


def _results(graph: Graph, part: Plan) -> list[tuple[str, Window]]:
    """The values that a part gives, and where."""
    return [(value.name, window) for value, window in zip(graph.outputs, part.outputs, strict=True)
            if isinstance(value, Value) and isinstance(window, Window)]


def _fits(graph: Graph, part: Plan, kept: Kept, stored: Mapping[str, str]) -> bool:
    """Whether the part makes outside the arena what the forward makes there: each may fuse in its own way."""
    external = {b.name for b in part.buffers if b.is_external}
    if any(value.name not in stored for value in graph.inputs):
        return False  # weights that this plan does not gather
    return all(value in stored and (window.buffer in external or kept.buffers[value][0] not in kept.outside)
               for value, window in _results(graph, part))


def _names(graph: Graph, part: Plan, stored: Mapping[str, str]) -> dict[str, str]:
    """Buffers of a part -> those of the backward."""
    names = {b.name: stored[graph.inputs[b.index].name] if b.is_input else f"{graph.name} {b.name}"
             for b in part.buffers}
    return names | {window.buffer: stored[value] for value, window in _results(graph, part)}
