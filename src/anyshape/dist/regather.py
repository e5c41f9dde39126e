"""Rematerialisation of gathered weights: what the forward gathered is let go, and gathered again in the backward.

    g = all_gather(w);  h = matmul(x, g);  ...;                          d = matmul(y, g)
    -->  g = all_gather(w);  h = matmul(x, g);  ...;  g_again = all_gather(w);  d = matmul(y, g_again)

FSDP calls this `reshard_after_forward` (Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.3). It is recomputation whose
operation is a message: so all ranks have to decide alike, whatever sizes and limits they have, and it is decided in the
graph that they share, not at a call. A weight is kept where nothing that is gathered is read between its last use in
the forward and its first in the backward, as that of the last layer; and so are small ones.
"""
from __future__ import annotations

from collections.abc import Mapping

from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.ops.collective import COLLECTIVES
from anyshape.sym.expr import Size

SMALL = 1 << 16  # bytes of a whole weight that is not gathered again


def regathered(graph: Graph) -> Graph:
    """The graph of a step, before collectives are merged, with gathers of inputs twice where the backward uses them,
    too."""
    return _Regather(graph).run()


def backward_begins(graph: Graph) -> int:
    """The position of the first equation of the backward: behind all that the loss, the first result, is made of, but
    for what adds it up over ranks. 0: there is no loss."""
    made = {v.name: place for place, node in enumerate(graph.nodes) for v in node.outputs}
    loss = graph.outputs[0] if graph.outputs else None
    while isinstance(loss, Value) and loss.name in made:
        node = graph.nodes[made[loss.name]]
        if node.op not in COLLECTIVES and row(node).kind != "view":
            return made[loss.name] + 1
        place = node.outputs.index(loss) if node.op in COLLECTIVES else 0
        operand = node.inputs[place]
        loss = operand if isinstance(operand, Value) else None
    return 0


class _Regather:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.border = backward_begins(graph)
        self.made = {v.name: place for place, node in enumerate(graph.nodes) for v in node.outputs}
        self.of: dict[str, int] = {}  # what shows a gathered weight -> the place of its gather
        self.uses: dict[int, list[int]] = {}
        self.read_inputs()
        self.again: set[int] = {place for place in self.uses if self.is_again(place)}
        self.copies: dict[str, Value] = {}
        self.taken = {v.name for v in graph.inputs} | set(self.made)
        self.nodes: list[Node] = []

    def read_inputs(self) -> None:
        """Finds gathers of inputs, and of views of them, and who reads what they give, through views."""
        early = {v.name for v in self.graph.inputs}
        for place, node in enumerate(self.graph.nodes):
            names = [v.name for v in node.values()]
            is_view = row(node).kind == "view"
            if all(name in early for name in names):
                if is_view:
                    early.update(v.name for v in node.outputs)
                elif node.op == "all_gather" and place < self.border:
                    self.uses[place] = []
                    self.of.update((v.name, place) for v in node.outputs)
            for name in names:
                if name in self.of and is_view:
                    self.of.update((v.name, self.of[name]) for v in node.outputs)
                elif name in self.of:
                    self.uses[self.of[name]].append(place)

    def is_again(self, place: int) -> bool:
        """Whether a gathered weight is let go between forward and backward."""
        before = [use for use in self.uses[place] if use < self.border]
        after = [use for use in self.uses[place] if use >= self.border]
        size: Size = self.graph.nodes[place].output.tensor.bytes
        if not before or not after or self.graph.facts.hint(size) < SMALL:
            return False
        return any(before[-1] < use < after[0] for other, uses in self.uses.items() if other != place for use in uses)

    def run(self) -> Graph:
        for place, node in enumerate(self.graph.nodes):
            if place >= self.border and any(self.is_copied(v) for v in node.values()):
                inputs: tuple[Operand, ...] = tuple(self.copy(v) if isinstance(v, Value) else v for v in node.inputs)
                node = Node(node.op, inputs, node.attrs, node.outputs, node.where)
            self.nodes.append(node)
        return self.graph.replace(nodes=tuple(self.nodes)) if self.copies else self.graph

    def is_copied(self, value: Value) -> bool:
        """Is it a gathered weight that is gathered again, or a view of one that the forward made?"""
        return self.of.get(value.name) in self.again and self.made[value.name] < self.border

    def copy(self, value: Value) -> Value:
        """The same of the second gather."""
        if not self.is_copied(value):
            return value
        if value.name not in self.copies:
            node = self.graph.nodes[self.made[value.name]]
            inputs = tuple(self.copy(v) if isinstance(v, Value) else v for v in node.inputs)
            outputs = tuple(Value(self.name(v.name), v.type) for v in node.outputs)
            self.copies |= {old.name: new for old, new in zip(node.outputs, outputs, strict=True)}
            self.nodes.append(Node(node.op, inputs, node.attrs, outputs, node.where))
        return self.copies[value.name]

    def name(self, old: str) -> str:
        found = f"{old}_again"
        while found in self.taken:
            found += "_"
        self.taken.add(found)
        return found


def messages_text(graph: Graph, before: Graph) -> str:
    """The collectives of a step's graph in words, and which weights are gathered twice (see `gathered_again`)."""
    counts: dict[str, list[Size]] = {}
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            values = node.outputs if node.op == "all_gather" else tuple(node.values())
            bytes_ = sum((v.tensor.bytes for v in values), start=0)  # type: ignore[arg-type]
            counts.setdefault(node.op, []).append(bytes_)
    found = [f"{len(sizes)} {op} of {sum(sizes, start=0)} bytes" for op, sizes in counts.items()]
    again = gathered_again(graph, before)
    if again:
        found.append(f"gathered again in the backward: {len(again)} weights, {sum(again.values(), start=0)} bytes")
    return "a step sends " + "; ".join(found) if found else "a step sends nothing"


def gathered_again(graph: Graph, before: Graph) -> Mapping[str, Size]:
    """Weight that is gathered twice -> its bytes; `before`: the graph that `regathered` was given."""
    known = {v.name for node in before.nodes for v in node.outputs}
    return {v.name: v.tensor.bytes for node in graph.nodes if node.op == "all_gather" for v in node.outputs
            if v.name not in known}
