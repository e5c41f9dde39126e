"""From one captured graph to a program that runs: our executable, or the graph as PyTorch would run it."""
from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import GraphModule

from anyshape.backend.interface import Target
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, Unsupported
from anyshape.compiler.compiled import BackwardGraph, CompiledGraph
from anyshape.compiler.driver import compile_backward, compile_pair
from anyshape.compiler.shape_preconditions import uncertain_sizes
from anyshape.compiler.stages import check_names
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.frontend.programs.differential_check import CheckedProgram
from anyshape.frontend.programs.graph_device import target_for
from anyshape.frontend.programs.graph_partition import is_in_parts, known_number, split_program
from anyshape.frontend.programs.plain_program import DeviceFallback
from anyshape.frontend.programs.session import Boxed, Compilation, PreparedBackward, ProgramRequest, is_copy
from anyshape.frontend.symbols.node_metadata import UnsupportedNode
from anyshape.ir.graph import Graph
from anyshape.ir.ir_dumps import check_edit
from anyshape.ir.types import TensorType
from anyshape.plan.schedule.ilp import check_installed
from anyshape.runtime.memory.offload_store import check_folder
from anyshape.runtime.torch_ops.extern_calls import FUNCTIONAL
from anyshape.sym.expr import Expr, Size, symbols_of
from anyshape.torch_compat.versions import api


class NativeProgram:
    """A compiled program: constants of the graph are added to the inputs, the rest is the executable.

    `compiled` and `notes` say what was decided, for `explain`.
    """

    _boxed_call = True

    def __init__(self, name: str, compiled: CompiledGraph, notes: Notes) -> None:
        self.name = name
        self.compiled = compiled
        self.notes = notes
        self.executable = compiled.executable
        self.constants = notes.constants

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.constants:
            inputs.extend(self.constants)
        return self.executable(inputs)


def compile_program(request: ProgramRequest) -> Boxed:
    """Compile one captured graph: whole, or in parts around what the IR does not carry.

    Raises:
        Unsupported: too much of it; the caller runs the graph as PyTorch would.
    """
    target_for(request.gm, request.config)
    first, why = None, ""
    try:
        if not is_in_parts(request.gm):
            graph, notes, forward = graph_of(request)
            if request.role != "backward" or request.tape is None or forward is not None:
                return _built(request, request.name, request.gm, graph, notes, forward)
    except UnsupportedNode as error:
        first, why = error.node, error.what
    return split_program(
        request, first, why,
        translate=lambda gm, name: to_graph(gm, name.replace(".", "_"), target=target_for(request.gm, request.config)),
        build=lambda form, name, gm: _built(request, name, gm, *form))


def _built(request: ProgramRequest, name: str, gm: GraphModule, graph: Graph, notes: Notes,
           forward: CompiledGraph | None = None) -> Boxed:
    """A program that runs `graph`, which is made of `gm`: all of the request's, or a part of it with a name of its own.
    """
    target = target_for(request.gm, request.config)
    ahead = prepared_of(request) if name == request.name else None
    compiled = None if ahead is None else ahead.compiled
    if compiled is None:
        with api.outside_tracing():
            if forward is None:
                compiled = _with_backward(request, name, graph, notes, target)
            else:
                compiled = _later(request, graph, notes, forward)
    if name == request.name:
        request.compilation.prepared.pop(name, None)
    program = NativeProgram(name, compiled, notes)
    if target.streams is not None and all(node.target is not known_number for node in gm.graph.nodes):
        compiled.executable.otherwise = DeviceFallback(request, gm, notes.constants)
    request.compilation.register(program)
    if any(node.op == "extern" and str(node.attr("target")).startswith(FUNCTIONAL) for node in graph.nodes):
        from anyshape.runtime.collectives.lost_rank import announce  # torch.distributed, which few programs need
        announce()
    if request.config.check >= 2:
        return CheckedProgram(program, graph, notes.constants, request)
    return program if notes.constants else compiled.executable  # one Python call less per run


def _with_backward(request: ProgramRequest, name: str, graph: Graph, notes: Notes, target: Target) -> CompiledGraph:
    """Compiles a graph, and its backward with it where the two are to know each other: under a limit, and of a whole
    step. That is handed over when torch asks for it."""
    config, compilation = request.config, request.compilation
    backward = _backward_of(request)
    ahead = backward if name == request.name and (config.limited or request.whole) else None
    given = (config, _needed(graph, notes, backward), request.whole, compilation.names_of(request.name),
             compilation.held, target)
    try:
        pair = compile_pair(graph, ahead.form[0] if ahead is not None and ahead.form is not None else None, *given)
    except Exception:
        if ahead is None or config.limited:
            raise
        pair = compile_pair(graph, None, *given)  # if it was the backward, its own request fails, and says so
    if ahead is not None:
        compilation.prepared[backward_name(name)] = dataclasses.replace(ahead, compiled=pair.backward)
        note = ahead.refused or pair.note
        if config.limited and note and pair.forward.plan.saved:
            compilation.record(backward_name(name), "limit", note)
    return pair.forward


