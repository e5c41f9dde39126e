"""Copies of code objects: what Dynamo traces of a compiled object belongs to that object alone.

Dynamo keeps what it knows of a frame with the code object: the programs, how many there may be, and that it shall
never be traced again (`apply_to_code`: after a graph break in a loop, or where a trace found nothing to compute). Code
objects are shared by all objects of a class and by all functions that one decorator has made, so one `torch.compile`
with such a graph break would leave every other compiled object of the class to PyTorch. Each compiled object has its
function, or the `forward` of its module, traced as a function with the same globals, closure and defaults and a code
object of its own. What runs is the same; names, files and lines are the same; what Dynamo knows goes with the copy.

Functions that Dynamo comes to only after a graph break keep their code objects: whoever calls them looks them up.
"""
from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.dynamo.eager_frames import is_sharded
from anyshape.torch_compat.tracing.fx_threads import USUAL

WRAPPERS = "torch._dynamo.external_utils"  # of Dynamo's frames around what has none of its own
MODULE_CALL = torch.nn.Module.__call__  # as it is before anybody patches it
MARK = "_torchdynamo"  # how Dynamo's attributes of functions begin: those of one that is disabled, or compiled


def copy_of(code: types.CodeType) -> types.CodeType:
    """Another code object that does the same, with those in it copied too."""
    return code.replace(co_consts=tuple(copy_of(one) if isinstance(one, types.CodeType) else one
                                        for one in code.co_consts))


class CopiedTarget:
    """A module, function or other callable that Dynamo traces by copies of its code objects.

    Args:
        target: what is compiled.
        optimize: what `api.dynamo_compile` returned; makes a callable that Dynamo watches.
    """

    __slots__ = ("__weakref__", "_between", "_bound", "_copies", "_optimize", "_shared", "target", "wrapper")

    def __init__(self, target: Any, optimize: Callable[[Any], Any]) -> None:
        self.target = target
        self._optimize = optimize
        self._copies: dict[int, tuple[types.CodeType, types.CodeType]] = {}  # id -> (the user's, its copy)
        self._bound: tuple[Any, Any, types.CodeType, types.FunctionType, Any] | None = None
        self._between: Callable[..., Any] | None = None  # see `_between_hooks`
        self._shared = optimize(target)
        inner = _inside(self._shared)
        if hasattr(inner, USUAL):  # another thread traces: Dynamo would keep what stands in for the module's call there
            with compat.compile_lock():
                self._shared = optimize(target)
            inner = _inside(self._shared)
        self.wrapper = inner if getattr(inner, "__globals__", {}).get("__name__") == WRAPPERS else None
        if self.wrapper is not None:  # a function made for this object
            _own_frame(self.wrapper)

    def call(self, *arguments: Any, **keywords: Any) -> Any:
        """The result of the target, its frame evaluated by Dynamo."""
        if self.wrapper is not None and is_sharded(self.target):
            return self._between_hooks()(*arguments, **keywords)
        found = None if self.wrapper is not None else self._function()
        if found is None or (isinstance(self._shared, torch.nn.Module) and module_call() is None):
            return self._shared(*arguments, **keywords)
        function, owner = found
        bound = self._bound
        if bound is None or bound[0] is not function or bound[1] is not owner or bound[2] is not function.__code__:
            self._bound = bound = self._bind(function, owner)
        copied, call = bound[3:]
        if copied.__defaults__ is not function.__defaults__:
            copied.__defaults__ = function.__defaults__
        if copied.__kwdefaults__ is not function.__kwdefaults__:
            copied.__kwdefaults__ = function.__kwdefaults__
        return call(*arguments, **keywords)

    def traced(self, code: types.CodeType) -> tuple[types.FunctionType, tuple[Any, ...]] | None:
        """The function that runs where Dynamo evaluates `code`, with what is passed before the caller's arguments; None
        where that is no frame of the target itself."""
        if self.wrapper is not None:
            return (self.wrapper, ()) if self.wrapper.__code__ is code else None
        found = self._function()
        if found is None:
            return None
        function, owner = found
        if code is not function.__code__ and code is not self._copies.get(id(function.__code__), (None, None))[1]:
            return None
        return function, () if owner is None else (owner,)

    def _between_hooks(self) -> Callable[..., Any]:
        """A module of torch's own that is sharded: its frame is Dynamo's around `forward`, and the hooks, which gather
        weights, are outside. (Around the module, they would be inside, and there is no graph of them.)"""
        make, wrap = module_call(), compat.get(f"{WRAPPERS}.wrap_inline")
        if self._between is None and (make is None or wrap is None):
            self._between = self._shared
        elif self._between is None:
            inner = wrap(self.target.forward)
            _own_frame(inner)
            self._between = self._optimize(types.MethodType(make(inner), self.target))  # type: ignore[misc]
        return self._between

    def _function(self) -> tuple[types.FunctionType, Any] | None:
        """The function whose frame a call begins with, and the object that it is bound to; None where it has to be
        looked up: that of a module which is called in a way of its own, one that is disabled or compiled already."""
        inner: Any = _frame_of(self.target) if isinstance(self._shared, torch.nn.Module) else _inside(self._shared)
        owner = None
        if isinstance(inner, types.MethodType):
            owner, inner = inner.__self__, inner.__func__
        if not isinstance(inner, types.FunctionType) or any(name.startswith(MARK) for name in vars(inner)):
            return None
        return inner, owner

    def _bind(self, function: types.FunctionType, owner: Any) -> Any:
        code = function.__code__
        copied = types.FunctionType(self._copies.setdefault(id(code), (code, copy_of(code)))[1], function.__globals__,
                                    function.__name__, function.__defaults__, function.__closure__)
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__module__, copied.__doc__ = function.__module__, function.__doc__
        copied.__dict__.update(function.__dict__)
        call = copied if owner is None else types.MethodType(copied, owner)
        if isinstance(self._shared, torch.nn.Module) and call_of(type(self.target)) is MODULE_CALL:
            call = types.MethodType(module_call()(call), self.target)  # type: ignore[misc]
        return function, owner, code, copied, self._optimize(call)


