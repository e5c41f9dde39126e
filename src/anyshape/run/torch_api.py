"""Calls whose name or behaviour depends on torch's version; with the other `torch_*` files, all there are.

Written for torch 2.13, with the other way where 2.11 or 2.12 lacks an interface; rules that 2.11 lacks are in
`torch_older`. The heavy parts of torch (Dynamo, AOTAutograd) are imported by the functions that need them, so that
running a compiled program does not load them.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anyshape.base.errors import InputError, Unsupported
from anyshape.run.torch_older import guards_refused
from anyshape.run.torch_random import nothing_drawn_in_vain

try:
    from torch._library.fake_class_registry import FakeScriptObject
    from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
    from torch._opaque_base import OpaqueBase
    HAS_OPAQUE = True
except ImportError:
    HAS_OPAQUE = False

    class OpaqueBase:  # type: ignore[no-redef]
        """Stands for torch's base class of opaque objects, which this torch does not have."""


def register_reference_type(cls: type) -> None:
    """Lets objects of `cls` (a subclass of OpaqueBase) cross from a forward to a backward graph."""
    if HAS_OPAQUE:
        register_opaque_type(cls, typ="reference")


def fake_opaque(cls: type) -> Any:
    """What stands for an object of `cls` in a traced graph's `meta["val"]`."""
    return FakeScriptObject(None, get_opaque_type_name(cls), None)


def keeps_graph() -> bool:
    """True inside `backward(retain_graph=True)`, or when no backward pass is running in this thread."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: torch.Tensor) -> int:
    """The counter of in-place changes; -1 for tensors that do not count (made under inference_mode)."""
    return -1 if tensor.is_inference() else tensor._version


def unhooked(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function` as Dynamo must not trace it."""
    import torch._dynamo
    return torch._dynamo.disable(function, reason=reason)


def partition_joint(joint: torch.fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int,
                    **more: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """torch's min-cut partition of a joint graph, without duplicates, into (forward, backward). torch's own search for
    duplicates would load Inductor. Pointwise values are computed again for the backward also where it must store them:
    our fusion makes that one pass over memory, and saves 36 % of what a Llama keeps."""
    import torch._functorch.config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    with functorch_config.patch(cse=False, ban_recompute_materialized_backward=False), nothing_drawn_in_vain():
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs,
                                                                **more)
    _describe_random(backward)
    return forward, backward


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
    import torch._functorch.config as functorch_config
    from torch._functorch.aot_autograd import aot_module_simplified

    def compile_backward(*arguments: Any) -> Callable[..., Any]:
        compile_here = unhooked(backward, "AnyShape compiles a backward graph")
        return unhooked(compile_here(*arguments), "AnyShape runs a compiled backward graph")

    compile_backward._is_wrapped_bw_compiler = True  # type: ignore[attr-defined]
    settings = {"unlift_effect_tokens": True} if hasattr(functorch_config, "unlift_effect_tokens") else {}
    with functorch_config.patch(settings) if settings else contextlib.nullcontext(), _first_calls_like_others(), \
            nothing_drawn_in_vain():
        return aot_module_simplified(
            gm, example_inputs, fw_compiler=forward, bw_compiler=compile_backward, inference_compiler=inference,
            partition_fn=partition, decompositions=decompositions, keep_inference_input_mutations=True)


@contextlib.contextmanager
def _first_calls_like_others() -> Iterator[None]:
    """Inside, AOTAutograd's wrappers are made to run their first call as any other. Torch 2.13 runs it under a dispatch
    mode, which looks for custom operators that return their operands (our programs copy those), and under any mode
    some operators forget that an operand is conjugated: `linalg.pinv` of complex numbers is wrong then."""
    from torch._functorch._aot_autograd import runtime_wrappers
    kind: Any = getattr(runtime_wrappers, "_FirstInvocationContext", None)
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


def is_restart(error: BaseException) -> bool:
    """True for the exceptions by which a backend asks Dynamo to trace again; they are not failures."""
    from torch._dynamo import exc
    kinds = [getattr(exc, name) for name in ("TensorifyScalarRestartAnalysis", "RestartAnalysis") if hasattr(exc, name)]
    return isinstance(error, tuple(kinds))


