"""The `torch.compile` backend: Dynamo graph -> AOTAutograd -> our program compiler, with a way out that never fails.

Registered as the entry point `torch_dynamo_backends: anyshape`, so that `torch.compile(model, backend="anyshape")`
works; `anyshape.compile` binds a `Compilation` to the same function.
"""
from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from anyshape import torch_compat as compat
from anyshape.base.config import Config
from anyshape.base.errors import AnyShapeError, ConfigError, InputError, Unsupported
from anyshape.frontend.aten import decompositions
from anyshape.frontend.attention_fusion.match import attention
from anyshape.frontend.autograd.custom_derivatives import derivatives
from anyshape.frontend.autograd.partition import PartitionedGraphs, partition_with_tape
from anyshape.frontend.capture.autograd_function import AutogradProgram
from anyshape.frontend.capture.caught_errors import LEFT, caught
from anyshape.frontend.capture.copied_parts import check_copied_parts
from anyshape.frontend.capture.data_size_guard import DataSizeGuard, asks_data
from anyshape.frontend.capture.frame_callback import NESTED, check_nested
from anyshape.frontend.diagnostics import repro
from anyshape.frontend.messages.recompile_reasons import size_names
from anyshape.frontend.programs.compile_program import check_stages, compile_program
from anyshape.frontend.programs.double_backward import DoubleBackward, with_double_backward
from anyshape.frontend.programs.eager_fallback import BY_OPERATOR, REPLACED, FallbackWarning, note, refuse
from anyshape.frontend.programs.found_numbers import with_found_checked
from anyshape.frontend.programs.plain_program import interpret
from anyshape.frontend.programs.session import Boxed, Compilation, ProgramRequest, Role
from anyshape.frontend.recurrent import scans
from anyshape.frontend.train_step.distributed import compile_distributed
from anyshape.frontend.train_step.partition import HalvesProgram, step_halves
from anyshape.frontend.train_step.pipelined import compile_pipelined
from anyshape.frontend.train_step.program import StepProgram
from anyshape.frontend.train_step.tiled import compile_tiled
from anyshape.frontend.train_step.traced_gradients import detached, point_at_forward
from anyshape.frontend.train_step.update_op import expanded
from anyshape.frontend.train_step.validation import warn_of_inputs
from anyshape.passes.driver.pipeline import ATTENTION, FAST_DISPATCH
from anyshape.runtime.context.process_context import context_underway
from anyshape.torch_compat.dynamo import internals
from anyshape.torch_compat.replaced_kernels import replaced_kernels
from anyshape.torch_compat.versions import api

NOT_WITH_THIS = "nothing can be compiled with this version of torch"
FAST_PATH = ("nn.TransformerEncoderLayer is one operator without gradients, and under autocast PyTorch's tracer takes "
             "its results for float32")
WITH = "install a version of torch that AnyShape is tested with (see README)"


def backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None,
            options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """The backend that `torch.compile(..., backend="anyshape", options={...})` calls.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: fake tensors and symbolic numbers.
        mode: not used; torch passes it.
        options: fields of `Config`.

    Raises:
        KeyboardInterrupt: it came while torch.compile checked guards.
    """
    if internals.lost_before_trace():
        raise KeyboardInterrupt("while guards were checked")
    with context_underway(Config.make(**(options or {}))):
        return compile_fx(gm, example_inputs, options=options)


