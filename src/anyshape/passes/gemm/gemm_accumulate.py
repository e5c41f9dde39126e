"""GEMM accumulation: products of f32 and f64 take in what is added to them: a value that nothing else needs any more,
which the product is written over, and a bias where no kernel would add it for free.

before:
    graph example(x: f32[n, 8], w: f32[8, 8], v: f32[8, 4], b: f32[8], c: f32[4])
      h = matmul(x, w)                          f32[n, 8]
      p = matmul(h, w)                          f32[n, 8]
      q = add(p, b)                             f32[n, 8]
      s = add(q, h)                             f32[n, 8]
      t = tanh(s)                               f32[n, 8]
      y = matmul(t, v)                          f32[n, 4]
      z = add(y, c)                             f32[n, 4]
      return z
after:
    graph example(x: f32[n, 8], w: f32[8, 8], v: f32[8, 4], b: f32[8], c: f32[4])
      h = matmul(x, w)                          f32[n, 8]
      p = matmul(h, w)                          f32[n, 8]
      q = add(p, b)                             f32[n, 8]
      matmul_add_1 = matmul_add(h, w, h | alpha=1.0, beta=1.0)  f32[n, 8]
      s = add(matmul_add_1, b)                  f32[n, 8]
      t = tanh(s)                               f32[n, 8]
      y = matmul(t, v)                          f32[n, 4]
      broadcast_1 = broadcast(c | shape=[n, 4])  f32[n, 4]
      z = matmul_add(t, v, broadcast_1 | alpha=1.0, beta=1.0)  f32[n, 4]
      return z

So a residual, or the gradients of several products of one operand, cost no buffer and no pass of their own (plan/
inplace.py gives the two one buffer; where it cannot, the value is copied first). The sum of a product is made in blocks
along the inner dim from zero, each added to what is there: no less exact than one sum after the other.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.passes.dce import dce
from anyshape.passes.rewriter import Replay, replay
from anyshape.sym.expr import Size, product

LEAST_ROWS = 16  # at the hints; with fewer, a product costs less than spreading the bias before it
_DTYPES = ("f32", "f64")  # half precision is rounded where the trace rounds it
_CALLED = ("library", "extern")


def gemm_accumulate(graph: Graph, config: Config) -> Graph:
    """The graph with products of f32 and f64 that are added to a value where it lies, or take in a bias."""
    if not any(node.op == "matmul" for node in graph.nodes):
        return graph
    uses = _Uses(dce(graph, config))  # what nobody needs any more is no reader

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if node.op != "add" or node.output.name not in uses.position or node.output.name in uses.strided:
            return None
        if node.output.tensor.dtype not in _DTYPES or not all(map(_is_tensor, node.inputs)):
            return None
        return _over(replay, node, uses) or _bias(replay, node, uses)

    return replay(graph, rewrite)


class _Uses:
    """Who reads what in a graph, by names. position: of the equation that makes a value; reads: how often; last: of
    values under views, the position of the last equation that reads them in any form."""

    def __init__(self, graph: Graph) -> None:
        self.hint = graph.facts.hint
        self.producers = graph.producers()
        self.users = graph.users()
        self.position = {value.name: i for i, node in enumerate(graph.nodes) for value in node.outputs}
        self.reads = Counter(value.name for node in graph.nodes for value in node.values())
        self.roots = {value.name for value in graph.roots()}
        strides = graph.output_strides or (None,) * len(graph.outputs)
        self.strided = {value.name for value, wanted in zip(graph.outputs, strides, strict=True)
                        if isinstance(value, Value) and wanted not in (None, value.tensor.dense().layout())}
        self.strided |= {value.name for _, value in graph.writes}
        self.last: dict[str, int] = {}
        for i, node in enumerate(graph.nodes):
            if row(node).kind != "view":
                for value in node.values():
                    self.last[self.base(value.name)] = i
        for name in self.roots:
            self.last[self.base(name)] = len(graph.nodes)

    def base(self, name: str) -> str:
        """The value under the views."""
        node = self.producers.get(name)
        while node is not None and row(node).kind == "view":
            name = next(node.values()).name
            node = self.producers.get(name)
        return name

    def only_read_once(self, name: str) -> bool:
        return self.reads[name] == 1 and name not in self.roots

    def only_called(self, name: str) -> bool:
        """Do only library routines, PyTorch's operators and the caller read a value, through views? No kernel does."""
        return name not in self.strided and all(
            self.only_called(user.output.name) if row(user).kind == "view" else row(user).kind in _CALLED
            for user in self.users.get(name, ()))

    def called(self, name: str) -> bool:
        """Does a library routine or an operator of PyTorch read a value, through views?"""
        return any(self.called(user.output.name) if row(user).kind == "view" else row(user).kind in _CALLED
                   for user in self.users.get(name, ()))

    def needs(self, name: str, other: str) -> bool:
        """Is `other` needed to make `name`?"""
        first = self.position[other]
        waiting, seen = [name], {name}
        while waiting:
            node = self.producers.get(waiting.pop())
            for value in node.values() if node is not None else ():
                if value.name == other:
                    return True
                if value.name not in seen and self.position.get(value.name, -1) > first:
                    seen.add(value.name)
                    waiting.append(value.name)
        return False


