"""GEMM of prepacked operands: a product whose right operand is read out of panels (ir/panels.py) reads the panels.

before:
    graph example(x: f32[n, 64], w: f32[4, 64, 32, 1])
      p = permute(w | dims=[1, 0, 2, 3])                f32[64, 4, 32, 1]
      m = reshape(p | shape=[64, 128])                  f32[64, 128]
      a = slice(m | dim=1, start=0, count=100, step=1)  f32[64, 100]
      y = matmul(x, a)                                  f32[n, 100]
      return y
after:
    graph example(x: f32[n, 64], w: f32[4, 64, 32, 1])
      p = permute(w | dims=[1, 0, 2, 3])                f32[64, 4, 32, 1]
      m = reshape(p | shape=[64, 128])                  f32[64, 128]
      a = slice(m | dim=1, start=0, count=100, step=1)  f32[64, 100]
      y = matmul(x, w | columns=100)                    f32[n, 100]
      return y

So a graph says what panels hold in words that every pass and target knows, and a file of prepacked weights
(artifact/prepack.py) is right wherever it is compiled. Rows and columns of the matrix may be a part of those that lie
there, from whole panels on. What is not used any more is left to the pass dce.
"""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.panels import OUT_OF_PANELS, PANEL
from anyshape.passes.rewriter import Replay, replay
from anyshape.sym.expr import Size


def prepacked_gemm(graph: Graph, config: Config) -> Graph:
    """The graph with products that read panels where they lie."""
    if not any(_reads_panels(node) for node in graph.nodes):
        return graph

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if node.op not in ("matmul", "matmul_add") or node.attrs not in ((), (("alpha", 1.0), ("beta", 1.0))):
            return None
        part = _part(replay, node.inputs[1])
        left, _, *addend = node.inputs
        if part is None or part.turned or node.output.tensor.dtype != "f32" or part.first % PANEL:
            return None
        panels, inner, held = part.panels, part.rows, part.panels.tensor.shape
        count = -(-part.columns // PANEL)
        for dim, start, size in ((0, part.first // PANEL, count), (1, part.row, inner)):
            if size != held[dim]:
                panels = replay.op("slice", panels, dim=dim, start=start, count=size, step=1)
        return replay.op(node.op, left, panels, *addend, **dict(node.attrs), columns=part.columns)

    return replay(graph, rewrite)


@dataclass(frozen=True, slots=True)
class _Part:
    """So many rows and columns, from `row` and column `first` on, of a matrix that lies in panels; or its transpose."""

    panels: Value
    row: int
    rows: int
    first: int
    columns: int
    turned: bool = False


def _reads_panels(node: Node) -> bool:
    """Whether the equation brings what may be panels in the order of a matrix."""
    return node.op == "permute" and node.attr("dims") == OUT_OF_PANELS and node.output.tensor.dtype == "f32" \
        and node.output.tensor.device == "cpu" and node.output.tensor.shape[2:] == (PANEL, 1)


def _part(replay: Replay, operand: Operand) -> _Part | None:
    """What of panels an operand of a product shows; None where it shows something else."""
    node = replay.producer(operand)
    source = None if node is None else node.inputs[0]
    if node is None or not isinstance(source, Value):
        return None
    if node.op == "reshape":
        return _whole(replay, node)
    if node.op == "broadcast":
        kept = source.tensor.rank >= 2 and source.tensor.shape[-2:] == node.output.tensor.shape[-2:]
        return _part(replay, source) if kept else None
    found = _part(replay, source) if node.op in ("permute", "slice") and source.tensor.rank == 2 else None
    if found is None:
        return None
    if node.op == "permute":
        return _Part(found.panels, found.row, found.rows, found.first, found.columns,
                     found.turned != (node.attr("dims") == (1, 0)))
    start, count, step = (node.attr(name) for name in ("start", "count", "step"))
    if not isinstance(start, int) or not isinstance(count, int) or step != 1:
        return None
    if (node.attr("dim") == 0) != found.turned:
        return _Part(found.panels, found.row + start, count, found.first, found.columns, found.turned)
    return _Part(found.panels, found.row, found.rows, found.first + start, count, found.turned)


def _whole(replay: Replay, node: Node) -> _Part | None:
    """All rows and columns that panels hold, where the reshape makes a matrix of them."""
    below = replay.producer(node.inputs[0])
    if below is None or not _reads_panels(below):
        return None
    panels, (rows, count, _, _) = below.inputs[0], below.output.tensor.shape
    shape: tuple[Size, ...] = node.output.tensor.shape
    if not isinstance(panels, Value) or not isinstance(rows, int) or not isinstance(count, int) \
            or shape != (rows, count * PANEL):
        return None
    return _Part(panels, 0, rows, 0, count * PANEL)