def trace_failure(error: BaseException) -> tuple[str, str, dict[str, str]] | None:
    """What an operator said that refused its operands while Dynamo traced, the user's line, and the place of every
    symbol in the caller's arguments, such as L['x'].size()[0]. None for any other error."""
    from torch._dynamo.exc import TorchRuntimeError
    if not isinstance(error, TorchRuntimeError):
        return None
    found = re.search(r"got (\w+)\((['\"])(.*?)\2\)\s*$", str(error), re.MULTILINE | re.DOTALL)
    message = found.group(3) if found else str(error).split("\n")[0]
    stack = list(getattr(error, "real_stack", None) or ())
    stack = [line for line in stack if not re.search(r"/(site|dist)-packages/torch/", line.filename)] or stack
    where = ""
    if stack:
        where = f"{stack[-1].filename.rsplit('/', 1)[-1]}:{stack[-1].lineno}  {stack[-1].line or ''}".strip()
    sources: dict[str, str] = {}
    trace = error.__traceback__
    while trace is not None:
        env = getattr(getattr(trace.tb_frame.f_locals.get("tx"), "output", None), "shape_env", None)
        for symbol, places in getattr(env, "var_to_sources", {}).items():
            if places:
                name = places[0].name
                sources[str(symbol)] = name() if callable(name) else name
        trace = trace.tb_next
    return message, where, sources


def tracer_failures() -> tuple[type[BaseException], ...]:
    """The exceptions by which Dynamo says that a trace failed: in torch's tracer, on shapes, or in a backend."""
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError
    return BackendCompilerFailed, InternalTorchDynamoError, TorchRuntimeError


def not_one_graph() -> tuple[type[BaseException], ...]:
    """The exceptions by which Dynamo, or we in its words, say that a function cannot be one graph: also one that asks
    about data (UserError), and one that was traced too often."""
    from torch._dynamo import exc
    return (*tracer_failures(), exc.Unsupported, exc.UserError, InputError, Unsupported, *too_many_graphs())


def too_many_graphs() -> tuple[type[BaseException], ...]:
    """The exception by which Dynamo says that a function would be traced once more, and may not."""
    from torch._dynamo.exc import FailOnRecompileLimitHit
    return (FailOnRecompileLimitHit,)


