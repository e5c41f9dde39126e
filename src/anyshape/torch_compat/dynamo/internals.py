"""Dynamo's guards and code, which fast dispatch runs itself, and AOTAutograd's run-time wrapper, where it would do
nothing that we do not, as far as they depend on torch's version.

Callers ask the same questions here as torch's own wrappers do.
"""
from __future__ import annotations

import inspect
import signal
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from anyshape import torch_compat as compat
from anyshape.torch_compat import replaced_kernels as replaced
from anyshape.torch_compat.tensors import plain_gradient
from anyshape.torch_compat.versions import api

DROPPED = ("torch._dynamo.guards.GuardManagerWrapper", "torch._dynamo.guards.DeletedGuardManagerWrapper",
           "torch._dynamo.utils.CleanupManager.instance")
GUARD = "torch._C._dynamo.guards.RootGuardManager.add_epilogue_lambda_guard"
AOT = "torch._functorch._aot_autograd."


def cached_programs(code: Any) -> list[tuple[Any, Any]]:
    """What Dynamo holds for a code object: (guards, transformed code) of every program. `guards.check(locals)` says
    whether a frame with these locals may run the code; `guards.cache_entry` is None once Dynamo dropped the program.
    Empty where torch does not say."""
    entries = compat.get("torch._dynamo.eval_frame._debug_get_cache_entry_list")
    return [] if entries is None else [(entry.guard_manager, entry.code) for entry in entries(code)
                                        if entry.code is not None]


class Callback:
    """What Dynamo calls where it has no program for a frame. Torch 2.13 loses count of it when such a call raises, so
    it may never die; `clear` lets go of all that it leads to."""

    __slots__ = ("_torchdynamo_orig_backend", "trace")

    def __init__(self, trace: Callable[..., Any]) -> None:
        self.trace: Callable[..., Any] | None = trace

    def __call__(self, *arguments: Any) -> Any:
        assert self.trace is not None, "its compiled object is gone"
        return self.trace(*arguments)

    def clear(self) -> None:
        """It will not be called any more."""
        self.trace = self._torchdynamo_orig_backend = None


def forget(callback: Callback, codes: Sequence[Any], backend: Callable[..., Any]) -> None:
    """Drops what torch holds of a compilation that is gone: its programs for the code objects `codes`, which are those
    of functions and classes that live on, and `backend`, which Dynamo would call in `torch._dynamo.reset()`."""
    callback.clear()
    entries, backends = map(compat.get, ("torch._dynamo.eval_frame._debug_get_cache_entry_list",
                                         "torch._dynamo.eval_frame.cached_backends"))
    for code in {id(code): code for code in codes}.values() if entries is not None and compat.has(*DROPPED) else ():
        for entry in entries(code):
            if entry.backend is backend:
                _drop(entry)
    if backends is not None:
        backends.pop(id(backend), None)


def _drop(entry: Any) -> None:
    """Drops one program of Dynamo's. What Dynamo does itself when an object that is guarded dies leaves more: its
    guards live as long as the classes that they name, and after a graph break its code (of which torch 2.13 loses
    count) with its names among the globals of the user's module."""
    kind, gone, names = map(compat.need, DROPPED)
    guards, code = entry.guard_manager, entry.code
    guards.extra_state.invalidate(entry, gone("its compiled object is gone"))
    kind.__init__(guards)
    if code in names:
        names._remove_id(id(code))


def guard_check(guards: Any) -> Callable[[dict[str, Any]], bool]:
    """`guards.check`, without the function of Python around it."""
    return getattr(guards, "root", guards).check  # type: ignore[no-any-return]


def can_add_guards() -> bool:
    """Whether `add_guard` works with this torch."""
    return compat.has(GUARD)


def add_guard(guards: Any, holds: Callable[[dict[str, Any]], bool], words: str) -> None:
    """A guard more for a program that Dynamo is about to keep, asked after all others: `holds`, of the frame's locals.
    `words` say it where it fails (`failed_guards`)."""
    add = guards.root.add_epilogue_lambda_guard
    try:
        add(holds, [words], None)
    except TypeError:  # before torch 2.12 without the user's stack
        add(holds, [words])


def failed_guards(code: Any, frame_locals: dict[str, Any], callback: Any) -> list[list[str]]:
    """The guards by which each program that Dynamo holds for `code` and made with `callback` (the `inner` of
    `api.dynamo_compile`) refuses a frame with these locals; the nearest program's first."""
    answers = [guards.check_verbose(frame_locals) for guards in _guards_of(code, callback)]
    refused = sorted((one for one in answers if not one.result), key=lambda one: -one.num_guards_executed)
    return [list(one.verbose_code_parts) for one in refused]


