"""What Dynamo leaves to eager PyTorch, by torch's version: graph breaks, skipped frames, stances, sharded modules."""
from __future__ import annotations

import inspect
import os
import re
import sys
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.tracing import settings
from anyshape.torch_compat.tracing.namespace_objects import RESUMED
from anyshape.torch_compat.user_lines import last_line
from anyshape.torch_compat.versions import api

INSIDE = os.path.dirname(torch.__file__) + os.sep


def dispatch_mode_names() -> list[str]:
    """The classes of the TorchDispatchModes that are on, outermost first."""
    stack = compat.get("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
    if stack is None:
        return ["TorchDispatchMode"] * api.dispatch_modes()
    return [type(mode).__name__ for mode in stack()]


def switched_off() -> tuple[str, str]:
    """Why Dynamo would trace no call now, and what to do; two empty texts where it would."""
    evaluation, config = compat.get("torch._dynamo.eval_frame"), compat.get("torch._dynamo.config")
    if getattr(getattr(evaluation, "_stance", None), "stance", "") == "force_eager":
        return 'torch.compiler.set_stance("force_eager") is set', 'set the stance "default"'
    if getattr(config, "disable", False):
        return "torch._dynamo.config.disable is set", "unset it, and TORCH_COMPILE_DISABLE in the environment"
    return "", ""


def uncompiled_words(target: Any) -> tuple[str, str]:
    """Why no call of a module or function is compiled, and what to do; two empty texts where calls are."""
    if isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return ("TorchScript (torch.jit.script, torch.jit.trace) runs in an interpreter of its own and is not compiled",
                "compile the module or function that it was made from")
    if not isinstance(target, torch.nn.Module):
        return _suspended_words(target)
    if isinstance(target, torch.nn.parallel.DistributedDataParallel):
        return "", ""  # what is in it is compiled
    fully = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    for module in target.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            return ("a part of the module is under DistributedDataParallel, which runs as PyTorch, and all around it",
                    "put DistributedDataParallel around all of it, or compile that part")
        if fully is not None and isinstance(module, fully):
            return ("FullyShardedDataParallel is not compiled, nor what is in it: it cuts weights out of one flat "
                    "tensor while the model runs", "use torch.distributed.fsdp.fully_shard, which is compiled")
    return _suspended_words(target.forward)


SHARDED = ("parts of the model are sharded (fully_shard), and hooks gather their weights around each: parts that are "
           "torch's own modules run as PyTorch, and so does what calls parts where a frame cannot be cut")
COMPILE_PARTS = "compile the parts before they are sharded: fully_shard(anyshape.compile(block))"
_SHARDING = os.path.join(INSIDE, "distributed", "fsdp") + os.sep


def sharded_parts(target: Any) -> int:
    """How many modules there are in a module that FSDP2 (`fully_shard`) gathers the weights of: its hooks, around each
    of them, run as PyTorch, and what is between hooks is a program. The module's own are outside of its frame."""
    if not isinstance(target, torch.nn.Module) or "torch.distributed.fsdp" not in sys.modules:
        return 0
    return sum(is_sharded(module) for module in target.modules() if module is not target)


def is_sharded(module: Any) -> bool:
    """Whether FSDP2 (`fully_shard`) gathers the weights of a module itself."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def is_at_sharding(one: Any) -> bool:
    """Whether an entry of `graph_breaks` is a hook of FSDP2."""
    return ends_at_sharding(getattr(one, "user_stack", None))


def ends_at_sharding(stack: Any) -> bool:
    """Whether the innermost frame of a stack of Dynamo's is a hook of FSDP2."""
    frames = list(stack or ())
    return bool(frames) and frames[-1].filename.startswith(_SHARDING)


def _suspended_words(target: Any) -> tuple[str, str]:
    """As `uncompiled_words`, for a function that stops half-way and goes on later."""
    for one in (target, type(target).__call__):
        if inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one):
            return ("an `async` function is not compiled: it stops where it awaits, and other code runs meanwhile",
                    "compile the function that it calls for the computation")
        if inspect.isgeneratorfunction(one):
            return ("a generator is not compiled: it stops at each yield, and other code runs meanwhile",
                    "compile the function that computes what it yields")
    return "", ""

