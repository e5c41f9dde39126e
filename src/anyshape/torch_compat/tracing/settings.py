"""Tracing settings: those of Dynamo while we trace, and rules for operators that end a graph without them.

Nothing here lasts longer than a trace: other users of torch.compile in the process see torch as it is.
"""
from __future__ import annotations

import contextlib
import functools
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd import forward_ad

from anyshape import torch_compat as compat
from anyshape.torch_compat.tracing.asserted_numbers import as_written, assertions_kept
from anyshape.torch_compat.tracing.class_names import names_traced
from anyshape.torch_compat.tracing.fx_threads import fx_in_this_thread
from anyshape.torch_compat.tracing.namespace_objects import holders_traced, parts_of_holders_traced
from anyshape.torch_compat.tracing.quiet_logs import WHILE_TRACING, quiet
from anyshape.torch_compat.tracing.symint_cache import general_tracing, quick_tracing
from anyshape.torch_compat.tracing.tensor_positions import positions_traced
from anyshape.torch_compat.user_lines import users_frames
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.backports import newer_rules
from anyshape.torch_compat.versions.python_kernels import eager_operators
from anyshape.torch_compat.versions.side_effects import nothing_drawn_in_vain

ATTEMPTS = "__builtins_dict__"  # how names begin that each attempt of Dynamo to trace a frame puts among its globals
DYNAMO_SETTINGS: dict[str, Any] = {
    "specialize_float": True,
    "assume_static_by_default": False,
    "automatic_dynamic_shapes": True,
    "skip_nnmodule_hook_guards": False,  # a hook that is added later must run: 0.3 us a module and call
    "trace_autograd_ops": True,  # torch.autograd.grad in a program: else its graph ends there, with what it needs lost
    "fake_tensor_cache_enabled": False,  # with symbolic sizes a hit costs more than the rule: 9 to 30 % of all calls
    "optimize_ddp": False,  # one graph under DistributedDataParallel too, not one for each of its buckets
    "allow_rnn": True,  # recurrent layers are operators of ours (torch_compat/versions/python_kernels.py)
    "recompile_limit": 64,
    "accumulated_recompile_limit": 1024,
}


@contextlib.contextmanager
def tracing_settings(dynamic: bool, oblivious: bool, rules: dict[Any, Callable[..., Any]],
                     in_python: dict[Any, Any], others: int = 0,
                     numbers: frozenset[str] = frozenset(),
                     changing: frozenset[str] = frozenset(), positions: bool = True) -> Iterator[None]:
    """While Dynamo traces: every dimension gets its own symbol (`dynamic`), sizes 0 and 1 are not singled out
    (`oblivious`, torch's `backed_size_oblivious`), `rules` say the shapes of operators that torch has none for, and
    functions of torch are traced as those `in_python`. Costs about 100 us, so it is entered on a cache miss only.
    `others` programs of the frame do not count for Dynamo's limits. Sizes of inputs that are among `numbers`, such as
    L['x'].size()[0], are taken as the numbers that they are; whole numbers at `changing`, such as L['self'].step, and
    sizes of buffers there, as symbols (torch takes a module's numbers, and sizes of its buffers, as constants).
    `positions`: subscripts that are tensors without dims are operands (torch_compat/tracing/tensor_positions.py)."""
    dynamo_config = compat.need("torch._dynamo.config")
    symbolic_config = compat.get("torch.fx.experimental._config")
    counted = getattr(getattr(torch.compiler, "config", None), "dynamic_sources", None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.compile_lock())  # torch's own, for what is changed here is every thread's
        stack.enter_context(fx_in_this_thread())
        dynamo = {name: value for name, value in DYNAMO_SETTINGS.items() if hasattr(dynamo_config, name)}
        if not dynamic:
            dynamo["assume_static_by_default"] = True
        for limit in ("recompile_limit", "accumulated_recompile_limit"):
            if limit in dynamo:
                dynamo[limit] += others
        # a warning does not end the graph: it is given after it
        if hasattr(dynamo_config, "reorderable_logging_functions"):
            dynamo["reorderable_logging_functions"] = {*dynamo_config.reorderable_logging_functions, warnings.warn}
        symbolic = {name: value for name, value in {"use_duck_shape": False,
                                                    "backed_size_oblivious": oblivious}.items()
                    if hasattr(symbolic_config, name)}
        stack.enter_context(dynamo_config.patch(dynamo))
        if symbolic_config is not None and symbolic:
            stack.enter_context(symbolic_config.patch(symbolic))
        if counted is not None and dynamic and changing:
            names = ",".join(re.escape(place) + "$" for place in sorted(changing))
            settings: Any = torch.compiler.config
            stack.enter_context(settings.patch(dynamic_sources=f"{counted},{names}"))
        stack.enter_context(quick_tracing())
        stack.enter_context(nothing_drawn_in_vain())
        stack.enter_context(eager_operators())
        stack.enter_context(_sizes_chosen(numbers if oblivious else frozenset(), changing if dynamic else frozenset()))
        if oblivious:
            stack.enter_context(newer_rules())
            stack.enter_context(general_tracing())
        stack.enter_context(quiet(*WHILE_TRACING))
        stack.enter_context(_warnings_of_functions())
        stack.enter_context(_no_empty_guards())
        stack.enter_context(assertions_kept())
        stack.enter_context(_floats_left())
        stack.enter_context(transforms_left())
        stack.enter_context(_no_guard_in_a_traceback())
        stack.enter_context(shape_rules(rules))
        stack.enter_context(_replaced(in_python))
        if positions:
            stack.enter_context(positions_traced())
        stack.enter_context(holders_traced())
        stack.enter_context(parts_of_holders_traced())
        stack.enter_context(names_traced())
        yield