def trace_formulas(function: Callable[..., Any], values: Sequence[Any],
                   table: dict[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """The ATen graph of `function` at fake tensors, decomposed by `table`; whoever traces meanwhile sees nothing."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
    with torch.no_grad(), disable_proxy_modes_tracing():
        return make_fx(function, decomposition_table=table)(*values)


def fix_sizes(tensor: torch.Tensor) -> None:
    """Lets Dynamo take the sizes of a tensor as numbers, as it does with parameters."""
    import torch._dynamo
    torch._dynamo.mark_static(tensor)


def plain_frame() -> Any:
    """The answer to Dynamo that lets one call of a frame, and all that it calls, run as it is."""
    from torch._dynamo.types import ConvertFrameReturn, FrameAction, FrameExecStrategy
    return ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP),
                              apply_to_code=False)


FrameCallback = Callable[..., Any]


def made_program(answer: Any) -> bool:
    """Whether Dynamo's answer for a frame holds compiled code; other frames run as they are."""
    return getattr(answer, "guarded_code", None) is not None


def dynamo_compile(target: Any, backend: Callable[..., Any], *, fullgraph: bool,
                   around: Callable[[FrameCallback], FrameCallback]) -> Any:
    """What `torch.compile(target, backend=backend, fullgraph=fullgraph)` returns, with its own cache.

    Args:
        around: wraps the function that Dynamo calls on a cache miss, with (frame, cache entry, frame state).
    """
    import torch._dynamo
    more = {"isolate_recompiles": True} if _isolates() else {}
    context = torch._dynamo.optimize(backend, nopython=fullgraph, **more)
    inner = context.callback
    outer = around(inner)
    outer._torchdynamo_orig_backend = inner  # type: ignore[attr-defined]  # Dynamo keys its cache on the innermost
    context.callback = outer
    return context(target)


@functools.cache
def _isolates() -> bool:
    """Whether Dynamo can keep the programs of one compilation apart from those of others with the same code."""
    from torch._dynamo.eval_frame import _optimize
    return "isolate_recompiles" in inspect.signature(_optimize).parameters


def programs_of_others(code: Any, callback: FrameCallback) -> int:
    """How many programs Dynamo holds for a code object that belong to other compilations than that of `callback` (the
    `inner` of `dynamo_compile`), and that it would count with its own: none, where it keeps them apart."""
    if _isolates():
        return 0
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    backend = backend_of(callback)
    return sum(entry.backend is not backend for entry in _debug_get_cache_entry_list(code))


def backend_of(callback: Any) -> Any:
    """The innermost function of a callback, by which Dynamo knows whose a program is."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def decompositions_of(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the given ops (packets or overloads)."""
    from torch._decomp import get_decompositions
    return dict(get_decompositions(list(ops)))


def core_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table that torch.export uses: everything outside the core ATen set is taken apart."""
    from torch._decomp import core_aten_decompositions
    return dict(core_aten_decompositions().items())


def static_inputs() -> tuple[int, ...]:
    """Indices of the inputs, of the graph that AOTAutograd is compiling, that stay at one address (parameters)."""
    context = torch._guards.TracingContext.try_get()
    metadata = getattr(context, "fw_metadata", None)
    return tuple(getattr(metadata, "static_input_indices", None) or ())


def is_random(target: Any) -> bool:
    """True for operators that draw from torch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def attribute_of(gm: torch.fx.GraphModule, target: str) -> Any:
    """The attribute of a module that a get_attr node names."""
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part)
    return found


def number_of(size: torch.SymInt, values: dict[str, int]) -> int:
    """A traced size where its symbols, by name, have these values; slow."""
    import sympy
    formula = size.node.expr
    return int(formula.xreplace({symbol: sympy.Integer(values[str(symbol)]) for symbol in formula.free_symbols}))


def is_unbacked(symbol: str) -> bool:
    """True for the name of a number that is only known from the data: u0, or zuf0 for a float."""
    return symbol.startswith(("u", "zuf")) and symbol.lstrip("zuf").isdigit()


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # how many TorchDispatchModes are active


def is_fake(value: Any) -> bool:
    """True for a tensor that has a shape and no numbers (FakeTensorMode's)."""
    from torch._subclasses.fake_tensor import FakeTensor
    return isinstance(value, FakeTensor)


def storage_key(value: Any) -> int | None:
    """One number per storage of a (fake) tensor, or None when the value has no storage."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def fake_clone(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor like `value`, in its own storage."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return value.clone()


@contextlib.contextmanager
def no_new_guards() -> Iterator[None]:
    """Inside, a compiler that asks a symbolic size for its value raises, instead of adding a guard (a recompile)."""
    context = torch._guards.TracingContext.try_get()
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
TOKENS = frozenset(("prims._make_token.default", "prims._sink_tokens.default"))

ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


def may_be_small(size: torch.SymInt) -> bool:
    """Whether a size of a trace may be 0 or 1 although all sizes of inputs are 2 or more."""
    node = size.node
    return node.shape_env._maybe_evaluate_static(node.expr >= 2, size_oblivious=True) is not True \
        and not node.expr.is_number


def size_text(size: torch.SymInt, places: Mapping[str, str]) -> str:
    """The formula of a size of a trace as Python text, with symbols written as `places` has them; empty if one has no
    place, or if the formula is no plain arithmetic."""
    from torch.utils._sympy.printers import PythonPrinter

    formula = size.node.shape_env.replace(size.node.expr)
    if not {str(symbol) for symbol in formula.free_symbols} <= places.keys():
        return ""
    text = str(PythonPrinter().doprint(formula))
    text = re.sub(r"[A-Za-z_]\w*", lambda found: places.get(found.group(), found.group()), text)
    return text if set(re.findall(r"[A-Za-z_]\w*(?=\()", text)) <= {"min", "max"} else ""


def changes_mode(target: Any) -> bool:
    """True for functions in a captured graph that switch a mode of torch, autocast and grad mode aside."""
    if target in (ENTER_AUTOCAST, EXIT_AUTOCAST, torch._C._set_grad_enabled):
        return False
    module = getattr(target, "__module__", None) or ""
    name = getattr(target, "__name__", "")
    return "_functorch" in module or name.startswith(("_enter_", "_exit_", "_set_")) or "nesting" in name


def allocator() -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """The quickest way to allocate a CPU tensor of given sizes and strides."""
    fast = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if hasattr(fast, "_empty_strided_cpu"):
        return fast._empty_strided_cpu  # type: ignore[union-attr, no-any-return]
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype)


def same_kind(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A quick function of as many objects: whether each is a tensor of the same type, dtype, sizes, strides, device,
    and with the same need of a gradient. None where this torch has no such function."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if not hasattr(guards, "TensorGuards"):
        return None
    checks = guards.TensorGuards(  # type: ignore[union-attr]
        *tensors, dynamic_dims_sizes=[list(one.shape) for one in tensors],
        dynamic_dims_strides=[list(one.stride()) for one in tensors])
    return checks.check  # type: ignore[no-any-return]


# the switch behind torch.no_grad(), which costs microseconds
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled


def outside_tracing() -> Any:
    """A context in which tensors are real although a trace is going on: the compiler allocates its own memory."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def source_of(node: torch.fx.Node) -> str:
    """Where Dynamo found the value of a placeholder, such as L['x'].size()[0]; empty when it made it up."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


@functools.lru_cache(maxsize=1)
def _convolutions() -> tuple[Any, Any] | None:
    """The calls that reorder weights and that take reordered ones, for float32 on the CPU."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return (torch.ops.mkldnn._reorder_convolution_weight.default,
                torch.ops.mkldnn._convolution_pointwise.default)
    except AttributeError:
        return None


