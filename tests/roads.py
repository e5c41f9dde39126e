"""The ways by which the tests run a function: the compiler as users have it, or its front end over the reference."""
from __future__ import annotations

import os
from typing import Any

import anyshape
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.frontend.programs.session import Boxed, Compilation, ProgramRequest
from anyshape.runtime.memory.tape import Tape
from anyshape.runtime.torch_ops.reference_interpreter import interpret

# "interp": captured graphs are translated and run by the reference interpreter, so that a failure that stays is the
# front end's and one that goes is the backend's
ROAD = os.environ.get("ANYSHAPE_TEST_ROAD", "native")


class Interpreted:
    """A program compiler that stops after the translation and interprets the graph."""

    def __call__(self, request: ProgramRequest) -> Boxed:
        graph, notes = to_graph(request.gm, request.name)
        layout = request.tape

        def program(inputs: list[Any]) -> list[Any]:
            arguments = list(inputs)
            inputs.clear()
            tape = arguments.pop(0) if notes.tape_input else None
            if tape is not None:
                values = tape.open()
                arguments = [values[index] for index in range(len(graph.restored))] + arguments
            outputs, saved, _ = interpret(graph, arguments + notes.constants)
            if tape is not None:
                tape.close()
            if notes.tape_output:
                outputs.append(Tape(saved, checked=layout.checked))
            return outputs

        request.compilation.register(program)
        return program


def compiled(target: Any, **settings: Any) -> Any:
    """`anyshape.compile(target, **settings)`, by the road that the environment asks for."""
    fast = anyshape.compile(target, **settings)
    if ROAD == "interp":
        compilation_of(fast).compiler = Interpreted()
    return fast


def compilation_of(fast: Any) -> Compilation:
    """The record of a compiled function or module."""
    return fast._anyshape.compilation
