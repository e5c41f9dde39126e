"""The region of each router in a captured graph: its route plan, dispatches, branches and combines.

    route_plan -> order, inverse, ends      dispatch(cells, order) -> body: the branches -> combine(rows, inverse)

The body of a region is all that follows its dispatches (and parameters taken by row) and does not stand behind its
combines. A value of a body has rows in an order that is data.
"""
from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from anyshape.route.flow.capture import module_of


@dataclass(frozen=True)
class RouterCall:
    """One call of a router. name: of the router's module; further calls of the same one end in `:1`, `:2` and so on.

    cells, choices: how many cells are routed, and k. branches: how many there are.
    """

    name: str
    plan: Node
    ids: Node
    order: Node | None
    inverse: Node | None
    ends: Node | None
    dispatches: tuple[Node, ...]
    combines: tuple[Node, ...]
    body: frozenset[Node]
    branches: int


def routing(node: Node) -> str:
    """The name of a routing operator; empty for other nodes."""
    if node.op != "call_function" or not hasattr(node.target, "name"):
        return ""
    space, _, name = str(node.target.name()).partition("::")  # type: ignore[operator]
    return name.split(".")[0] if space == "anyshape_route" else ""


def followers(starts: Iterable[Node], ends: Iterable[Node]) -> frozenset[Node]:
    """The starts and all nodes that read them, up to but without the ends."""
    stop, found, stack = set(ends), set(), list(starts)
    while stack:
        node = stack.pop()
        if node not in found and node not in stop:
            found.add(node)
            stack.extend(node.users)
    return frozenset(found)


def regions_of(nodes: Sequence[Node]) -> tuple[RouterCall, ...]:
    """The regions of a graph, in the order of their plans."""
    found: list[RouterCall] = []
    seen: dict[str, int] = {}
    for node in nodes:
        if routing(node) != "route_plan":
            continue
        name = module_of(node) or f"router{len(found)}"
        number = seen.get(name, 0)
        seen[name] = number + 1
        parts: dict[int, Node] = {int(user.args[1]): user for user in node.users  # type: ignore[arg-type]
                                  if user.target is operator.getitem}
        order, inverse = parts.get(0), parts.get(1)
        dispatches = tuple(one for one in nodes if routing(one) == "dispatch" and one.args[1:2] == (order,))
        combines = tuple(one for one in nodes if routing(one) == "combine" and one.args[1:2] == (inverse,))
        taken = [one for one in nodes if routing(one) == "grouped_take"
                 and _scale(one.args[1], parts.get(2)) is not None]
        ids, branches = node.args[0], node.args[1]
        assert isinstance(ids, Node)
        found.append(RouterCall(f"{name}:{number}" if number else name, node, ids, order, inverse, parts.get(2),
                            dispatches, combines, followers((*dispatches, *taken), combines),
                            _count(branches)))
    return tuple(found)


def _count(branches: Any) -> int:
    return branches if isinstance(branches, int) else 0


def scale_of(ends: Any, region: RouterCall) -> int | None:
    """How many rows of `ends` stand for one row of the region: ends, or ends times a whole number; None: neither."""
    return _scale(ends, region.ends)


def _scale(ends: Any, own: Node | None) -> int | None:
    factor = 1
    while isinstance(ends, Node) and ends is not own:
        name = str(getattr(ends.target, "__name__", ends.target)).split(".")[0]
        if ends.op != "call_function" or name != "mul" or not isinstance(ends.args[1], int):
            return None
        factor *= ends.args[1]
        ends = ends.args[0]
    return factor if ends is not None and ends is own else None
