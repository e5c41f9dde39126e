"""Joins kernels that read the same memory over the same space, where no third must run between (horizontal fusion).

    a = exp(x)   [kernel]      b = neg(x)   [kernel]      -->      a, b   [one kernel; x is read once]

Pairs are tried by the bytes that they share, most first. Two are left apart where a library's step that reads the one
comes before a step that the other waits for: its operand would lie in memory all that time. So are two that share a
number or two, where what the one alone reads would have to wait for the other (gradients, and one factor for all).
"""
from __future__ import annotations

from anyshape.ir.op import row
from anyshape.kernel.fusion.group_builder import Draft, Drafts
from anyshape.kernel.lowering.group import NotLowerable
from anyshape.sym.expr import Size

MOST_READERS = 16  # of one value, of which all pairs are looked at


def merge_siblings(drafts: Drafts, limit: int) -> None:
    """Join what can be joined; `limit`: largest number of equations in a group. Raises NotFusable."""
    owner = list(range(len(drafts.groups)))
    for (first, second), saved in sorted(_shared(drafts).items(), key=lambda item: (-item[1], item[0])):
        first, second = _find(owner, first), _find(owner, second)
        if first != second and saved and _merge(drafts, first, second, limit, saved):
            owner[second] = first


def _shared(drafts: Drafts) -> dict[tuple[int, int], int]:
    """The bytes, at the hints' sizes, that two groups over one space both read or write."""
    readers: dict[str, list[int]] = {}
    spaces: dict[int, tuple[Size, Size, bool]] = {}
    for group, draft in drafts.groups.items():
        spaces[group] = (draft.points, draft.rows, bool(draft.dims) and draft.dims[-1][1])
        for name in drafts.kernel(draft).lowered.values:
            if name:
                readers.setdefault(name, []).append(group)
    shared: dict[tuple[int, int], int] = {}
    for name, groups in readers.items():
        for position, first in enumerate(groups[:MOST_READERS]):
            for second in groups[position + 1:MOST_READERS]:
                if spaces[first] == spaces[second]:
                    shared[first, second] = shared.get((first, second), 0) + drafts.bytes(name)
    return shared


def _merge(drafts: Drafts, a: int, b: int, limit: int, saved: int) -> bool:
    """Make groups `a` and `b` one, which saves so many bytes, if no third kernel must run between them and the result
    can be lowered."""
    first, second = drafts.groups[a], drafts.groups[b]
    merged = Draft({**first.nodes, **second.nodes}, {**first.roots, **second.roots}, first.dims,
                   first.reductions + second.reductions)
    if first.scatters or second.scatters:
        return False
    if len(merged.nodes) > limit or len(merged.roots) > drafts.hardware.write_streams:
        return False
    if any(reduced for _, reduced in first.dims) != any(reduced for _, reduced in second.dims):
        return False
    if first.by_strips and any(value.tensor.count == first.points for value in merged.roots.values()):
        return False
    if drafts.leads_to(a, b) or drafts.leads_to(b, a) or _delays(drafts, first, second):
        return False
    # to read a cache line twice is nothing
    small = saved <= drafts.hardware.cache_line_bytes
    if small and max(_held(drafts, a, b), _held(drafts, b, a)) > drafts.hardware.launch_bytes:
        return False
    try:
        lowered = drafts.lowered(merged)
    except NotLowerable:
        return False
    if any(lowered.asked.get(name, 1) > 1 for name in merged.roots):
        return False
    drafts.replace(a, b, merged)
    return True


def _delays(drafts: Drafts, first: Draft, second: Draft) -> bool:
    """Would a step outside of all groups that reads what one of the two stores have to wait for one that makes what the
    other reads, and that comes later?"""
    return any(_reader(drafts, one) < _maker(drafts, other) for one, other in ((first, second), (second, first)))


def _held(drafts: Drafts, a: int, b: int) -> int:
    """Bytes, at the hints' sizes, that only group `a` reads and that would have to wait for a step outside of all
    groups that group `b` waits for."""
    draft = drafts.groups[a]
    if _maker(drafts, draft) >= _maker(drafts, drafts.groups[b]):
        return 0
    return sum(drafts.bytes(name) for name in dict.fromkeys(drafts.kernel(draft).lowered.values)
               if name in drafts.producers and name not in draft.roots
               and all(drafts.holders(position) == [a] for position in drafts.uses(name)))


def _reader(drafts: Drafts, draft: Draft) -> int:
    """The position of the first step outside of groups that reads what a group stores, through views; or the end."""
    first, waiting = len(drafts.graph.nodes), list(draft.roots)
    while waiting:
        for position in drafts.uses(waiting.pop()):
            node = drafts.graph.nodes[position]
            if row(node).kind == "view":
                waiting += [value.name for value in node.outputs]
            elif not drafts.holders(position):
                first = min(first, position)
    return first


def _maker(drafts: Drafts, draft: Draft) -> int:
    """The position of the last step outside of groups that makes what a group reads, through views; -1 for none."""
    last, seen = -1, set(draft.nodes)
    waiting = [value.name for node in draft.nodes.values() for value in node.values()]
    while waiting:
        made = drafts.producers.get(waiting.pop())
        position = drafts.position[id(made)] if made is not None else -1
        if made is None or position in seen:
            continue
        seen.add(position)
        if row(made).kind == "view":
            waiting += [value.name for value in made.values()]
        elif not drafts.holders(position):
            last = max(last, position)
    return last


def _find(owner: list[int], group: int) -> int:
    while owner[group] != group:
        group = owner[group]
    return group
