"""Alpha-renaming: the text of a graph that says all but the names that stand in it.

    graph f(u7: size, a: f32[u7, 8]) {b = neg(a)}   -->   graph g(n0: size, v0: f32[n0, 8]) {v1 = neg(v0)}

Two graphs of one text are the same program: values and symbols are numbered where they are first met, in the order of
the inputs and the equations. Source lines are left out, and so are likely sizes, which are hints.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.show import show, symbols_in_order
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, Size, substitute, symbol
from anyshape.sym.facts import Facts


def nameless(graph: Graph) -> str:
    """The text of `graph` with numbers in the place of names."""
    numbers = {name: symbol(f"n{place}") for place, name in enumerate(symbols_in_order(graph))}
    return show(_Renaming(graph, numbers, False).graph())


def with_symbols(graph: Graph, symbols: Mapping[str, Size]) -> Graph:
    """`graph` with sizes in the place of symbols. Its values keep their names, and inputs that are sizes stay: on those
    of symbols that went, nothing depends any more."""
    return _Renaming(graph, symbols, True).graph()


class _Renaming:
    def __init__(self, graph: Graph, symbols: Mapping[str, Size], keeps_names: bool) -> None:
        self.given = graph
        self.symbols = symbols
        self.keeps_names = keeps_names
        self.values: dict[Value, Value] = {}

    def graph(self) -> Graph:
        given = self.given
        inputs = tuple(self.value(one) for one in given.inputs)
        nodes = tuple(self.node(node) for node in given.nodes)
        names = {value.name: self.value(value).name for value in given.inputs}
        return given.replace(
            name=given.name if self.keeps_names else "g", inputs=inputs, nodes=nodes,
            outputs=tuple(map(self.operand, given.outputs)),
            output_strides=tuple(None if strides is None else self.attr(strides) for strides in given.output_strides),
            memory=tuple(names.get(one, one) for one in given.memory),
            writes=tuple((self.value(a), self.value(b)) for a, b in given.writes),
            saved=tuple(map(self.operand, given.saved)), restored=tuple(map(self.value, given.restored)),
            facts=given.facts if self.keeps_names else self.facts(given.facts))

    def facts(self, facts: Facts) -> Facts:
        ranges = sorted((str(self.symbols.get(name, name)), low, -1 if high is None else high)
                        for name, low, high in facts.ranges)
        return Facts(tuple((name, low, None if high < 0 else high) for name, low, high in ranges), (),
                     tuple((self.attr(size), by) for size, by in facts.divisible),
                     tuple(self.attr(size) for size in facts.known))

    def node(self, node: Node) -> Node:
        inputs: Any = tuple(map(self.operand, node.inputs))
        attrs = tuple((name, self.attr(value)) for name, value in node.attrs)
        where = node.where if self.keeps_names else ""
        return Node(node.op, inputs, attrs, tuple(map(self.value, node.outputs)), where)

    def operand(self, operand: Operand | None) -> Any:
        return self.value(operand) if isinstance(operand, Value) else self.attr(operand)

    def value(self, value: Value) -> Value:
        found = self.values.get(value)
        if found is None:
            kind = value.type
            if isinstance(kind, TensorType):
                kind = TensorType(kind.dtype, self.attr(kind.shape), self.attr(kind.strides), kind.device)
            is_size = value.name in self.symbols
            name = str(self.symbols[value.name]) if is_size else f"v{len(self.values)}"
            name = value.name if self.keeps_names else name
            found = self.values[value] = Value(name, kind)
        return found

    def attr(self, value: Attr) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.attr, value))
        return substitute(value, self.symbols) if isinstance(value, Expr) else value
