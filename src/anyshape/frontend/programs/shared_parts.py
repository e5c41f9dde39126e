"""Common subprogram elimination: parts of a program that are the same but for names are compiled once.

The branches of a router most often differ in their weights alone, which are inputs. One program then serves them all,
and remembers each size of a load once for all of them.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.frontend.programs.session import Boxed
from anyshape.ir.alpha_rename import nameless
from anyshape.ir.graph import Graph


class SharedParts:
    """The compiled parts of one program.

    Args:
        build: a part in our IR, its name, and its graph as it was captured -> the compiled part.
    """

    def __init__(self, build: Callable[[Any, str, GraphModule], Boxed]) -> None:
        self.build = build
        self.known: dict[Any, Boxed] = {}
        self.parts = 0

    def program(self, form: tuple[Graph, Notes], name: str, gm: GraphModule) -> Boxed:
        """The program of a part: a new one, named `name`, or that of an equal part before it."""
        self.parts += 1
        graph, notes = form
        # sizes that the trace takes as equal, and constants, are beside the graph: such parts stay apart
        key = name if notes.equalities or notes.constants else (nameless(graph), notes.float_inputs)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.build(form, name, gm)
        return found
