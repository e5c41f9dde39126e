"""From one captured graph to a program that runs: our executable, or the graph as PyTorch would run it."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import ConfigError, Unsupported
from anyshape.compiler.driver import CompiledGraph, compile_graph, twin
from anyshape.frontend.autograd.undefined_gradients import given, zeros_of
from anyshape.frontend.importer.fx_to_graph import Notes, to_graph
from anyshape.frontend.importer.graph_inputs import UNUSED
from anyshape.frontend.programs.differential_check import CheckedProgram
from anyshape.frontend.programs.graph_partition import found_in_data, split_program
from anyshape.frontend.programs.session import Boxed, ProgramRequest
from anyshape.frontend.symbols.node_metadata import UnsupportedNode
from anyshape.ir.graph import Graph
from anyshape.ir.show import show
from anyshape.ir.types import TensorType, ValueType
from anyshape.ops.shape_preconditions import uncertain_sizes
from anyshape.passes.driver import pipeline
from anyshape.passes.driver.ir_dumps import check_edit
from anyshape.plan.ir.program import Window
from anyshape.plan.schedule.ilp import check_installed
from anyshape.runtime.budget.arbitration import attach_memory_budget
from anyshape.runtime.budget.calibration import calibration_of
from anyshape.runtime.budget.order_selection import attach_order_selection
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.memory.offload_store import check_folder
from anyshape.runtime.specialize.joint_layout import attach_joint_layout
from anyshape.sym.expr import Expr, Size, symbols_of
from anyshape.torch_compat import need
from anyshape.torch_compat.tensors import plain_gradient
from anyshape.torch_compat.versions import api


class PlainProgram:
    """Runs a graph op by op, as PyTorch would: the reference, and the way out when compiling fails.

    Called with one list of inputs, which it empties; returns the list of outputs. `count` is called with every run.
    """

    _boxed_call = True

    def __init__(self, gm: GraphModule, name: str, takes_tape: bool, count: Callable[[], object]) -> None:
        self.gm = gm
        self.name = name
        self.takes_tape = takes_tape
        self.count = count
        gm.graph.set_codegen(need("torch.fx.graph._BoxedCodeGen")())
        gm.recompile()
        self.run = gm.forward

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.count()
        if not self.takes_tape:
            with torch.no_grad():
                return list(self.run(inputs))
        tape = inputs[0]
        tape.open()
        inputs[1:] = [plain_gradient(one) if isinstance(one, torch.Tensor) else one for one in inputs[1:]]
        with torch.no_grad():
            # a gradient may be a saved value itself, or a view of one, in memory that the tape is about to give back
            outputs = [tape.apart(result) for result in self.run(inputs)]
        tape.close()
        return outputs


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


def interpret(request: ProgramRequest, reason: str) -> Boxed:
    """The graph of `request` as a callable that runs it op by op, and counts that, with the reason why."""
    takes_tape = request.role == "backward" and request.tape is not None
    return PlainProgram(request.gm, request.name, takes_tape,
                        functools.partial(request.compilation.ran_eagerly, reason))


def compile_program(request: ProgramRequest) -> Boxed:
    """Compile one captured graph: whole, or in parts around what the IR does not carry.

    Raises:
        Unsupported: too much of it; the caller runs the graph as PyTorch would.
    """
    first, why = None, ""
    try:
        if not found_in_data(request.gm):
            graph, notes, forward = graph_of(request)
            if request.role != "backward" or request.tape is None or forward is not None:
                return _built(request, request.name, graph, notes, forward)
    except UnsupportedNode as error:
        first, why = error.node, error.what
    return split_program(
        request, first, why,
        translate=lambda gm, name: to_graph(gm, name.replace(".", "_"), target=target_of(request.config)),
        build=lambda form, name: _built(request, name, *form))


def _built(request: ProgramRequest, name: str, graph: Graph, notes: Notes,
           forward: CompiledGraph | None = None) -> Boxed:
    _refuse_other_devices(graph)
    with api.outside_tracing():
        prepared = request.compilation.prepared.pop(request.name, None)
        if prepared is not None and show(prepared.history.captured) == show(graph):
            compiled = prepared
        else:
            compiled = compile_graph(graph, request.config, forward, _needed(request, graph, notes), request.whole)
        _offer(compiled, forward, request.config)
        _name_sizes(request, compiled)
        if forward is not None:
            _name_sizes(request, forward)
        if request.whole and request.role == "backward" and forward is not None and not _own_sizes(forward, compiled):
            for one, later in in_orders(forward.executable, compiled.executable):
                if later is not None:
                    attach_joint_layout(one.maker, later.maker)
        if request.config.limited:
            _limit(request, compiled, notes, forward)
    program = NativeProgram(name, compiled, notes)
    request.compilation.register(program)
    if request.config.check >= 2:
        return CheckedProgram(program, graph, notes.constants, request)
    return program if notes.constants else _with(compiled.executable, program)


def _limit(request: ProgramRequest, compiled: CompiledGraph, notes: Notes, forward: CompiledGraph | None) -> None:
    """Puts the limit on a program. That of a forward has to know its backward, which is compiled with it."""
    if request.role == "backward":
        if forward is not None:
            _pair(request, forward, compiled, _zeros(request, compiled, notes))
        return
    backward = None
    zeros: list[tuple[Size, int]] = []
    if request.role == "forward" and request.partner is not None and compiled.plan.saved:
        name = request.name.replace("forward", "backward")
        try:
            later, notes = to_graph(request.partner, name.replace(".", "_"), "backward",
                                tuple(_saved_type(s) for s in compiled.plan.saved), target_of(request.config))
            backward = compile_graph(later, request.config, compiled)
            request.compilation.prepared[name] = backward
            zeros = _zeros(request, backward, notes)
            if _own_sizes(compiled, backward):
                request.compilation.record(name, "limit", "its memory is not counted: it has sizes of its own")
                backward = None
            else:
                _offer(backward, compiled, request.config)
                _name_sizes(request, backward)
                _name_sizes(request, compiled)
        except Unsupported as error:
            request.compilation.record(name, "limit", f"nothing is computed again: {error.what}")
    _pair(request, compiled, backward, zeros)


def _pair(request: ProgramRequest, forward: CompiledGraph, backward: CompiledGraph | None,
          zeros: list[tuple[Size, int]]) -> None:
    """Puts the limit on a forward, or on a program that has no backward, in each order that there is."""
    later = None if backward is None else backward.executable
    for one, other in in_orders(forward.executable, later):
        attach_memory_budget(one, other, request.config, request.compilation.held, calibration_of(request.config),
                             zeros)


def in_orders(program: Executable, backward: Executable | None) -> list[tuple[Executable, Executable | None]]:
    """A program with its backward, in each order of steps that calls choose from."""
    found = [(program, backward)]
    if program.other is not None:
        found.append((program.other, None if backward is None else backward.other))
    return found


def _name_sizes(request: ProgramRequest, compiled: CompiledGraph) -> None:
    """Lets errors of a program call its sizes what the report calls them, in each order of steps."""
    names = request.compilation.names_of(request.name)
    for one, _ in in_orders(compiled.executable, None):
        one.layout.names.update(names)


def _offer(compiled: CompiledGraph, forward: CompiledGraph | None, config: Config) -> None:
    """Lets calls of a program, and of its forward, choose between the orders of steps that there are for it."""
    if compiled.other is None or compiled.executable.other is not None:
        return
    if forward is None:
        attach_order_selection(compiled.executable, compiled.other)
    elif forward.executable.other is None and not _own_sizes(forward, compiled):
        attach_order_selection(compiled.executable, compiled.other, forward.executable, twin(forward, config))


def _own_sizes(forward: CompiledGraph, backward: CompiledGraph) -> bool:
    """Whether a backward has sizes that its forward does not know."""
    unknown = set(backward.executable.layout.symbols) - set(forward.executable.layout.symbols)
    return any(not symbol.startswith(UNUSED) for symbol in unknown)


def _zeros(request: ProgramRequest, backward: CompiledGraph, notes: Notes) -> list[tuple[Size, int]]:
    if request.whole:
        return []
    return zeros_of(backward, len(given(backward.plan)) - len(notes.constants), request.wrapped)


def _needed(request: ProgramRequest, graph: Graph, notes: Notes) -> tuple[Size, ...]:
    """Sizes that must be at least 0, beside those of the graph itself: differences of sizes that the trace takes as
    equal, and what the backward of this forward needs. A call that does not fit must be refused before it runs."""
    sizes = list(_differences(notes))
    if request.role == "forward" and request.partner is not None:
        try:
            backward, later = to_graph(request.partner, "later", "backward", target=target_of(request.config))
            sizes += [*_differences(later), *uncertain_sizes(backward)]
        except Unsupported:
            pass  # it will be compiled in parts, or not at all
    known = {name for value in graph.inputs if isinstance(value.type, TensorType) for size in value.type.shape
             for name in symbols_of(size)} | {value.name for value in graph.inputs}
    return tuple(size for size in dict.fromkeys(sizes) if symbols_of(size) <= known)


def _differences(notes: Notes) -> list[Size]:
    return [size for a, b in notes.equalities for size in (a - b, b - a) if isinstance(size, Expr)]


def _refuse_other_devices(graph: Graph) -> None:
    for value in (*graph.inputs, *(result for node in graph.nodes for result in node.outputs)):
        if isinstance(value.type, TensorType) and value.type.device != "cpu":
            raise Unsupported(f"{value.name} is on the device {value.type.device}", why="programs run on CPUs only",
                              do="move the inputs to the CPU")


def graph_of(request: ProgramRequest) -> tuple[Graph, Notes, CompiledGraph | None]:
    """The graph of a request in our IR, what it does not say, and for a backward the compiled forward.

    Raises:
        Unsupported: as `to_graph`.
    """
    forward = _forward_of(request)
    restored = None if forward is None else tuple(_saved_type(s) for s in forward.plan.saved)
    graph, notes = to_graph(request.gm, request.name.replace(".", "_"), request.role, restored,
                            target_of(request.config))
    return graph, notes, forward


def _with(executable: Any, program: NativeProgram) -> Boxed:
    """The executable itself, one Python call less per run, keeping its record alive."""
    executable.program = program
    return executable


def _forward_of(request: ProgramRequest) -> CompiledGraph | None:
    if request.role != "backward":
        return None
    wanted = request.name.replace("backward", "forward")
    for program in request.compilation.programs:
        if isinstance(program, NativeProgram) and program.name == wanted:
            return program.compiled
    return None


def _saved_type(saved: object) -> ValueType:
    if isinstance(saved, Window):
        return saved.type
    return TensorType("i64", ())


STAGES = ("capture", *(step.__name__ for step in pipeline.ROAD), "kernels", "llvm", "plan", "all")


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
    passes = (*pipeline.TECHNIQUES, *dict.fromkeys(step.__name__ for step in pipeline.ROAD))
    for name, text, known in (("show", config.show, STAGES), ("disable", config.disable, passes)):
        unknown = [word for word in map(str.strip, text.split(",")) if word and word not in known]
        if unknown:
            raise ConfigError(f"{name} names no {'stage' if name == 'show' else 'pass'}: {', '.join(unknown)}",
                              why=f"there are {', '.join(known)}", do="correct the name")
