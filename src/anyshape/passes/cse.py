"""Common subexpression elimination: computes what is computed twice once. Calls with effects are left alone, and
nothing is merged across a call with an effect that has touched an operand.

before:
    graph example(x: f32[n])
      a = exp(x)         f32[n]
      c = exp(x)         f32[n]
      d = add(a, c)      f32[n]
      return d
after:
    graph example(x: f32[n])
      a = exp(x)     f32[n]
      d = add(a, a)  f32[n]
      return d
"""
from __future__ import annotations

import math
from collections.abc import Hashable

from anyshape.base.config import Config
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, has_effect
from anyshape.ir.op import row
from anyshape.passes.rewriter import Replay


class _Table:
    """Equations made so far, by what they compute."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Value] = {}
        self.touched: dict[str, int] = {}

    def rewrite(self, replay: Replay, node: Node) -> Operand | None:
        key = self.key(node)
        known = self.found.setdefault(key, node.output)
        return None if known is node.output else known

    def touch(self, node: Node) -> None:
        for value in node.values():
            self.touched[value.name] = self.touched.get(value.name, 0) + 1

    def key(self, node: Node) -> Hashable:
        return (node.op, tuple([self.operand_key(x) for x in node.inputs]),
                tuple([(name, attr_key(value)) for name, value in node.attrs]))

    def operand_key(self, operand: Operand) -> Hashable:
        if isinstance(operand, Value):
            times = self.touched.get(operand.name, 0)
            return operand.name if not times else (operand.name, times)
        return attr_key(operand)


def attr_key(value: Attr) -> Hashable:
    """A key that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(value, tuple):
        return tuple([attr_key(item) for item in value])
    if isinstance(value, float):
        return ("float", "nan") if math.isnan(value) else ("float", value, math.copysign(1.0, value))
    return (type(value).__name__, value)


def cse(graph: Graph, config: Config) -> Graph:
    """The graph with equal equations computed once; calls with effects stay as they are."""
    table = _Table()
    # a constant that a scatter writes over: with another reader it would have to be copied first
    over = {node.inputs[0] for node in graph.nodes if row(node).kind == "scatter"}

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if has_effect(node):
            table.touch(node)
            return None
        if node.output in over and not any(node.values()):
            return None
        return table.rewrite(replay, node)

    return Replay(graph, rewrite).run()