def compile_fx(gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None,
               compilation: Compilation | None = None) -> Callable[..., Any]:
    """Compiles one Dynamo graph; returns a callable over its flat inputs.

    Args:
        compilation: the record that programs register with; a new one, from `options`, when None.

    Raises:
        ConfigError: an option is not a field of Config.
        AnyShapeError: compiling failed, or there is a nested tensor, and `config.strict` is set.
    """
    if compilation is None:
        compilation = Compilation(Config.make(**(options or {})), compile_program)
        check_stages(compilation.config)
    gm = scans.recognised(gm)
    check_copied_parts(gm)
    lack = compat.lack()
    if lack:
        return _as_pytorch(gm, compilation, f"{NOT_WITH_THIS}: {lack}", WITH)
    if replaced_kernels():
        return _as_pytorch(gm, compilation, f"{REPLACED}: {', '.join(replaced_kernels())}", BY_OPERATOR)
    if _has_fast_path(gm):
        return _as_pytorch(gm, compilation, FAST_PATH, "call it with gradients enabled, or without autocast")
    fakes = [value for value in example_inputs if api.is_fake(value)]
    if fakes and not all(map(api.is_traced, fakes)):
        return gm.forward  # a call on shapes alone: there is no memory to compute on
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in example_inputs):
        check_nested(compilation.config)
        return _as_pytorch(gm, compilation, NESTED, "use padded tensors")
    if compilation.step is None:
        _leave_what_is_caught(gm, compilation)
    number = compilation.next_graph(size_names(gm))
    captured = gm
    if compilation.tracing[2] in ("all sizes", "one graph") and asks_data(gm):
        compilation.data_sizes[str(number)] = DataSizeGuard(gm)
    gm = derivatives(_recognised(with_found_checked(gm), compilation, number))
    if compilation.step is not None:
        warn_of_inputs(gm)
        gm = detached(gm)
    halves = PartitionedGraphs()
    pair = AutogradProgram(halves, compilation, len(example_inputs))
    inference = _Inference(compilation, number, halves)
    wrapped = api.aot_compile(
        gm, example_inputs,
        forward=functools.partial(_compile_forward, compilation, number, pair),
        backward=functools.partial(_compile_backward, compilation, number, pair),
        inference=inference,
        partition=lambda joint, inputs, **more: partition_with_tape(joint, inputs, halves, **more),
        decompositions=decompositions.table())
    if pair.forward is not None:
        pair.second = DoubleBackward(captured, halves, pair.as_given, compilation)
        wrapped = with_double_backward(wrapped, pair.second)
    if FAST_DISPATCH in compilation.config.disabled():
        return _or_shapes(wrapped, gm) if fakes else wrapped
    flat = inference.flat(len(example_inputs)) or pair.flat(wrapped)
    ahead = compilation.prepared.get(f"{number}.backward")
    if flat is not None and halves.backward is not None and ahead is not None and ahead.compiled is not None:
        _compile_backward(compilation, number, pair, halves.backward, ())  # so that the first call goes that way too
    found = flat or wrapped
    return _or_shapes(found, gm) if fakes else found


def _has_fast_path(gm: GraphModule) -> bool:
    """Whether a graph has the one operator of nn.TransformerEncoderLayer under autocast on the CPU, where eager PyTorch
    computes it, and returns it, in the lower precision, and the tracer takes its results for float32."""
    names = {getattr(node.target, "__name__", "") for node in gm.graph.nodes if node.op == "call_function"}
    return "_transformer_encoder_layer_fwd" in names and (
        torch.is_autocast_enabled("cpu") or "_enter_autocast" in names)


def _leave_what_is_caught(gm: GraphModule, compilation: Compilation) -> None:
    """Has Dynamo leave the frame of a graph alone where the code catches errors of its operators."""
    where = caught(gm)
    if not where:
        return
    compilation.left_alone = LEFT, where
    if compilation.tracing[2] == "backend":  # nobody counts calls
        refuse(compilation.config, LEFT, where=where)
        note(compilation, f"{LEFT} ({where})")
    raise api.skip_frame(f"{LEFT} ({where})")


def _or_shapes(compiled: Callable[..., Any], gm: GraphModule) -> Callable[..., Any]:
    """A compiled part of a graph that gives shapes for shapes: torch's DDPOptimizer cuts a graph at the borders of its
    buckets, has each part compiled, and calls it on fake tensors for the operands of the next one."""
    def call(*inputs: Any) -> Any:
        return (gm.forward if any(map(api.is_fake, inputs)) else compiled)(*inputs)

    return call


def _as_pytorch(gm: GraphModule, compilation: Compilation, reason: str, do: str) -> Callable[..., Any]:
    """A graph whose calls run as PyTorch, and are counted."""
    refuse(compilation.config, reason, do)

    def plain(*inputs: Any) -> Any:
        note(compilation, reason, do)
        return gm.forward(*inputs)

    return plain