ASKS_DATA = re.compile(
    r"Could not (?:guard on|extract specialized integer from) data-dependent expression (.+?) \(unhinted")


def is_never_traced(code: Any) -> bool:
    """Whether Dynamo looks at the file of a code object and leaves it alone, as it does with torch's own."""
    check = compat.get("torch._dynamo.trace_rules.check")
    return check is not None and bool(check(code))


def is_resumed(code: Any) -> bool:
    """Whether a code object is what Dynamo made for the part after a graph break."""
    return str(code.co_name).startswith(RESUMED)


def graph_breaks() -> list[Any]:
    """What Dynamo notes of each graph break, in the order in which it met them; nothing where this torch has no
    such list."""
    found: list[Any] = getattr(compat.get("torch._dynamo.utils"), "graph_break_reasons", [])
    return found


def break_words(one: Any) -> str:
    """An entry of `graph_breaks` in words, with the user's line."""
    said = str(getattr(one, "reason", one)).strip().splitlines() or ["a graph break"]
    where = last_line(getattr(one, "user_stack", None))
    return f"the program is cut in parts{f' at {where}' if where else ''}: {said[0].strip()}"


def line_of(error: BaseException) -> str:
    """The user's line where a trace ended in `error`; empty where Dynamo does not say."""
    return last_line(getattr(error, "real_stack", None))


def has_no_graph(answer: Any) -> bool:
    """Whether the code in Dynamo's answer for a frame computes nothing with tensors."""
    names = getattr(getattr(answer.guarded_code, "code", None), "co_names", ())
    return not any(name.startswith(("__compiled_fn", "__resume_at")) for name in names)


def is_left(code: Any, answer: Any) -> bool:
    """Whether a frame for which Dynamo made no program is one that is left to PyTorch, and none of those in which
    nothing is computed (those of torch around a user's, those without tensors)."""
    said = getattr(answer, "skip_reason", None) or ""
    return "suppressed" in said or not (str(code.co_filename).startswith(INSIDE) or said)


def error_words(error: BaseException) -> str:
    """What Dynamo says when it makes no program: the beginning of it."""
    if type(error).__name__ == "FailOnRecompileLimitHit":
        limit = settings.DYNAMO_SETTINGS["recompile_limit"]
        return f"one function has as many programs as are made of one (recompile_limit = {limit})"
    asked = ASKS_DATA.search(str(error))
    if asked:
        return (f"Python asks for what only the data tell ({asked[1]}): where that is whether a tensor is empty, leave "
                "the question out, for operators take empty tensors; anyshape.route chooses branches without it")
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}"


def dropped_interrupt(error: BaseException) -> bool:
    """Whether `error` came of a Ctrl-C: torch's C++, which reads sizes by calling Python, makes a TypeError of whatever
    that raises, and keeps the interrupt only in its words."""
    seen: list[BaseException] = []
    rest: list[BaseException | None] = [error]
    while rest:
        one = rest.pop()
        if one is None or one in seen:
            continue
        if 'with error "KeyboardInterrupt' in str(one):
            return True
        seen.append(one)
        rest += [getattr(one, "inner_exception", None), one.__cause__, one.__context__]
    return False


def tracer_words() -> tuple[type[BaseException], ...]:
    """The exceptions by which Dynamo says that a call cannot be one program."""
    names = ("Unsupported", "UserError", "InternalTorchDynamoError", "FailOnRecompileLimitHit", "BackendCompilerFailed",
             "UncapturedHigherOrderOpError")
    return tuple(compat.need(f"torch._dynamo.exc.{name}") for name in names)
