"""The order in which kernels and single nodes run: dependencies first, otherwise as near to the program as can be."""
from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from anyshape.ir.graph import Node
from anyshape.kernel.fusion import Kernel, NotFusable, taken_over

Item = Kernel | Node


def ordered(items: Sequence[Item], where: Sequence[int], base: Mapping[str, str]) -> tuple[Item, ...]:
    """Topological order; among items that are ready the one with the least `where` (place in the graph).

    base: operand of a library or extern call -> the stored value that it is a window of. Raises NotFusable when the
    kernels depend on each other in a circle.
    """
    maker = {name: k for k, item in enumerate(items) for name in _makes(item)}
    waiting: list[int] = []
    followers: dict[int, list[int]] = {}
    for k, item in enumerate(items):
        before = dict.fromkeys(maker[name] for name in _reads(item, base) if name in maker and maker[name] != k)
        waiting.append(len(before))
        for other in before:
            followers.setdefault(other, []).append(k)
    ready = [(where[k], k) for k in range(len(items)) if not waiting[k]]
    heapq.heapify(ready)
    result: list[Item] = []
    while ready:
        _, k = heapq.heappop(ready)
        result.append(items[k])
        for follower in followers.get(k, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (where[follower], follower))
    if len(result) != len(items):
        raise NotFusable("the kernels depend on each other in a circle")
    return tuple(result)


def _reads(item: Item, base: Mapping[str, str]) -> list[str]:
    if isinstance(item, Kernel):
        stored = {v.name for v in item.group.stored}
        taken = [base.get(v.name, v.name) for v in taken_over(item)]
        return [*taken, *(name for name in item.lowered.values if name and name not in stored)]
    return [base.get(v.name, v.name) for v in item.values()]


def _makes(item: Item) -> list[str]:
    return [v.name for v in (item.group.stored if isinstance(item, Kernel) else item.outputs)]
