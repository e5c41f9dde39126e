"""SymInt caching and size-oblivious tracing: the same symbolic sizes are asked of torch once, and traces serve sizes of
0 and 1 too.

Tracing a transformer's training step asks torch for some 80 000 sums, products and comparisons of symbolic sizes, a few
hundred of them different. `quick_tracing` keeps the results, which are torch's own objects made by torch's own code.

A graph being written knows each such object by where it came from. An object must therefore not be given again where
its origin would be wrong: what was made before the forward pass begins may come from the tangents, which only the
backward may use. So everything is forgotten when a pass over the program begins.

`general_tracing` is for traces that serve sizes 0 and 1 too. What the user's own Python asks of a size becomes a guard.
What torch's operators ask while they are traced mostly decides between a quick way and the general one (is this tensor
contiguous, may this be folded): there the answer for sizes of 2 and more is given, and no guard is made.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

from anyshape import torch_compat as compat
from anyshape.torch_compat.tracing.einsum_path import by_hints
from anyshape.torch_compat.tracing.fake_tensor_cache import remembered_shapes
from anyshape.torch_compat.versions.symbolic_functions import general_form, traced_values

# functions of torch's decompositions that compute another number where a size is 1.
NUMBERS_BY_SIZE = frozenset(("_compute_scale",))

PYTHON = ("_operator", "builtins", "math")  # modules of functions of numbers that a captured graph may call

LONG = 2**40  # a length that no slice reaches

# methods of torch's symbolic numbers whose result depends on nothing but the two operands; `mod` asks for value ranges
BINARY = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "sym_max", "sym_min")


@contextlib.contextmanager
def quick_tracing() -> Iterator[None]:
    """Inside, traces are quick. Without effect where torch's internals are not as expected, and when nested."""
    SymNode = compat.need("torch.fx.experimental.sym_node.SymNode")
    known = compat.is_there(SymNode) and {"_expr", "_hint", "pytype", "shape_env", "_optimized_summation"} <= set(
        SymNode.__init__.__code__.co_names)
    if not known or hasattr(SymNode.mul, "anyshape"):
        yield
        return
    memory: dict[Any, Any] = {}
    quick = {name: _remembering(name, getattr(SymNode, name), SymNode, memory) for name in BINARY}
    quick["wrap_int"] = _remembering_numbers(SymNode.wrap_int, memory)
    quick["maybe_as_int"] = _remembering_values(memory)
    with _patched([(SymNode, name, method) for name, method in quick.items()]), remembered_shapes(memory), \
            _forgetting(memory), _nothing_for_logs(), _messages_once():
        yield