@contextlib.contextmanager
def guard_settings() -> Iterator[None]:
    """While guards are made again: Dynamo's settings of a trace, and nothing that a trace needs beside them."""
    config = compat.need("torch._dynamo.config")
    with compat.compile_lock(), config.patch({name: value for name, value in DYNAMO_SETTINGS.items()
                                              if hasattr(config, name)}):
        yield


@contextlib.contextmanager
def nothing_left_behind(names: dict[str, Any]) -> Iterator[None]:
    """After a trace of a frame with the globals `names`, nothing of it is kept that nobody asks for: torch's memory of
    what it knew about sizes, which holds every trace of the process, and names among the globals that belong to
    attempts which Dynamo has given up."""
    sizes, hooks = map(compat.get, ("torch.fx.experimental.symbolic_shapes.ShapeEnv",
                                    "torch._dynamo.utils.CleanupManager.instance"))
    before = {name for name in list(names) if name.startswith(ATTEMPTS)}
    try:
        yield
    finally:
        for method in vars(sizes).values() if sizes is not None else ():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
        if hooks is not None:
            kept = before.union(hook.name for some in list(hooks.values.values()) for hook in some)
            for name in [name for name in list(names) if name.startswith(ATTEMPTS) and name not in kept]:
                del names[name]


@contextlib.contextmanager
def shape_rules(rules: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Inside, fake tensors know the shapes of more operators. A rule is called with a function that makes an unknown
    size, and the operator's arguments; torch's decompositions of these operators, which it asks first where a size is a
    symbol, are set aside. Without effect where another thread traces."""
    table = compat.get("torch._subclasses.fake_impls.op_implementations_dict")
    if table is None or any(getattr(table.get(op), "func", None) is _by_rule for op in rules):
        yield
        return
    before = {op: table[op] for op in rules if op in table}
    decompositions = compat.get("torch._decomp.decomposition_table") or {}
    set_aside = {op: decompositions.pop(op) for op in rules if op in decompositions}
    table.update({op: functools.partial(_by_rule, rule, before.get(op)) for op, rule in rules.items()})
    try:
        yield
    finally:
        for op in rules:
            table.pop(op, None)
        table.update(before)
        decompositions.update(set_aside)


@contextlib.contextmanager
def _sizes_chosen(numbers: frozenset[str], changing: frozenset[str]) -> Iterator[None]:
    """Inside, Dynamo gives sizes of inputs that are among `numbers` no symbols, and those of buffers at `changing` do
    get some."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic
    if not compat.has("torch._dynamo.variables.builder._automatic_dynamic"):
        yield
        return
    builder = compat.need("torch._dynamo.variables.builder")
    choose = builder._automatic_dynamic

    def chosen(value: Any, tracer: Any, source: Any, is_fixed: bool, *arguments: Any, **keywords: Any) -> Any:
        name = source.name() if callable(source.name) else source.name
        context = choose(value, tracer, source, is_fixed and name not in changing, *arguments, **keywords)
        for dim in range(len(context.dynamic_sizes)):
            if f"{name}.size()[{dim}]" in numbers:
                context.dynamic_sizes[dim], context.constraint_sizes[dim] = DimDynamic.STATIC, None
        return context

    builder._automatic_dynamic = chosen if numbers or changing else choose
    try:
        yield
    finally:
        builder._automatic_dynamic = choose


def _by_rule(rule: Callable[..., Any], torchs: Callable[..., Any] | None, mode: Any, op: Any, *arguments: Any,
             **keywords: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    constrain = compat.get("torch.fx.experimental.symbolic_shapes._constrain_range_for_size")

    def new_size() -> Any:
        if mode.shape_env is None or constrain is None or not mode.shape_env.allow_dynamic_output_shape_ops:
            raise compat.need("torch._subclasses.fake_tensor.DynamicOutputShapeException")(op)
        # Dynamo sees composite operators from outside, where nothing waits for a size inside of them
        inside = compat.operator_name(op).startswith("_") and get_proxy_mode() is None
        with mode.shape_env.ignore_fresh_unbacked_symbols() if inside else contextlib.nullcontext():
            size = mode.shape_env.create_unbacked_symint()
        constrain(size)
        return size

    with mode:
        found = rule(new_size, *arguments, **keywords)
    if found is not NotImplemented or torchs is None:
        return found
    return torchs(mode, op, *arguments, **keywords)


@contextlib.contextmanager
def _warnings_of_functions() -> Iterator[None]:
    """Inside, a warning in a function that is called is given too; torch hands on those of the outermost one only."""
    DebuggingVariable = compat.get("torch._dynamo.variables.misc.DebuggingVariable")
    if DebuggingVariable is None:
        yield
        return
    method = DebuggingVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        return method(self, tx.output.root_tx, args, kwargs)

    DebuggingVariable.call_function = call_function
    try:
        yield
    finally:
        DebuggingVariable.call_function = method


_OF_EVERY_SIZE = re.compile(r"0 <= [^\s#*/%+-]+\.size\(\)\[\d+\]\s*(#.*)?", re.DOTALL)  # of one size, no formula


@contextlib.contextmanager
def _no_empty_guards() -> Iterator[None]:
    """Inside, there are no guards that a size of a tensor is 0 or more, which every call would ask in Python. At the
    end the environments of sizes whose guards are made let go of the traced inputs: these hold their environment
    through C++, where Python's collector does not see the circle, and every trace would stay for ever."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    method = ShapeEnv.produce_guards_verbose
    done: list[Any] = []

    def produce(self: Any, *arguments: Any, **keywords: Any) -> Any:
        done.append(self)
        found = method(self, *arguments, **keywords)
        for one in found:
            one.exprs[:] = [text for text in one.exprs if not _OF_EVERY_SIZE.fullmatch(text)]
        return found

    ShapeEnv.produce_guards_verbose = produce  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv.produce_guards_verbose = method  # type: ignore[method-assign]
        for environment in done:
            environment.tracked_fakes = None


@contextlib.contextmanager
def _floats_left() -> Iterator[None]:
    """Inside, a float made of sizes by a function that torch's pass over floats does not know (a remainder of what may
    be negative) stays as it is; the pass would fail."""
    handlers = compat.get("torch.utils._sympy.interp.handlers")
    Known = compat.get("torch.utils._sympy.reference.TensorReferenceAnalysis")
    missing = [name for name in set(handlers().values()) if not hasattr(Known, name)] if handlers and Known else []
    for name in missing:
        setattr(Known, name, staticmethod(_leave))
    try:
        yield
    finally:
        for name in missing:
            delattr(Known, name)


@contextlib.contextmanager
def transforms_left() -> Iterator[None]:
    """Leaves the transforms of torch.func and of forward-mode differentiation that a failed trace is still in: what
    runs next would run inside of them."""
    inner, leave, end_level = map(compat.get, ("torch._C._functorch.maybe_current_level",
                                               "torch._C._functorch.pop_dynamic_layer_stack",
                                               "torch._C._exit_dual_level"))
    if None in (inner, leave, end_level):
        yield
        return
    depth, level = inner() or 0, forward_ad._current_level
    done = False
    try:
        yield
        done = True
    finally:
        while not done and (inner() or 0) > depth:
            leave()
        if not done and level < 0:  # a traced program enters its one level without telling Python
            forward_ad._current_level = level
            with contextlib.suppress(RuntimeError):
                end_level(level=0)


@contextlib.contextmanager
def _no_guard_in_a_traceback() -> Iterator[None]:
    """Inside, a tensor of torch.func whose text cannot be made leaves nothing behind. Torch turns functorch off
    meanwhile by a guard among the variables of a function, and an error's traceback keeps these: when that is
    collected, the guard sets the thread's dispatch keys as they were then, and no gradients are computed any more."""
    module = compat.get("torch._tensor_str")
    text = compat.get("torch._tensor_str._str")
    if text is None:
        yield
        return

    def shown(tensor: Any, **keywords: Any) -> str:
        with contextlib.ExitStack() as stack:
            stack.push(lambda _kind, _error, where: traceback.clear_frames(where))
            return text(tensor, **keywords)

    module._str = shown
    try:
        yield
    finally:
        module._str = text


_innermost_transform: Callable[[], Any] = compat.need("torch._C._functorch.peek_interpreter_stack")


def in_transform() -> bool:
    """Is a transform of torch.func running (grad, vmap, ...), or forward-mode differentiation? They go through the
    operators of a program one by one, and no compiled one has rules for that."""
    return _innermost_transform() is not None or forward_ad._current_level >= 0


def _leave(*operands: Any) -> Any:
    raise NotImplementedError("by this torch's pass leaves a float")


@contextlib.contextmanager
def _replaced(functions: dict[Any, Any]) -> Iterator[None]:
    """Inside, Dynamo traces the values of `functions` where a program calls the keys, also as methods of tensors: what
    its own `substitute_in_graph` does for good. Without effect where torch's internals are not as expected, and where
    another thread traces."""
    names = [f"torch._dynamo.{name}" for name in (
        "variables.builder.VariableBuilder._id_dispatch", "trace_rules.get_torch_obj_rule_map",
        "variables.PolyfilledFunctionVariable._get_polyfill_handlers", "trace_rules._polyfilled_function_ids",
        "variables.PolyfilledFunctionVariable", "variables.TensorVariable", "guards.GuardBuilder")]
    *tables, identities, Replaced, TensorVariable, GuardBuilder = map(compat.get, names)
    if not compat.has(*names):
        yield
        return

    def dispatch(builder: Any, value: Any) -> Any:
        return Replaced(value, source=builder.source, **builder.install_guards(GuardBuilder.ID_MATCH))

    by_identity, kinds, handlers = [table() for table in tables]
    if any(original in handlers for original in functions):
        yield
        return
    kinds_before = {original: kinds[original] for original in functions if original in kinds}
    added = []
    for original, ours in functions.items():
        stand_in = _stand_in(original, ours)
        for function in (original, stand_in):
            by_identity[id(function)] = dispatch
            kinds[function] = Replaced
            handlers[function] = stand_in
            identities.add(id(function))
            added.append(function)
    methods = {one.__name__: one for one in functions if hasattr(torch.Tensor, one.__name__)}
    call_method = TensorVariable.call_method

    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in methods and self.class_type is torch.Tensor:
            return Replaced(methods[name]).call_function(tx, [self, *args], kwargs)
        return call_method(self, tx, name, args, kwargs)

    TensorVariable.call_method = called
    try:
        yield
    finally:
        TensorVariable.call_method = call_method
        for function in added:
            for table, key in ((by_identity, id(function)), (kinds, function), (handlers, function)):
                table.pop(key, None)
            if id(function) in identities():
                identities.remove(id(function))
        kinds.update(kinds_before)


def _stand_in(original: Any, ours: Any) -> Any:
    """What Dynamo takes for `original` and traces as `ours`."""
    @functools.wraps(ours)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return original(*arguments, **keywords)

    call.__torch_dynamo_original__ = original  # type: ignore[attr-defined]
    call.__torch_dynamo_polyfill__ = ours  # type: ignore[attr-defined]
    call.__torch_dynamo_can_constant_fold_through__ = False  # type: ignore[attr-defined]
    return call


def has_size_0(x: torch.Tensor) -> bool:
    """Whether a traced tensor is known to have no elements; asks for no guard."""
    return any(type(size) is int and size == 0 for size in x.shape)


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two traced tensors are known to have one shape; asks for no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    return a.dim() == b.dim() and all(statically_known_true(n == m) for n, m in zip(a.shape, b.shape, strict=True))


def is_known_true(condition: torch.SymBool) -> bool:
    """Whether a condition of a trace holds whatever its symbols are; asks for no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true
    return bool(statically_known_true(condition))


def holds_of_sizes(condition: torch.SymBool, sizes: set[str]) -> bool:
    """Whether a condition of a trace holds of all numbers, those named `sizes` from 0 on, whatever the trace assumes.
    """
    import sympy
    formula = as_written(condition)
    plain = {symbol: sympy.Symbol(str(symbol), integer=True, nonnegative=str(symbol) in sizes or None)
             for symbol in formula.free_symbols if symbol.is_integer}
    return formula.xreplace(plain) == sympy.true


def symbols_as_written(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> set[str]:
    """The symbols of a number of a trace, those included that the trace has since taken for numbers."""
    return {str(symbol) for symbol in as_written(number).free_symbols}


def taken_for(number: torch.SymInt | torch.SymFloat) -> tuple[str, Any] | None:
    """Of a number of a trace that the data give: its symbol, and the formula that the trace has taken for it since;
    None where there is none."""
    written, now = as_written(number), number.node.expr
    if written == now or not written.is_Symbol or not api.is_unbacked(str(written)):
        return None
    return str(written), now


def nodes_of_formula(graph: torch.fx.Graph, formula: Any, nodes: Mapping[Any, torch.fx.Node]) -> Any:
    """Writes out a formula over the symbols of `nodes`, at the place where the graph inserts; a node or a number."""
    analysis, interpret = map(compat.need, ("torch.utils._sympy.reference.PythonReferenceAnalysis",
                                            "torch.utils._sympy.interp.sympy_interp"))
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    result = interpret(analysis, {symbol: torch.fx.Proxy(node, tracer) for symbol, node in nodes.items()}, formula)
    return result.node if isinstance(result, torch.fx.Proxy) else result


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes of a trace are one formula; asks for no guard."""
    formulas = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (a, b)]
    return bool(formulas[0] == formulas[1])