def _recognised(gm: GraphModule, compilation: Compilation, number: int) -> GraphModule:
    """The graph with fused attention; as it was where the search for it fails, which must not cost the user the run."""
    try:
        gm, compilation.attentions[number] = attention(gm, compilation.config)
    except Exception as error:
        if compilation.config.strict:
            raise
        compilation.record(str(number), ATTENTION, f"{type(error).__name__}: {error}")
    return gm


class _Inference:
    """Compiles an inference graph, and keeps the program where AOTAutograd's wrapper would add nothing to it."""

    def __init__(self, compilation: Compilation, number: int, halves: PartitionedGraphs) -> None:
        self.compile = functools.partial(_compile_half, compilation, number, halves, "inference")
        self.whole_step = functools.partial(_traced_step, compilation, number)
        self.inputs = -1
        self.program: Boxed | None = None
        self.hints: list[tuple[int, set[int]]] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        program = self.whole_step(gm) or self.compile(gm, example_inputs)
        hints = internals.identity_runtime()
        if hints is not None:
            self.program = program
            self.hints = hints
            self.inputs = len(example_inputs)
        return program

    def flat(self, count: int) -> Callable[..., Any] | None:
        """The program over `count` flat inputs, or None when it needs AOTAutograd's wrapper."""
        if self.program is None or self.inputs != count:
            return None
        return flat_program(self.program, self.hints)


def flat_program(program: Boxed, hints: list[tuple[int, set[int]]]) -> Callable[..., Any]:
    """`program` over flat inputs, its outputs marked with `hints`. Its `boxed` takes a list, as `program` does;
    `made_of` says of what it is made."""
    boxed = internals.marking_dynamic(program, hints) if hints else program

    def run(*inputs: Any) -> list[Any]:
        return boxed(list(inputs))

    run.boxed, run.made_of = boxed, (program, hints)  # type: ignore[attr-defined]
    return run


def _compile_forward(compilation: Compilation, number: int, pair: AutogradProgram, gm: GraphModule,
                     example_inputs: Sequence[Any]) -> Boxed:
    if compilation.step is not None:  # all its gradients are taken inside of it
        raise Unsupported("PyTorch would differentiate the step once more",
                          why="the model changes one of its weights while it runs")
    pair.runtime, pair.as_given = internals.training_runtime(), internals.returns_as_given()
    pair.forward = _compile_half(compilation, number, pair.halves, "forward", gm, example_inputs, not pair.is_plain())
    return pair.forward


def _compile_backward(compilation: Compilation, number: int, pair: AutogradProgram, gm: GraphModule,
                      example_inputs: Sequence[Any]) -> Boxed:
    if pair.backward is None:
        pair.backward = _compile_half(compilation, number, pair.halves, "backward", gm, example_inputs,
                                      not pair.is_plain())
        if pair.when_whole is not None:
            pair.when_whole()
            pair.when_whole = None
    return pair.backward


def _compile_half(compilation: Compilation, number: int, halves: PartitionedGraphs, role: Role, gm: GraphModule,
                  example_inputs: Sequence[Any], wrapped: bool = False) -> Boxed:
    request = ProgramRequest(
        gm=gm, role=role, name=f"{number}.{role}", config=compilation.config, compilation=compilation,
        tape=halves.layout if role != "inference" else None,
        partner={"forward": halves.backward, "backward": halves.forward, "inference": None}[role],
        wrapped=wrapped,
        static_inputs=api.static_inputs() if role != "backward" else ())
    program = compile_or_interpret(request)
    program._boxed_call = True  # type: ignore[attr-defined]
    return program


def _traced_step(compilation: Compilation, number: int, gm: GraphModule) -> Boxed | None:
    """The programs of a train step, which are compiled when they are first called; None for other graphs."""
    if compilation.step is None:
        return None
    point_at_forward(gm)
    return StepProgram(gm, compilation.step, functools.partial(_compile_step, compilation, number, iter((number,))),
                       api.static_inputs())


