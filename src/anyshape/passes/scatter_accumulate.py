"""Scatter-add fusion: what is scattered into zeros and added to something is added to that where it lies.

before:
    graph example(x: f32[n, 8], y: f32[n, 16], v: f32[m, 16], i: i64[m])
      t = permute(x | dims=[1, 0])                 f32[8, n]
      p = matmul(t, y)                             f32[8, 16]
      z = full(0.0 | shape=[8, 16], dtype="f32")   f32[8, 16]
      s = put_add(z, v, i | dims=[0])              f32[8, 16]
      g = add(p, s)                                f32[8, 16]
      return g
after:
    graph example(x: f32[n, 8], y: f32[n, 16], v: f32[m, 16], i: i64[m])
      t = permute(x | dims=[1, 0])                 f32[8, n]
      p = matmul(t, y)                             f32[8, 16]
      z = full(0.0 | shape=[8, 16], dtype="f32")   f32[8, 16]
      s = put_add(z, v, i | dims=[0])              f32[8, 16]
      g = put_add(p, v, i | dims=[0])              f32[8, 16]
      return g
So the gradient of a table that a network reads at both its ends (tied embeddings) is the product of one end, with the
rows of the other added: no second table of zeros, and no pass over both. Where the first is needed later, it is copied,
which costs no more than zeros. What is left over goes with dce.
"""
from __future__ import annotations

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.passes.rewriter import Replay, replay, same_type

_SCATTERS = ("put_add", "scatter_add")
_DTYPES = ("f32", "f64")  # sums of half precision are rounded where the trace rounds them


def scatter_accumulate(graph: Graph, config: Config) -> Graph:
    """The graph with scatters into zeros that scatter into what is added to them instead."""
    if not any(node.op in _SCATTERS for node in graph.nodes):
        return graph
    users, kept = graph.users(), {value.name for value in graph.roots()}

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if node.op != "add" or node.output.tensor.dtype not in _DTYPES:
            return None
        for start, end in (node.inputs, node.inputs[::-1]):
            below = replay.producer(end)
            if below is None or not _into_zeros(replay, below) or not isinstance(start, Value):
                continue
            name = below.output.name
            if name not in kept and len(users.get(name, ())) == 1 \
                    and same_type(start.type, node.output.type) and same_type(below.output.type, node.output.type):
                return replay.op(below.op, start, *below.inputs[1:], **dict(below.attrs))
        return None

    return replay(graph, rewrite)


def _into_zeros(replay: Replay, node: Node) -> bool:
    below = replay.producer(node.inputs[0]) if node.op in _SCATTERS else None
    return below is not None and below.op == "full" and below.inputs[0] == 0