def lost_interrupt(code: Any, frame_locals: dict[str, Any], callback: Any) -> bool:
    """Whether Dynamo asks for a program of a frame because Ctrl-C came while it checked guards: one of those that it
    has serves the frame. With other threads that cannot be told, for they have Dynamo move the programs that it looks
    through."""
    # the thread that tqdm starts, which torch uses, calls nothing
    threads = [one for one in threading.enumerate() if type(one).__module__ != "tqdm._monitor"]
    return interrupt_raises() and len(threads) == 1 and any(
        guard_check(guards)(frame_locals) for guards in _guards_of(code, callback))


def lost_before_trace() -> bool:
    """`lost_interrupt` of the frame that torch.compile traces at the moment, for a backend that it calls."""
    current = compat.get("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")
    try:
        frame = None if current is None else current()
    except AttributeError:  # nothing is traced
        return False
    return frame is not None and lost_interrupt(frame.f_code, frame.f_locals, frame.output.compiler_fn)


def interrupt_raises() -> bool:
    """Whether Ctrl-C raises KeyboardInterrupt here. torch's C++ clears whatever a guard that is written in Python
    raises, and says that the guard does not hold; what another handler would have raised is not known."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler \
        and threading.current_thread() is threading.main_thread()


def _guards_of(code: Any, callback: Any) -> list[Any]:
    """The guards of the programs that Dynamo holds for `code` and made with `callback`."""
    all_of = compat.get("torch._dynamo.eval_frame._debug_get_cache_entry_list")
    backend = api.backend_of(callback)
    return [entry.guard_manager for entry in (() if all_of is None else all_of(code))
            if entry.backend is backend and entry.guard_manager.cache_entry is not None]


def only_graph(code: Any, names: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """The program of the one graph that Dynamo's `code` calls, and what may stand for names among the frame's globals
    (`names`) when the code runs outside of Dynamo: the same functions without the wrappers that switch Dynamo off.

    None when the code calls several graphs or goes on in another frame.
    """
    utils = compat.get("torch._dynamo.utils")
    if utils is None or any(name.startswith("__resume_at") for name in code.co_names):
        return None
    found = [name for name in code.co_names if name.startswith("__compiled_fn")]
    if len(found) != 1 or found[0] not in names:
        return None
    program = _unwrapped(names[found[0]])
    stand_in = types.ModuleType("utils")
    for name in code.co_names:
        if not name.startswith("__") and hasattr(utils, name):
            setattr(stand_in, name, _for_profiles(name, _unwrapped(getattr(utils, name))))
    others = {name: stand_in for name in code.co_names if name in names and names[name] is utils
              and name.startswith("__import_")}
    return program, {found[0]: program, **others}


def _unwrapped(function: Any) -> Any:
    function = getattr(function, "_torchdynamo_orig_callable", function)
    if getattr(function, "__globals__", {}).get("__name__") == "torch._compile":  # torch._disable_dynamo
        function = getattr(function, "__wrapped__", function)
    return function


def _for_profiles(name: str, function: Any) -> Any:
    """What marks the frame's own code in a profile: nothing, for while somebody takes one no call comes this way
    (`tracer_detector`). Functions of C, which take the least time."""
    if not compat.has("torch.autograd.profiler._is_profiler_enabled"):
        return function
    return {"record_pregraph_bytecode_enter": tuple, "record_pregraph_bytecode_exit": len}.get(name, function)


def tracer_detector() -> Callable[[], bool]:
    """A quick function that says whether something other than a plain call is going on in this thread: a tracer other
    than torch.compile's, a frame evaluated by Dynamo, a profile, or a stance set by `torch.compiler.set_stance`."""
    names = ("torch._C._dynamo.eval_frame.get_eval_frame_callback", "torch._C._is_tracing", "torch._guards._TLS",
             "torch._dynamo.eval_frame._stance", "torch._dynamo.eval_frame.DynamoStance")
    callback, jit_tracing, local, _, default = map(compat.get, names)
    if not compat.has(*names):
        return lambda: True
    eval_frame = compat.need("torch._dynamo.eval_frame")  # where torch puts another stance
    usual = eval_frame._stance if eval_frame._stance.stance == "default" else default()
    profiler = torch.autograd.profiler
    if not compat.has("torch.autograd.profiler._is_profiler_enabled"):
        profiler = types.SimpleNamespace(_is_profiler_enabled=False)  # type: ignore[assignment]

    def detect() -> bool:
        return (callback() is not None or jit_tracing() or getattr(local, "tracing_context", None) is not None
                or profiler._is_profiler_enabled or (eval_frame._stance is not usual and eval_frame._stance != usual))

    return detect


Hints = list[tuple[int, set[int]]]  # (output index, dynamic dims), for later traces


