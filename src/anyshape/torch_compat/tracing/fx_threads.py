"""Symbolic tracing by torch.fx, for the thread that traces only.

While torch.fx traces (AOTAutograd does, for every graph), it stands in for the calls and attributes of all modules of
the process, and says to all threads that it traces: a module that runs in another thread would take part in the trace,
and torch.compile would refuse to run there. Here both are for the tracing thread alone.
"""
from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from anyshape import torch_compat as compat

PATCHED = "torch.fx._symbolic_trace._Patcher.patch_method"
ASKED = "torch.fx._symbolic_trace.is_fx_symbolic_tracing"
USUAL = "_anyshape_usual"  # attribute of what stands in for a method of modules: that method
_INHERITED = object()

_lock = threading.Lock()
_threads: Counter[int] = Counter()  # those that may trace, and how often each has entered
_undo = contextlib.ExitStack()


def _traces_here() -> bool:
    return _threads[threading.get_ident()] > 0


@contextlib.contextmanager
def fx_in_this_thread() -> Iterator[None]:
    """Inside, what torch.fx traces in this thread changes nothing for others. Threads may be inside together; where
    torch lacks the names, it does nothing."""
    if not compat.has(PATCHED, ASKED):
        yield
        return
    thread = threading.get_ident()
    with _lock:
        if not _threads.total():
            _undo.enter_context(_calls_of_modules())
            _undo.enter_context(_flag())
        _threads[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _threads[thread] -= 1
            if not _threads[thread]:
                del _threads[thread]
            if not _threads:
                _undo.close()


@contextlib.contextmanager
def _calls_of_modules() -> Iterator[None]:
    patcher = compat.need("torch.fx._symbolic_trace._Patcher")
    patch, skip = patcher.patch_method, compat.get("torch._dynamo.eval_frame.skip_code")

    def patch_method(self: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
        usual, owner = getattr(cls, name), threading.get_ident()

        def either(*arguments: Any, **keywords: Any) -> Any:
            return (new if threading.get_ident() == owner else usual)(*arguments, **keywords)

        functools.update_wrapper(either, new)
        setattr(either, USUAL, usual)
        if skip is not None:  # a thread that is about to capture may come by here: Dynamo goes on with what is called
            skip(either.__code__)
        patch(self, cls, name, either, deduplicate)

    with put(patcher, "patch_method", patch_method):
        yield


def _flag() -> contextlib.AbstractContextManager[None]:
    return code_of(compat.need(ASKED), "def ask():\n    return _is_fx_tracing_flag and _anyshape_traces_here() "
                                       "and not torch.compiler.is_compiling()", _traces_here)


@contextlib.contextmanager
def code_of(function: Any, text: str, here: Callable[[], bool]) -> Iterator[None]:
    """Inside, `function` has the code of the function in `text`, where `_anyshape_traces_here` is `here`. Callers hold
    the function itself, so that another one in its place would not reach them."""
    usual = function.__code__
    names: dict[str, Any] = {}
    exec(text, names)
    code = next(one for one in names.values() if hasattr(one, "__code__")).__code__
    function.__globals__["_anyshape_traces_here"] = here
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = usual
        del function.__globals__["_anyshape_traces_here"]


@contextlib.contextmanager
def put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a module or class has another value."""
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