def _later(request: ProgramRequest, graph: Graph, notes: Notes, forward: CompiledGraph) -> CompiledGraph:
    """Compiles a backward when torch asks for it."""
    if request.config.limited and request.name in request.compilation.prepared:
        request.compilation.record(request.name, "limit", "its memory is not counted: it is compiled after its forward")
    return compile_backward(graph, request.config, forward, _needed(graph, notes, None), request.whole,
                            request.compilation.names_of(request.name))


def backward_name(name: str) -> str:
    """The name of a forward's backward."""
    return name.replace("forward", "backward")


def _backward_of(request: ProgramRequest) -> PreparedBackward | None:
    """The backward of a forward, translated when it is first asked for; None of other requests."""
    if request.role != "forward" or request.partner is None:
        return None
    name = backward_name(request.name)
    found = request.compilation.prepared.get(name)
    if found is None:
        found = request.compilation.prepared[name] = _translated(request, request.partner, name)
    return found


def _translated(request: ProgramRequest, gm: GraphModule, name: str) -> PreparedBackward:
    """A backward in our IR, which reads the tape of a forward that has no plan yet."""
    try:
        graph, notes = to_graph(gm, name.replace(".", "_"), target_for(gm, request.config))
    except Unsupported as error:  # it will be compiled in parts, or not at all
        return PreparedBackward(gm, refused=f"nothing is computed again: {error.what}")
    backward = BackwardGraph(graph, notes.renamed, _needed(graph, notes, None), len(notes.constants), request.wrapped)
    return PreparedBackward(gm, (backward, notes))


def prepared_of(request: ProgramRequest) -> PreparedBackward | None:
    """What there is of a backward since its forward was compiled; None where it was another graph."""
    if request.role != "backward":
        return None
    found = request.compilation.prepared.get(request.name)
    return found if found is not None and found.form is not None and is_copy(found.gm, request.gm) else None


def _needed(graph: Graph, notes: Notes, backward: PreparedBackward | None) -> tuple[Size, ...]:
    """Sizes that must be at least 0, beside those of the graph itself: differences of sizes that the trace takes as
    equal, and what the backward of this forward needs. A call that does not fit must be refused before it runs."""
    sizes = list(size_differences(notes))
    if backward is not None and backward.form is not None:
        later, more = backward.form
        sizes += [*size_differences(more), *uncertain_sizes(later.graph)]
    known = {name for value in graph.inputs if isinstance(value.type, TensorType) for size in value.type.shape
             for name in symbols_of(size)} | {value.name for value in graph.inputs}
    return tuple(size for size in dict.fromkeys(sizes) if symbols_of(size) <= known)


def size_differences(notes: Notes) -> list[Size]:
    """Differences of sizes that the trace takes as equal, which are at least 0 then."""
    return [size for a, b in notes.equalities for size in (a - b, b - a) if isinstance(size, Expr)]


def graph_of(request: ProgramRequest) -> tuple[Graph, Notes, CompiledGraph | None]:
    """The graph of a request in our IR, what it does not say, and for a backward the compiled forward.

    Raises:
        Unsupported: as `to_graph`.
    """
    forward, known = _forward_of(request), prepared_of(request)
    if known is not None and known.form is not None:
        backward, notes = known.form
    else:
        graph, notes = to_graph(request.gm, request.name.replace(".", "_"), target_for(request.gm, request.config))
        backward = BackwardGraph(graph, notes.renamed)
    return backward.graph if forward is None else backward.reading(forward.plan), notes, forward


def _forward_of(request: ProgramRequest) -> CompiledGraph | None:
    if request.role != "backward":
        return None
    wanted = request.name.replace("backward", "forward")
    for program in request.compilation.programs:
        if isinstance(program, NativeProgram) and program.name == wanted:
            return program.compiled
    return None


def native(program: Boxed, compilation: Compilation) -> NativeProgram | None:
    """What is known of a program that is one executable; None of others."""
    known = (one for one in compilation.programs if isinstance(one, NativeProgram))
    return next((one for one in known if program in (one, one.executable)), None)


def check_stages(config: Config) -> None:
    """Raises ConfigError, before anything compiles, when settings do not go together, when `config.show` or
    `config.disable` names what does not exist, or `config.edit` no folder."""
    check_edit(config)
    check_folder(config.memory_store)
    if config.planning_seconds:
        check_installed()
    if config.check >= 2 and config.limited:
        raise ConfigError("check=2 goes with no limit in bytes",
                          why="the interpreter, which then runs the program too, keeps every value",
                          do="use check=1, or leave the limit out")
    check_names(config)
