"""Placement propagation for tensor parallelism: a walk over the graph that deals out weights where they are first used.

    h = x @ up^T      x whole              -->  up S(0): by columns of the product; h S(1)
    y = relu(h) @ down^T   h dealt out     -->  down S(1): by rows; y is a partial sum, which is added up
    e = table[tokens]                      -->  table S(0): by rows, of which each rank looks up its own

What runs with a dim that is dealt out follows by the factors of dist/rules.py. Dims that the ranks do not divide stay
whole, as do weights of norms, whose input is whole.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyshape.dist.placement import Placement, Shard, exact
from anyshape.dist.reshape import reshaped
from anyshape.dist.rules import Factor, factors
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.op import row


class WeightWalk:
    """weights: inputs that may be dealt out; data: inputs that a batch consists of."""

    def __init__(self, graph: Graph, ranks: int, weights: Mapping[str, str], data: Sequence[str]) -> None:
        self.graph = graph
        self.ranks = ranks
        self.weights = weights
        self.made = graph.producers()
        self.states: dict[str, Shard] = {}
        self.data = set(data)
        self.found: dict[str, Placement] = {}

    def run(self) -> dict[str, Placement]:
        """The placements of the weights that are dealt out."""
        for node in self.graph.nodes:
            if any(v.name in self.data for v in node.values()):
                self.data.update(v.name for v in node.outputs)
            self.visit(node)
        return self.found

    def visit(self, node: Node) -> None:
        """States of the results, and placements of weights that the equation is the first to use."""
        if node.op == "reshape":
            (source,) = node.values()
            state = self.states.get(source.name)
            after = None if state is None else reshaped(source.tensor.shape, node.output.tensor.shape, state)
            if after is not None:
                self.states[node.output.name] = after
            return
        if node.op in ("take", "gather") and self.table(node):
            return
        rules = factors(node)
        for index, value in enumerate(node.inputs):
            state = self.states.get(value.name) if isinstance(value, Value) else None
            if state is not None and self.follow(node, rules, index, state):
                return
        if node.op == "matmul":
            self.by_columns(node, rules)

    def follow(self, node: Node, rules: Sequence[Factor], index: int, state: Shard) -> bool:
        """Deals out the loop that runs with a dim of an operand that is dealt out; whether all operands allow it."""
        for factor in rules:
            if factor.ins[index] != state.dim:
                continue
            for other, dim in zip(node.inputs, factor.ins, strict=True):
                if not isinstance(other, Value):
                    continue
                wanted = None if dim is None else Shard(dim, state.outer, state.n)
                own = self.states.get(other.name)
                if own is not None and own != wanted:
                    return False
                if wanted is not None and exact(other.tensor.shape[wanted.dim], state.outer * state.count) is None:
                    return False
            for other, dim in zip(node.inputs, factor.ins, strict=True):
                if isinstance(other, Value) and dim is not None and other.name not in self.states:
                    self.assign(other, Shard(dim, state.outer, state.n))
            for result, at in zip(node.outputs, factor.outs, strict=True):
                if isinstance(at, int):
                    self.states[result.name] = Shard(at, state.outer, state.n)
            return True
        return False

    def by_columns(self, node: Node, rules: Sequence[Factor]) -> None:
        """A product of what is whole: the weight's dim that is in the result."""
        x, w = node.inputs
        assert isinstance(x, Value) and isinstance(w, Value)
        if x.name not in self.data or w.name in self.data or x.name in self.states or w.name in self.states:
            return
        for factor in rules:
            dim = factor.ins[1]
            if factor.ins[0] is None and isinstance(dim, int) and isinstance(factor.outs[0], int):
                if self.assign(w, Shard(dim, 1, self.ranks)):
                    self.states[node.output.name] = Shard(factor.outs[0], 1, self.ranks)

    def table(self, node: Node) -> bool:
        """A lookup: the rows of the table are dealt out, and what is found is added up."""
        table = node.inputs[0]
        assert isinstance(table, Value)
        if table.name in self.states or table.name in self.data:
            return False
        dim = node.attr("dim")
        assert isinstance(dim, int)
        return self.assign(table, Shard(dim, 1, self.ranks))

    def assign(self, value: Value, wanted: Shard) -> bool:
        """Deals out the weight that a value is a view of; False where it is none, or stays whole."""
        chain: list[tuple[Value, Shard]] = [(value, wanted)]
        while (node := self.made.get(chain[-1][0].name)) is not None:
            back = _behind(node, chain[-1][1])
            if back is None:
                return False
            chain.append(back)
        source, place = chain[-1]
        if source.name not in self.weights or exact(source.tensor.shape[place.dim], self.ranks * place.outer) is None:
            return False
        if self.found.setdefault(source.name, place) != place:
            return False
        for one, state in chain:
            self.states[one.name] = state
        return True


def _behind(node: Node, state: Shard) -> tuple[Value, Shard] | None:
    """Of a view, its operand, and where that is dealt out."""
    operands = list(node.values())
    if len(operands) != 1 or len(node.outputs) != 1:
        return None
    (source,) = operands
    if node.op == "permute":
        dims = node.attr("dims")
        assert isinstance(dims, tuple) and isinstance(dims[state.dim], int)
        return source, Shard(dims[state.dim], state.outer, state.n)  # type: ignore[arg-type]
    if node.op == "reshape":
        back = reshaped(node.output.tensor.shape, source.tensor.shape, state)
        return None if back is None else (source, back)
    if node.op == "broadcast" or row(node).kind == "pointwise":
        dim = state.dim - (node.output.tensor.rank - source.tensor.rank)
        if dim < 0 or source.tensor.shape[dim] != node.output.tensor.shape[state.dim]:
            return None
        return source, Shard(dim, state.outer, state.n)
    return None
