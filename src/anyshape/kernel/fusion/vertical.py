"""Vertical (producer-consumer) fusion: a scored search, from the results backwards, for the equations that become one
kernel.

    m = amax(x) ... y = div(e, s)      -->      groups [amax sub exp sum div -> y]

Equations are visited last to first. One whose every reader is in a single group joins that group (a reduction only
when the group can still be lowered). One with readers in several groups is computed again in each when that moves
fewer bytes than storing it, else stored: inside one of the reading groups when its index there is the group's own, or
in a group of its own. Views and constants never stand alone: readers absorb them. Refused fusions are kept,
with their reason and the bytes they would have saved, for `explain`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.kernel.fusion.group_builder import Draft, Drafts, Space
from anyshape.kernel.fusion.horizontal import merge_siblings
from anyshape.kernel.fusion.partial_reduction import join_across
from anyshape.kernel.fusion.result import FusedKernel, Fusion, FusionBlocklist, fusable
from anyshape.kernel.fusion.topological_order import ordered
from anyshape.kernel.lowering.group import NotLowerable
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import Size, product

SMALL_PART = 8  # so many times smaller than what it selects from is a small part
DEEPEST = 32  # equations of a chain that are weighed together, where it would be computed again


def fuse(graph: Graph, required: Mapping[str, Value], layouts: Mapping[str, TensorType],
         base: Mapping[str, str], *, hardware: HardwareParams, limit: int, refused: FusionBlocklist,
         enabled: bool = True) -> Fusion:
    """Group the fusable equations of `graph`.

    required: the values that must be stored in memory (results, operands of library and extern calls,
        what scatters write into).
    layouts: types of stored values whose strides are not dense.
    base: operand of a library or extern call -> the stored value that it is a window of.
    hardware: of the target.
    limit: largest number of equations in a group.

    Raises NotFusable; the caller may try again with its values refused.
    """
    native = [fusable(node, refused) for node in graph.nodes]
    search = _Search(Drafts(graph, layouts, hardware), required, limit, enabled, native)
    for position in range(len(graph.nodes) - 1, -1, -1):
        if native[position]:
            search.place(position, graph.nodes[position])
    drafts = search.drafts
    if enabled:
        merge_siblings(drafts, limit)
        join_across(drafts, limit)
        drop_unread(drafts, required)
    items: list[FusedKernel | Node] = []
    where: list[int] = []
    for draft in drafts.groups.values():
        items.append(drafts.kernel(draft))
        where.append(_place(drafts, draft))
    for position, node in enumerate(graph.nodes):
        if not native[position] and (row(node).kind != "view" or node.output.name in required):
            items.append(node)
            where.append(position)
    return Fusion(ordered(items, where, base), tuple(drafts.refusals))


def drop_unread(drafts: Drafts, required: Mapping[str, Value]) -> None:
    """Let no group store what nothing reads from memory: all readers may have come into the group after it was to be
    stored."""
    spare = [(draft, name) for draft in drafts.groups.values() for name in draft.roots if name not in required]
    if not spare:
        return
    loaded = {name for draft in drafts.groups.values()
              for name in drafts.kernel(draft).lowered.values if name not in draft.roots}
    for draft, name in spare:
        if name not in loaded and len(draft.roots) + len(draft.sums) > 1:
            del draft.roots[name]
            drafts.settle(name)


def _place(drafts: Drafts, draft: Draft) -> int:
    """The place in the graph that a kernel stands for; what adds up parts follows the kernel that makes them."""
    read = {value.name for node in draft.nodes.values() for value in node.values()}
    for other in drafts.groups.values():
        if any(value.name in read for _, value in other.sums):
            return _place(drafts, other)
    names = [*draft.roots] or [node.output.name for node, _ in draft.sums]
    return min(drafts.position[id(drafts.producers[name])] for name in names)


class _Search:
    """Finds the place of one equation after another."""

    def __init__(self, drafts: Drafts, required: Mapping[str, Value], limit: int, enabled: bool,
                 native: Sequence[bool]) -> None:
        self.drafts = drafts
        self.native = native
        self.required = required
        self.limit = limit
        self.enabled = enabled
        self.hint = drafts.graph.facts.hint

    def place(self, position: int, node: Node) -> None:
        """Put a node into the groups that read it, or into a new one; nowhere when nobody needs it."""
        value = node.output
        groups = self.drafts.readers(value)
        needed = value.name in self.required
        if not groups and not needed:
            return
        if row(node).kind in ("scatter", "scan"):
            space = _scatter_space(node) if row(node).kind == "scatter" else _scan_space(node)
            draft = Draft({}, {value.name: value}, space, scatters=True)
            self.drafts.add(self.drafts.start(draft), position, node)
            return
        if not self.ends_a_life(groups, position, node):
            if not needed and self.absorbed(groups, position, node):
                return
            if self.enabled and self.join_as_root(groups, position, node):
                return
        dims = _own_space(node) if row(node).kind == "reduce" else tuple((size, False) for size in value.tensor.shape)
        self.drafts.add(self.drafts.start(Draft({}, {value.name: value}, dims)), position, node)

    def ends_a_life(self, groups: list[int], position: int, node: Node) -> bool:
        """Does the node select a small part of a large value (a gather), which would be kept for it until a library or
        extern call that comes later has run? Such as a gate's scores for the weights of the combine."""
        if row(node).kind != "index" or not self.enabled:
            return False
        large = sum(self.hint(value.tensor.bytes) for value in node.values() if value.name in self.drafts.producers)
        if SMALL_PART * self.hint(node.output.tensor.bytes) > large:
            return False
        read = {value.name for group in groups for one in self.drafts.groups[group].nodes.values()
                for value in one.values()}
        producers = [self.drafts.producers[name] for name in read if name in self.drafts.producers]
        if not any(self.drafts.position[id(one)] > position and not self.native[self.drafts.position[id(one)]]
                   for one in producers):
            return False
        self.drafts.refuse(node, "what it selects from would be kept until the kernel runs")
        return True

    def absorbed(self, groups: list[int], position: int, node: Node) -> bool:
        """Can the value be left unstored? Then the node is now in every group that reads it."""
        kind = row(node).kind
        everywhere = kind in ("view", "create")
        if self.enabled and not everywhere:
            if not any(isinstance(operand, Value) for operand in node.inputs):
                everywhere = True
            elif len(groups) == 1:
                return self.pull(groups[0], position, node)
            else:
                everywhere = kind != "reduce" and self.cheap_to_repeat(node, len(groups)) and all(
                    self.may_join(group, node) for group in groups)
        if everywhere:
            for group in groups:
                self.drafts.add(group, position, node)
        return everywhere

    def is_full(self, group: int, node: Node) -> bool:
        full = len(self.drafts.groups[group].nodes) >= self.limit
        if full:
            self.drafts.refuse(node, f"the kernel already has {self.limit} equations")
        return full

    def may_join(self, group: int, node: Node) -> bool:
        """Would inlining the pointwise `node` into the group repeat little work?"""
        draft = self.drafts.groups[group]
        if self.is_full(group, node):
            return False
        count = node.output.tensor.count
        if count in (draft.points, draft.rows) or self.inline_cost(node) < self.drafts.hardware.free_operations:
            return True
        if self.hint(count) * 2 > self.hint(draft.points):
            return True
        self.drafts.refuse(node, "it would be computed again for every row that reads it")
        return False

    def inline_cost(self, node: Node, depth: int = 3) -> int:
        """Operations per element, with the operands that would follow."""
        cost = row(node).cost
        if depth:
            for value in node.values():
                producer = self.drafts.producers.get(value.name)
                if producer is not None and row(producer).kind in ("pointwise", "index", "view"):
                    if len(self.drafts.users.get(value.name, ())) == 1:
                        cost += self.inline_cost(producer, depth - 1)
        return cost

    def cheap_to_repeat(self, node: Node, copies: int) -> bool:
        """Do `copies` evaluations move fewer bytes than one evaluation, a store, and `copies` loads? What leads to the
        node counts, too: it would be evaluated as often, or be stored in the place of the node."""
        if self.repeated(node, copies, DEEPEST) <= (1 + copies) * self.hint(node.output.tensor.bytes):
            return True
        self.drafts.refuse(node, f"{copies} kernels read it; storing it moves fewer bytes than computing it in each")
        return False

    def repeated(self, node: Node, copies: int, depth: int) -> float:
        """Bytes that `copies` evaluations of a node move more than one does, with the time of its operations as bytes.
        depth: so many equations before it are looked at; earlier ones count as stored."""
        work = row(node).cost * self.drafts.hardware.bytes_per_operation * self.hint(node.output.tensor.count)
        found = (copies - 1) * work
        for value in {value.name: value for value in node.values()}.values():
            found += self.provided(value, copies, depth)
        return found

    def provided(self, value: Value, copies: int, depth: int) -> float:
        """The same of having an operand in `copies` groups: each loads what is stored, or computes it; or it is stored
        for them."""
        loads = (copies - 1) * self.hint(value.tensor.bytes)
        while (view := self.single(value)) is not None and row(view).kind == "view":
            (value,) = view.values()
            loads = min(loads, (copies - 1) * self.hint(value.tensor.bytes))
        node = self.single(value)
        if node is None or depth == 0 or row(node).kind not in ("pointwise", "index"):
            return loads
        stored = (1 + copies) * self.hint(value.tensor.bytes)
        return max(loads, min(stored, self.repeated(node, copies, depth - 1)))

    def single(self, value: Value) -> Node | None:
        """The equation of a value that one equation reads and no step needs, where a kernel may compute it."""
        node = self.drafts.producers.get(value.name)
        if node is None or value.name in self.required or len(self.drafts.users.get(value.name, ())) != 1:
            return None
        return node if self.native[self.drafts.position[id(node)]] else None

    def pull(self, group: int, position: int, node: Node) -> bool:
        """Put a node whose only readers are in `group` into it."""
        if row(node).kind != "reduce":
            if not self.may_join(group, node):
                return False
            self.drafts.add(group, position, node)
            return True
        if self.is_full(group, node):
            return False
        draft = self.drafts.groups[group]
        for dims in _spaces(draft, node):
            if self.asked(draft.having(position, node, dims), node) is not None:
                draft.dims = dims
                self.drafts.add(group, position, node)
                return True
        return False

    def asked(self, trial: Draft, node: Node) -> Mapping[str, int] | None:
        """At how many indices the trial group asks for each of its values; None when it cannot be lowered."""
        try:
            return self.drafts.lowered(trial).asked
        except NotLowerable as error:
            self.drafts.refuse(node, f"{error.what}: {error.why}")
            return None

    def join_as_root(self, groups: list[int], position: int, node: Node) -> bool:
        """Store the node's result from inside a group that computes over the same space."""
        value = node.output
        for group in sorted(groups, key=lambda g: -len(self.drafts.groups[g].nodes)):
            draft = self.drafts.groups[group]
            full = len(draft.nodes) >= self.limit or len(draft.roots) >= self.drafts.hardware.write_streams
            if full or self.makes_cycle(group, value):
                continue
            for dims in _root_spaces(draft, node):
                asked = self.asked(draft.having(position, node, dims, value), node)
                if asked is None:
                    continue
                if asked.get(value.name, 1) > 1:
                    self.drafts.refuse(node, "the readers ask for it at other indices than the kernel's own")
                    continue
                draft.dims = dims
                draft.roots[value.name] = value
                self.drafts.add(group, position, node)
                return True
        return False

    def makes_cycle(self, group: int, value: Value) -> bool:
        """If `value` were stored by `group`: does another reader of it run before the group?"""
        uses = [(position, self.drafts.holders(position)) for position in self.drafts.uses(value.name)]
        others = [position for position, holders in uses if group not in holders or len(holders) > 1]
        return self.drafts.reaches(others, group)