def _remembering(name: str, method: Callable[..., Any], kind: Any, memory: dict[Any, Any]) -> Callable[..., Any]:
    """`method`, which gives the same object for the same operands. In a trace that writes a graph only results that the
    graph already knows are given again, so that each is written where it is first needed."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    def remembered(self: Any, other: Any) -> Any:
        if other.__class__ is not kind:
            return method(self, other)
        key = (name, self._expr, other._expr, self._hint, other._hint, self.pytype, other.pytype,
               self._optimized_summation, other._optimized_summation, id(self.shape_env))
        found = memory.get(key)
        mode = get_proxy_mode()
        if mode is None:
            if found is None:
                found = memory[key] = method(self, other)
            return found
        if found is not None and found in getattr(mode.tracer.symnode_tracker, "sym_node_dict", ()):
            return found
        return method(self, other)

    remembered.anyshape = True  # type: ignore[attr-defined]
    return remembered


def _remembering_numbers(wrap_int: Callable[..., Any], memory: dict[Any, Any]) -> Callable[..., Any]:
    """`SymNode.wrap_int`, which makes one object for a number."""
    def remembered(self: Any, number: int) -> Any:
        if type(number) is not int:
            return wrap_int(self, number)
        key = (number, id(self.shape_env))
        found = memory.get(key)
        if found is None:
            found = memory[key] = wrap_int(self, number)
        return found

    return remembered


def _remembering_values(memory: dict[Any, Any]) -> Callable[..., Any]:
    """`SymNode.maybe_as_int`, which asks each formula once whether it is a number."""
    def remembered(self: Any) -> int | None:
        formula = self.expr
        try:
            return memory[formula]  # type: ignore[no-any-return]
        except KeyError:
            value = memory[formula] = int(formula) if formula.is_number else None
            return value

    return remembered


@contextlib.contextmanager
def general_tracing() -> Iterator[None]:
    """Inside, operators that are traced take the general path where they ask whether sizes are 0 or 1. All of
    compat.ALL_SIZES must be there."""
    asking = _Asking()
    with _patched([*_of_numbers(asking), *_of_conditions(asking), *_of_slices(asking), *_of_operators(asking)]):
        yield


Patch = tuple[Any, str, Any]  # an attribute of an object or module of torch, and what stands there meanwhile


@contextlib.contextmanager
def _patched(patches: Sequence[Patch]) -> Iterator[None]:
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, ours in patches:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, torchs in saved:
            setattr(owner, name, torchs)


class _Asking:
    """Who asks a size. running: "operator", or "layout" where no answer changes a result; "function" of torch's written
    in Python, which asks as the user's does, but for what its methods of tensors ask; empty: the user's Python."""

    def __init__(self) -> None:
        self.running: list[str] = []

    def operator(self) -> str:
        """The word, or empty where Python asks."""
        return self.running[-1] if self.running and self.running[-1] != "function" else ""

    def within(self, word: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, during which `word` asks."""
        def run(*arguments: Any, **keywords: Any) -> Any:
            self.running.append(word)
            try:
                return function(*arguments, **keywords)
            finally:
                self.running.pop()

        return run

    def as_python(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function`, during which the user's Python asks."""
        rest, self.running = self.running, []
        try:
            return function(*arguments)
        finally:
            self.running = rest


def _of_numbers(asking: _Asking) -> list[Patch]:
    """What is asked of a symbolic number itself."""
    import sympy
    SymNode = compat.need("torch.fx.experimental.sym_node.SymNode")
    guard, check, remainder = SymNode.guard_bool, SymNode.expect_true, SymNode.mod
    in_python = SymNode.bool_.__code__  # of `if`; C++ calls guard_bool itself

    def guard_bool(self: Any, file: str, line: int) -> bool:
        word = asking.operator() or (asking.running and sys._getframe(1).f_code is not in_python and "operator")
        answer = _general_answer(self, word) if word else None
        if not word:
            _guard_rows(self)
        return guard(self, file, line) if answer is None else answer

    def expect_true(self: Any, file: str, line: int) -> bool:
        # what must hold is no choice between two ways; that a size is not 0 or 1 is asked again of such a call's shapes
        if asking.operator() and self.shape_env._maybe_evaluate_static(self.expr, size_oblivious=True) is sympy.true:
            return True
        return bool(asking.as_python(check, self, file, line))

    def mod(self: Any, other: Any) -> Any:
        try:
            return remainder(self, other)
        except ZeroDivisionError:
            if not asking.operator():
                raise
            return self.wrap_int(1)  # torch's rules for strides ask whether 0 divides a size: it does not

    return [(SymNode, "guard_bool", guard_bool), (SymNode, "expect_true", expect_true), (SymNode, "mod", mod)]


def _of_conditions(asking: _Asking) -> list[Patch]:
    """What is known of conditions without a guard, and of sizes when they get a name."""
    import torch
    from torch.fx.experimental import symbolic_shapes
    symbolic_config, SymNode, SymT = map(compat.need, (
        "torch.fx.experimental._config", "torch.fx.experimental.sym_node.SymNode", "torch.utils._sympy.symbol.SymT"))
    size_oblivious = bool(getattr(symbolic_config, "backed_size_oblivious", False))  # a setting of torch takes 5 us
    guard = SymNode.guard_bool
    symbol, static, either = (symbolic_shapes.make_symbol, symbolic_shapes._static_eval_sym_bool,
                              symbolic_shapes._guard_or)
    known: dict[Any, bool] = {}  # what was answered for good, by formula and environment: facts are only ever added
    positive: dict[Any, bool | None] = {}  # by formula

    def static_value(condition: Any) -> bool | None:
        node = condition.node
        key = (node._expr, node.shape_env)
        answer = known.get(key)
        if answer is None:
            answer = static(condition)
            if answer is not None:
                known[key] = answer
        if answer is None and asking.operator() and isinstance(condition, torch.SymBool):
            formula = node.expr
            if formula not in positive:
                positive[formula] = _where_positive(formula)
            answer = positive[formula]
            if answer is None:
                answer = _length_of_slice(condition, lambda one: asking.as_python(guard, one.node, "", 0))
            if answer is None:
                answer = _square_of_root(condition, lambda one: asking.as_python(guard, one.node, "", 0))
        return answer

    def guard_or(condition: Any, default: bool) -> bool:
        if not isinstance(condition, torch.SymBool) or not size_oblivious:
            return either(condition, default)
        answer = static_value(condition)
        return default if answer is None else answer

    def make_symbol(prefix: Any, number: int, **assumptions: Any) -> Any:
        if prefix is SymT.SIZE and assumptions.get("positive"):
            # torch takes every traced size to be positive, so that `n == 0` and `max(n, 1)` are decided, with no guard
            assumptions = {**assumptions, "positive": None, "nonnegative": True}
        return symbol(prefix, number, **assumptions)

    return [(symbolic_shapes, "make_symbol", make_symbol), (symbolic_shapes, "_static_eval_sym_bool", static_value),
            (symbolic_shapes, "_guard_or", guard_or)]


def _of_slices(asking: _Asking) -> list[Patch]:
    """The bounds of slices."""
    import torch
    fake_impls = compat.need("torch._subclasses.fake_impls")
    slice_index = fake_impls._compute_slice_index

    def by_sign(size: Any, index: Any) -> Any:
        return torch.sym_min(index, size) if index >= 0 else torch.sym_max(index + size, 0)

    def compute_slice_index(size: Any, index: Any) -> Any:
        # a bound that may be negative, by its sign in this call, which becomes a guard: `cache[:, :position + n]`
        found = slice_index(size, index)
        if found is not None or not isinstance(index, torch.SymInt) or not index.node.has_hint() \
                or getattr(index.node.shape_env, "_error_on_new_guards", False):
            return found
        return asking.as_python(by_sign, size, index)

    return [(fake_impls, "_compute_slice_index", compute_slice_index)]


def _of_operators(asking: _Asking) -> list[Patch]:
    """Where operators are traced."""
    import torch
    from torch.fx.experimental import proxy_tensor
    utils, aot_autograd, convolutions = map(compat.need, (
        "torch._dynamo.utils", "torch._functorch.aot_autograd", "torch._C._select_conv_backend"))
    python_run, operator_run = utils.run_node, asking.within("operator", utils.run_node)

    def run_node(tracer: Any, node: Any, arguments: Any, keywords: Any, *rest: Any) -> Any:
        ours = general_form(node.target, arguments, keywords) if node.op in ("call_function", "call_method") else None
        if ours is not None:
            node.op, node.target = "call_function", ours
        if getattr(node.target, "__module__", "") in PYTHON and not any(
                isinstance(one, torch.Tensor) for one in arguments):  # `not n == 1`: the user's Python asks a size
            return python_run(tracer, node, arguments, keywords, *rest)
        flags = {name: bool(value) for name, value in keywords.items() if isinstance(value, torch.SymBool)}
        if flags:  # `f(flag=n > 1 and ...)` where the condition is false: n is known, the flag is still a formula
            node.kwargs = {**node.kwargs, **flags}
            keywords = {**keywords, **flags}
        if not isinstance(node.target, FunctionType):  # torch._check takes formulas
            flags = {place: bool(value) for place, value in enumerate(arguments) if isinstance(value, torch.SymBool)}
            node.args = tuple(flags.get(place, value) for place, value in enumerate(node.args))
            arguments = tuple(flags.get(place, value) for place, value in enumerate(arguments))
        return operator_run(tracer, node, arguments, keywords, *rest)

    def of_function(self: Any, function: Any, *rest: Any, **keywords: Any) -> Any:
        # `x.contiguous()` asks before it is an operator; `x.is_contiguous()` is the user's own question
        if getattr(function, "__name__", "").startswith("is_"):
            return torchs(self, function, *rest, **keywords)
        return (python if isinstance(function, FunctionType) else operator)(self, function, *rest, **keywords)

    exported, functions = torch.export.ExportedProgram, proxy_tensor.PreDispatchTorchFunctionMode
    torchs = functions.__torch_function__
    python, operator = (asking.within(word, torchs) for word in ("function", "operator"))
    return [(utils, "run_node", run_node),
            (aot_autograd, "aot_module_simplified", asking.within("operator", aot_autograd.aot_module_simplified)),
            (proxy_tensor, "proxy_call", asking.within("operator", proxy_tensor.proxy_call)),
            (functions, "__torch_function__", of_function),
            (exported, "run_decompositions", asking.within("operator", exported.run_decompositions)),
            (torch._C, "_select_conv_backend", asking.within("layout", convolutions)),
            (torch.backends.opt_einsum, "get_opt_einsum", by_hints(torch.backends.opt_einsum.get_opt_einsum))]


def _general_answer(node: Any, place: str) -> bool | None:
    """What an operator gets to hear when it asks `node`; None when it is a guard after all."""
    import sympy
    env = node.shape_env
    formula = node.expr
    if getattr(env, "_error_on_new_guards", False) or formula.is_number:
        return None
    if place == "layout":
        return None if node.hint is None else bool(node.hint)
    known = env._maybe_evaluate_static(formula, size_oblivious=True)
    if known is not None and not _chooses_numbers(env, formula):
        return bool(known)
    if known is None and isinstance(formula, (sympy.Eq, sympy.Ne)) and any(side in (0, 1) for side in formula.args) \
            and any(str(symbol).startswith("u") for symbol in formula.free_symbols):
        return isinstance(formula, sympy.Ne)  # a size that the data tell: general, too; what is found is asked again
    if compat.need("torch._C._current_graph_task_id")() != -1 and isinstance(formula, (sympy.Eq, sympy.Ne)):
        # the formulas of derivatives ask which layout is quicker: unequal sizes have no shortcut
        unequal = isinstance(formula, sympy.Ne)
        if bool(node.hint) == unequal:
            return unequal
    return None


def _guard_rows(node: Any) -> None:
    """`if edges.numel() > 0` of some that the data choose and one for each of n rows: u0 + n is not 0 where n is not,
    whatever u0 is. What was asked is decided by guards of the sizes that are known, where these decide it."""
    import sympy
    env, formula = node.shape_env, node.expr
    sizes = traced_values(env)
    known = [symbol for symbol in formula.free_symbols if symbol in sizes]
    later = [symbol for symbol in formula.free_symbols if symbol not in sizes]
    if not known or not later or getattr(env, "_error_on_new_guards", False) or any(sizes[one] < 1 for one in known) \
            or any(env.var_to_range[symbol].lower < 0 for symbol in later):
        return
    if env._maybe_evaluate_static(formula) is None and _where_positive(formula, later) is not None:
        for symbol in known:
            env.evaluate_expr(sympy.Ge(symbol, 1), sympy.true)


def _where_positive(formula: Any, later: Sequence[Any] = ()) -> bool | None:
    """Whether a condition holds for all sizes from 1 on, and from 0 on for `later`; None when that cannot be told."""
    import sympy
    known = formula.xreplace({
        **{size: sympy.Symbol(size.name, positive=True, integer=True) for size in formula.free_symbols
           if size.is_nonnegative},
        **{size: sympy.Symbol(size.name, nonnegative=True, integer=True) for size in later}})
    return bool(known) if known in (sympy.true, sympy.false) else None


def _length_of_slice(condition: Any, guard_of: Callable[[Any], bool]) -> bool | None:
    """Whether `x[:, k:k + 1]` has a length of 1, when `condition` asks that; else None. It has where `x` is long
    enough, which is a guard: `squeeze` and broadcasting are not to take its length for any other."""
    import sympy
    Max, Min = compat.need("torch.utils._sympy.functions.Max"), compat.need("torch.utils._sympy.functions.Min")
    node, formula = condition.node, condition.node.expr
    env = node.shape_env
    if not isinstance(formula, sympy.Eq) or 1 not in formula.args or not formula.has(Min, Max):
        return None
    known = env._maybe_evaluate_static(formula, size_oblivious=True)
    if known in (sympy.true, sympy.false):
        return bool(known)
    if not node.has_hint() or not node.hint or getattr(env, "_error_on_new_guards", False):
        return None
    hints = traced_values(env)
    given = {symbol: sympy.Integer(hints[symbol]) for symbol in formula.free_symbols}
    long = any(formula.xreplace(given | {symbol: sympy.Integer(LONG)}) == sympy.true for symbol in given)
    return guard_of(condition) if long else None


def _square_of_root(condition: Any, guard_of: Callable[[Any], bool]) -> bool | None:
    """The answer to how a size compares with the square of its own rounded root, `int(n ** 0.5)`; None for any other
    condition. They are equal where they are so in this call, which is a guard: a reshape to root by root is a view
    then, as in eager PyTorch, and has no other use where they differ."""
    import sympy
    node, formula = condition.node, condition.node.expr
    env, Rounded = node.shape_env, compat.need("torch.utils._sympy.functions.TruncToInt")
    is_relation = isinstance(formula, sympy.core.relational.Relational)
    if not is_relation or not node.has_hint() or len(formula.free_symbols) != 1 or not formula.has(Rounded):
        return None
    left, right = formula.args
    if left.is_number or right.is_number:
        return None  # as whether int(0.5 * n) is 2
    hints = traced_values(env)
    numbers = [side.xreplace({symbol: sympy.Integer(hints[symbol]) for symbol in side.free_symbols})
               for side in (left, right) if all(symbol in hints for symbol in side.free_symbols)]
    if len(numbers) < 2 or numbers[0] != numbers[1] or numbers[0] < 2:
        return None
    if not getattr(env, "_error_on_new_guards", False) and not guard_of(env.create_symboolnode(sympy.Eq(left, right))):
        return None
    return bool(formula.func(numbers[0], numbers[1]))


def _chooses_numbers(env: Any, formula: Any) -> bool:
    """Whether the answer chooses numbers, not a layout: torch's decomposition of resizing asks for `n > 1` before it
    divides by n - 1. A size of 1 makes another number then, and no shape shows it."""
    import sympy
    if not isinstance(formula, (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)):
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or "experimental" in
                                        frame.f_code.co_filename or frame.f_code.co_name == "__bool__"):
        frame = frame.f_back
    return frame.f_code.co_name in NUMBERS_BY_SIZE and env._maybe_evaluate_static(formula) is None


@contextlib.contextmanager
def _forgetting(memory: dict[Any, Any]) -> Iterator[None]:
    """Empties the memory whenever AOTAutograd begins to run a program: for its metadata, and to write a graph."""
    from torch.fx.experimental.symbolic_shapes import PropagateUnbackedSymInts
    run = PropagateUnbackedSymInts.run

    def forget_and_run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        memory.clear()
        return run(self, *arguments, **keywords)

    own = "run" in vars(PropagateUnbackedSymInts)
    PropagateUnbackedSymInts.run = forget_and_run  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            PropagateUnbackedSymInts.run = run  # type: ignore[method-assign]
        else:
            del PropagateUnbackedSymInts.run


def _nothing_for_logs() -> contextlib.AbstractContextManager[None]:
    """Dynamo tokenizes every source file that it traces, to name functions, and flushes the processor's caches, to time
    the guards of a program (20 ms each), both for logs that are not written."""
    quick = [("torch._dynamo.symbolic_convert", "get_funcname", lambda filename, lineno: None),
             ("torch._dynamo.guards", "profile_guard_manager", lambda root, values, count: 0.0)]
    return _patched([(compat.need(module), name, ours) for module, name, ours in quick
                     if compat.get(f"{module}.{name}") is not None])


@contextlib.contextmanager
def _messages_once() -> Iterator[None]:
    """Lets a program go on past `logger.warning_once("...")`, where Dynamo would cut it in two. Such a message comes at
    most once in a process, so it is written when the program is traced."""
    ConstantVariable = compat.get("torch._dynamo.variables.constant.ConstantVariable")
    LoggingLoggerVariable = compat.get("torch._dynamo.variables.misc.LoggingLoggerVariable")
    if ConstantVariable is None or LoggingLoggerVariable is None:
        yield
        return
    original = LoggingLoggerVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if name in ("warning_once", "info_once") and all(value.is_python_constant() for value in given):
            words = [value.as_python_constant() for value in args]
            named = {key: value.as_python_constant() for key, value in kwargs.items()}
            getattr(self.value, name)(*words, **named)
            return ConstantVariable.create(None)
        return original(self, tx, name, args, kwargs)

    with _patched([(LoggingLoggerVariable, "call_method", call_method)]):
        yield
