"""Lowering of collectives: each becomes an asynchronous one, a launch and a wait, in one order on all ranks.

    y = all_reduce(x | axis="data", combine="add")
    --> m = extern(x | target="anyshape_collective.start.default", template=..., effect=1)
        y = extern(m | target="anyshape_collective.wait.default", template=..., effect=2)

Calls with effects are never merged, dropped or reordered, so all ranks send the same messages in the same order; those
that were there before are counted anew with them. What a launch gives is the message: all that it sends and receives,
in tensors whose sizes are formulas. So what plans know of memory, they know of messages; the plan's scheduler moves
the two apart (plan/schedule/overlap.py). A large weight that is gathered is a message by itself, if its parts are as
long on all ranks and follow one another: so it comes where it is to be, and is not copied, nor there twice.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyshape.dist.mesh import Mesh
from anyshape.ir.asynchronous import START, WAIT
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, has_effect
from anyshape.ir.types import TensorType
from anyshape.ops.collective import COLLECTIVES, RINGS, Parts, parts_of
from anyshape.sym.expr import Size, ceildiv, product

APART_BYTES = 256 << 10  # of a whole from which a message of its own costs less than copying it does
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
            nodes += _calls(node, mesh, effects, taken)
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


def lies_in_lines(whole: TensorType, one: Parts, ranks: int) -> bool:
    """Do the parts of a dense whole follow one another, as long on all ranks?"""
    return isinstance(one.n, int) and one.n % ranks == 0 and one.outer == 1 and all(
        size == 1 for size in whole.shape[:one.dim])


def _apart(node: Node, ranks: int) -> list[int]:
    """Places of operands that are messages by themselves, which lie as the results do."""
    if node.op != "all_gather":
        return []
    return [place for place, (value, one) in enumerate(zip(node.outputs, parts_of(node), strict=True))
            if lies_in_lines(value.tensor, one, ranks) and isinstance(value.tensor.bytes, int)
            and value.tensor.bytes >= APART_BYTES]


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


def _calls(node: Node, mesh: Mesh, effects: int, taken: set[str]) -> tuple[Node, Node]:
    axis, combine = node.attr("axis"), dict(node.attrs).get("combine", "add")
    assert isinstance(axis, str) and isinstance(combine, str)
    ranks = mesh.axis(axis).size
    node, apart = _sorted(node, _apart(node, ranks))
    numbers = [size for key, _ in node.attrs if key in ("parts", "into")
               for one in parts_of(node, key) for size in one.attr()]
    words: tuple[Attr, ...] = (("str", node.op), ("str", str(mesh)), ("str", axis))
    messages = tuple(
        Value(_new_name(f"{one.outputs[0].name}_message", taken),
              TensorType(kind.dtype, (message_elements(one, ranks),), None, kind.device))
        for one in _messages(node, apart) for kind in (one.outputs[0].tensor,))

    def call(target: str, operands: Iterable[Operand], *before: Attr, outputs: tuple[Value, ...], effect: int) -> Node:
        given = _Arguments(operands)
        template: Attr = (("args", *before, *words, given.sizes(numbers), ("int", apart)), ("kwargs",))
        return Node("extern", tuple(given.operands), (("target", target), ("template", template), ("effect", effect)),
                    outputs, node.where)

    def tensors(kind: str, count: int) -> Attr:
        return ("list", *((kind, place) for place in range(count)))

    sent, come = tensors("result", len(messages)), tensors("operand", len(messages))
    return (call(START, node.inputs, sent, tensors("operand", len(node.inputs)), ("str", combine), outputs=messages,
                 effect=effects + 1),
            call(WAIT, messages, tensors("result", len(node.outputs)), come, outputs=node.outputs, effect=effects + 2))


def _sorted(node: Node, apart: Sequence[int]) -> tuple[Node, int]:
    """The collective with the operands at these places first, and how many they are."""
    if not apart:
        return node, 0
    order = [*apart, *(place for place in range(len(node.inputs)) if place not in apart)]
    return _of(node, order), len(apart)


def _of(node: Node, places: Sequence[int]) -> Node:
    """The collective of some of its operands, in an order."""
    parts = node.attr("parts")
    assert isinstance(parts, tuple)
    attrs = tuple((key, tuple(parts[place] for place in places) if key == "parts" else value)
                  for key, value in node.attrs)
    return Node(node.op, tuple(node.inputs[place] for place in places), attrs,
                tuple(node.outputs[place] for place in places), node.where)


def _messages(node: Node, apart: int) -> list[Node]:
    """What each message brings, as a collective of its own: each of the first operands, and all others."""
    if not apart:
        return [node]
    rest = range(apart, len(node.inputs))
    return [_of(node, places) for places in (*([place] for place in range(apart)), rest) if len(places)]


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


def raised(node: Node, outputs: tuple[Value, ...]) -> Node:
    """The collective that a launch, or ring attention, was made of; `outputs`: what its wait makes."""
    target, arguments = node.attr("target"), node.attr("template")[0][1:]  # type: ignore[index]
    words = [one[1] for one in arguments if one[0] in ("str", "bool", "float", "none") and len(one) > 1]  # type: ignore
    lists = [one[1:] for one in arguments if one[0] == "list"]  # type: ignore[index]
    numbers = [node.inputs[one[1]] if one[0] == "operand" else one[1] for one in lists[-1]]  # type: ignore
    parts: Attr = tuple(tuple(numbers[at:at + 5]) for at in range(0, len(numbers), 5))  # type: ignore[arg-type]
    tensors = tuple(node.inputs[one[1]] for one in lists[-2])  # type: ignore
    if target == RING:
        op, _, axis, causal, *scale = words
        attrs = (("axis", axis), ("causal", causal), ("scale", scale[0] if scale else None), ("parts", parts))
    else:
        combine, op, _, axis = words
        more: dict[object, tuple[tuple[str, Attr], ...]] = {
            "all_reduce": (("combine", combine),),
            "all_to_all": (("parts", parts[:1]), ("into", parts[1:]))}  # type: ignore[index]
        attrs = (("axis", axis), *more.get(op, (("parts", parts),)))  # type: ignore[assignment]
    return Node(str(op), tensors, attrs, outputs, node.where)
