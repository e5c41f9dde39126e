"""Gathers of weights before their views: a weight that is read in several orders of dims comes once.

    t = permute(w); y = all_gather(t)   -->   whole = all_gather(w); y = permute(whole)

The partitioner deals out what it finds, equation by equation, so a product that reads a weight turned round gathers it
turned round. Forward and backward read a linear layer's weight in two orders.
"""
from __future__ import annotations

from collections.abc import Collection

from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.types import TensorType
from anyshape.ops.collective import Parts, parts_of


def gathered_first(graph: Graph, data: Collection[str]) -> Graph:
    """The graph with gathers of permuted inputs, but for those of `data`, as permuted gathers of inputs."""
    inputs = {v.name: v for v in graph.inputs if v.name not in data}
    made = graph.producers()
    names = {v.name for v in graph.inputs} | set(made)
    known: dict[tuple[str, object, object], Value] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        operand = next(node.values(), None)
        dims = tuple(range(operand.tensor.rank)) if operand is not None else ()
        while node.op == "all_gather" and operand is not None and operand.name in made and made[
                operand.name].op == "permute":
            before = made[operand.name].attr("dims")
            assert isinstance(before, tuple)
            dims = tuple(before[d] for d in dims)  # type: ignore[misc,index]
            operand = next(made[operand.name].values())
        if node.op != "all_gather" or operand is None or operand.name not in inputs:
            nodes.append(node)
            continue
        (one,) = parts_of(node)
        own = Parts(dims[one.dim], one.outer, one.n, one.inner, one.count).attr()
        key = operand.name, node.attr("axis"), own
        if key not in known and dims == tuple(range(len(dims))):
            nodes.append(node)
            known[key] = node.output
            continue
        if key not in known:
            name = f"{operand.name}_whole"
            while name in names:
                name += "_"
            names.add(name)
            kind = operand.tensor
            whole = Value(name, TensorType(kind.dtype, Parts(*own).whole(kind.shape), None, kind.device))
            attrs = tuple((name, (own,) if name == "parts" else value) for name, value in node.attrs)
            nodes.append(Node("all_gather", (operand,), attrs, (whole,), node.where))
            known[key] = whole
        nodes.append(Node("permute", (known[key],), (("dims", dims),), node.outputs, node.where))
    return graph.replace(nodes=tuple(nodes))
