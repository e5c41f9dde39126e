"""The whole road, from a graph to an executable: the only file that knows it. Read top to bottom.

Linking is imported where it is done: executables are PyTorch's, and a deployed graph is planned where there is none.
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import anyshape.ops.table  # noqa: F401  fills the table of ops
from anyshape.backend.interface import Target
from anyshape.backend.targets import target_of
from anyshape.base import counters
from anyshape.base.config import Config
from anyshape.base.errors import ParseError, Unsupported, VerifyError
from anyshape.compiler.build_plan import Storage, assemble, storage
from anyshape.compiler.compiled import BackwardGraph, CompiledGraph, CompiledPair, PlannedGraph
from anyshape.compiler.gemm_epilogue import fuse_epilogues
from anyshape.compiler.shape_preconditions import divided_sizes, selected_sizes, uncertain_sizes
from anyshape.compiler.stages import KERNELS, LLVM, check_names, stages_of
from anyshape.compiler.undefined_gradients import given, zeros_of
from anyshape.ir.asynchronous import WAIT
from anyshape.ir.graph import Graph, Value
from anyshape.ir.ir_dumps import Edits, edits, publish
from anyshape.ir.pass_manager import History
from anyshape.kernel.fusion.result import FusedKernel, Fusion, FusionBlocklist, NotFusable
from anyshape.kernel.fusion.vertical import fuse
from anyshape.kernel.loop_ir.kernel_override import put_back
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.loop_ir.show import content_name
from anyshape.kernel.loop_ir.show import show as show_kernel
from anyshape.kernel.schedule.multiversion import Versions, versions
from anyshape.passes.dce import dce
from anyshape.passes.driver import pipeline
from anyshape.plan.driver.pipeline import PLAN_ROAD, PlanPasses
from anyshape.plan.ir.context import EPILOGUES, ForwardGraph, PlanContext
from anyshape.plan.ir.program import KernelStep, LibraryStep, Plan, origins, parts_of
from anyshape.plan.remat.checkpoint_segments import RecomputeSegment, again_graph, segments
from anyshape.plan.remat.insert_recompute import kept_values
from anyshape.plan.verify import verify
from anyshape.runtime.memory.pools import LiveTapes
from anyshape.sym.expr import Size
from anyshape.sym.facts import Facts

if TYPE_CHECKING:
    from anyshape.runtime.call.executable import Executable


def compile_pair(forward: Graph, backward: BackwardGraph | None, config: Config, needed: tuple[Size, ...] = (),
                 whole: bool = False, names: Mapping[str, str] = MappingProxyType({}),
                 held: LiveTapes | None = None, target: Target | None = None) -> CompiledPair:
    """Compile a forward with its backward, or a graph alone.

    Args:
        backward: None where none follows, or it is compiled later (`compile_backward`).
        needed: sizes that must be at least 0 in a call, beside those of the graph itself.
        whole: the two are a whole step. No second backward reads the tape, and all inputs are the caller's.
        names: symbol -> what errors call it.
        held: what tapes keep of the limits of `config`; None: those limits are not put on the programs.
        target: that of the configuration when left out.

    Raises:
        EditError: a stage in `config.edit` is not valid or does not fit.
    """
    from anyshape.compiler.link import link_pair
    target = target_of(config) if target is None else target
    gathered = frozenset() if backward is None or not config.limited else _gathered(forward, backward.graph)
    first, note = plan_graph(forward, target, config, None, needed, whole, gathered), ""
    if backward is not None:
        try:
            second = plan_graph(backward.reading(first.plan), target, config, first, backward.needed, whole)
            return link_pair(first, second, config, names, held, _zeros(second, backward, whole), whole)
        except Unsupported as error:
            note = f"nothing is computed again: {error.what}"
    return dataclasses.replace(link_pair(first, None, config, names, held), note=note)


def compile_backward(graph: Graph, config: Config, forward: CompiledGraph, needed: tuple[Size, ...] = (),
                     whole: bool = False, names: Mapping[str, str] = MappingProxyType({})) -> CompiledGraph:
    """Compile a backward whose forward is there, and knows nothing of it; see `compile_pair`."""
    from anyshape.compiler.link import link_backward
    return link_backward(plan_graph(graph, forward.target, config, forward, needed, whole), forward, config, names)


def compile_graph(graph: Graph, config: Config, target: Target | None = None) -> CompiledGraph:
    """Compile a graph alone, without limits; see `compile_pair`."""
    return compile_pair(graph, None, config, target=target).forward


def plan_graph(graph: Graph, target: Target, config: Config, forward: PlannedGraph | None = None,
               needed: tuple[Size, ...] = (), whole: bool = False,
               gathered: frozenset[str] = frozenset()) -> PlannedGraph:
    """The plans of one graph and its kernels. forward: of a backward, the graph whose memory and tape it shares.
    gathered: see `segments`. The others: see `compile_pair`."""
    clock = _Clock()
    history = History()
    check_names(config)
    edited = edits(config, graph.name, stages_of(config))
    uncertain = uncertain_sizes(graph)
    graph = pipeline.run(pipeline.ROAD, graph, config, history, edited)
    nonnegative = tuple(dict.fromkeys((*uncertain, *(uncertain_sizes(graph) if edited else ()), *needed)))
    clock.mark("passes")

    parts: tuple[RecomputeSegment, ...] = ()
    again: list[_Again] = []
    if config.limited and forward is None and graph.saved:
        parts = segments(graph, storage(graph, FusionBlocklist(target.unsupported)).base(), gathered)
        graph = _with_inputs_saved(graph, parts)
    elif config.limited and forward is not None and forward.segments:
        graph, again = _again(graph, forward, target, config)

    store, fusion = fused(graph, target, config)
    stored = frozenset(store.base().values()) if parts else frozenset()
    clock.mark("fuse")

    first = -1 if pipeline.REGIMES in config.disabled() else 0
    regimes, programs = named(fusion, graph.facts, target, first)
    for part in again:
        part.regimes, more = named(part.fusion, graph.facts, target, first)
        programs |= more
    regimes, programs = _with_edited(regimes, programs, edited, target)
    publish(config, graph.name, *KERNELS, lambda: "\n\n".join(show_kernel(p) for p in programs.values()))
    lowered = _Lowered(store, fusion, regimes, parts, again, stored)
    plan = _assembled(graph, lowered, nonnegative, whole and forward is None)
    if EPILOGUES not in config.disabled():
        plan, more = fuse_epilogues(plan, programs, target.hardware)
        programs |= more
    texts = [target.emit(program) for program in programs.values()]
    publish(config, graph.name, *LLVM, lambda: "\n\n".join(texts))
    clock.mark("emit")

    kernels = target.build(texts)
    clock.mark("build")

    context = _context(graph, lowered, plan, forward, target, config)
    finished = PlanPasses(PLAN_ROAD, config).run((plan,), context, history, edited)
    fusion = dataclasses.replace(fusion, items=tuple(fusion.items[at] for at in origins(finished[0])))
    clock.mark("plan")
    counters.count("compile_seconds", clock.total())
    return PlannedGraph(
        graph.name, target, graph, history, fusion, programs, tuple(kernels), finished[0],
        finished[1] if len(finished) > 1 else None, tuple(clock.marks), tuple(one.path for one in edited.values()),
        parts, stored)


def _zeros(second: PlannedGraph, backward: BackwardGraph, whole: bool) -> list[tuple[Size, int]]:
    """The zeros that are probably made for a backward, which a limit counts; a whole step takes no gradients."""
    if whole:
        return []
    count = len(given(second.plan)) - backward.constants
    return zeros_of(second.plan, second.programs, count, backward.materialized)


def rebuilt(compiled: CompiledGraph, plan: Plan, programs: Mapping[str, LoopProgram], config: Config) -> Executable:
    """The executable of `plan`, which is that of `compiled` but for its kernels and inputs. programs: by name, the
    kernels that `compiled` has not."""
    from anyshape.compiler.link import link_plan
    used = {name for step in plan.steps for part in parts_of(step) if isinstance(part, KernelStep)
            for one in part.regimes for name in one.kernels}
    kernels = [kernel for kernel in compiled.kernels if kernel.name in used]
    kernels += compiled.target.build([compiled.target.emit(program) for program in programs.values()])
    if config.check >= 1:
        verify(plan)
    specializer = compiled.executable.specializer
    return link_plan(plan, kernels, specializer.keeps.forward, compiled.target, config, specializer.names)


@dataclass(slots=True)
class _Again:
    """A graph that computes values of the forward again, and what becomes of it."""

    graph: Graph
    store: Storage
    fusion: Fusion
    regimes: dict[int, Versions]


@dataclass(frozen=True, slots=True)
class _Lowered:
    """What the steps of a graph are made of: where its values lie, its kernels, and what a backward computes again."""

    store: Storage
    fusion: Fusion
    regimes: dict[int, Versions]
    parts: tuple[RecomputeSegment, ...]
    again: list[_Again]
    stored: frozenset[str]


def _assembled(graph: Graph, lowered: _Lowered, nonnegative: tuple[Size, ...], whole: bool) -> Plan:
    """The plan of a graph before the first pass over it."""
    plan = assemble(graph, lowered.fusion, lowered.store, lowered.regimes)
    return dataclasses.replace(plan, nonnegative=nonnegative, selected=selected_sizes(graph),
                               divided=divided_sizes(graph), whole=whole)


def _context(graph: Graph, lowered: _Lowered, plan: Plan, forward: PlannedGraph | None, target: Target,
             config: Config) -> PlanContext:
    """What passes over the plan go by."""
    dtypes = {step.dtype for step in plan.steps if isinstance(step, LibraryStep) and step.op == "matmul"}
    if forward is None:
        anchors = tuple(value.name for part in lowered.parts for value in part.anchors)
        source = ForwardGraph(graph, lowered.stored, anchors)
    else:
        source = ForwardGraph(forward.graph, forward.stored)
    return PlanContext(
        config, None if forward is None else forward.plan, source,
        tuple((one.graph, assemble(one.graph, one.fusion, one.store, one.regimes)) for one in lowered.again),
        frozenset(filter(target.multiplies_any_strides, dtypes)), target.hardware.band_bytes,
        # where results and gradients are alive until the backward has ended, its order matters less than that its
        # forward knows it
        not graph.saved if forward is None else forward.plan.whole)


def _gathered(forward: Graph, backward: Graph) -> frozenset[str]:
    """What both graphs wait for, by one name: weights of which each rank has a part."""
    first, second = ({v.name for node in graph.nodes if node.op == "extern" and node.attr("target") == WAIT
                      for v in node.outputs}
                     for graph in (forward, backward))
    return frozenset(first & second)


def _with_inputs_saved(graph: Graph, parts: tuple[RecomputeSegment, ...]) -> Graph:
    """A forward whose tape also has the inputs that its segments read: tensors that exist anyway."""
    there = {value.name for value in graph.saved if isinstance(value, Value)}
    more = {value.name: value for part in parts for value in part.inputs if value.name not in there}
    return graph.replace(saved=(*graph.saved, *more.values()))


def _again(graph: Graph, forward: PlannedGraph, target: Target, config: Config) -> tuple[Graph, list[_Again]]:
    """The backward `graph` with what its forward's tape has beside, and the graphs of the forward's segments."""
    taken = {value.name for node in graph.nodes for value in node.outputs} | {value.name for value in graph.inputs}
    more = []
    for value in forward.graph.saved[len(graph.restored):]:
        assert isinstance(value, Value)
        name = f"tape_{value.name}"
        while name in taken:
            name += "_"
        more.append(Value(name, value.type))
    graph = graph.replace(inputs=(*graph.inputs, *more), restored=(*graph.restored, *more))
    kept = kept_values(forward.graph, forward.plan, forward.stored)
    found = []
    for number, segment in enumerate(forward.segments):
        one = again_graph(segment, number, forward.graph, kept.types)
        if one is not None:
            one = dce(one, config)
            found.append(_Again(one, *fused(one, target, config), {}))
    return graph, found


def fused(graph: Graph, target: Target, config: Config) -> tuple[Storage, Fusion]:
    """Storage and fusion; what cannot be lowered after all is left to PyTorch, one group after another."""
    refused = FusionBlocklist(target.unsupported)
    enabled = config.fuse
    while True:
        store = storage(graph, refused)
        try:
            return store, fuse(graph, store.required, store.layouts, store.base(), hardware=target.hardware,
                               limit=config.max_nodes, refused=refused, enabled=enabled)
        except NotFusable as error:
            counters.count("fusion_retries")
            if not error.values and not enabled:
                raise
            enabled = enabled and bool(error.values)
            refused = FusionBlocklist(refused.ops, refused.values | error.values)


def named(fusion: Fusion, facts: Facts, target: Target,
          first: int = 0) -> tuple[dict[int, Versions], dict[str, LoopProgram]]:
    """The versions of every kernel by its position, from the one at `first` on (the last one may always be used), and
    all programs by name. A name says the contents, so that equal kernels (repeated layers) are one."""
    regimes: dict[int, Versions] = {}
    programs: dict[str, LoopProgram] = {}
    for position, item in enumerate(fusion.items):
        if isinstance(item, FusedKernel):
            inside = zip(item.lowered.program.sizes, item.lowered.sizes, strict=True)
            found = versions(item.lowered.program, target.hardware,
                             {name: facts.hint(size) for name, size in inside})[first:]
            for program in (program for version in reversed(found) for program in version.programs):
                name = content_name(program)
                programs.setdefault(name, dataclasses.replace(program, name=name))
            regimes[position] = tuple(dataclasses.replace(version, programs=tuple(
                programs[content_name(program)] for program in version.programs)) for version in found)
    return regimes, programs


def _with_edited(regimes: dict[int, Versions], programs: dict[str, LoopProgram],
                 edited: Edits, target: Target) -> tuple[dict[int, Versions], dict[str, LoopProgram]]:
    """The kernels that a person has edited in place of the computed ones."""
    found = edited.get("kernels")
    if found is None:
        return regimes, programs
    try:
        programs = put_back(programs, found.text)
        for program in programs.values():
            target.emit(program)
    except (ParseError, VerifyError) as error:
        found.refuse(error)
    return {position: tuple(dataclasses.replace(version, programs=tuple(
        programs[program.name] for program in version.programs)) for version in several)
            for position, several in regimes.items()}, programs


@dataclass(slots=True)
class _Clock:
    last: float = field(default_factory=time.perf_counter)
    marks: list[tuple[str, float]] = field(default_factory=list)

    def mark(self, stage: str) -> None:
        now = time.perf_counter()
        self.marks.append((stage, now - self.last))
        self.last = now

    def total(self) -> float:
        return sum(seconds for _, seconds in self.marks)
