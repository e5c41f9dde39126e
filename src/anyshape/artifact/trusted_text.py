"""Parsing of texts that came from a file, under limits: nesting, digits, terms, equations, bytes and time.

The parsers themselves know these limits (ir/scanner.py, sym/parse.py); what they raise is put into the words of files.
"""
from __future__ import annotations

from collections.abc import Sequence

import anyshape.ops  # noqa: F401  fills the table of ops
from anyshape.artifact.container import refused
from anyshape.base.errors import AnyShapeError, ParseError
from anyshape.ir.graph import Graph
from anyshape.ir.parse import parse as read_graph
from anyshape.ir.types import TensorType
from anyshape.ir.verify import verify
from anyshape.plan.ir.parse import parse as read_plan
from anyshape.plan.ir.program import Plan
from anyshape.plan.verify import verify as verify_plan
from anyshape.sym import parse as size_text
from anyshape.sym.expr import Size

MOST_NODES = 200_000
MOST_ELEMENTS = 1 << 62


def parse_graph(text: str, needed: Sequence[str], where: str) -> tuple[Graph, tuple[Size, ...]]:
    """The verified graph of a file, and the sizes that must be at least 0.

    Raises:
        ArtifactError: it is none, or asks for what a file may not have.
    """
    try:
        if text.count("\n") > 2 * MOST_NODES:
            raise ParseError("cannot read the graph", why=f"it has more than {MOST_NODES} equations")
        graph = read_graph(text)
        sizes = tuple(size_text.parse(one) for one in needed)
        verify(graph)
    except (AnyShapeError, RecursionError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise refused(where, _words(error)) from None
    for node in graph.nodes:
        if node.op == "extern":
            raise refused(where, f"it calls {str(node.attr('target'))[:80]}, an operator of PyTorch",
                          "save a program without such operators")
    for value in (*graph.inputs, *(one for node in graph.nodes for one in node.outputs)):
        if isinstance(value.type, TensorType):
            count = 1
            for n in value.type.shape:
                if isinstance(n, int):
                    count *= n
                    if not 0 <= count < MOST_ELEMENTS:
                        raise refused(where, f"{value.name[:80]} has impossible sizes: {str(value.type)[:80]}")
            if value.type.device != "cpu":
                raise refused(where, f"{value.name[:80]} is on {value.type.device}")
    if graph.saved or graph.restored:
        raise refused(where, "it is a part of a training step")
    return graph, sizes


def parse_plan(text: str, where: str) -> Plan:
    """The verified plan of a trusted file.

    Raises:
        ArtifactError: it is none.
    """
    try:
        plan = read_plan(text)
        verify_plan(plan)
    except (AnyShapeError, RecursionError, ValueError, OverflowError, KeyError, TypeError) as error:
        raise refused(where, _words(error)) from None
    return plan


def _words(error: Exception) -> str:
    if isinstance(error, AnyShapeError):
        return " ".join(f"{error.what}: {error.why}".split())[:400]
    return f"{type(error).__name__}: {str(error)[:200]}"
