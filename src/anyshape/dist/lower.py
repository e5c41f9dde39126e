"""Lowering of collectives: each becomes an asynchronous one, a launch and a wait, in one order on all ranks.

    y = all_reduce(x | axis="data", combine="add")
    --> m = extern(x | target="anyshape_collective.start.default", template=..., effect=1)
        y = extern(m | target="anyshape_collective.wait.default", template=..., effect=2)

Calls with effects are never merged, dropped or reordered, so all ranks send the same messages in the same order; those
that were there before are counted anew with them. What a launch gives is the message: all that it sends and receives,
in one tensor, whose size is a formula. So what plans know of memory, they know of messages; the plan's scheduler moves
the two apart (plan/schedule/overlap.py).
"""
from __future__ import annotations

from collections.abc import Iterable

from anyshape.dist.mesh import Mesh
from anyshape.ir.asynchronous import START, WAIT
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, has_effect
from anyshape.ir.types import TensorType
from anyshape.ops.collective import COLLECTIVES, RINGS, Parts, parts_of
from anyshape.sym.expr import Size, ceildiv, product

RING = "anyshape_collective.ring.default"


def lowered(graph: Graph, mesh: Mesh) -> Graph:
    """The graph with collectives as calls of START and WAIT along the axes of `mesh`."""
    nodes: list[Node] = []
    effects = 0
    taken = {value.name for value in (*graph.inputs, *(one for node in graph.nodes for one in node.outputs))}
    for node in graph.nodes:
        if node.op in RINGS:  # its messages are under way while it computes
            effects += 1
            nodes.append(_ring(node, mesh, effects))
        elif node.op in COLLECTIVES:
            nodes += _calls(node, mesh, effects, _new_name(f"{node.outputs[0].name}_message", taken))
            effects += 2
        elif has_effect(node):
            effects += 1
            attrs = tuple((name, effects if name == "effect" else value) for name, value in node.attrs)
            nodes.append(Node(node.op, node.inputs, attrs, node.outputs, node.where))
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _most(kind: TensorType, one: Parts, ranks: int) -> Size:
    """Elements of the longest part of a whole, of which `kind` is the whole or a part."""
    rest = product(size for dim, size in enumerate(kind.shape) if dim != one.dim)
    return one.outer * ceildiv(one.n, ranks) * one.inner * rest


def message_elements(node: Node, ranks: int) -> Size:
    """How long the message of a collective is: what is received, and what is sent where it lies beside that."""
    kinds = [value.tensor for value in node.values()]
    if node.op == "all_reduce":
        return sum((kind.count for kind in kinds), start=0)  # type: ignore[operator,return-value]
    parts = parts_of(node, "into" if node.op == "all_to_all" else "parts")
    if node.op == "all_to_all":
        (whole,) = parts_of(node)
        kinds = [TensorType(kinds[0].dtype, (*kinds[0].shape[:whole.dim],
                                             whole.outer * ceildiv(whole.n, ranks) * whole.inner,
                                             *kinds[0].shape[whole.dim + 1:]))]
    most: Size = sum((_most(kind, one, ranks) for kind, one in zip(kinds, parts, strict=True)), start=0)  # type: ignore
    return most * {"all_gather": ranks, "reduce_scatter": ranks + 1, "all_to_all": 2 * ranks}[node.op]


class _Arguments:
    """Sizes as entries of a template: numbers as they are, formulas as further operands."""

    def __init__(self, operands: Iterable[Operand]) -> None:
        self.operands = list(operands)

    def sizes(self, sizes: Iterable[Size]) -> Attr:
        return ("list", *map(self._entry, sizes))

    def _entry(self, size: Size) -> Attr:
        if isinstance(size, int):
            return ("int", size)
        self.operands.append(size)
        return ("operand", len(self.operands) - 1)


def _new_name(wanted: str, taken: set[str]) -> str:
    while wanted in taken:
        wanted += "_"
    taken.add(wanted)
    return wanted


def _calls(node: Node, mesh: Mesh, effects: int, name: str) -> tuple[Node, Node]:
    axis, combine = node.attr("axis"), dict(node.attrs).get("combine", "add")
    assert isinstance(axis, str) and isinstance(combine, str)
    ranks = mesh.axis(axis).size
    first = next(node.values()).tensor
    message = Value(name, TensorType(first.dtype, (message_elements(node, ranks),), None, first.device))
    numbers = [size for key, _ in node.attrs if key in ("parts", "into")
               for one in parts_of(node, key) for size in one.attr()]
    words: tuple[Attr, ...] = (("str", node.op), ("str", str(mesh)), ("str", axis))

    def call(target: str, operands: Iterable[Operand], *before: Attr, outputs: tuple[Value, ...], effect: int) -> Node:
        given = _Arguments(operands)
        template: Attr = (("args", *before, *words, given.sizes(numbers)), ("kwargs",))
        return Node("extern", tuple(given.operands), (("target", target), ("template", template), ("effect", effect)),
                    outputs, node.where)

    tensors: Attr = ("list", *(("operand", place) for place in range(len(node.inputs))))
    results: Attr = ("list", *(("result", place) for place in range(len(node.outputs))))
    return (call(START, node.inputs, ("result", 0), tensors, ("str", combine), outputs=(message,), effect=effects + 1),
            call(WAIT, (message,), results, ("operand", 0), outputs=node.outputs, effect=effects + 2))


def _ring(node: Node, mesh: Mesh, effect: int) -> Node:
    """Ring attention is one call."""
    axis, causal, scale = node.attr("axis"), node.attr("causal"), node.attr("scale")
    given = _Arguments(node.inputs)
    numbers = given.sizes(size for one in parts_of(node) for size in one.attr())
    tensors: Attr = ("list", *(("operand", place) for place in range(len(node.inputs))))
    template: Attr = (("args", tensors, ("str", node.op), ("str", str(mesh)), ("str", axis), ("bool", causal),
                       ("none",) if scale is None else ("float", scale), numbers), ("kwargs",))
    return Node("extern", tuple(given.operands), (("target", RING), ("template", template), ("effect", effect)),
                node.outputs, node.where)
