"""Cast fusion into GEMM: products of bf16 and f16 take in casts of inputs in f32, and of results that the caller
receives in f32.

before:
    graph example(x: bf16[n, 8], w: f32[8, 4], g: bf16[n, 4])
      h = cast(w | dtype="bf16")                bf16[8, 4]
      y = matmul(x, h)                          bf16[n, 4]
      t = permute(x | dims=[1, 0])              bf16[8, n]
      m = matmul(t, g)                          bf16[8, 4]
      d = cast(m | dtype="f32")                 f32[8, 4]
      return y, d
after:
    graph example(x: bf16[n, 8], w: f32[8, 4], g: bf16[n, 4])
      h = cast(w | dtype="bf16")                bf16[8, 4]
      y = matmul(x, w | rounded="bf16")         bf16[n, 4]
      t = permute(x | dims=[1, 0])              bf16[8, n]
      m = matmul(t, g)                          bf16[8, 4]
      d = matmul(t, g | rounded="bf16", dtype="f32")  f32[8, 4]
      return y, d

So runs a model under autocast whose weights are f32. Elements are rounded while they are packed or written, and the
weight and its gradient do not exist a second time. An operand that many products read is rounded once for all.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.passes.dce import dce
from anyshape.passes.rewriter import Replay, replay

MOST_READERS = 2  # products that read an operand of 4 bytes an element; with three, 4 + 2 + 3 * 2 are no more
_PRODUCTS = ("matmul", "matmul_add")
_HALF = ("bf16", "f16")


def cast_into_gemm(graph: Graph, config: Config) -> Graph:
    """The graph with products of bf16 and f16 that read inputs, and write results, in f32 without a cast."""
    if not any(node.op in _PRODUCTS for node in graph.nodes):
        return graph
    uses = _Uses(dce(graph, config))  # what nobody needs any more does not count as a reader

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if node.op in _PRODUCTS:
            return _operands(replay, node, uses)
        return _result(replay, node, uses) if node.op == "cast" else None

    return replay(graph, rewrite)


class _Uses:
    """Who reads what in a graph. inputs, outputs (dense ones), roots: names; reads: how often; free: casts that only
    products read."""

    def __init__(self, graph: Graph) -> None:
        self.inputs = {value.name for value in graph.inputs}
        strides = graph.output_strides or (None,) * len(graph.outputs)
        self.outputs = {value.name for value, wanted in zip(graph.outputs, strides, strict=True)
                        if isinstance(value, Value) and wanted in (None, value.tensor.dense().layout())}
        self.roots = Counter(value.name for value in graph.roots())
        self.reads = Counter(value.name for node in graph.nodes for value in node.values())
        readers: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for value in node.values():
                readers.setdefault(value.name, []).append(node)
        self.free = {node.output.name for node in graph.nodes
                     if node.op == "cast" and self._by_products(node.output, readers) in range(1, MOST_READERS + 1)}

    def _by_products(self, value: Value, readers: Mapping[str, list[Node]]) -> int:
        """How many products read a value, through views; many when something else does."""
        if self.roots[value.name]:
            return MOST_READERS + 1
        count = 0
        for node in readers.get(value.name, ()):
            if row(node).kind == "view":
                count += self._by_products(node.output, readers)
            elif node.op in _PRODUCTS and all(operand != value for operand in node.inputs[2:]):
                count += 1
            else:
                count += MOST_READERS + 1
        return count


def _operands(replay: Replay, node: Node, uses: _Uses) -> Operand | None:
    """matmul(x, cast(w))  -->  matmul(x, w | rounded)"""
    first = node.inputs[0]
    assert isinstance(first, Value)
    dtype = str(dict(node.attrs).get("rounded", first.tensor.dtype))
    if dtype not in _HALF:
        return None
    found = [_unrounded(replay, operand, dtype, uses) for operand in node.inputs[:2]]
    if found == [None, None]:
        return None
    inputs = [new or old for new, old in zip(found, node.inputs, strict=False)]
    return replay.op(node.op, *inputs, *node.inputs[2:], **{**dict(node.attrs), "rounded": dtype})


def _unrounded(replay: Replay, operand: Operand, dtype: str, uses: _Uses) -> Value | None:
    """The operand before it was rounded, where an input is, through views; None otherwise."""
    below = replay.producer(operand)
    if below is None:
        return None
    source = below.inputs[0]
    if row(below).kind == "view":
        found = _unrounded(replay, source, dtype, uses)
        return None if found is None else replay.op(below.op, found, **dict(below.attrs))
    if below.op != "cast" or below.output.name not in uses.free or below.output.tensor.dtype != dtype:
        return None
    assert isinstance(source, Value)
    return source if source.tensor.dtype == "f32" and _is_input(replay, source, uses) else None


def _is_input(replay: Replay, value: Value, uses: _Uses) -> bool:
    """An input, or a view of one: it lies in memory as it is."""
    below = replay.producer(value)
    while below is not None and row(below).kind == "view":
        source = below.inputs[0]
        assert isinstance(source, Value)
        value, below = source, replay.producer(source)
    return below is None and value.name in uses.inputs


def _result(replay: Replay, node: Node, uses: _Uses) -> Operand | None:
    """cast(matmul(x, y))  -->  matmul(x, y | rounded, dtype), where the caller receives it and nothing else reads it"""
    below = replay.producer(node.inputs[0])
    if below is None or below.op != "matmul" or node.output.name not in uses.outputs or uses.reads[node.output.name]:
        return None
    dtype, half = node.output.tensor.dtype, below.output.tensor.dtype
    if dtype != "f32" or half not in _HALF or uses.reads[below.output.name] != 1 or uses.roots[below.output.name]:
        return None
    return replay.op("matmul", *below.inputs, **{**dict(below.attrs), "rounded": half, "dtype": "f32"})
