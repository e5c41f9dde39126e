"""The compatibility layer: calls of torch whose name or behaviour depends on its version.

Written for torch 2.13, with the other way where 2.11 or 2.12 lacks an interface; rules that 2.11 lacks are in
`backports.py`. The heavy parts of torch (Dynamo, AOTAutograd) are imported by the functions that need them, so that
running a compiled program does not load them.
"""
from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.base.errors import InputError, Unsupported
from anyshape.torch_compat.user_lines import last_line
from anyshape.torch_compat.versions.backports import guards_refused
from anyshape.torch_compat.versions.python_kernels import eager_operators
from anyshape.torch_compat.versions.side_effects import nothing_drawn_in_vain

FakeTensor = compat.need("torch._subclasses.fake_tensor.FakeTensor")


def _graph_keeper() -> Callable[[], bool]:
    task, keeps = (compat.get("torch._C._current_graph_task_id"),
                   compat.get("torch._C._autograd._get_current_graph_task_keep_graph"))
    return (lambda: True) if task is None or keeps is None else lambda: task() == -1 or bool(keeps())


_keeps_graph: Callable[[], bool] = compat.bind(globals(), "_keeps_graph", _graph_keeper)


def keeps_graph() -> bool:
    """True inside `backward(retain_graph=True)`, or when no backward pass is running in this thread."""
    return _keeps_graph()


def version_of(tensor: torch.Tensor) -> int:
    """The counter of in-place changes; -1 for tensors that do not count (made under inference_mode)."""
    return -1 if tensor.is_inference() else tensor._version


