"""Dead code elimination: removes equations whose results nobody needs; calls with effects stay.

before:
    graph example(x: f32[n])
      a = exp(x)      f32[n]
      c = neg(a)      f32[n]
      d = sqrt(x)     f32[n]
      return d
after:
    graph example(x: f32[n])
      d = sqrt(x)  f32[n]
      return d
"""
from __future__ import annotations

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Value, has_effect


def dce(graph: Graph, config: Config) -> Graph:
    """The graph without equations whose results nobody needs; calls with effects stay."""
    needed = {value.name for value in graph.roots()}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if has_effect(node) or any(value.name in needed for value in node.outputs):
            kept.append(node)
            for operand in node.inputs:
                if isinstance(operand, Value):
                    needed.add(operand.name)
    return graph if len(kept) == len(graph.nodes) else graph.replace(nodes=tuple(reversed(kept)))
