"""The graph rewriter: writes a graph again, equation by equation, with rewrites applied; every pass that rewires
equations uses this.

A rewrite is given one equation whose operands are already rewritten. It answers with an operand that stands for the
equation's only result (a value made before, or one that it makes through the `Replay`), or None to leave it.

Two rules keep the caller's view of the graph: a result that the caller receives, or that is kept for the backward
program, never becomes an input or a value that the caller receives already (two results must not share storage); and
values keep their names, so that texts before and after can be compared.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.op import OPS
from anyshape.ir.types import TensorType, ValueType

# new equations are rewritten in turn; a rule that feeds itself for ever stops here
_DEEPEST = 32

Rewrite = Callable[["Replay", Node], Operand | None]
Several = Callable[["Replay", Node], tuple[Value, ...] | None]


class Replay:
    """A graph being written again. `made` maps a value's name to the equation that defines it in the new graph.
    `several`: a rewrite of equations with several results, which answers with a value for each."""

    def __init__(self, graph: Graph, rewrite: Rewrite, several: Several | None = None) -> None:
        self.graph = graph
        self.rewrite = rewrite
        self.several = several
        self.nodes: list[Node] = []
        self.made: dict[str, Node] = {}
        self.changed = False
        self._env: dict[str, Operand] = {}
        self._names = {value.name for value in graph.inputs}
        for node in graph.nodes:
            for value in node.outputs:
                self._names.add(value.name)
        self._kept = frozenset(value.name for value in graph.roots())
        self._taken = {*self._kept, *(value.name for value in graph.inputs)}
        self._next: dict[str, int] = {}
        self._where = ""
        self._depth = 0

    def run(self) -> Graph:
        """The new graph; the same object when nothing changed."""
        env = self._env
        for node in self.graph.nodes:
            inputs = node.inputs
            for operand in inputs:
                if isinstance(operand, Value) and operand.name in env:
                    inputs = tuple(env.get(x.name, x) if isinstance(x, Value) else x for x in node.inputs)
                    node = Node(node.op, inputs, node.attrs, node.outputs, node.where)
                    self.changed = True
                    break
            self._where = node.where
            before = len(self.nodes)
            if len(node.outputs) != 1:
                if self.several is None or not self._accept_all(node, self.several(self, node)):
                    self._forget(before)
                    self._append(node)
                continue
            found = self.rewrite(self, node)
            if found is None or not self._accept(node, found, before):
                self._forget(before)
                self._append(node)
        if not self.changed:
            return self.graph
        return self._finish()

    def op(self, op: str, *inputs: Operand, **attrs: Attr) -> Value:
        """The result of a new equation, itself rewritten as far as the rules go. VerifyError if it does not fit."""
        (kind,) = OPS[op].infer(inputs, attrs)
        pairs = tuple(attrs.items())
        if self._depth < _DEEPEST:
            self._depth += 1
            found = self.rewrite(self, Node(op, inputs, pairs, (Value("", kind),), self._where))
            self._depth -= 1
            if isinstance(found, Value) and same_type(found.type, kind):
                return found
        value = Value(self._fresh(op), kind)
        self._append(Node(op, inputs, pairs, (value,), self._where))
        return value

    def multi(self, op: str, inputs: tuple[Operand, ...], attrs: tuple[tuple[str, Attr], ...],
              types: Sequence[ValueType]) -> tuple[Value, ...]:
        """The results, of these types, of a new equation that no rule knows the types of; it is not rewritten."""
        values = tuple(Value(self._fresh(op), kind) for kind in types)
        self._append(Node(op, inputs, attrs, values, self._where))
        return values

    def stand(self, value: Value, other: Value) -> None:
        """`other`, of the same type, stands for an input in all equations, before any of them is written."""
        self._env[value.name] = other

    def producer(self, operand: Operand) -> Node | None:
        """The equation that defines `operand` in the new graph; None for inputs and for what is no value."""
        return self.made.get(operand.name) if isinstance(operand, Value) else None

    def now(self, operand: Operand) -> Operand:
        """What stands in the new graph for an operand of the old one."""
        return self._env.get(operand.name, operand) if isinstance(operand, Value) else operand

    def _accept(self, node: Node, found: Operand, before: int) -> bool:
        old = node.output
        if not isinstance(found, Value) or not same_type(found.type, old.type):
            return False
        if len(self.nodes) > before and self.nodes[-1].outputs == (found,):
            # the equation made last takes over the name
            made = self.nodes[-1]
            del self.made[found.name]
            self._names.discard(found.name)
            found = Value(old.name, found.type)
            self.nodes[-1] = self.made[old.name] = Node(made.op, made.inputs, made.attrs, (found,), made.where)
        elif old.name in self._kept:
            if found.name in self._taken:
                return False
            self._taken.add(found.name)
        self._env[old.name] = found
        self.changed = True
        return True

    def _accept_all(self, node: Node, found: tuple[Value, ...] | None) -> bool:
        if found is None:
            return False
        for new, old in zip(found, node.outputs, strict=True):
            if not same_type(new.type, old.type) or (old.name in self._kept and new.name in self._taken):
                return False
        for new, old in zip(found, node.outputs, strict=True):
            if old.name in self._kept:
                self._taken.add(new.name)
            self._env[old.name] = new
        self.changed = True
        return True

    def _forget(self, before: int) -> None:
        """Drops equations that a rewrite made in vain."""
        for node in self.nodes[before:]:
            for value in node.outputs:
                del self.made[value.name]
                self._names.discard(value.name)
        del self.nodes[before:]

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        for value in node.outputs:
            self.made[value.name] = node

    def _fresh(self, hint: str) -> str:
        count = self._next.get(hint, 1)
        while f"{hint}_{count}" in self._names:
            count += 1
        self._next[hint] = count
        name = f"{hint}_{count}"
        self._names.add(name)
        return name

    def _finish(self) -> Graph:
        env = self._env

        def new(operand: Operand | None) -> Operand | None:
            return env.get(operand.name, operand) if isinstance(operand, Value) else operand

        graph = self.graph
        return graph.replace(
            nodes=tuple(self.nodes),
            outputs=tuple(new(operand) for operand in graph.outputs),
            saved=tuple(new(operand) for operand in graph.saved),
            writes=tuple((target, new(value)) for target, value in graph.writes),
        )


def strided_results(graph: Graph) -> set[str]:
    """The names of results that the caller wants in other strides than dense ones."""
    strides = graph.output_strides or (None,) * len(graph.outputs)
    return {value.name for value, wanted in zip(graph.outputs, strides, strict=True)
            if isinstance(value, Value) and wanted not in (None, value.tensor.dense().layout())}


def same_type(a: object, b: object) -> bool:
    """The same dtype, shape and device."""
    return isinstance(a, TensorType) and isinstance(b, TensorType) and a.dtype == b.dtype and a.shape == b.shape \
        and a.device == b.device


def replay(graph: Graph, rewrite: Rewrite) -> Graph:
    """`graph` with `rewrite` applied to every equation, in order."""
    return Replay(graph, rewrite).run()