def _plain_metadata() -> Any:
    """AOTAutograd's notes on the graph that it compiles; None if its run-time wrapper has to change inputs, make
    aliases, wrap subclasses, thread tokens, or switch autocast off."""
    context = compat.need("torch._guards.TracingContext").try_get()
    metadata = getattr(context, "fw_metadata", None)
    casts = compat.get("torch._C._is_any_autocast_enabled")
    if metadata is None or casts is None or casts():
        return None
    inputs_as_given = not any(info.mutates_data or info.mutates_metadata or info.mutates_storage_metadata
                              for info in metadata.input_info)
    plain_tensors = all(type(kind).__name__ in ("PlainTensorMeta", "int")
                        for kind in (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta))
    if not inputs_as_given or not plain_tensors or metadata.tokens or metadata.is_rng_op_functionalized \
            or metadata.num_outputs_aliased or metadata.num_intermediate_bases \
            or metadata.grad_enabled_mutation is not None or metadata.num_graphsafe_rng_states:
        return None
    return metadata


def _hints(metadata: Any) -> Hints:
    return [(index, set(info.dynamic_dims)) for index, info in enumerate(metadata.output_info) if info.dynamic_dims]


def identity_runtime() -> Hints | None:
    """Asked while AOTAutograd compiles an inference graph: None if its run-time wrapper does more than call the
    program with the arguments as they are and hand its outputs on; else the only other thing it does, hints on
    outputs."""
    metadata = _plain_metadata()
    return None if metadata is None else _hints(metadata)


@dataclass(frozen=True, slots=True)
class TrainingRuntime:
    """What AOTAutograd's run-time wrapper does for a forward and a backward that share a tape.

    Args:
        hints: as for inference.
        constant: outputs that have no gradient.
        views: outputs whose memory nobody else has, but which are views to autograd.
        tangents: per gradient that the backward takes, the output's index and torch's note of its layout.
        steady: compiled while deterministic algorithms were not asked for.
        inputs, outputs: how many.
        detached: inputs whose gradient, should it come out as None, the wrapper hides from autograd.
    """
    hints: Hints
    constant: tuple[int, ...]
    views: tuple[int, ...]
    tangents: tuple[tuple[int, Any], ...]
    steady: bool
    inputs: int
    outputs: int
    detached: tuple[int, ...]


def training_runtime() -> TrainingRuntime | None:
    """Asked while AOTAutograd compiles the forward of a pair; None if its wrapper does more than a `TrainingRuntime`
    says."""
    metadata = _plain_metadata()
    names = [f"{AOT}{name}" for name in ("utils.top_saved_tensors_hooks", "runtime_wrappers.AOTDispatchAutograd",
                                         "runtime_wrappers.coerce_to_expected_memory_format")]
    if metadata is None or not compat.has(*names) or metadata.num_backward_tokens or compat.need(names[0])() \
            or metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw:
        return None
    tangents = [index for index, info in enumerate(metadata.output_info)
                if info.output_type.name in ("non_alias", "unsafe_view_alias", "custom_function_view")
                and issubclass(info.raw_type, torch.Tensor)
                and getattr(info, "requires_grad_for_backward", info.requires_grad)]
    layouts = metadata.subclass_tangent_meta
    if len(layouts) != len(tangents) or not all(type(one).__name__ == "PlainTensorMeta" and one.memory_format
                                                for one in layouts):
        return None
    return TrainingRuntime(
        hints=_hints(metadata),
        constant=tuple(i for i, info in enumerate(metadata.output_info) if not info.requires_grad),
        views=tuple(metadata.unsafe_view_out_indices),
        tangents=tuple(zip(tangents, layouts, strict=True)),
        steady=metadata.deterministic is not None and not metadata.deterministic,
        inputs=len(metadata.input_info), outputs=len(metadata.output_info),
        detached=tuple(i for i, info in enumerate(metadata.input_info) if info.requires_grad and not info.is_leaf))


_REGENERATED = ("alias_of_input", "alias_of_intermediate", "alias_of_intermediate_save_as_output",
                "alias_of_intermediate_base_is_user_output")


def regenerates_views() -> bool:
    """Asked while AOTAutograd compiles a graph: whether its run-time wrapper makes some result anew, as a view of an
    input or of another result, at the strides and the offset that the program's own result has. (Where no size is a
    symbol it repeats the views instead.)"""
    metadata = getattr(compat.need("torch._guards.TracingContext").try_get(), "fw_metadata", None)
    for info in getattr(metadata, "output_info", ()):
        if info.output_type.name in _REGENERATED and issubclass(info.raw_type, torch.Tensor):
            views = getattr(info, "view_meta_sequence", None)
            if views is None or any(view.has_symbolic_inputs for view in views.sequence):
                return True
    return False