def _compile_step(compilation: Compilation, traced: int, first: Iterator[int], gm: GraphModule,
                  static: tuple[int, ...], reason: str) -> Boxed:
    """A train step as a forward and a backward with its update, or as one program where it is not cut. traced: the
    number of its trace, which is that of the `first` program; reason: of another one."""
    number = next(first, None)
    if number is None:
        number = compilation.next_update(traced, reason)
    if compilation.step.distribution is not None:
        has_pipe = compilation.step.distribution.strategy.pipe is not None
        return (compile_pipelined if has_pipe else compile_distributed)(compilation, number, gm, static)
    halves = step_halves(gm, static)
    if halves is None:
        expanded(gm)
        return compile_or_interpret(ProgramRequest(
            gm=gm, role="inference", name=f"{number}.inference", config=compilation.config, compilation=compilation,
            tape=None, partner=None, whole=True, static_inputs=static))
    tiled = compile_tiled(compilation, number, gm, halves)
    if tiled is not None:
        return tiled
    expanded(halves.backward)
    found = []
    for role, half, partner, places in (("forward", halves.forward, halves.backward, halves.order.forward_inputs),
                                        ("backward", halves.backward, halves.forward, halves.order.backward_inputs)):
        found.append(compile_or_interpret(ProgramRequest(
            gm=half, role=role, name=f"{number}.{role}", config=compilation.config,  # type: ignore[arg-type]
            compilation=compilation, tape=halves.layout, partner=partner, whole=True,
            static_inputs=tuple(i for i, place in enumerate(places) if place in static))))
    return HalvesProgram(halves.order, *found)


def _shares_complex_memory(gm: GraphModule) -> bool:
    """Whether some result, perhaps a real one, lies in the memory of complex numbers."""
    complexes = {api.storage_key(node.meta["val"]) for node in gm.graph.nodes
                 if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].is_complex()}
    return any(api.storage_key(node.meta.get("val")) in complexes for node in gm.graph.output_node().all_input_nodes
               if isinstance(node.meta.get("val"), torch.Tensor))


def compile_or_interpret(request: ProgramRequest) -> Boxed:
    """The compiled program; when compiling fails, one warning and the same graph run node by node.

    One of the package's two borders with a broad `except`: an error inside the compiler must not cost the user the run.

    Raises:
        AnyShapeError: compiling failed and `config.strict` is set.
        LimitError: it failed under a limit in bytes, which the graph as it is would not keep to.
    """
    compilation = request.compilation
    try:
        if request.role != "backward" and internals.regenerates_views() and _shares_complex_memory(request.gm):
            raise Unsupported("a result is a view of complex numbers",
                              why="PyTorch makes it anew from where the program's own result lies in memory, and "
                                  "programs copy complex numbers",
                              do="return a clone() of it, or the whole tensor")
        with api.no_new_guards():
            return compilation.compiler(request)
    except Exception as error:
        if api.is_restart(error) or isinstance(error, (ConfigError, InputError)):
            raise
        path = "" if isinstance(error, Unsupported) else repro.write(request, error)
        report = f"report it with the file {path}" if path else "report it"
        if request.config.strict:
            if isinstance(error, AnyShapeError) and not path:
                raise
            raise AnyShapeError(
                f"AnyShape could not compile program {request.name}", why=f"{type(error).__name__}: {error}",
                do=f"{report}, or set strict=False to run this graph as PyTorch would") from error
        reason = f"{type(error).__name__}: {error}"
        refuse(request.config, f"program {request.name} could not be compiled: {reason}",
               do=f"{report}, or leave the limit out")
        compilation.record(request.name, repro.stage_of(error) or "compile", reason)
        again = f", or look into it: anyshape repro {path}" if path else ""
        warnings.warn(
            f"AnyShape could not compile program {request.name}; it runs as PyTorch would.\n  why: {reason}\n"
            f"  do:  set strict=True to stop here, and see explain(){again}", FallbackWarning, stacklevel=2)
        return interpret(request, f"program {request.name} could not be compiled: {reason}")