def unhooked(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function` as Dynamo must not trace it."""
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]


def partition_joint(joint: torch.fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int,
                    **more: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """torch's min-cut partition of a joint graph, without duplicates, into (forward, backward). torch's own search for
    duplicates would load Inductor. Pointwise values are computed again for the backward also where it must store them:
    our fusion makes that one pass over memory, and saves 36 % of what a Llama keeps."""
    cut = compat.need("torch._functorch.partitioners.min_cut_rematerialization_partition")
    with _settings_of_aot(cse=False, ban_recompute_materialized_backward=False), nothing_drawn_in_vain():
        forward, backward = cut(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)
    _describe_random(backward)
    return forward, backward


def _settings_of_aot(**settings: Any) -> Any:
    """A context with those of AOTAutograd's settings that this torch has."""
    config = compat.get("torch._functorch.config")
    known = {name: value for name, value in settings.items() if hasattr(config, name)}
    return config.patch(known) if known else contextlib.nullcontext()


def _describe_random(backward: torch.fx.GraphModule) -> None:
    """Says what random numbers drawn again (under `torch.utils.checkpoint`) look like, which torch leaves out."""
    for node in backward.graph.nodes:
        if str(node.target) == "run_with_rng_state" and "val" not in node.meta:
            _, op, *operands = torch.fx.node.map_arg(node.args, lambda one: one.meta["val"])
            tensor = next(one for one in operands if isinstance(one, torch.Tensor))
            with tensor.fake_mode:  # type: ignore[attr-defined]
                node.meta["val"] = op(*operands, **torch.fx.node.map_arg(node.kwargs, lambda one: one.meta["val"]))


def aot_compile(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, forward: Callable[..., Any],
                backward: Callable[..., Any], inference: Callable[..., Any], partition: Callable[..., Any],
                decompositions: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """AOTAutograd over a Dynamo graph; mutations of inputs stay `copy_` nodes at the end of the graph."""
    aot = compat.need("torch._functorch.aot_autograd")
    made: list[Callable[..., Any]] = []

    def compile_backward(*arguments: Any) -> Callable[..., Any]:
        with compat.compile_lock():  # each thread asks for it whose first backward comes before there is one
            if not made:
                compile_here = unhooked(backward, "AnyShape compiles a backward graph")
                made.append(unhooked(compile_here(*arguments), "AnyShape runs a compiled backward graph"))
            return made[0]

    compile_backward._is_wrapped_bw_compiler = True  # type: ignore[attr-defined]
    # the partition computes again what `torch.utils.checkpoint` marks; torch's other pass for it refuses random numbers
    with _settings_of_aot(unlift_effect_tokens=True, remat_using_tags_for_fwd_loss_bwd_graph=False), \
            _first_calls_like_others(), _part_of_ddp(), nothing_drawn_in_vain(), eager_operators():
        return aot.aot_module_simplified(  # type: ignore[no-any-return]
            gm, example_inputs, fw_compiler=forward, bw_compiler=compile_backward, inference_compiler=inference,
            partition_fn=partition, decompositions=decompositions, keep_inference_input_mutations=True)


@contextlib.contextmanager
def _first_calls_like_others() -> Iterator[None]:
    """Inside, AOTAutograd's wrappers are made to run their first call as any other. Torch 2.13 runs it under a dispatch
    mode, which looks for custom operators that return their operands (our programs copy those), and under any mode
    some operators forget that an operand is conjugated: `linalg.pinv` of complex numbers is wrong then."""
    kind = compat.get("torch._functorch._aot_autograd.runtime_wrappers._FirstInvocationContext")
    if kind is None:
        yield
        return
    made = kind.__init__

    def make(self: Any) -> None:
        made(self)
        self._is_first = False

    kind.__init__ = make
    try:
        yield
    finally:
        kind.__init__ = made


@contextlib.contextmanager
def _part_of_ddp() -> Iterator[None]:
    """Inside, what DDPOptimizer asks of AOTAutograd for each part of a graph: the compilation is counted, for it keeps
    the metadata of those that were, one for each backward to come. It asks for wrappers whose first call gives shapes
    alone, too; here the graph itself gives them, and the first call computes as any other."""
    context, counters = tracing_context(), compat.get("torch._dynamo.utils.counters")
    if getattr(context, "ddp_optimizer_ctx", None) is None or counters is None:
        yield
        return
    context.fakify_first_call = False
    try:
        yield
        counters["aot_autograd"]["total"] += 1
    finally:
        context.fakify_first_call = True


def is_restart(error: BaseException) -> bool:
    """True for the exceptions by which a backend asks Dynamo to trace again; they are not failures."""
    return isinstance(error, (_raised("TensorifyScalarRestartAnalysis"), _raised("RestartAnalysis")))


def _raised(name: str) -> Any:
    """A kind of error that Dynamo raises; where it is absent, one that nothing is."""
    return compat.need(f"torch._dynamo.exc.{name}")


_NO_FORMULA = re.compile(r"Cannot call \w+\(\) on tensor with symbolic sizes")


def skip_frame(reason: str) -> BaseException:
    """What a backend raises so that Dynamo lets the frame run as it is."""
    error: BaseException = _raised("SkipFrame")(reason)
    return error


def trace_failure(error: BaseException) -> tuple[str, str, str, dict[str, str]] | None:
    """The kind of error, such as TypeError, by which an operator refused its operands while Dynamo traced, what it
    said, the user's line, and the place of every symbol in the caller's arguments, such as L['x'].size()[0]. None for
    any other error."""
    if isinstance(error, _raised("TorchRuntimeError")):
        if _NO_FORMULA.search(str(error)):  # an operator that torch cannot trace with sizes that are symbols
            return None
        found = re.search(r"got (\w+)\((['\"])(.*?)\2\)\s*$", str(error), re.MULTILINE | re.DOTALL)
        kind, message = (found.group(1), found.group(3)) if found else ("", str(error).split("\n")[0])
    elif isinstance(error, IndexError) and hasattr(error, "real_stack"):  # a dim that there is not
        kind, message = "IndexError", str(error).split("\n")[0]
    else:
        return None
    message = message.replace("FakeTensor", "Tensor")
    where = last_line(getattr(error, "real_stack", None))
    sources: dict[str, str] = {}
    trace = error.__traceback__
    while trace is not None:
        env = getattr(getattr(trace.tb_frame.f_locals.get("tx"), "output", None), "shape_env", None)
        for symbol, places in getattr(env, "var_to_sources", {}).items():
            if places:
                name = places[0].name
                sources[str(symbol)] = name() if callable(name) else name
        trace = trace.tb_next
    return kind, message, where, sources


def tracer_failures() -> tuple[type[BaseException], ...]:
    """The exceptions by which Dynamo says that a trace failed: in torch's tracer, on shapes, or in a backend."""
    kinds = tuple(map(_raised, ("BackendCompilerFailed", "InternalTorchDynamoError", "TorchRuntimeError")))
    return kinds if all(map(compat.is_there, kinds)) else (Exception,)


def not_one_graph() -> tuple[type[BaseException], ...]:
    """The exceptions by which Dynamo, or we in its words, say that a function cannot be one graph: also one that asks
    about data (UserError; of an index of a list the tracer's own error comes as it is), and one that was traced too
    often."""
    return (*tracer_failures(), _raised("Unsupported"), _raised("UserError"), InputError, Unsupported,
            compat.need("torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode"), *too_many_graphs())


def graph_breaks() -> tuple[type[BaseException], ...]:
    """The exceptions by which Dynamo says, of a function that has to be one graph, that it would have to be cut."""
    return _raised("Unsupported"), _raised("UserError")


def too_many_graphs() -> tuple[type[BaseException], ...]:
    """The exception by which Dynamo says that a function would be traced once more, and may not."""
    return (_raised("FailOnRecompileLimitHit"),)


def trace_formulas(function: Callable[..., Any], values: Sequence[Any],
                   table: dict[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """The ATen graph of `function` at fake tensors, decomposed by `table`; whoever traces meanwhile sees nothing.
    Operators have their Python kernels, as AOTAutograd has them: those in C++ ask for sizes in numbers, and fail or
    fix them where they are symbols (products with weights before torch 2.13, recurrent layers, resizing)."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
    by_python = compat.get("torch._dispatch.python.enable_python_dispatcher") or contextlib.nullcontext
    with torch.no_grad(), disable_proxy_modes_tracing(), by_python(), eager_operators():
        return make_fx(function, decomposition_table=table)(*values)


def trace_model(function: Callable[..., Any], values: Sequence[Any],
                table: dict[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """`trace_formulas` of a user's model: it takes the branches that it takes where it is compiled, and what it writes
    in place is made functional. That is done in a second trace, for models ask whether their tensors are fake."""
    flag = "_is_compiling_flag"
    with compat.compile_lock():
        before = compat.get(f"torch.compiler.{flag}")
        try:
            if before is not None:
                setattr(torch.compiler, flag, True)
            graph = trace_formulas(function, values, table)
        finally:
            if before is not None:
                setattr(torch.compiler, flag, before)
    if not any(isinstance(node.target, compat.OpOverload) and compat.is_mutable(node.target)
               for node in graph.graph.nodes):
        return graph
    return trace_formulas(torch.func.functionalize(graph), values, table)


def fix_sizes(tensor: torch.Tensor) -> None:
    """Lets Dynamo take the sizes of a tensor as numbers, as it does with parameters."""
    mark = compat.get("torch._dynamo.mark_static")
    if mark is not None:
        mark(tensor)


def plain_frame() -> Any:
    """The answer to Dynamo that lets one call of a frame, and all that it calls, run as it is."""
    skip = compat.need("torch._dynamo.types.FrameAction").SKIP
    strategy = compat.need("torch._dynamo.types.FrameExecStrategy")(skip, skip)
    return compat.need("torch._dynamo.types.ConvertFrameReturn")(frame_exec_strategy=strategy, apply_to_code=False)


FrameCallback = Callable[..., Any]


def keeps_apart(answer: Any) -> Any:
    """Dynamo's answer for a frame as it holds for one compilation alone: None where it does so already. Before torch
    2.13 Dynamo notes with the code, for all who compile it, that it makes no (more) programs of it; the answer that is
    returned notes nothing, and has to be given at each frame."""
    if made_program(answer) or not getattr(answer, "apply_to_code", False) or _isolates():
        return None
    return dataclasses.replace(answer, apply_to_code=False)


def made_program(answer: Any) -> bool:
    """Whether Dynamo's answer for a frame holds compiled code; other frames run as they are."""
    return getattr(answer, "guarded_code", None) is not None


def dynamo_compile(backend: Callable[..., Any], *, fullgraph: bool,
                   around: Callable[[FrameCallback], FrameCallback]) -> Callable[[Any], Any]:
    """A function that makes what `torch.compile(target, backend=backend, fullgraph=fullgraph)` returns, of a target,
    with its own cache; of several ones with one cache.

    Args:
        around: wraps the function that Dynamo calls on a cache miss, with (frame, cache entry, frame state).
    """
    more = {"isolate_recompiles": True} if _isolates() else {}
    context = compat.need("torch._dynamo.optimize")(backend, nopython=fullgraph, **more)
    inner = context.callback
    outer = around(inner)
    outer._torchdynamo_orig_backend = inner  # type: ignore[attr-defined]  # Dynamo keys its cache on the innermost
    context.callback = outer
    return context  # type: ignore[no-any-return]


def _isolates() -> bool:
    """Whether Dynamo can keep the programs of one compilation apart from those of others with the same code."""
    optimize = compat.get("torch._dynamo.eval_frame._optimize")
    return optimize is not None and "isolate_recompiles" in inspect.signature(optimize).parameters


def programs_of_others(code: Any, callback: FrameCallback) -> int:
    """How many programs Dynamo holds for a code object that belong to other compilations than that of `callback` (the
    `inner` of `dynamo_compile`), and that it would count with its own: none, where it keeps them apart, and none for
    code objects that are copied (`dynamo/copied_target.py`); functions behind a graph break are not."""
    entries = compat.get("torch._dynamo.eval_frame._debug_get_cache_entry_list")
    if entries is None or _isolates():
        return 0
    backend = backend_of(callback)
    return sum(entry.backend is not backend for entry in entries(code))


def comm_hooks(model: torch.nn.Module) -> Sequence[Any]:
    """The communication hooks of a DistributedDataParallel; empty too where this torch does not say."""
    return getattr(model, "_comm_hooks", ())


def backend_of(callback: Any) -> Any:
    """The innermost function of a callback, by which Dynamo knows whose a program is."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def decompositions_of(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the given ops (packets or overloads)."""
    found = compat.get("torch._decomp.get_decompositions")
    return {} if found is None else dict(found([op for op in ops if compat.is_there(op)]))


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that torch.export uses: everything outside the core ATen set is taken apart."""
    found = compat.get("torch._decomp.core_aten_decompositions") or torch.export.default_decompositions
    return dict(found().items())


def tracing_context() -> Any:
    """What the trace that is going on in this thread knows; None where there is none."""
    return compat.need("torch._guards.TracingContext").try_get()


def static_inputs() -> tuple[int, ...]:
    """Indices of the inputs, of the graph that AOTAutograd is compiling, that stay at one address (parameters)."""
    context = tracing_context()
    metadata = getattr(context, "fw_metadata", None)
    return tuple(getattr(metadata, "static_input_indices", None) or ())


def attribute_of(gm: torch.fx.GraphModule, target: str) -> Any:
    """The attribute of a module that a get_attr node names."""
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part)
    return found


def number_of(size: torch.SymInt, values: Mapping[str, float]) -> int:
    """A traced size where its symbols, by name, have these values; slow."""
    import sympy
    formula = size.node.expr
    return int(formula.xreplace({symbol: sympy.sympify(values[str(symbol)]) for symbol in formula.free_symbols}))


def is_unbacked(symbol: str) -> bool:
    """True for the name of a number that is only known from the data: u0, or zuf0 for a float."""
    return symbol.startswith(("u", "zuf")) and symbol.lstrip("zuf").isdigit()


# how many TorchDispatchModes are active
dispatch_modes: Callable[[], int] = compat.need("torch._C._len_torch_dispatch_stack")


def is_fake(value: Any) -> bool:
    """True for a tensor that has a shape and no numbers (FakeTensorMode's)."""
    return isinstance(value, FakeTensor)


def is_traced(value: Any) -> bool:
    """True for a fake tensor of the trace that is going on: it stands for one that has numbers when the graph runs. (So
    torch's DDPOptimizer has parts of a graph compiled; where it cannot be told of that, none is true.)"""
    return (isinstance(value, FakeTensor) and value.fake_mode is getattr(tracing_context(), "fake_mode", None)
            and compat.has("torch._dynamo.utils.counters"))


def storage_key(value: Any) -> int | None:
    """One number per storage of a (fake) tensor, or None when the value has no storage."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return compat.storage_id(value)


def fake_clone(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor like `value`, in its own storage."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.clone()


@contextlib.contextmanager
def no_new_guards() -> Iterator[None]:
    """Inside, a compiler that asks a symbolic size for its value raises, instead of adding a guard (a recompile)."""
    context = tracing_context()
    shape_env = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    if shape_env is None:
        yield
    elif hasattr(shape_env, "error_on_new_guards"):
        with shape_env.error_on_new_guards():
            yield
    else:
        with guards_refused(shape_env):
            yield


WITH_EFFECTS = torch.ops.higher_order.with_effects  # a call that AOTAutograd keeps in order by tokens
MAKE_TOKEN = torch.ops.prims._make_token.default
TOKENS = frozenset((str(MAKE_TOKEN), "prims._sink_tokens.default"))

ENTER_AUTOCAST = compat.need("torch.amp.autocast_mode._enter_autocast")
EXIT_AUTOCAST = compat.need("torch.amp.autocast_mode._exit_autocast")


def may_be_small(size: torch.SymInt) -> bool:
    """Whether a size of a trace may be 0 or 1 although all sizes of inputs are 2 or more."""
    node = size.node
    static = compat.get("torch.fx.experimental.symbolic_shapes.ShapeEnv._maybe_evaluate_static")
    return not node.expr.is_number and (
        static is None or static(node.shape_env, node.expr >= 2, size_oblivious=True) is not True)


def size_text(size: torch.SymInt, places: Mapping[str, str]) -> str:
    """The formula of a size of a trace as Python text, with symbols written as `places` has them; empty if one has no
    place, or if the formula is no plain arithmetic."""
    printer = compat.get("torch.utils._sympy.printers.PythonPrinter")
    formula = size.node.shape_env.replace(size.node.expr)
    if printer is None or not {str(symbol) for symbol in formula.free_symbols} <= places.keys():
        return ""
    text = str(printer().doprint(formula))
    text = re.sub(r"[A-Za-z_]\w*", lambda found: places.get(found.group(), found.group()), text)
    return text if set(re.findall(r"[A-Za-z_]\w*(?=\()", text)) <= {"min", "max"} else ""


def changes_mode(target: Any) -> bool:
    """True for functions in a captured graph that switch a mode of torch, autocast and grad mode aside."""
    if target in (ENTER_AUTOCAST, EXIT_AUTOCAST, set_grad_enabled):
        return False
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    return "_functorch" in module or name.startswith(("_enter_", "_exit_", "_set_")) or "nesting" in name


VMAP = frozenset(("lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim",
                  "_remove_batch_dim"))


# of a reverse-mode transform (`grad`, `vjp`, `jacrev`), which needs gradients to be on
REVERSE = frozenset(("_grad_increment_nesting", "_grad_decrement_nesting", "_wrap_for_grad", "_unwrap_for_grad",
                     "_set_tensor_requires_grad", "set_inplace_requires_grad_allowed", "_autograd_grad"))


def is_of_vmap(target: Any) -> bool:
    """True for the functions in a captured graph that begin and end a `vmap`."""
    return _is_of(target, VMAP)


def is_of_reverse_mode(target: Any) -> bool:
    """True for the functions in a captured graph that are of a transform in reverse mode."""
    return _is_of(target, REVERSE)


def is_about_hooks(target: Any) -> bool:
    """True for what a captured graph calls to put a hook on a gradient, or, in a transform, to forbid hooks on saved
    tensors and to end that."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name == "register_hook" or name.startswith("_saved_tensors_hooks_")


def _is_of(target: Any, names: frozenset[str]) -> bool:
    return "_functorch" in (getattr(target, "__module__", None) or "") and getattr(target, "__name__", "") in names


def allocator(device: torch.device = torch.device("cpu")
              ) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """The quickest way to allocate a tensor of given sizes and strides on a device."""
    fast = None
    if device.type == "cpu":
        fast = compat.get("torch._C._dynamo.guards._empty_strided_cpu")
    elif device.type == "cuda" and torch.cuda.device_count() == 1:  # it allocates on the current one
        fast = compat.get("torch._C._dynamo.guards._empty_strided_cuda")
    if fast is not None:
        return fast  # type: ignore[no-any-return]
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def raw_stream() -> Callable[[int], int]:
    """A function from the number of a CUDA or ROCm device to the driver's handle of its current stream."""
    fast = compat.get("torch._C._cuda_getCurrentRawStream")
    if fast is not None:
        return fast  # type: ignore[no-any-return]
    return lambda device: int(torch.cuda.current_stream(device).cuda_stream)


def same_kind(tensors: Sequence[torch.Tensor], sizes: bool) -> Callable[..., bool] | None:
    """A quick function of as many objects: whether each is a tensor of the same type, dtype, number of dims, device,
    bits and other dispatch keys, with the same need of a gradient, and, where `sizes`, of the same sizes and strides.
    None where this torch has no such function."""
    kind = compat.get("torch._C._dynamo.guards.TensorGuards")
    if kind is None:
        return None
    checks = kind(
        *tensors, dynamic_dims_sizes=[list(one.shape) if sizes else [None] * one.dim() for one in tensors],
        dynamic_dims_strides=[list(one.stride()) if sizes else [None] * one.dim() for one in tensors])
    return checks.check  # type: ignore[no-any-return]


# the switch behind torch.no_grad(), which costs microseconds
set_grad_enabled: Callable[[bool], Any] = compat.bind(
    globals(), "set_grad_enabled", lambda: compat.get("torch._C._set_grad_enabled") or torch.set_grad_enabled)


def outside_tracing() -> Any:
    """A context in which tensors are real although a trace is going on: the compiler allocates its own memory."""
    return compat.need("torch._subclasses.fake_tensor.unset_fake_temporarily")()


def source_of(node: torch.fx.Node) -> str:
    """Where Dynamo found the value of a placeholder, such as L['x'].size()[0]; empty when it made it up."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def has_packed_convolutions() -> bool:
    """Can convolutions take reordered weights now (the library is there, and the user has not switched it off)?"""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled) and compat.has(
        "torch.ops.mkldnn._reorder_convolution_weight.default", "torch.ops.mkldnn._convolution_pointwise.default")


def pack_convolution(weights: torch.Tensor, padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
                     groups: int) -> torch.Tensor:
    """The weights in the library's order. (Told a likely shape of the operand, the call makes one more copy.)"""
    pack = compat.need("torch.ops.mkldnn._reorder_convolution_weight.default")
    return pack(weights, padding, stride, dilation, groups)  # type: ignore[no-any-return]


def packed_convolution(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int],
                       stride: Sequence[int], dilation: Sequence[int], groups: int) -> torch.Tensor:
    """A convolution with weights of `pack_convolution`; a channels-last operand gives such a result."""
    convolve = compat.need("torch.ops.mkldnn._convolution_pointwise.default")
    return convolve(x, packed, bias, padding, stride, dilation, groups, "none", [], "")  # type: ignore[no-any-return]


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """A list that receives, at the end, the bytes that torch's allocator for CPUs gave meanwhile, in order; what it
    took back is negative. The older of torch's profilers is asked: the other one writes to the terminal."""
    paths = [f"torch._C.{name}" for name in (
        "_profiler", "_profiler._ExperimentalConfig", "_autograd._enable_profiler_legacy",
        "_autograd._disable_profiler_legacy")]
    _profiler, experimental, enable, disable = map(compat.get, paths)
    if not compat.has(*paths):
        yield []
        return
    config = _profiler.ProfilerConfig(_profiler.ProfilerState.CPU, False, True, False, False, False,
                                      experimental())
    found: list[int] = []
    enable(config)
    try:
        yield found
    finally:
        events = [event for thread in disable() for event in thread]
        start = next(event for event in events if event.name() == "__start_profile")
        changes = [event for event in events if event.kind() == "memory_alloc"]
        found.extend(event.cpu_memory_usage() for event in sorted(changes, key=start.cpu_elapsed_us))
