"""Fallback to eager: every call that runs as PyTorch is counted with its reason and said once, or refused beforehand.

One rule for all of them: `strict=True` refuses the call, a limit in bytes refuses it too (PyTorch keeps to none), and
else it runs, `stats()["eager_calls"]` counts it, and `explain()` says how many there were for which reason.
"""
from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anyshape.base.config import Config
from anyshape.base.errors import LimitError, Unsupported
from anyshape.frontend.programs.session import Compilation
from anyshape.torch_compat.dynamo import eager_frames
from anyshape.torch_compat.replaced_kernels import replaced_kernels
from anyshape.torch_compat.tracing import settings

UNKNOWN = "PyTorch's tracer makes no program of it, and does not say why"
NO_OTHER = "the program for all sizes does not take this call, and PyTorch's tracer makes no other"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
REPLACED = "kernels of PyTorch's own operators are replaced (torch.library), which compiled code would not call"
BY_OPERATOR = "make an operator of your own (torch.library.custom_op), which is called"
AGAIN = "set strict=True to stop here, and see explain()"


class FallbackWarning(UserWarning):
    """Something runs as PyTorch would run it, instead of compiled."""


@dataclass(slots=True)
class DynamoCall:
    """What happens in one call that goes through Dynamo.

    Attributes:
        frames: of the user's code that Dynamo was asked about.
        runs: of compiled programs.
        reason: why a part of it ran as PyTorch; empty where none did.
        plain: what the tracer said of frames that run as PyTorch: (code object, error) each.
        deferred: patterns of small sizes for which frames run as PyTorch for now.
        chosen: they run as PyTorch because a setting says so, which needs no warning.
        seen: how many programs there were when Dynamo looked for one.
        looks: how often it has looked again since, for what other threads may have made.
    """
    frames: int = 0
    runs: int = 0
    reason: str = ""
    plain: list[tuple[Any, BaseException]] = field(default_factory=list)
    deferred: list[Any] = field(default_factory=list)
    chosen: bool = False
    seen: int = 0
    looks: int = 0


class Underway(threading.local):
    """The call that is going on in each thread; None between calls."""

    call: DynamoCall | None = None


def counted(program: Callable[..., Any], underway: Underway, piece: str) -> Callable[..., Any]:
    """`program`, which counts its runs with the call that is going on. Fast dispatch, which need not count, takes
    the `program` itself.

    Args:
        piece: why it is not all of what the user has called; empty where it is.
    """
    def run(*inputs: Any) -> Any:
        call = underway.call
        if call is not None:
            call.runs += 1
            call.reason = call.reason or piece
        return program(*inputs)

    run.program, run.piece = program, piece  # type: ignore[attr-defined]
    return run


def refuse(config: Config, reason: str, do: str = "", where: str = "") -> None:
    """Refuses a call that would run as PyTorch, where it may not.

    Raises:
        Unsupported: under `strict`.
        LimitError: under a limit in bytes.
    """
    if config.strict:
        raise Unsupported("this call would run as PyTorch, which strict=True refuses", where=where, why=reason,
                          do=do or "change that, or set strict=False to let such calls run as PyTorch")
    if config.limited:
        raise LimitError("this call would run as PyTorch, which keeps to no limit in bytes", where=where, why=reason,
                         do=do or "change that, or leave the limit out")


def note(compilation: Compilation, reason: str, do: str = "", chosen: bool = False) -> None:
    """Counts a call that runs as PyTorch, and warns of it when the reason is new.

    Args:
        do: what the user can do about it.
        chosen: a setting of the user's says so, which needs no warning.
    """
    if compilation.ran_eagerly(reason) and not chosen:
        limit = ", and keeps to no limit in bytes there" if compilation.config.limited else ""
        warnings.warn(f"a call of a compiled object runs as PyTorch would run it, all of it or a part{limit}.\n"
                      f"  why: {reason}\n  do:  {do + '; ' if do else ''}{AGAIN}", FallbackWarning,
                      stacklevel=_callers_level())


def warn(what: str, why: str, do: str) -> None:
    """A warning at the user's line."""
    warnings.warn(f"{what}\n  why: {why}\n  do:  {do}", FallbackWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """The level of the stack, for the function that asks, at which the user's code is."""
    level, frame = 1, sys._getframe(1)
    inside = _PACKAGE, eager_frames.INSIDE, "<sizes of "
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def watchers() -> tuple[str, str]:
    """Who watches every operator or module, and has to see them, and what a user can do about that; two empty texts
    where it is a call on shapes alone, for which there is nothing to compute."""
    modes = eager_frames.dispatch_mode_names()
    if modes:
        if all(name == "FakeTensorMode" for name in modes):
            return "", ""
        return (f"a dispatch mode that watches every operator is on: {', '.join(dict.fromkeys(modes))}",
                "leave the mode before the call")
    if replaced_kernels():
        return f"{REPLACED}: {', '.join(replaced_kernels())}", BY_OPERATOR
    if settings.in_transform():
        return ("a transform of torch.func (vmap, grad, jvp) or a derivative in forward mode is going on",
                "take the transform inside of the compiled function")
    return ("hooks on every module are registered (torch.nn.modules.module.register_module_forward_hook and the like)",
            "remove them, or register hooks on the modules that need them")
