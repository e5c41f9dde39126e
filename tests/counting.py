"""Work counted, not timed: a machine that is busy, or a collection of garbage, fails no test."""
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

OURS = "/src/anyshape/"


def _profiled(function: Callable[[], Any], on_event: Callable[[Any, str, Any], None]) -> None:
    """Runs `function`, telling `on_event` what this thread enters meanwhile."""
    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(before)


def calls(function: Callable[[], Any]) -> int:
    """How many functions, of Python and built in, are called while `function` runs in this thread."""
    count = 0

    def on_event(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    _profiled(function, on_event)
    return count


Function = tuple[str, str]  # file below src/anyshape, qualified name with its line
# code that is generated has a name in place of a file; it counts as a function of the file that generates it
GENERATED = {"<entry of": "runtime/call/dispatch_codegen.py", "<key of": "runtime/call/dispatch_codegen.py",
             "<locals of": "frontend/capture/fast_dispatch.py", "<sizes of a": "frontend/capture/small_size_guard.py",
             "<sizes of": "plan/ir/size_function.py", "<extern": "runtime/torch_ops/extern_calls.py"}
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


@cache
def own(code: CodeType) -> Function | None:
    """The function of src/anyshape that a code object is; None: of somebody else, or a comprehension, which reads as a
    part of the function that it stands in."""
    file = next((name for start, name in GENERATED.items() if code.co_filename.startswith(start)), "")
    if not file and OURS in code.co_filename:
        file = code.co_filename.rsplit(OURS, 1)[1]
    if not file or code.co_name in COMPREHENSIONS:
        return None
    return file, f"{getattr(code, 'co_qualname', code.co_name)}:{code.co_firstlineno}"


def entered(function: Callable[[], Any]) -> dict[Function, list[list[Function]]]:
    """The functions of src/anyshape that this thread enters while `function` runs, in order; with each, the stacks of
    such functions, outermost first and itself last, by which it was entered (a stack is told once)."""
    found: dict[Function, list[list[Function]]] = {}

    def on_event(frame: Any, event: str, _argument: Any) -> None:
        if event != "call" or own(frame.f_code) is None:
            return
        stack = []
        while frame is not None:
            one = own(frame.f_code)
            if one is not None:
                stack.append(one)
            frame = frame.f_back
        stacks = found.setdefault(stack[0], [])
        if stack[::-1] not in stacks:
            stacks.append(stack[::-1])

    _profiled(function, on_event)
    return found