def copy_captured(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph of Dynamo's in its own nodes, with what AOTAutograd reads off it; both share what the graph refers to."""
    graph = torch.fx.Graph()
    copies: dict[Any, Any] = {}
    graph.output(graph.graph_copy(gm.graph, copies)).meta = dict(gm.graph.output_node().meta)
    for node, copy in copies.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
    result = torch.fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        result._param_name_to_source = gm._param_name_to_source
    return result


def found_later(size: torch.SymInt) -> dict[Any, int]:
    """The symbols of a traced size that are only known from the data, each with its least value, or 0."""
    ranges = size.node.shape_env.var_to_range
    found = [symbol for symbol in size.node.expr.free_symbols if api.is_unbacked(str(symbol))]
    return {symbol: int(ranges[symbol].lower) if ranges[symbol].lower > 0 else 0 for symbol in found}


@contextlib.contextmanager
def ranges_from(env: Any, ranges: Mapping[Any, tuple[int, Any]]) -> Iterator[None]:
    """Inside, these symbols have other ranges, each given by its least and its largest number."""
    from torch.utils._sympy.value_ranges import ValueRanges
    before = {symbol: env.var_to_range[symbol] for symbol in ranges}
    env.var_to_range.update({symbol: ValueRanges(*one) for symbol, one in ranges.items()})
    try:
        yield
    finally:
        env.var_to_range.update(before)


def admitted(values: Iterable[Any], symbols: dict[Any, int]) -> bool:
    """Whether all guards made so far hold at these values of the symbols in the sizes of traced values."""
    import sympy
    numbers = {symbol: sympy.Integer(number) for symbol, number in symbols.items()}
    environments = {size.node.shape_env for value in values
                    for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
                    if isinstance(size, torch.SymInt)}
    return not any(guard.expr.xreplace(numbers) == sympy.false for env in environments for guard in env.guards)


def hints(values: Iterable[Any]) -> dict[Any, int]:
    """The numbers that the symbols in the sizes of traced values had when the trace was made."""
    found: dict[Any, int] = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.has_hint():
                found.setdefault(size.node.expr, int(size.node.hint))
    return found


def fixed_sizes() -> dict[str, str]:
    """Asked while Dynamo compiles a graph: the sizes that it took as numbers, such as L['x'].size()[0], each with the
    user's line that asked."""
    context = torch._guards.TracingContext.try_get()
    env = getattr(getattr(context, "fake_mode", None), "shape_env", None)
    found = {}
    for source, stack in getattr(env, "specialization_stacks", {}).items():
        name = source.name() if callable(source.name) else source.name
        lines = users_frames(stack)
        if lines:
            file, line = lines[-1].filename.rsplit("/", 1)[-1], (lines[-1].line or "").strip()
            found[name] = f"{file}:{lines[-1].lineno}: {line}"
    return found


def one_node(function: Callable[..., Any]) -> None:
    """Has Dynamo write a call of `function` into its graph without looking into it."""
    torch.compiler.allow_in_graph(function)


@contextlib.contextmanager
def text_when_run() -> Iterator[None]:
    """Inside, modules of graphs that `graph_module` and torch make are written as Python only once one of them runs:
    a compiler reads the graph, and the text takes longer than most changes of it."""
    lazy = compat.get("torch.fx._lazy_graph_module._use_lazy_graph_module")
    with contextlib.nullcontext() if lazy is None else lazy(True):
        yield


def graph_module(root: torch.fx.GraphModule, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of `graph`, which names attributes of `root`; inside of `text_when_run`, without its text."""
    make = compat.get("torch.fx._lazy_graph_module._make_graph_module") or torch.fx.GraphModule
    found: torch.fx.GraphModule = make(root, graph)
    found.meta.update(root.meta)
    return found


def met_a_lock(error: BaseException) -> bool:
    """Whether a trace failed where Python code takes a lock, which Dynamo does not."""
    unsupported = compat.need("torch._dynamo.exc.Unsupported")
    return isinstance(error, unsupported) and re.search("enter a `R?[Ll]ock` context manager", str(error)) is not None


def is_writing() -> bool:
    """Is a graph of operators being written, rather than a graph run to see what it does?"""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    return get_proxy_mode() is not None


def captured_here() -> bool:
    """Whether this thread captures what it runs, where `torch.compiler.is_compiling()`, which is true in all threads
    while one captures, says that somebody does."""
    local = compat.get("torch._guards._TLS")
    return (local is None or getattr(local, "tracing_context", None) is not None
            or getattr(local, "compile_context", None) is not None or is_writing())


def in_trace_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called after the trace that is going on as it would be called now."""
    context, tracing = api.tracing_context(), compat.need("torch._guards.tracing")

    @functools.wraps(function)
    def later(*arguments: Any) -> Any:
        # as in the trace itself: one thread at a time, and what torch.fx traces is nobody else's
        with compat.compile_lock(), fx_in_this_thread(), tracing(context):
            return function(*arguments)

    return api.unhooked(later, "AnyShape compiles the update of a step")
