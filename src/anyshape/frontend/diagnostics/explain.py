"""Collects what `explain()` says from the records of a compilation."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from anyshape.base.errors import InputError
from anyshape.compiler.compiled import CompiledGraph
from anyshape.frontend.diagnostics.explain_data import (
    AttentionUse,
    CallNote,
    KernelNote,
    ProgramNote,
    RefusalNote,
    RegimeNote,
    RouterNote,
    StepNote,
    VersionNote,
)
from anyshape.frontend.diagnostics.explain_text import Explanation
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Compilation, Fallback
from anyshape.ir.graph import UNUSED
from anyshape.kernel.fusion.result import FusedKernel
from anyshape.passes.driver.pipeline import ATTENTION
from anyshape.plan.ir.liveness import live_bytes
from anyshape.plan.ir.program import (
    ExternStep,
    KernelStep,
    LibraryStep,
    Plan,
    Regime,
    parts_of,
)
from anyshape.plan.ir.step_text import step_text
from anyshape.route.profile.routers import routers_of
from anyshape.runtime.call.extern_table import CONVOLUTION
from anyshape.sym.expr import Size, product, substitute, symbol
from anyshape.sym.pairwise_order import compared
from anyshape.torch_compat import lacking

MOST_VALUES = 4  # values named for one reason of refused fusions
Names = Mapping[str, Size]


def explain(name: str, compilation: Compilation, sizes: Mapping[str, Any],
            waiting: tuple[str, ...] = (), target: Any = None) -> Explanation:
    """Everything decided so far. `sizes`: as for `memory`. `waiting`: sizes that run as PyTorch for now, in words.
    `target`: what was compiled.

    Raises:
        InputError: a name that no program has.
    """
    values = given_values(compilation, sizes)
    programs = program_notes(compilation, values)
    fallbacks = (*compilation.fallbacks, *(Fallback("trace", "not compiled yet", reason) for reason in waiting),
                 *(Fallback("torch", path, f"this version lacks it: {without}") for path, without in lacking().items()))
    return Explanation(name, programs, fallbacks, compilation.graphs, tuple(sorted(values.items())),
                       _attentions(compilation), tuple(compilation.eager.items()), _routers(target),
                       tuple(compilation.cuts), tuple(dict.fromkeys(compilation.warm)),
                       tuple(dict.fromkeys(compilation.strategy)))


def _routers(target: Any) -> tuple[RouterNote, ...]:
    """The routers of a model; of a function none are known."""
    found = routers_of(target) if isinstance(target, nn.Module) else {}
    return tuple(RouterNote(name, one.branch_count, one.way,
                            getattr(one.router_fn, "__name__", type(one.router_fn).__name__), one.combine, one.drop,
                            one.recorder is not None) for name, one in found.items())


def _attentions(compilation: Compilation) -> tuple[AttentionUse, ...]:
    """What was written out, repeated layers once: as captured, and what the pass over graphs found."""
    found: list[AttentionUse] = []
    passed = [_attentions_of_pass(program) for program in native_programs(compilation)]
    made = {number: sum(one.graph == number for uses in passed for one in uses) for number in compilation.attentions}
    for number, notes in sorted(compilation.attentions.items()):
        left = sum(not note.taken for note in notes)  # before autograd: the pass may have taken them since
        found += [AttentionUse(number, note.where, note.taken, note.what, notes.count(note))
                  for note in dict.fromkeys(notes) if note.taken or made[number] < left]
    for uses in passed:
        found += [dataclasses.replace(one, uses=uses.count(one)) for one in dict.fromkeys(uses)]
    return tuple(found)


def _attentions_of_pass(program: NativeProgram) -> list[AttentionUse]:
    """What the pass put into a program's graph."""
    history = program.compiled.history
    graphs = [history.captured, *(stage.ir for stage in history.stages)]
    at = next((place for place, stage in enumerate(history.stages, 1) if stage.name == ATTENTION), None)
    before, after = (graphs[at - 1], graphs[at]) if at is not None else (None, None)
    if before is None or after is None or before is after:
        return []
    old = {node.outputs[0].name for node in before.nodes if node.op == ATTENTION}
    return [AttentionUse(int(program.name.split(".")[0]), node.where, True,
                         f"one call, with{'' if len(node.inputs) > 3 else 'out'} a mask", 1)
            for node in after.nodes if node.op == ATTENTION and node.outputs[0].name not in old]


def program_notes(compilation: Compilation, values: Mapping[str, int]) -> tuple[ProgramNote, ...]:
    """What is known of each program that is compiled, and at sizes by name."""
    return tuple(_program(one, compilation, known_symbols(one, compilation, values))
                 for one in native_programs(compilation))


def known_symbols(program: NativeProgram, compilation: Compilation, values: Mapping[str, int]) -> dict[str, int]:
    """`values` by the names of sizes and by the symbols of a program."""
    return {**values, **{old: values[name] for old, name in compilation.names_of(program.name).items()
                         if name in values}}


