"""Graphs as PyTorch runs them: the way out where a program does not compile, and where a device refuses a call."""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from anyshape.base.errors import DeviceError
from anyshape.frontend.programs.eager_fallback import note, refuse
from anyshape.frontend.programs.session import Boxed, ProgramRequest
from anyshape.torch_compat import need
from anyshape.torch_compat.tensors import plain_gradient


class PlainProgram:
    """Runs a graph op by op, as PyTorch would: the reference, and the way out when compiling fails.

    Called with one list of inputs, which it empties; returns the list of outputs. `count` is called with every run.
    """

    _boxed_call = True

    def __init__(self, gm: GraphModule, name: str, takes_tape: bool, count: Callable[[], object]) -> None:
        self.gm = gm
        self.name = name
        self.takes_tape = takes_tape
        self.count = count
        gm.graph.set_codegen(need("torch.fx.graph._BoxedCodeGen")())
        gm.recompile()
        self.run = gm.forward

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.count()
        if not self.takes_tape:
            with torch.no_grad():
                return list(self.run(inputs))
        tape = inputs[0]
        tape.open()
        inputs[1:] = [plain_gradient(one) if isinstance(one, torch.Tensor) else one for one in inputs[1:]]
        with torch.no_grad():
            # a gradient may be a saved value itself, or a view of one, in memory that the tape is about to give back
            outputs = [tape.apart(result) for result in self.run(inputs)]
        tape.close()
        return outputs


def interpret(request: ProgramRequest, reason: str) -> Boxed:
    """The graph of `request` as a callable that runs it op by op, and counts that, with the reason why."""
    return PlainProgram(request.gm, request.name, takes_tape(request),
                        functools.partial(request.compilation.ran_eagerly, reason))


def takes_tape(request: ProgramRequest) -> bool:
    """Whether its first input is a tape."""
    return request.role == "backward" and request.tape is not None


class DeviceFallback:
    """The calls of one program that its device refuses: a kernel does not compile for it, its driver does not load one
    or refuses a launch. They run as PyTorch, counted, where they may.

    Args:
        gm: the program's graph: that of the request, or a part of it.
        constants: the tensors that the program is given behind the graph's inputs.
    """

    def __init__(self, request: ProgramRequest, gm: GraphModule, constants: Sequence[Any]) -> None:
        self.config = request.config
        self.compilation = request.compilation
        self.name = request.name
        self.constants = len(constants)
        tape = takes_tape(request) and gm is request.gm
        self.make = functools.partial(PlainProgram, gm, request.name, tape, int)
        self.program: PlainProgram | None = None

    def __call__(self, args: list[Any], error: DeviceError) -> list[Any]:
        """The results of a call with these arguments.

        Raises:
            DeviceError: under `strict`. LimitError: under a limit in bytes.
        """
        if self.config.strict:
            raise error
        reason = ": ".join(filter(None, (error.what, error.why))) + (f" ({error.where})" if error.where else "")
        refuse(self.config, reason, error.do, error.where)
        if self.program is None:
            self.program = self.make()
        note(self.compilation, reason, error.do)
        return self.program(args[:len(args) - self.constants])