def has_packed_convolutions() -> bool:
    """Can convolutions take reordered weights now (the library is there, and the user has not switched it off)?"""
    return _convolutions() is not None and bool(torch._C._get_mkldnn_enabled())


def pack_convolution(weights: torch.Tensor, padding: Sequence[int], stride: Sequence[int], dilation: Sequence[int],
                     groups: int) -> torch.Tensor:
    """The weights in the library's order. (Told a likely shape of the operand, the call makes one more copy.)"""
    found = _convolutions()
    assert found is not None
    return found[0](weights, padding, stride, dilation, groups)  # type: ignore[no-any-return]


def packed_convolution(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int],
                       stride: Sequence[int], dilation: Sequence[int], groups: int) -> torch.Tensor:
    """A convolution with weights of `pack_convolution`; a channels-last operand gives such a result."""
    found = _convolutions()
    assert found is not None
    return found[1](x, packed, bias, padding, stride, dilation, groups, "none", [], "")  # type: ignore[no-any-return]


@contextlib.contextmanager
def allocations() -> Iterator[list[int]]:
    """A list that receives, at the end, the bytes that torch's allocator for CPUs gave meanwhile, in order; what it
    took back is negative. The older of torch's profilers is asked: the other one writes to the terminal."""
    from torch._C import _autograd, _profiler
    config = _profiler.ProfilerConfig(_profiler.ProfilerState.CPU, False, True, False, False, False,
                                      _profiler._ExperimentalConfig())
    found: list[int] = []
    _autograd._enable_profiler_legacy(config)
    try:
        yield found
    finally:
        events = [event for thread in _autograd._disable_profiler_legacy() for event in thread]
        start = next(event for event in events if event.name() == "__start_profile")
        changes = [event for event in events if event.kind() == "memory_alloc"]
        found.extend(event.cpu_memory_usage() for event in sorted(changes, key=start.cpu_elapsed_us))