def returns_as_given() -> bool:
    """Asked while AOTAutograd compiles the forward of a pair: whether the outputs of its function of autograd are those
    of the graph, and no others."""
    metadata = getattr(compat.need("torch._guards.TracingContext").try_get(), "fw_metadata", None)
    return metadata is not None and not (metadata.num_mutated_inp_runtime_indices or metadata.num_intermediate_bases)


def tangent_of(gradient: Any, layout: Any, index: int) -> Any:
    """A gradient that came in, in the layout of the trace, as AOTAutograd makes it.

    Raises:
        RuntimeError: it is of a subclass that is made of other tensors and that the trace did not know.
    """
    if type(gradient) is not torch.Tensor or gradient.layout is not torch.strided:
        gradient = plain_gradient(gradient)
    if type(gradient) is torch.Tensor:
        coerce = compat.need(f"{AOT}runtime_wrappers.coerce_to_expected_memory_format")
        return coerce(gradient, layout.memory_format)
    process = compat.need(f"{AOT}runtime_wrappers.AOTDispatchAutograd").process_runtime_tangent
    more = (index,) if "tangent_idx" in inspect.signature(process).parameters else ()
    return process(gradient, layout, *more)[0]


_innermost_transform: Callable[[], Any] = compat.need("torch._C._functorch.peek_interpreter_stack")


def check_backward(steady: bool) -> None:
    """What AOTAutograd asks before a compiled backward runs.

    Raises:
        RuntimeError: in a transform of torch.func, or when deterministic algorithms are asked for, but were not in the
            forward (`steady`).
    """
    if _innermost_transform() is not None:
        raise RuntimeError(
            "It looks like you're trying to call a compiled backward function within vmap/grad/vjp, which isn't "
            "supported. Try wrapping vmap inside torch.compile, or skip compiling the backward function.")
    if steady and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "This compiled backward function is being run with torch.use_deterministic_algorithms(True), but it was "
            "previously generated during the forward function while torch.use_deterministic_algorithms(False) was set.")


def left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, as Dynamo leaves it and what it calls: a backward runs inside of the user's call of `backward`, and
    where that ends a graph of torch.compile, each frame that follows would be traced."""
    mark = compat.get("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    if mark is None:
        return api.unhooked(function, "AnyShape runs a compiled backward graph")
    skip = compat.need("torch._dynamo.types.FrameAction").SKIP
    mark(function.__code__, compat.need("torch._dynamo.types.FrameExecStrategy")(skip, skip))
    return function


def callers_context() -> Any:
    """The context variables of whoever called `backward`, as torch keeps them for the engine's threads; None if none
    are kept."""
    return _context()


def _context_reader() -> Callable[[], Any]:
    has, read = compat.get("torch._C._is_key_in_tls"), compat.get("torch._C._get_obj_in_tls")
    return (lambda: None) if has is None or read is None else lambda: read("context") if has("context") else None


_context: Callable[[], Any] = compat.bind(globals(), "_context", _context_reader)


def plain_training() -> bool:
    """Whether autograd records, and no transform of torch.func is going on."""
    return torch.is_grad_enabled() and _innermost_transform() is None


def plain_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for calls that are in no transform of torch.func, which Python would otherwise ask first."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def hint_dynamic(tensor: torch.Tensor, dims: set[int]) -> None:
    """Marks dimensions of one fresh output as `marking_dynamic` does."""
    tensor._dynamo_propagated_dynamic_indices = dims.copy()  # type: ignore[attr-defined]


def marking_dynamic(program: Callable[[list[Any]], list[Any]], hints: Hints) -> Callable[[list[Any]], list[Any]]:
    """`program`, with dimensions of its fresh outputs marked as likely to change, for later traces, as AOTAutograd
    does; never guarded."""
    def marked(inputs: list[Any]) -> list[Any]:
        outputs = program(inputs)
        for index, dims in hints:
            outputs[index]._dynamo_propagated_dynamic_indices = dims.copy()
        return outputs

    return marked


_forward_hooks = compat.need("torch.nn.modules.module._global_forward_hooks")
_forward_pre_hooks = compat.need("torch.nn.modules.module._global_forward_pre_hooks")
_backward_hooks = compat.need("torch.nn.modules.module._global_backward_hooks")
_backward_pre_hooks = compat.need("torch.nn.modules.module._global_backward_pre_hooks")
_dispatch_modes = api.dispatch_modes


def watched() -> bool:
    """Does somebody watch every operator (a TorchDispatchMode, a transform: `settings.in_transform`), or every module
    (a global hook), or replace an operator's kernel? Asked at every call."""
    return bool(_dispatch_modes() or _innermost_transform() is not None or forward_ad._current_level >= 0
                or _forward_hooks or _forward_pre_hooks or _backward_hooks or _backward_pre_hooks
                or (replaced.last if len(replaced.registered) == replaced.count else replaced.replaced_kernels()))
