"""Parsing of texts that came from a file, under limits: nesting, digits, terms, equations, bytes.

The parsers know the limits of nesting, digits and terms (ir/scanner.py, sym/parse.py). Whatever they, or a type rule,
raise for a text that nobody would write is one error here, in the words of files.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anyshape.artifact.format.container import refused
from anyshape.base.errors import AnyShapeError
from anyshape.ir.graph import Graph, effect_of
from anyshape.ir.types import SizeType, TensorType
from anyshape.plan.ir.parse import parse as read_plan
from anyshape.plan.ir.program import Plan
from anyshape.plan.verify import verify as verify_plan
from anyshape.sym import parse as size_text
from anyshape.sym.expr import Size, symbols_of
from anyshape.sym.facts import Facts

if TYPE_CHECKING:
    from anyshape.kernel.loop_ir.program import LoopProgram

MOST_NODES = 200_000
MOST_ELEMENTS = 1 << 62


def parse_graph(text: str, needed: Sequence[str], where: str) -> tuple[Graph, tuple[Size, ...]]:
    """The verified graph of a file, and the sizes that must be at least 0.

    Raises:
        ArtifactError: it is none, or asks for what a file may not have.
    """
    import anyshape.ops.table  # noqa: F401  fills the table of ops; not needed where a file's plan is trusted
    from anyshape.ir.parse import parse as read_graph
    from anyshape.ir.verify import verify
    from anyshape.runtime.numpy_ops import reason_against
    if text.count("\n") > MOST_NODES:
        raise refused(where, f"it has more than {MOST_NODES} equations")
    try:
        graph = read_graph(text)
        sizes = tuple(size_text.parse(one) for one in needed)
        verify(graph)
    except Exception as error:  # the border to a stranger's text
        raise refused(where, _words(error)) from None
    graph = _with_known_facts(graph)
    for node in graph.nodes:
        reason = reason_against(str(node.attr("target")), node.attr("template"), len(node.inputs),
                                effect_of(node)) if node.op == "extern" else ""
        if reason:
            raise refused(where, f"it calls an operator of PyTorch: {reason[:200]}",
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
    return graph, (*sizes, *graph.facts.known)


def _with_known_facts(graph: Graph) -> Graph:
    """The graph without facts of sizes that no input has: nobody could check them."""
    bound = {value.name for value in graph.inputs if isinstance(value.type, SizeType)}
    for value in graph.inputs:
        if isinstance(value.type, TensorType):
            for size in (*value.type.shape, *(value.type.strides or ())):
                bound |= symbols_of(size)
    facts = graph.facts
    return graph.replace(facts=Facts(
        tuple(one for one in facts.ranges if one[0] in bound), facts.hints,
        tuple(one for one in facts.divisible if symbols_of(one[0]) <= bound and one[1] > 0),
        tuple(size for size in facts.known if symbols_of(size) <= bound)))


def parse_plan(text: str, where: str) -> Plan:
    """The verified plan of a trusted file.

    Raises:
        ArtifactError: it is none.
    """
    try:
        plan = read_plan(text)
        verify_plan(plan)
    except Exception as error:  # the border to a text of a file
        raise refused(where, _words(error)) from None
    return plan


def parse_kernels(text: str, where: str) -> list[LoopProgram]:
    """The kernels of a file.

    Raises:
        ArtifactError: they are none.
    """
    if not text.strip():
        return []
    from anyshape.kernel.loop_ir.parse import parse as read_kernels  # not needed where a file's plan is trusted
    try:
        return [program for _, program in read_kernels(text)]
    except Exception as error:  # the border to a text of a file
        raise refused(where, _words(error)) from None


def _words(error: Exception) -> str:
    if isinstance(error, AnyShapeError):
        return " ".join(f"{error.what}: {error.why}".split())[:400]
    return f"{type(error).__name__}: {str(error)[:200]}"