def _own_frame(wrapper: Any) -> None:
    """Gives a function of `WRAPPERS` a code object of its own, which Dynamo traces as it would that one."""
    always = compat.get("torch._dynamo.eval_frame.always_optimize_code_objects")
    if always is not None:
        wrapper.__code__ = copy_of(wrapper.__code__)
        always[wrapper.__code__] = True


def _inside(optimized: Any) -> Any:
    """What a callable that Dynamo watches calls."""
    if isinstance(optimized, torch.nn.Module):  # that of a lazy module is told apart from what checks it
        optimized = vars(optimized).get("_forward", optimized.forward)
    return getattr(optimized, "_torchdynamo_orig_callable", None)


def call_of(kind: type) -> Any:
    """The class's `__call__`, also while torch.fx stands in for that of all modules."""
    call = kind.__call__  # type: ignore[operator]
    return getattr(call, USUAL, call)


def _frame_of(module: torch.nn.Module) -> Any:
    """What a call of the module runs: its class's own `__call__`, or `forward`, where `nn.Module.__call__` leads to it
    and nothing but hooks runs besides; else None."""
    call = call_of(type(module))
    if isinstance(module, torch.fx.GraphModule) or hasattr(module, "_initialize_hook"):
        return None
    if call is not MODULE_CALL:
        return types.MethodType(call, module) if isinstance(call, types.FunctionType) else None
    usual = compat.get("torch.nn.Module._call_impl")
    own = usual is not None and getattr(module._call_impl, "__func__", None) is not usual
    return None if own or getattr(module, "_compiled_call_impl", None) is not None else module.forward


def module_call() -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """A function of a `forward` that returns `nn.Module._call_impl` with it in place of the module's own; None where
    this torch has no such method, or another."""
    usual = compat.get("torch.nn.Module._call_impl")
    return None if usual is None else _with_forward(usual)


@functools.cache
def _with_forward(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Made of torch's source, in its file and on its lines, with another name for `self.forward`."""
    try:
        source, renamed = re.subn(r"\bself\.forward\b", "own_forward", inspect.getsource(function))
    except (OSError, TypeError):  # no source there
        return None
    if renamed != 1 or not source.startswith("    def _call_impl(self, *args, **kwargs):"):
        return None
    start = function.__code__.co_firstlineno - 2
    text = "\n" * start + f"def make(own_forward):\n{source}\n    return _call_impl\n"
    space: dict[str, Any] = {}
    exec(compile(text, function.__code__.co_filename, "exec", dont_inherit=True), function.__globals__, space)
    return space["make"]  # type: ignore[no-any-return]
