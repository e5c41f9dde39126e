"""Lowering of collectives: each becomes a call of an operator, in one order on all ranks.

    y = all_reduce(x | axis="data", combine="add")
    --> y = extern(x | target="anyshape_collective.run.default", template=..., effect=1)

Calls with effects are never merged, dropped or reordered, so all ranks send the same messages in the same order; those
that were there before are counted anew with them.
"""
from __future__ import annotations

from anyshape.dist.mesh import Mesh
from anyshape.ir.graph import Attr, Graph, Node, Operand, has_effect
from anyshape.ops.collective import COLLECTIVES, RINGS, parts_of
from anyshape.sym.expr import Size

TARGET = "anyshape_collective.run.default"
RING = "anyshape_collective.ring.default"


def lowered(graph: Graph, mesh: Mesh) -> Graph:
    """The graph with collectives as calls of `TARGET` along the axes of `mesh`."""
    nodes, effects = [], 0
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            effects += 1
            node = _call(node, str(mesh), effects)
        elif has_effect(node):
            effects += 1
            attrs = tuple((name, effects if name == "effect" else value) for name, value in node.attrs)
            node = Node(node.op, node.inputs, attrs, node.outputs, node.where)
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _call(node: Node, mesh: str, effect: int) -> Node:
    operands: list[Operand] = list(node.inputs)
    numbers: list[Attr] = []

    def entry(size: Size) -> Attr:
        if isinstance(size, int):
            return ("int", size)
        operands.append(size)
        return ("operand", len(operands) - 1)

    for name, _ in node.attrs:
        if name in ("parts", "into"):
            for one in parts_of(node, name):
                numbers += [entry(size) for size in one.attr()]  # type: ignore[arg-type]
    combine = dict(node.attrs).get("combine", "add")
    axis = node.attr("axis")
    assert isinstance(axis, str) and isinstance(combine, str)
    tensors: Attr = ("list", *(("operand", place) for place in range(len(node.inputs))))
    target = TARGET
    more: tuple[Attr, ...] = (("str", combine), ("list", *numbers))
    if node.op in RINGS:
        scale = node.attr("scale")
        target = RING
        more = (("bool", node.attr("causal")), ("none",) if scale is None else ("float", scale), ("list", *numbers))
    template: Attr = (("args", tensors, ("str", node.op), ("str", mesh), ("str", axis), *more), ("kwargs",))
    return Node("extern", tuple(operands), (("target", target), ("template", template), ("effect", effect)),
                node.outputs, node.where)