def _placed(program: NativeProgram, at: dict[str, int]) -> int | None:
    """The bytes of the arena of a call: where the formula's layout is far from the least, the run time makes a better
    one for these sizes."""
    executable = program.compiled.executable
    if all(name in at or name.startswith(UNUSED) for name in executable.layout.symbols):
        executable = executable.at(at)
    return executable.specializer.arena(at)


def native_programs(compilation: Compilation) -> list[NativeProgram]:
    """The programs of a compilation that are compiled."""
    return [program for program in compilation.programs if isinstance(program, NativeProgram)]


def known_sizes(compilation: Compilation) -> set[str]:
    """The names of all programs' sizes: of the whole, and of a rank's part of it."""
    found = {name for program in native_programs(compilation) for name in _sizes_of(program, compilation)}
    for program in native_programs(compilation):
        names = compilation.names_of(program.name)
        found |= {names.get(one, one) for one in program.compiled.executable.layout.symbols
                  if not one.startswith(UNUSED)}
    return found


def given_values(compilation: Compilation, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Symbol -> number, from names of symbols (ours or torch's) and from shapes of inputs.

    Raises:
        InputError: a name that no program has.
    """
    known = known_sizes(compilation)
    aliases = {old: name for capture in compilation.captures for old, _, name in capture.sizes}
    values: dict[str, int] = {}
    for name, given in sizes.items():
        if name in known or name in aliases:
            values[aliases.get(name, name)] = int(given)
            continue
        dims = {f"{name}_{dim}": size for dim, size in enumerate(given)} if isinstance(given, (tuple, list)) else {}
        found = {dim: int(size) for dim, size in dims.items() if dim in known}
        if not found and known:
            raise InputError(f"no program has a size {name!r}", why=f"the sizes are {', '.join(sorted(known))}",
                             do="give one of those, or an input's shape, such as x=(8, 128)")
        values.update(found)
    return values


def _program(program: NativeProgram, compilation: Compilation, at: dict[str, int]) -> ProgramNote:
    compiled, capture = program.compiled, compilation.capture_of(program.name)
    plan = compiled.plan
    names = {old: symbol(name) for old, name in compilation.names_of(program.name).items()}
    places = {name: words for _, words, name in capture.sizes}
    kernels = _kernels(compiled, names)
    libraries, externs = _calls(program, plan)
    outputs = sum((b.bytes for b in plan.buffers if b.is_allocated_tensor), start=0)
    used = _sizes_of(program, compilation)
    likely = tuple((str(names.get(old, old)), value) for old, value in plan.facts.hints)
    return ProgramNote(
        program.name, program.name.partition(".")[2], capture.where, capture.way, capture.reason,
        tuple((name, places.get(name, "found while it runs")) for name in used), kernels, libraries, externs,
        _refusals(compiled, names), _steps(plan, names), substitute(plan.arena, names), substitute(plan.kept, names),
        substitute(outputs, names), compiled.seconds,
        _passes(compiled, "equations"), likely,
        placed=_placed(program, at), edited=compiled.edited, undecided=_undecided(plan, names),
        other=None if compiled.other is None else substitute(compiled.other.plan.arena, names),
        plan_passes=_passes(compiled, "steps"), versions=_versions(program, names))


def _versions(program: NativeProgram, names: Names) -> tuple[VersionNote, ...]:
    """Which versions of kernels have run, and at which sizes."""
    executable = program.compiled.executable
    found: dict[tuple[str, str], dict[str, None]] = {}
    for record in list(executable.specializations.values()):
        known = {str(names.get(old, old)): value for old, value in record.values.items() if not old.startswith(UNUSED)}
        sizes = ", ".join(f"{name} {value}" for name, value in sorted(known.items())) or "fixed sizes"
        for number, titles in executable.runner.versions(record.payload).items():
            step = executable.plan.steps[number]
            if isinstance(step, KernelStep):
                key = step.regimes[-1].kernel, ", or ".join(dict.fromkeys(titles))
                found.setdefault(key, {})[sizes] = None
    return tuple(VersionNote(kernel, version, tuple(sizes)[:MOST_VALUES])
                 for (kernel, version), sizes in found.items())


def _passes(compiled: CompiledGraph, unit: str) -> tuple[tuple[str, int, int, float], ...]:
    """The passes that ran, those in whose IR `unit` is counted."""
    return tuple((stage.name, stage.before, stage.after, stage.seconds) for stage in compiled.history.stages
                 if stage.unit == unit)


def _undecided(plan: Plan, names: Names) -> tuple[tuple[Size, Size], ...]:
    """Bytes of different buffers of which no proof says how they compare."""
    sizes = dict.fromkeys(b.bytes for b in plan.buffers if b.in_arena or b.is_output)
    return tuple((substitute(a, names), substitute(b, names)) for a, b, _ in compared(sizes, plan.facts).undecided)


def _sizes_of(program: NativeProgram, compilation: Compilation) -> list[str]:
    """The names of a program's sizes, in the user's words where there are some."""
    names = compilation.names_of(program.name)
    return sorted({names.get(one, one) for one in _symbols(program.compiled.plan)})


def _symbols(plan: Plan) -> set[str]:
    return {name for name, _, _ in plan.facts.ranges} | {name for name, _ in plan.facts.hints}


def _kernels(compiled: CompiledGraph, names: Names) -> tuple[KernelNote, ...]:
    groups = [item for item in compiled.fusion.items if isinstance(item, FusedKernel)]
    optional = set(compiled.plan.optional)
    steps = [part for k, step in enumerate(compiled.plan.steps) if k not in optional
             for part in parts_of(step) if isinstance(part, KernelStep)]
    found: dict[tuple[Any, ...], list[KernelNote]] = {}
    for group, step in zip(groups, steps, strict=False):
        regime = step.regimes[-1]
        loops = compiled.programs[regime.kernel]
        inside = dict(zip(loops.sizes, regime.sizes, strict=False))
        rows, columns = (substitute(substitute(product(extent for _, extent in part), inside), names)
                         for part in (loops.rows, loops.columns))
        moved = [(i in step.outputs, window.type.bytes) for i, window in enumerate(step.params)
                 if window.buffer != "status"]
        read = substitute(sum((size for out, size in moved if not out), start=0), names)
        written = substitute(sum((size for out, size in moved if out), start=0), names)
        lines = tuple(dict.fromkeys(node.where for node in group.group.nodes if node.where))
        regimes = tuple(RegimeNote(one.kernel, _when(one, names), one.then) for one in step.regimes)
        note = KernelNote(regime.kernel, tuple(node.op for node in group.group.nodes), lines, rows, columns, read,
                          written, 1, regimes)
        found.setdefault((note.name, str(rows), str(columns)), []).append(note)
    return tuple(_repeated(notes) for notes in found.values())


def _when(regime: Regime, names: Names) -> str:
    return " and ".join(f"{substitute(condition, names)} >= 0" for condition in regime.conditions)


def _repeated(notes: list[KernelNote]) -> KernelNote:
    """Uses of one kernel (repeated layers) as one note, with the bytes of all."""
    return dataclasses.replace(
        notes[0], lines=tuple(dict.fromkeys(line for note in notes for line in note.lines)), uses=len(notes),
        read=sum((note.read for note in notes), start=0), written=sum((note.written for note in notes), start=0))


def _calls(program: NativeProgram, plan: Plan) -> tuple[tuple[CallNote, ...], tuple[CallNote, ...]]:
    reasons = {target: why for target, why, _ in program.notes.externs}
    libraries: dict[str, list[str]] = {}
    dtypes: dict[str, dict[str, None]] = {}
    externs: dict[str, list[str]] = {}
    for step in (part for one in plan.steps for part in parts_of(one)):
        if isinstance(step, LibraryStep):
            libraries.setdefault(step.op, []).append(step.where)
            dtypes.setdefault(step.op, {})[step.dtype] = None
        elif isinstance(step, ExternStep):
            externs.setdefault(step.target, []).append(step.where)
    reasons.setdefault(CONVOLUTION, "PyTorch's library does it, channels last and with reordered weights")
    own = "no kernel can be made for these dtypes or sizes"
    told = program.compiled.executable.target.products_in_words
    return (tuple(CallNote(op, "; ".join(filter(None, map(told, dtypes[op]))), _lines(lines), len(lines))
                  for op, lines in libraries.items()),
            tuple(CallNote(target, reasons.get(target, own), _lines(lines), len(lines))
                  for target, lines in externs.items()))


def _lines(lines: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for line in lines if line))


def _refusals(compiled: CompiledGraph, names: Names) -> tuple[RefusalNote, ...]:
    """By reason, the one that would have saved the most bytes (at likely sizes) first."""
    values: dict[str, list[str]] = {}
    saved: dict[str, Size] = {}
    for refusal in compiled.fusion.refusals:
        values.setdefault(refusal.reason, []).append(refusal.value)
        saved[refusal.reason] = saved.get(refusal.reason, 0) + refusal.bytes
    facts = compiled.graph.facts
    order = sorted(saved, key=lambda reason: -facts.hint(saved[reason]))
    return tuple(RefusalNote(reason, tuple(dict.fromkeys(values[reason]))[:MOST_VALUES],
                             substitute(saved[reason], names)) for reason in order)


def _steps(plan: Plan, names: Names) -> tuple[StepNote, ...]:
    placed, end = dict(plan.offsets), len(plan.steps)
    live = live_bytes(((b.bytes, 0 if b.is_restored else b.first, end if b.is_saved else b.last)
                       for b in plan.buffers if b.in_arena or b.name in placed), end)
    return tuple(StepNote(number, step_text(step), step.where, substitute(size, names))
                 for number, (step, size) in enumerate(zip(plan.steps, live, strict=False)))
