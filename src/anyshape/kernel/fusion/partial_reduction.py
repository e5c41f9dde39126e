"""Fusion of partial (split) reductions: lets a kernel that goes along rows also add up over them, so that both read the
data once.

    gx = ... x, g along rows [kernel]                 -->  gx, and sums of x*g over each part of the rows   [kernel]
    gw = sum over rows of x*g, cast to bf16 [kernel]       gw = sum over the parts, cast to bf16            [kernel]

A kernel that reduces over the rows is cut in two where it reduces. What comes before joins a kernel over the same
space, and is reduced over the rows of each part; the rest works on the parts, of which there are few.
"""
from __future__ import annotations

from anyshape.ir.graph import Node, Value
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.kernel.fusion.group_builder import Draft, Drafts, Space
from anyshape.kernel.lowering.group import NotLowerable
from anyshape.kernel.lowering.lower import COMPUTE
from anyshape.sym.expr import Size, ceildiv, minimum, product

PART_ROWS = 32  # at least: what is stored of the parts is small beside the rows
VECTORS = 8  # of a row of a kernel that could do without rows: what a row costs beside its elements does not count


def join_across(drafts: Drafts, limit: int) -> None:
    """Join what can be joined; `limit`: largest number of equations in a group. Raises NotFusable."""
    cuts = {number: cut for number, draft in drafts.groups.items() if (cut := _cut(drafts, draft)) is not None}
    values = _touched(drafts) if cuts else {}
    for number, cut in cuts.items():
        draft = drafts.groups[number]
        found = []
        for other, candidate in drafts.groups.items():
            long = drafts.graph.facts.hint(draft.rows) >= VECTORS * drafts.hardware.vector_lanes
            space = _row_space(candidate, draft, long) if other != number else None
            saved = sum(drafts.bytes(name) for name in values[number] & values[other])
            if space is not None and saved > cut.cost:
                found.append((-saved, other, space))
        for saved, other, space in sorted(found, key=lambda each: each[:2]):
            reason = _join(drafts, other, number, cut, space, limit)
            if not reason:
                values[other] |= values[number]
                break
            for node in cut.reductions:
                drafts.refuse(node, reason, -saved)


class _Cut:
    """A group that reduces over rows, cut where it reduces. before: what the reductions need; reductions; after: the
    rest; each by position in the graph. parts: how many parts the rows fall into."""

    def __init__(self, drafts: Drafts, draft: Draft) -> None:
        inside = {value.name: position for position, node in draft.nodes.items() for value in node.outputs}
        self.positions = [position for position, node in draft.nodes.items() if row(node).kind == "reduce"]
        self.reductions = [draft.nodes[position] for position in self.positions]
        self.before = _needed([v.name for node in self.reductions for v in node.values()], inside, draft, ())
        ends = [node.output.name for node in self.reductions]
        self.after = _needed(list(draft.roots), inside, draft, ends)
        rows = product(size for size, reduced in draft.dims if reduced)
        self.parts = minimum(drafts.hardware.parallelism, ceildiv(rows, PART_ROWS))
        self.stored = [_in_parts(node.output, self.parts) for node in self.reductions]
        hint = drafts.graph.facts.hint
        self.cost = 2 * sum(hint(value.tensor.bytes) for value in self.stored)


def _in_parts(value: Value, parts: Size) -> Value:
    """What stands for a reduction: its result for every part of the rows, in the dtype that kernels compute in."""
    kind = value.tensor
    return Value(f"{value.name} parts", TensorType(COMPUTE.get(kind.dtype, kind.dtype), (parts, *kind.shape), None,
                                                   kind.device))


def _needed(names: list[str], inside: dict[str, int], draft: Draft, ends: list[str] | tuple[()]) -> set[int]:
    """Positions of the equations inside that `names` are computed from, back to `ends`."""
    found: set[int] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        position = inside.get(name)
        if position is None or position in found or name in ends:
            continue
        found.add(position)
        stack.extend(value.name for value in draft.nodes[position].values())
    return found


