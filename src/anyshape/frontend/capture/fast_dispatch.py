"""Fast dispatch: calls of a compiled object that skip PyTorch's wrappers, behind PyTorch's own guards.

    an ordinary call:  module -> torch.compile's wrapper -> frame evaluation -> guards -> code -> AOT wrapper -> program
    fast dispatch:     module -> guards -> code -> program

The guards and the code are Dynamo's, taken from its cache after a call that traced: the guards check everything the
trace relied on (types, dtypes, sizes, modes, module state), and the code reads parameters anew and replays side
effects. So fast dispatch serves exactly the calls that Dynamo would serve from its cache. What lies between the caller
and the traced frame and is not guarded (hooks of the module, an overridden `forward`, tracers,
`torch.compiler.set_stance`) is checked here. Whenever a check fails, the call goes the ordinary way.
"""
from __future__ import annotations

import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from anyshape.torch_compat.dynamo import internals
from anyshape.torch_compat.dynamo.copied_target import MODULE_CALL, CopiedTarget, call_of

MISS = object()
MOST_PROGRAMS = 8  # guards are tried one after another
_numbers = itertools.count()


def has_nested(values: Iterable[Any]) -> bool:
    """Whether there is a nested tensor, in lists and dictionaries too. Asked at every call: 0.15 us for a tensor."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_nested:
                return True
        elif isinstance(value, (list, tuple)):
            if value and has_nested(value):
                return True
        elif isinstance(value, dict) and value and has_nested(value.values()):
            return True
    return False


class FastDispatch:
    """Fast dispatch of one compiled object.

    Args:
        copied: the module, function or bound method that was compiled, as Dynamo traces it.
        own: the programs of this compilation, as handed to Dynamo; other entries of a shared cache are left alone.
    """

    __slots__ = (
        "__weakref__",
        "bind",
        "code",
        "copied",
        "defaults",
        "elsewhere",
        "function",
        "keyword_defaults",
        "kind",
        "own",
        "prefix",
        "programs",
        "target",
    )

    def __init__(self, copied: CopiedTarget, own: Sequence[Callable[..., Any]]) -> None:
        self.copied = copied
        self.target = copied.target
        self.own = own
        self.programs: tuple[tuple[Any, Callable[..., bool], Callable[..., Any]], ...] = ()
        self.bind: Callable[..., dict[str, Any]] | None = None
        self.prefix: tuple[Any, ...] = ()
        self.function: types.FunctionType | None = None
        self.kind: type | None = None
        self.code: types.CodeType | None = None  # with the defaults, what `function` was when `take` was called
        self.defaults: Any = None
        self.keyword_defaults: Any = None
        self.elsewhere = internals.tracer_detector()

    def take(self, code: types.CodeType) -> None:
        """Takes the programs that Dynamo holds for the traced frame's `code`; none if the frame is not a known one."""
        self.programs = ()
        found = self._frame(code)
        if found is None:
            return
        self.function, self.prefix, self.kind = found
        self.bind = frame_locals(self.function)
        self.code, self.defaults = self.function.__code__, self.function.__defaults__
        self.keyword_defaults = self.function.__kwdefaults__
        programs = []
        for guards, transformed in internals.cached_programs(code):
            run = self._runner(transformed)
            if run is not None:
                programs.append((guards, internals.guard_check(guards), run))
        self.programs = tuple(programs[:MOST_PROGRAMS])

    def _frame(self, code: types.CodeType) -> tuple[types.FunctionType, tuple[Any, ...], type | None] | None:
        """The function whose frame was traced, what is passed before the caller's arguments, and the class of a module
        whose `forward` it is."""
        found = self.copied.traced(code)
        if found is None or not isinstance(self.target, torch.nn.Module):
            return None if found is None else (*found, None)
        if hasattr(self.target, "_initialize_hook"):
            return None
        if found[0] is self.copied.wrapper:
            return (*found, None)
        kind: Any = type(self.target)
        is_plain = kind.forward is found[0] and found[1] and call_of(kind) is MODULE_CALL
        return (*found, kind) if is_plain else None

    def _runner(self, code: types.CodeType) -> Callable[..., Any] | None:
        """Dynamo's code as a function, calling our program without the wrapper that switches Dynamo off: it is off.
        None when the code is not one whole graph of this compilation."""
        function = self.function
        assert function is not None
        found = internals.only_graph(code, function.__globals__)
        if found is None:
            return None
        program: Any = found[0]
        if not any(program is one for one in self.own) or program.piece:
            return None
        # the program itself: whoever comes this way knows that it runs
        replaced = {name: value.program if value is program else value for name, value in found[1].items()}
        aliases = {name: f"__anyshape_{next(_numbers)}" for name in replaced}
        names = tuple(aliases.get(name, name) for name in code.co_names)
        run = types.FunctionType(code.replace(co_names=names), function.__globals__, function.__name__,
                                 function.__defaults__, function.__closure__)
        run.__kwdefaults__ = function.__kwdefaults__
        for name, alias in aliases.items():
            function.__globals__[alias] = replaced[name]
            weakref.finalize(run, function.__globals__.pop, alias, None)
        return run

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of the call, or MISS when it has to go the ordinary way (nothing has run then). The caller has
        asked whether somebody watches, or whether torch.compile is tracing.

        Raises:
            KeyboardInterrupt: it came while guards were checked.
            NotCovered: as the program does; and whatever the user's program raises.
        """
        function = self.function
        assert function is not None and self.bind is not None
        if function.__code__ is not self.code or function.__defaults__ is not self.defaults \
                or function.__kwdefaults__ is not self.keyword_defaults or self.elsewhere():
            return MISS
        if self.kind is not None and self._reached_through_hooks(self.kind):
            return MISS
        if self.prefix:
            arguments = (*self.prefix, *arguments)
        try:
            values = self.bind(*arguments, **keywords)
        except (TypeError, ValueError):  # wrong arguments, or an empty cell: the ordinary way words the error
            return MISS
        programs = self.programs
        for guards, check, run in programs:
            if guards.cache_entry is not None and check(values):
                return run(*arguments, **keywords)
        # guards that hold now, of the same values, have lost a Ctrl-C
        if internals.interrupt_raises() \
                and any(guards.cache_entry is not None and check(values) for guards, check, _ in programs):
            raise KeyboardInterrupt("while guards were checked")
        return MISS

    def _reached_through_hooks(self, kind: Any) -> bool:
        """Would calling the module do more than call `forward`? (`nn.Module._call_impl`, and its overriding)"""
        module: Any = self.target
        state = module.__dict__
        return bool(
            state["_backward_hooks"] or state["_backward_pre_hooks"] or state["_forward_hooks"]
            or state["_forward_pre_hooks"] or "forward" in state
            or kind.forward is not self.function or type(module) is not kind
            or getattr(module, "_compiled_call_impl", None) is not None)


def frame_locals(function: types.FunctionType) -> Callable[..., dict[str, Any]]:
    """A function with the parameters of `function` that returns the locals of a frame of it, at its first line.

    Raises (when called): TypeError: the arguments do not fit. ValueError: a variable of the closure is not bound.
    """
    code = function.__code__
    count = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:count])
    positional, keyword = names[:code.co_argcount], names[code.co_argcount:]
    rest = list(code.co_varnames[count:])
    parts = list(positional)
    if 0 < code.co_posonlyargcount <= len(parts):
        parts.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        star = rest.pop(0)
        names.append(star)
        parts.append(f"*{star}")
    elif keyword:
        parts.append("*")
    parts += keyword
    if code.co_flags & inspect.CO_VARKEYWORDS:
        double = rest.pop(0)
        names.append(double)
        parts.append(f"**{double}")
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    space: dict[str, Any] = {}
    entries = [f"{name!r}: {name}" for name in names]
    for index, (name, cell) in enumerate(cells.items()):
        space[f"_cell{index}"] = cell
        entries.append(f"{name!r}: _cell{index}.cell_contents")
    source = f"def bind({', '.join(parts)}):\n    return {{{', '.join(entries)}}}"
    exec(compile(source, f"<locals of {function.__qualname__}>", "exec"), space)
    bind: types.FunctionType = space["bind"]
    bind.__defaults__ = function.__defaults__
    bind.__kwdefaults__ = function.__kwdefaults__
    return bind
