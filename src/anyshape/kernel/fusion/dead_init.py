"""Dead-initialisation elimination: a `full` whose every element is overwritten later is memory without a first value.

    full(0) -> a;  overwrite(a, x at 0) -> b;  overwrite(b, y at n) -> c      a is memory and nothing else, if x and y
                                                                              fill all of c and only c is read
"""
from __future__ import annotations

from anyshape.ir.graph import Graph, Node, Value
from anyshape.sym.expr import Size


def covered(graph: Graph) -> frozenset[str]:
    """The values made by `full` of which nothing is ever read."""
    users, kept = graph.users(), {value.name for value in graph.roots()}
    found: set[str] = set()
    for node in graph.nodes:
        if node.op == "full" and _covers(node.output, users, kept):
            found.add(node.output.name)
    return frozenset(found)


def _covers(value: Value, users: dict[str, list[Node]], kept: set[str]) -> bool:
    """Do the equations that write into `value`, and into what comes of it, fill one part behind the other?"""
    dim: int | None = None
    filled: Size = 0
    while value.name not in kept and len(users[value.name]) == 1:
        node = users[value.name][0]
        if node.op != "overwrite" or node.inputs[0] is not value or node.inputs[1] is value:
            return False
        part, where = node.inputs[1], node.attr("dim")
        assert isinstance(part, Value) and isinstance(where, int)
        if dim not in (None, where) or node.attr("step") != 1 or node.attr("start") != filled:
            return False
        dim, filled, value = where, filled + part.tensor.shape[where], node.output
        if filled == value.tensor.shape[where]:
            return True
    return False
