"""Branches of a router as parts of a program: which nodes of a graph stand on the rows of one branch.

    a, b = split_rows(rows, ends)            a: f32[u0, 8], b: f32[u1, 8]
    c = relu(a); d = exp(b); e = exp(c)  --> {u0: c, e}, {u1: d}
    out = merge_rows([e, d], ends, n)

A branch is known by the symbol of its load, the size of dim 0 of its rows. What has that symbol alone among its sizes
belongs to it, and so does what only such nodes read or give (a transposed weight, the gradient of one). All else, and
what stands on the rows of several branches, belongs to none. A router inside of a branch splits the rows of that
branch: its branches have loads of their own.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from anyshape.frontend.programs.split_program import MERGE, SPLITS, is_number, symbols_of
from anyshape.runtime.memory.tape import make_tape, tape_get


def cuts(gm: GraphModule) -> list[Node]:
    """The calls that give one tensor a branch, or merge them again."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and str(node.target) in (*SPLITS, MERGE)]


def groups_of(gm: GraphModule, own: list[Node]) -> dict[Node, str]:
    """By node, the load of the branch to which it belongs; nodes of no branch are left out. own: the cuts."""
    loads = _loads(own)
    if not loads:
        return {}
    cut = set(own)
    groups: dict[Node, str] = {}
    undecided: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or _is_outside(node, cut):
            continue
        found = symbols_of([node, *node.all_input_nodes]) & loads
        if not found:
            found = {groups.get(one, "") for one in node.all_input_nodes if one in groups or one in undecided
                     or _computes(one, cut)}
            if len(found) != 1 or "" in found:
                undecided[node] = None
                continue
        if len(found) == 1:
            groups[node] = found.pop()
    for node in reversed(undecided):
        users = {groups.get(user, "") for user in node.users if user.op != "output" and not _is_outside(user, cut)}
        if len(users) == 1 and "" not in users:
            groups[node] = users.pop()
    return groups


def _loads(own: Iterable[Node]) -> set[str]:
    """The symbols that are dim 0 of the rows of one branch."""
    found: set[str] = set()
    for node in own:
        parts = [one.meta.get("val") for one in node.args[0]] if str(node.target) == MERGE \
            else node.meta.get("val") or ()  # type: ignore[union-attr]
        for part in parts:
            size = part.shape[0] if isinstance(part, torch.Tensor) and part.dim() else None
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.add(str(size.node.expr))
    return found


def _computes(node: Node, cut: set[Node]) -> bool:
    """Whether it stands in a part, and so is neither an input nor what a cut or the tape gives."""
    return node.op == "call_function" and not _is_outside(node, cut)


def _is_outside(node: Node, cut: set[Node]) -> bool:
    return node in cut or node.target in (make_tape, tape_get) or is_number(node.meta.get("val")) \
        or any(operand in cut for operand in node.all_input_nodes[:1])


class Grouping:
    """Nodes that wait until they are a part, by the branch they belong to. No group needs another one that waits."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Node]] = {}
        self.place: dict[Node, str] = {}
        self.effects: set[str] = set()

    def add(self, node: Node, group: str, effect: bool) -> list[list[Node]]:
        """Puts a node into its group. effect: it has to stay behind all that has one, too. Returns the groups that are
        parts now."""
        closed = self.close_before(node, group)
        if effect:
            closed += self._close([one for one in self.effects if one != group])
            self.effects.add(group)
        self.waiting.setdefault(group, []).append(node)
        self.place[node] = group
        return closed

    def close_before(self, node: Node, group: str | None = None) -> list[list[Node]]:
        """Closes the groups that `node`, of a group or of none, reads."""
        operands: list[Node] = []
        map_arg((node.args, node.kwargs), operands.append)
        return self._close([self.place[one] for one in operands if one in self.place and self.place[one] != group])

    def close(self) -> list[list[Node]]:
        """Closes all."""
        return self._close(list(self.waiting))

    def _close(self, groups: Iterable[str]) -> list[list[Node]]:
        closed = []
        for group in dict.fromkeys(groups):
            nodes = self.waiting.pop(group)
            for node in nodes:
                del self.place[node]
            self.effects.discard(group)
            closed.append(nodes)
        return closed