def _own_space(node: Node) -> Space:
    """The space of a reduction by itself."""
    reduced = node.attr("dims")
    assert isinstance(reduced, tuple)
    return tuple((size, d in reduced) for d, size in enumerate(next(node.values()).tensor.shape))


def _scatter_space(node: Node) -> Space:
    """The elements that a scatter writes; those that may meet are taken one after another."""
    source, meeting = node.inputs[1], row(node).meeting
    assert isinstance(source, Value) and meeting is not None
    return tuple((size, d in meeting(node)) for d, size in enumerate(source.tensor.shape))


def _scan_space(node: Node) -> Space:
    """The elements of a scan; those along its dim are taken in order."""
    return tuple((size, d == node.attr("dim")) for d, size in enumerate(node.output.tensor.shape))


def _spaces(draft: Draft, node: Node) -> list[Space]:
    """Iteration spaces in which the group could hold the reduction."""
    if draft.scatters and any(reduced for _, reduced in draft.dims):
        return []
    if draft.reductions:
        return [draft.dims] if draft.points == next(node.values()).tensor.count else []
    own = Draft({}, {}, _own_space(node))
    return [own.dims] if draft.points in (own.points, own.rows) else []


def _root_spaces(draft: Draft, node: Node) -> list[Space]:
    """Iteration spaces in which the group could store the result of the node."""
    count = node.output.tensor.count
    if draft.scatters:
        return []
    if row(node).kind == "reduce":
        return _spaces(draft, node)
    if draft.reductions:
        # a strip of rows runs through all columns: storing every point from it would tear them apart
        torn = count == draft.points and not draft.dims[-1][1]
        return [draft.dims] if not torn and count in (draft.points, draft.rows) else []
    return [draft.dims] if count == draft.points else _with_rows(draft.dims, count)


def _with_rows(dims: Space, count: Size) -> list[Space]:
    """The space with its trailing dimensions as columns, so that it has `count` rows; none if it cannot be."""
    for split in range(1, len(dims)):
        if product(size for size, _ in dims[:split]) == count:
            return [tuple((size, k >= split) for k, (size, _) in enumerate(dims))]
    return []