def _cut(drafts: Drafts, draft: Draft) -> _Cut | None:
    """The group cut in two, if it reduces over leading dims and keeps columns enough."""
    flags = [reduced for size, reduced in draft.dims if size != 1]
    if draft.scatters or not draft.reductions or flags != sorted(flags, reverse=True) or len(set(flags)) < 2:
        return None
    if drafts.graph.facts.hint(draft.rows) < drafts.hardware.vector_lanes:
        return None
    cut = _Cut(drafts, draft)
    if any(position in cut.before for position in cut.positions):
        for node in cut.reductions:
            drafts.refuse(node, "it is reduced over the rows, and so is what it is computed from")
        return None
    if any(value.tensor.count == draft.points for value in draft.roots.values()):
        for node in cut.reductions:
            drafts.refuse(node, "the rows are read again with what is reduced over them")
        return None
    return cut


def _row_space(draft: Draft, other: Draft, long: bool) -> Space | None:
    """The space of `draft` with the columns of `other`, which reduces over the rows, as its columns; long: they are
    many, as far as is known."""
    if draft.scatters or draft.points != other.points:
        return None
    count = product(size for size, reduced in other.dims if reduced)
    if any(reduced for _, reduced in draft.dims):
        flags = [reduced for size, reduced in draft.dims if size != 1]
        return draft.dims if flags == sorted(flags) and draft.rows == count else None
    if not long:
        return None
    for split in range(1, len(draft.dims)):
        if product(size for size, _ in draft.dims[:split]) == count:
            return tuple((size, k >= split) for k, (size, _) in enumerate(draft.dims))
    return None


def _join(drafts: Drafts, a: int, b: int, cut: _Cut, space: Space, limit: int) -> str:
    """Let group `a` compute what `b`, cut, reduces, over the rows of each part; the reason if it cannot."""
    first, second = drafts.groups[a], drafts.groups[b]
    taken = {position: second.nodes[position] for position in (*cut.before, *cut.positions)}
    merged = Draft({**first.nodes, **taken}, first.roots, space, first.reductions + len(cut.positions),
                   sums=(*first.sums, *zip(cut.reductions, cut.stored, strict=True)))
    if len(merged.nodes) > limit:
        return f"the kernel would have more than {limit} equations"
    if len(merged.roots) + len(merged.sums) > drafts.hardware.write_streams:
        return f"the kernel would have more than {drafts.hardware.write_streams} results"
    made = second.roots.keys()
    if any(value.name in made for node in first.nodes.values() for value in node.values()):
        return "the kernel along the rows needs it"
    if drafts.leads_to(a, b) or drafts.leads_to(b, a):
        return "another kernel must run between"
    if len({value.tensor.shape[0] for _, value in merged.sums}) > 1:
        return "the kernel has its rows in other parts"
    try:
        lowered = drafts.lowered(merged)
    except NotLowerable as error:
        return f"{error.what}: {error.why}"
    if any(lowered.asked.get(name, 1) > 1 for name in merged.roots):
        return "the kernel asks for what it stores at other indices than its own"
    nodes = {position: second.nodes[position] for position in cut.after}
    for position, node, value in zip(cut.positions, cut.reductions, cut.stored, strict=True):
        nodes[position] = Node(node.op, (value,), (("dims", (0,)), ("keep", False)), node.outputs, node.where)
    kept = tuple((size, False) for size, reduced in second.dims if not reduced)
    totals = Draft(nodes, second.roots, ((cut.parts, True), *kept), second.reductions)
    try:
        drafts.lowered(totals)
    except NotLowerable as error:
        return f"{error.what}: {error.why}"
    drafts.exchange({a: merged, b: totals})
    for node in cut.reductions:
        drafts.settle(node.output.name)
    return ""


def _touched(drafts: Drafts) -> dict[int, set[str]]:
    """The values in memory that each group reads or writes."""
    return {number: {name for name in drafts.kernel(draft).lowered.values if name}
            for number, draft in drafts.groups.items()}
