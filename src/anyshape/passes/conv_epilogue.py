"""Epilogue fusion of grouped convolutions: a residual that is added to one, and the maximum with zero behind it, become
part of it.

before:
    graph example(x: f32[n, 2, 9], w: f32[3, 2, 2, 1], e: i32[3])
      y = grouped_conv(x, w, e | stride=[1], padding=[0], dilation=[1])  f32[n, 2, 9]
      s = add(x, y)                             f32[n, 2, 9]
      z = maximum(0, s)                         f32[n, 2, 9]
      return z
after:
    graph example(x: f32[n, 2, 9], w: f32[3, 2, 2, 1], e: i32[3])
      y = grouped_conv(x, w, e | stride=[1], padding=[0], dilation=[1])  f32[n, 2, 9]
      s = grouped_conv(x, w, e, x | stride=[1], padding=[0], dilation=[1], added)  f32[n, 2, 9]
      z = grouped_conv(x, w, e, x | stride=[1], padding=[0], dilation=[1], added, relu)  f32[n, 2, 9]
      return z

What nobody reads any more is swept behind it. The routine has the sums in registers when it writes them, so that both
cost no pass over memory.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.passes.rewriter import Replay, replay

CONVOLUTIONS = ("grouped_conv", "direct_conv")


def conv_epilogue(graph: Graph, config: Config) -> Graph:
    """See the head of this file."""
    if not any(node.op in CONVOLUTIONS for node in graph.nodes):
        return graph
    for rule in (_added, _positive):
        graph = _with_rule(graph, rule)
    return graph


def _with_rule(graph: Graph, rule: Any) -> Graph:
    reads = Counter(value.name for node in graph.nodes for value in node.values())
    roots = {value.name for value in graph.roots()} | {value.name for _, value in graph.writes}
    strides = graph.output_strides or (None,) * len(graph.outputs)
    strided = {value.name for value, wanted in zip(graph.outputs, strides, strict=True)
               if isinstance(value, Value) and wanted not in (None, value.tensor.dense().layout())}

    def convolution(rewriting: Replay, operand: Operand) -> Node | None:
        """The grouped convolution that makes a value which nobody else reads."""
        if not isinstance(operand, Value) or reads[operand.name] != 1 or operand.name in roots:
            return None
        node = rewriting.producer(operand)
        return node if node is not None and node.op in CONVOLUTIONS else None

    def rewrite(rewriting: Replay, node: Node) -> Operand | None:
        if node.output.name in strided:
            return None
        found = rule(node, lambda operand: convolution(rewriting, operand))
        if found is None:
            return None
        product, more, attrs = found
        return rewriting.op(product.op, *product.inputs, *more, **{**dict(product.attrs), **attrs})

    return replay(graph, rewrite)


def _added(node: Node, convolution: Any) -> Any:
    """add(conv, x)  -->  conv with x on"""
    if node.op != "add":
        return None
    for operand, other in (node.inputs, node.inputs[::-1]):
        product = convolution(operand)
        if product is not None and not {"added", "relu"} & dict(product.attrs).keys() and isinstance(other, Value) \
                and other.type == node.output.type == product.output.type:
            return product, (other,), {"added": True}
    return None


def _positive(node: Node, convolution: Any) -> Any:
    """maximum(conv, 0)  -->  conv with that"""
    if node.op != "maximum":
        return None
    for operand, other in (node.inputs, node.inputs[::-1]):
        product = convolution(operand)
        if product is not None and not isinstance(other, Value) and other == 0 and "relu" not in dict(product.attrs):
            return product, (), {"relu": True}
    return None
