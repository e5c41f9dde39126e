"""Concat elimination: concatenations of many parts are written part by part; what follows element by element is done in
the parts.

before:
    graph example(x: f32[n, 4], y: f32[n, 2])
      c = concat(x, y, y, y, y, y, y, y, y | dim=1)  f32[n, 20]
      h = exp(c)                                     f32[n, 20]
      return h
after:
    graph example(x: f32[n, 4], y: f32[n, 2])
      c = concat(x, y, y, y, y, y, y, y, y | dim=1)  f32[n, 20]
      exp_1 = exp(x)  f32[n, 4]
      exp_2 = exp(y)  f32[n, 2]
      exp_3 = exp(y)  f32[n, 2]
      exp_4 = exp(y)  f32[n, 2]
      exp_5 = exp(y)  f32[n, 2]
      exp_6 = exp(y)  f32[n, 2]
      exp_7 = exp(y)  f32[n, 2]
      exp_8 = exp(y)  f32[n, 2]
      exp_9 = exp(y)  f32[n, 2]
      full_1 = full(0 | shape=[n, 20], dtype="f32")  f32[n, 20]
      overwrite_1 = overwrite(full_1, exp_1 | dim=1, start=0, step=1)  f32[n, 20]
      overwrite_2 = overwrite(overwrite_1, exp_2 | dim=1, start=4, step=1)  f32[n, 20]
      overwrite_3 = overwrite(overwrite_2, exp_3 | dim=1, start=6, step=1)  f32[n, 20]
      overwrite_4 = overwrite(overwrite_3, exp_4 | dim=1, start=8, step=1)  f32[n, 20]
      overwrite_5 = overwrite(overwrite_4, exp_5 | dim=1, start=10, step=1)  f32[n, 20]
      overwrite_6 = overwrite(overwrite_5, exp_6 | dim=1, start=12, step=1)  f32[n, 20]
      overwrite_7 = overwrite(overwrite_6, exp_7 | dim=1, start=14, step=1)  f32[n, 20]
      overwrite_8 = overwrite(overwrite_7, exp_8 | dim=1, start=16, step=1)  f32[n, 20]
      h = overwrite(overwrite_8, exp_9 | dim=1, start=18, step=1)  f32[n, 20]
      return h
A kernel that reads a concatenation asks at each element for every part, at the cost of a masked load; writing it apart
costs a pass over the memory. Each write is a kernel with what makes the part, over the memory of the one before.
"""
from __future__ import annotations

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.passes.rewriter import Replay, replay
from anyshape.sym.expr import Size

MOST = 8  # parts that a kernel reads: a masked load takes an eighth of what an element's way to memory and back takes
SMALL = 4096  # elements of a result below which so many kernels would take longer


def concat_elimination(graph: Graph, config: Config) -> Graph:
    """The graph with wide concatenations written part by part, and pointwise work on them done in the parts."""
    if not any(_wide(node) for node in graph.nodes):
        return graph
    users, kept = graph.users(), {value.name for value in graph.roots()}
    # values whose only reader works on single elements of them: that one is done in the parts
    passing = {value.name for node in graph.nodes for value in node.outputs
               if value.name not in kept and len(users.get(value.name, ())) == 1 and _single(users[value.name][0])}

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        source = node.inputs[0] if node.inputs else None
        below = replay.producer(source) if isinstance(source, Value) and source.name in passing else None
        parts = node.inputs
        if below is not None and _wide(below):
            rest, attrs = node.inputs[1:], dict(node.attrs)
            parts = tuple(replay.op(node.op, part, *rest, **attrs) for part in below.inputs)
            if node.output.name in passing:
                return replay.op("concat", *parts, dim=below.attr("dim"))
            return _written(replay, node.output, parts, below.attr("dim"))
        if _wide(node) and node.output.name not in passing:
            return _written(replay, node.output, parts, node.attr("dim"))
        return None

    return replay(graph, rewrite)


def _wide(node: Node) -> bool:
    count = node.output.tensor.count if node.op == "concat" and len(node.inputs) > MOST else 0
    return not (isinstance(count, int) and count < SMALL)


def _single(node: Node) -> bool:
    """Does the equation make one element of one element, and of numbers?"""
    return row(node).kind == "pointwise" and len(list(node.values())) == 1 and isinstance(node.inputs[0], Value)


def _written(replay: Replay, result: Value, parts: tuple[Operand, ...], dim: object) -> Value:
    assert isinstance(dim, int)
    kind = result.tensor
    found = replay.op("full", False if kind.dtype == "bool" else 0, shape=kind.shape, dtype=kind.dtype,
                      **({"device": kind.device} if kind.device != "cpu" else {}))
    start: Size = 0
    for part in parts:
        assert isinstance(part, Value)
        found = replay.op("overwrite", found, part, dim=dim, start=start, step=1)
        start = start + part.tensor.shape[dim]
    return found
