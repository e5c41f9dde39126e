"""Epilogue fusion of convolutions: factors and shifts of channels (batch norm in inference), a residual that is added,
and the maximum with zero become part of the convolution before them.

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

What nobody reads any more is swept behind it. The routine has the sums in registers when it writes them, so that all
this costs no pass over memory. Batch norm is (x - mean) / sqrt(variance + eps) * weight + shift: here a direct
convolution with the bias -mean, factors that are the products of one another, and shifts; each is computed from the
parameters in every call, for these may change, and by channel.
"""
from __future__ import annotations

from collections import Counter
from typing import Any

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.passes.rewriter import Replay, replay, strided_results

CONVOLUTIONS = ("grouped_conv", "direct_conv")


def conv_epilogue(graph: Graph, config: Config) -> Graph:
    """The graph with factors, shifts, residuals and maxima with zero inside of the convolution before them."""
    if not any(node.op in CONVOLUTIONS for node in graph.nodes):
        return graph
    for rule in (_scaled, _added, _positive):
        graph = _with_rule(graph, rule)
    return graph


def _with_rule(graph: Graph, rule: Any) -> Graph:
    reads = Counter(value.name for node in graph.nodes for value in node.values())
    roots = {value.name for value in graph.roots()} | {value.name for _, value in graph.writes}
    strided = strided_results(graph)

    def convolution(rewriting: Replay, operand: Operand) -> Node | None:
        """The grouped convolution that makes a value which nobody else reads."""
        if not isinstance(operand, Value) or reads[operand.name] != 1 or operand.name in roots:
            return None
        node = rewriting.producer(operand)
        return node if node is not None and node.op in CONVOLUTIONS else None

    def rewrite(rewriting: Replay, node: Node) -> Operand | None:
        if node.output.name in strided:
            return None
        found = rule(node, lambda operand: convolution(rewriting, operand), rewriting)
        if found is None:
            return None
        product, inputs, attrs = found
        return rewriting.op(product.op, *inputs, **{**dict(product.attrs), **attrs})

    return replay(graph, rewrite)


def _scaled(node: Node, convolution: Any, rewriting: Replay) -> Any:
    """sub, mul or add(conv, c), of which c has a number a channel  -->  conv with bias, factors, shifts"""
    if node.op not in ("add", "mul", "sub"):
        return None
    orders = (node.inputs,) if node.op == "sub" else (node.inputs, node.inputs[::-1])
    for operand, other in orders:
        product = convolution(operand)
        if product is None or product.op != "direct_conv" or {"added", "relu"} & dict(product.attrs).keys() \
                or node.output.type != product.output.type or not _by_channel(other, product.output):
            continue
        assert isinstance(other, Value)
        attrs = dict(product.attrs)
        scaled = bool(attrs.get("scaled"))
        if attrs.get("shifted") and node.op == "mul":  # the shifts would have to be multiplied, too
            return None
        number = rewriting.op("reshape", other, shape=product.output.tensor.shape[-1:])
        behind = len(product.inputs) - scaled - bool(attrs.get("shifted"))
        kept, last = product.inputs[:behind], product.inputs[behind:]
        if node.op == "mul":
            factors = rewriting.op("mul", *last, number) if scaled else number
            return product, (*kept, factors), {"scaled": True}
        if scaled:
            shifts = rewriting.op(node.op, last[1], number) if len(last) == 2 else _signed(rewriting, node.op, number)
            return product, (*kept, last[0], shifts), {"shifted": True}
        bias = rewriting.op(node.op, kept[2], number) if len(kept) == 3 else _signed(rewriting, node.op, number)
        return product, (*kept[:2], bias), {}
    return None


def _signed(rewriting: Replay, op: str, number: Value) -> Value:
    return rewriting.op("neg", number) if op == "sub" else number


def _by_channel(operand: Operand, result: Value) -> bool:
    """Has it a number for each of the channels, which lie last, and no more?"""
    if not isinstance(operand, Value) or operand.tensor.dtype != result.tensor.dtype:
        return False
    *before, channels = operand.tensor.shape or (1,)
    return all(size == 1 for size in before) and channels == result.tensor.shape[-1]


def _added(node: Node, convolution: Any, rewriting: Replay) -> Any:
    """add(conv, x)  -->  conv with x on"""
    if node.op != "add":
        return None
    for operand, other in (node.inputs, node.inputs[::-1]):
        product = convolution(operand)
        if product is not None and not {"added", "relu"} & dict(product.attrs).keys() and isinstance(other, Value) \
                and other.type == node.output.type == product.output.type:
            return product, (*product.inputs, other), {"added": True}
    return None


def _positive(node: Node, convolution: Any, rewriting: Replay) -> Any:
    """maximum(conv, 0)  -->  conv with that"""
    if node.op != "maximum":
        return None
    for operand, other in (node.inputs, node.inputs[::-1]):
        product = convolution(operand)
        if product is not None and not isinstance(other, Value) and other == 0 and "relu" not in dict(product.attrs):
            return product, product.inputs, {"relu": True}
    return None