def _is_tensor(operand: Operand) -> bool:
    return isinstance(operand, Value) and isinstance(operand.type, TensorType)


@dataclass(frozen=True, slots=True)
class _Path:
    """From a value down to a product that nothing else reads: reshapes, and at most one sum with a bias. steps: these
    equations from the top, each with the position of the operand that leads on."""

    product: Node
    steps: tuple[tuple[Node, int], ...]

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.product.output.tensor.shape

    @property
    def biased(self) -> bool:
        return any(node.op == "add" for node, _ in self.steps)

    def with_addend(self, replay: Replay, addend: Value) -> Value:
        """The equations again, from a product with an addend on."""
        value = replay.op("matmul_add", *self.product.inputs, addend, alpha=1.0, beta=1.0)
        for node, at in reversed(self.steps):
            inputs = (*node.inputs[:at], value, *node.inputs[at + 1:])
            value = replay.op(node.op, *inputs, **dict(node.attrs))
        return value


def _path(replay: Replay, value: Value, uses: _Uses) -> _Path | None:
    steps: list[tuple[Node, int]] = []
    while uses.only_read_once(value.name) and (node := replay.producer(value)) is not None:
        if node.op == "matmul":
            return _Path(node, tuple(steps)) if not node.attrs else None
        at = 0
        if node.op == "add" and all(below.op != "add" for below, _ in steps) and all(map(_is_tensor, node.inputs)):
            at = next((i for i, x in enumerate(node.inputs) if _leads_on(replay, x, node)), -1)
        elif node.op != "reshape":
            return None
        if at < 0:
            return None
        steps.append((node, at))
        value = node.inputs[at]  # type: ignore[assignment]
    return None


def _leads_on(replay: Replay, operand: Operand, node: Node) -> bool:
    """The summand that comes from a product, beside one that is repeated."""
    below = replay.producer(operand)
    assert isinstance(operand, Value)
    return below is not None and below.op in ("matmul", "reshape") and operand.tensor.shape == node.output.tensor.shape


def _over(replay: Replay, node: Node, uses: _Uses) -> Operand | None:
    """add(product, x)  -->  product written over x, where x is in memory and needed here for the last time"""
    pairs = [(x, y) for x, y in (node.inputs, node.inputs[::-1]) if isinstance(x, Value) and isinstance(y, Value)]
    pairs.sort(key=lambda pair: uses.position.get(pair[0].name, -1), reverse=True)  # over the earlier of two products
    for x, addend in pairs:
        path = _path(replay, x, uses)
        if path is None or not node.output.tensor.shape == x.tensor.shape == addend.tensor.shape:
            continue
        below = _under_reshapes(replay, addend, path.shape)
        if below is not None and _ends_here(replay, below, path.product, node, uses):
            if below.tensor.shape != path.shape:
                below = replay.op("reshape", below, shape=path.shape)
            return path.with_addend(replay, below)
    return None


def _under_reshapes(replay: Replay, value: Value, shape: tuple[Size, ...]) -> Value | None:
    """What lies under `value`, if it is reshapes down to the stored value: of them one of that shape, or the lowest."""
    found = value
    while (node := replay.producer(value)) is not None and row(node).kind == "view":
        if node.op != "reshape":
            return None
        value = node.inputs[0]  # type: ignore[assignment]
        found = found if found.tensor.shape == shape else value
    return found


def _ends_here(replay: Replay, value: Value, product: Node, node: Node, uses: _Uses) -> bool:
    """Is `value` in memory when `product` is made, whatever the kernels are, and needed no more after `node`?"""
    base = uses.base(value.name)
    if base not in uses.position or uses.last[base] != uses.position[node.output.name]:
        return False
    made = replay.made[base]
    if row(made).kind == "library" or uses.called(base):
        return True
    return made.op == "add" and uses.needs(product.output.name, base)  # the sums that a network hands on


def _bias(replay: Replay, node: Node, uses: _Uses) -> Operand | None:
    """add(product, bias)  -->  product with an addend, where no kernel reads the sum"""
    for x, bias in (node.inputs, node.inputs[::-1]):
        assert isinstance(x, Value) and isinstance(bias, Value)
        path = _path(replay, x, uses)
        if path is None or path.biased or not uses.only_called(node.output.name):
            continue
        if uses.hint(product(path.shape[:-1])) < LEAST_ROWS:
            continue
        if x.tensor.shape == node.output.tensor.shape and bias.tensor.shape == path.shape[-1:]:
            return path.with_addend(replay, replay.op("broadcast", bias, shape=path.shape))
    return None
