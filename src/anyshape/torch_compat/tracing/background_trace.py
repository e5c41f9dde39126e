"""Background tracing: what a trace in a thread of its own must leave to the thread that runs the program meanwhile.

Dynamo saves and restores what it may disturb: the state of torch's random generator, and the flag that says that torch
compiles. Both are the process's, so a trace beside a running program would draw the same random numbers twice, and send
the program down the branches that are for tracing. Here they are left alone, in the tracing thread only.
"""
from __future__ import annotations

import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.tracing.fx_threads import ASKED, PATCHED, code_of, fx_in_this_thread, put
from anyshape.torch_compat.versions.autocast import KINDS


def frame_to_keep(frame: Any) -> Any:
    """What Dynamo reads of a frame that it is offered, to trace it when that frame has gone on."""
    return SimpleNamespace(f_code=frame.f_code, f_locals=dict(frame.f_locals), f_globals=frame.f_globals,
                           f_builtins=frame.f_builtins, f_lasti=frame.f_lasti, closure=frame.closure)


def passed_over(frame: Any) -> bool:
    """Whether Dynamo lets such a frame run as it is, and looks at what it calls: that takes no time."""
    check = compat.get("torch._dynamo.trace_rules.check")
    if check is None:
        return False
    more = {"frame": frame} if "frame" in inspect.signature(check).parameters else {}  # torch 2.11 asks for code
    return bool(check(frame.f_code, **more))


def takes(answer: Any, frame_locals: dict[str, Any]) -> bool:
    """Whether the guards of Dynamo's answer, if it has any, let a frame with these locals run its code."""
    code = getattr(answer, "guarded_code", None)
    return code is None or bool(code.guard_manager.check(frame_locals))


def same_modes() -> bool:
    """Whether a thread of its own would trace what this one does: there is nothing that watches this thread only."""
    dispatch, functions, transforms = map(compat.get, (
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "torch._C._len_torch_function_stack",
        "torch._C._functorch.peek_interpreter_stack"))
    if None in (dispatch, functions, transforms) or not compat.has(PATCHED, ASKED):
        return False
    return not (dispatch() or functions() or transforms() or torch.is_inference_mode_enabled())


def in_a_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Starts `work` in a thread with this one's settings: gradients, autocast, number of threads, torch's configs."""
    context = contextvars.copy_context()
    gradients, threads = torch.is_grad_enabled(), torch.get_num_threads()
    wanted = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in KINDS]
    caching = torch.is_autocast_cache_enabled()

    def run() -> None:
        torch.set_num_threads(threads)
        torch.set_autocast_cache_enabled(caching)
        for kind, enabled, dtype in wanted:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        with torch.set_grad_enabled(gradients), _leaving_the_process_alone():
            context.run(work)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _leaving_the_process_alone() -> Iterator[None]:
    thread = threading.get_ident()

    def here() -> bool:
        return threading.get_ident() == thread

    with _one_at_a_time, contextlib.ExitStack() as stack:
        stack.enter_context(code_of(torch.random.set_rng_state, "def set_rng_state(new_state):\n"
                                    "    _anyshape_traces_here() or default_generator.set_state(new_state)", here))
        session = getattr(torch.compiler, "_compile_session_context", None)
        if session is not None:
            stack.enter_context(put(torch.compiler, "_compile_session_context",
                                    lambda: contextlib.nullcontext() if here() else session()))
        stack.enter_context(fx_in_this_thread())
        yield
