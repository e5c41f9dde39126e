"""Why a limit in bytes refuses a call that is not made yet, of a program of any kind."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from anyshape.base.errors import LimitError
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Boxed
from anyshape.runtime.call.executable import Executable


@runtime_checkable
class Refuses(Protocol):
    """A program that knows."""

    def refusal(self, inputs: Sequence[Any]) -> LimitError | None:
        """Why a limit refuses a call with these inputs; None where that is not so."""


def refusal_of(program: Boxed, inputs: Sequence[Any]) -> LimitError | None:
    """Why a limit refuses a call, which is not made; None where that is not so, or not known."""
    if isinstance(program, Refuses):
        return program.refusal(inputs)
    if isinstance(program, NativeProgram):
        return refusal_of(program.executable, [*inputs, *program.constants])
    if isinstance(program, Executable):
        try:
            program.admit(program.record(*inputs))
        except LimitError as error:
            return error.with_traceback(None)
    return None
