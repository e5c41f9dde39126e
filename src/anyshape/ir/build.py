"""Makes graphs: a builder that infers types and names values."""
from __future__ import annotations

from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, effect_of
from anyshape.ir.op import OPS
from anyshape.ir.types import SizeType, TensorType, ValueType
from anyshape.sym.facts import Facts


class Builder:
    """Collects equations in order. `where` is the user's source line given to the nodes made next."""

    def __init__(self, name: str, facts: Facts | None = None) -> None:
        self.name = name
        self.facts = facts or Facts()
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.where = ""
        self._names = {name for name, _, _ in self.facts.ranges}  # a tensor is not named as a size is
        self._next: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """An unused name that starts with `hint`."""
        if hint not in self._names:
            self._names.add(hint)
            return hint
        count = self._next.get(hint, 1)
        while f"{hint}_{count}" in self._names:
            count += 1
        self._next[hint] = count + 1
        name = f"{hint}_{count}"
        self._names.add(name)
        return name

    def input(self, name: str, type: ValueType) -> Value:
        """Declare the next input."""
        if isinstance(type, SizeType):
            self._names.discard(name)
        value = Value(self.fresh(name), type)
        self.inputs.append(value)
        return value

    def op(self, op: str, *inputs: Operand, name: str = "", **attrs: Attr) -> Value:
        """Append `op` with one result and return it."""
        return self.multi(op, *inputs, name=name, types=None, **attrs)[0]

    def multi(self, op: str, *inputs: Operand, name: str = "", types: tuple[TensorType, ...] | None = None,
              **attrs: Attr) -> tuple[Value, ...]:
        """Append `op` and return all results; `types` overrides the row's inference (extern calls). An `effect` that is
        True gets its place behind the effects before it."""
        if attrs.get("effect") is True:
            attrs["effect"] = 1 + next((place for node in reversed(self.nodes) if (place := effect_of(node))), 0)
        kinds = OPS[op].infer(inputs, attrs) if types is None else types
        outputs = tuple(Value(self.fresh(name or op), kind) for kind in kinds)
        self.nodes.append(Node(op, inputs, tuple(attrs.items()), outputs, self.where))
        return outputs

    def append(self, node: Node) -> None:
        """Take over a node as it is; its names are kept and must be new."""
        for value in node.outputs:
            assert value.name not in self._names, value.name
            self._names.add(value.name)
        self.nodes.append(node)

    def finish(self, outputs: tuple[Operand | None, ...], **fields: object) -> Graph:
        """The graph."""
        return Graph(self.name, tuple(self.inputs), tuple(self.nodes), outputs, facts=self.facts,
                     **fields)  # type: ignore[arg-type]
