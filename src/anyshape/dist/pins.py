"""Backward propagation of placements: where gradients are to lie, by the weights and states that are written with them.

    write moment <- add(mul(moment, b), mul(g, c))   moment S(0)   -->  pin g: S(0)

A gradient that is a partial sum is added up once, where it is made: without pins each reader would add up what it
makes of it. The walk from a write goes through equations of the update, element by element, and through reshapes; it
ends at a value that is computed from the batch alone.
"""
from __future__ import annotations

from collections.abc import Container, Mapping

from anyshape.dist.placement import REPLICATE, Placement, Shard
from anyshape.dist.reshape import reshaped
from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.op import row


def gradient_pins(graph: Graph, placed: Mapping[str, Placement], data: Container[str]) -> dict[str, Placement]:
    """By value, its placement. placed: of inputs, with their n; data: names of values that depend on the batch."""
    made = graph.producers()
    found: dict[str, Placement] = {}
    writes = [(value, placed.get(target.name, REPLICATE)) for target, value in graph.writes]
    # what is dealt out has the last word: whole weights are gathered from updates of parts
    for value, wanted in sorted(writes, key=lambda one: isinstance(one[1], Shard)):
        if isinstance(wanted, Shard):
            wanted = wanted.of(value.tensor.shape)
        _walk(value, wanted, made, data, found)
    return found


def _walk(value: Value, wanted: Placement, made: Mapping[str, Node], data: Container[str],
          found: dict[str, Placement]) -> None:
    waiting, seen = [(value, wanted)], set()
    while waiting:
        one, place = waiting.pop()
        if one.name in seen or one.name not in data:
            continue
        seen.add(one.name)
        node = made.get(one.name)
        operands = [] if node is None else _behind(node, place, data)
        if not operands and node is not None:
            found[one.name] = place
        waiting += operands


def _behind(node: Node, place: Placement, data: Container[str]) -> list[tuple[Value, Placement]]:
    """Operands that are to lie as the result does; none where the gradient ends here."""
    if len(node.outputs) != 1:
        return []
    shape = node.output.tensor.shape
    if node.op == "reshape":
        (source,) = node.values()
        if not isinstance(place, Shard):
            return [(source, place)]
        back = reshaped(shape, source.tensor.shape, place)
        return [] if back is None else [(source, back)]
    if node.op == "permute":
        (source,), dims = node.values(), node.attr("dims")
        assert isinstance(dims, tuple)
        if isinstance(place, Shard):
            dim = dims[place.dim]
            assert isinstance(dim, int)
            return [(source, Shard(dim, place.outer, place.n))]
        return [(source, place)]
    if row(node).kind != "pointwise":
        return []
    same = {v.name: v for v in node.values() if v.tensor.shape == shape}
    ours = [v for name, v in same.items() if name in data]
    if len(ours) == 2 and len(same) == 2 and node.op != "where":
        return []  # two gradients, of a weight that is used twice: their sum is what is added up
    return [(v, place) for v in ours]
