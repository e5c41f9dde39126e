"""The groups that fusion is building, which equation is in which, and what depends on what between them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from anyshape.ir.graph import Graph, Node, Value, has_effect
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.kernel.fusion.result import FusedKernel, NotFusable, RejectedFusion
from anyshape.kernel.lowering.group import FusionGroup, Lowered, NotLowerable
from anyshape.kernel.lowering.lower import lower
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import Size, product

Space = tuple[tuple[Size, bool], ...]  # the iteration space of a group: (size, is reduced) per dimension
MOST_REFUSALS = 1000


@dataclass(slots=True)
class Draft:
    """A group under construction. `nodes` maps graph position to node; `roots` are the values that it stores. One that
    `scatters` stores the result of a scatter, over the space of what is written, or of a scan, and nothing else.
    `sums`: as in FusionGroup.
    """

    nodes: dict[int, Node]
    roots: dict[str, Value]
    dims: Space
    reductions: int = 0
    scatters: bool = False
    sums: tuple[tuple[Node, Value], ...] = ()

    @property
    def points(self) -> Size:
        """The number of points of the iteration space."""
        return product(size for size, _ in self.dims)

    @property
    def rows(self) -> Size:
        """The number of points that are left when the reduced dimensions are gone."""
        return product(size for size, reduced in self.dims if not reduced)

    @property
    def by_strips(self) -> bool:
        """Do strips of neighbouring rows run through the reduced dimensions (the last dimension is not reduced)?"""
        return bool(self.dims) and not self.dims[-1][1] and any(reduced for _, reduced in self.dims)

    def group(self) -> FusionGroup:
        """The group as it is lowered: equations in graph order."""
        return FusionGroup(tuple(self.nodes[k] for k in sorted(self.nodes)), tuple(self.roots.values()), self.dims,
                           self.sums)

    def having(self, position: int, node: Node, dims: Space, root: Value | None = None) -> Draft:
        """A copy with one equation more, which is stored when given as `root`, over the space `dims`."""
        roots = dict(self.roots) if root is None else {**self.roots, root.name: root}
        return Draft({**self.nodes, position: node}, roots, dims, self.reductions + (row(node).kind == "reduce"))


class Drafts:
    """All drafts of a graph, by number; a merged one is gone."""

    def __init__(self, graph: Graph, layouts: Mapping[str, TensorType], hardware: HardwareParams) -> None:
        self.graph = graph
        self.hardware = hardware
        self.layouts = layouts
        self.position = {id(node): k for k, node in enumerate(graph.nodes)}
        self.producers = graph.producers()
        self.users = graph.users()
        self.groups: dict[int, Draft] = {}
        self.member: dict[int, list[int]] = {}  # node position -> drafts that hold it
        self.refusals: list[RejectedFusion] = []
        self.known: dict[FusionGroup, Lowered] = {}
        effects = [k for k, node in enumerate(graph.nodes) if has_effect(node)]
        self.following = dict(pairwise(effects))  # an equation with an effect -> the next one
        values = (*graph.inputs, *(value for node in graph.nodes for value in node.outputs))
        self.tensors = {value.name: value.type for value in values if isinstance(value.type, TensorType)}

    def start(self, draft: Draft) -> int:
        """Add an empty draft; returns its number."""
        number = len(self.groups)
        self.groups[number] = draft
        return number

    def add(self, group: int, position: int, node: Node) -> None:
        """Put an equation into a draft, if it is not there yet."""
        draft = self.groups[group]
        if position not in draft.nodes:
            draft.nodes[position] = node
            self.member.setdefault(position, []).append(group)
            draft.reductions += row(node).kind == "reduce"

    def replace(self, first: int, second: int, merged: Draft) -> None:
        """Let `merged` stand for both groups, under the number of the first."""
        for position in self.groups.pop(second).nodes:
            holders = self.member[position]
            holders.remove(second)
            if first not in holders:
                holders.append(first)
        self.groups[first] = merged

    def exchange(self, drafts: Mapping[int, Draft]) -> None:
        """Put other drafts in the place of some."""
        for number, draft in drafts.items():
            for position in self.groups[number].nodes:
                self.member[position].remove(number)
            for position in draft.nodes:
                self.member.setdefault(position, []).append(number)
            self.groups[number] = draft

    def lowered(self, draft: Draft) -> Lowered:
        """The draft as a loop program; equations that are still to come are read from memory. Raises NotLowerable."""
        group = draft.group()
        if group not in self.known:
            self.known[group] = lower(self.graph, group, self.layouts, self.hardware)
        return self.known[group]

    def kernel(self, draft: Draft) -> FusedKernel:
        """The kernel of a draft that is as it shall be. Raises NotFusable."""
        group = draft.group()
        try:
            return FusedKernel(group, self.lowered(draft))
        except NotLowerable as error:
            failure = NotFusable(error.what, where=error.where, why=error.why)
            failure.values = frozenset(n.output.name for n in group.nodes if row(n).kind != "view")
            raise failure from error

    def bytes(self, name: str) -> int:
        """Bytes of a value of the graph at the hints' sizes."""
        return self.graph.facts.hint(self.tensors[name].bytes) if name in self.tensors else 0

    def readers(self, value: Value) -> list[int]:
        """The groups that read `value`, through views and whatever else is absorbed on the way."""
        return list(dict.fromkeys(group for position in self.uses(value.name) for group in self.holders(position)))

    def uses(self, name: str) -> list[int]:
        """The positions of the nodes that have a value as operand."""
        return [self.position[id(node)] for node in self.users.get(name, ())]

    def holders(self, position: int) -> list[int]:
        """The groups that a node is in."""
        return self.member.get(position, [])

    def reaches(self, start: Iterable[int], target: int) -> bool:
        """Does a path of dependencies, the order of effects among them, lead from the nodes `start` (outside the group)
        into group `target`?"""
        origin = list(start)
        seen: set[int] = set()
        seen_groups: set[int] = set()
        stack = list(origin)
        while stack:
            position = stack.pop()
            if position in seen:
                continue
            seen.add(position)
            groups = self.holders(position)
            if target in groups and position not in origin:
                return True
            for group in groups:
                if group != target and group not in seen_groups:
                    # everything the group stores comes after any of its nodes
                    seen_groups.add(group)
                    for name in self.groups[group].roots:
                        stack.extend(self.uses(name))
            if position in self.following:
                stack.append(self.following[position])
            # a view may also be an operand of a library call, as a window of what it views
            if not groups or row(self.graph.nodes[position]).kind == "view":
                for output in self.graph.nodes[position].outputs:
                    stack.extend(self.uses(output.name))
        return False

    def leads_to(self, a: int, b: int) -> bool:
        """Is group `b` reached from what `a` stores by way of nodes outside both?"""
        def outside(position: int) -> bool:
            holders = self.holders(position)
            return len(holders) > 1 or not {a, b} & set(holders)

        return self.reaches([p for name in self.groups[a].roots for p in self.uses(name) if outside(p)], b)

    def refuse(self, node: Node, reason: str, bytes_: Size | None = None) -> None:
        """Keep a fusion that is not made, for `explain`; bytes_: what it would have saved, if not the node's result."""
        if len(self.refusals) < MOST_REFUSALS:
            self.refusals.append(RejectedFusion(node.output.name, reason,
                                         node.output.tensor.bytes if bytes_ is None else bytes_))

    def settle(self, name: str) -> None:
        """The value lies where it should after all: forget what was refused before."""
        self.refusals = [refusal for refusal in self.refusals if refusal.value != name]
