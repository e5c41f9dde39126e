"""Topological order of kernels and single nodes: dependencies first, otherwise as near to the program as can be."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from anyshape.ir.graph import Node, has_effect
from anyshape.kernel.fusion.result import FusedKernel, NotFusable, taken_over

Item = FusedKernel | Node
FEW = 16  # kernels that may come before their place, for another that needs them


def ordered(items: Sequence[Item], where: Sequence[int], base: Mapping[str, str]) -> tuple[Item, ...]:
    """Topological order, in which effects keep theirs: the item with the least `where` (place in the graph), after the
    few that it needs and that stand later, so that what nobody needs yet does not run because something small has to
    come first; an item that needs many waits for them.

    base: operand of a library or extern call -> the stored value that it is a window of. Raises NotFusable when the
    kernels depend on each other in a circle.
    """
    maker = {name: k for k, item in enumerate(items) for name in _makes(item)}
    before = [{maker[name] for name in _reads(item, base) if name in maker and maker[name] != k}
              for k, item in enumerate(items)]
    effects = [k for k, item in enumerate(items) if isinstance(item, Node) and has_effect(item)]
    effects.sort(key=where.__getitem__)
    for one, other in pairwise(effects):
        before[other].add(one)
    waiting = sorted(range(len(items)), key=lambda k: (where[k], k))
    place = {k: number for number, k in enumerate(waiting)}
    done: set[int] = set()
    result: list[Item] = []
    while waiting:
        for most in (FEW, len(items)):
            needed = next((some for k in waiting if (some := _needed(k, before, done, most)) is not None), None)
            if needed is not None:
                break
        else:
            raise NotFusable("the kernels depend on each other in a circle")
        while needed:
            ready = [k for k in needed if before[k] <= done]
            if not ready:
                raise NotFusable("the kernels depend on each other in a circle")
            k = min(ready, key=place.__getitem__)
            needed.remove(k)
            done.add(k)
            waiting.remove(k)
            result.append(items[k])
    return tuple(result)


def _needed(item: int, before: Sequence[set[int]], done: set[int], most: int) -> set[int] | None:
    """The item with those not done that it needs, at most so many; None: there are more."""
    found = {item}
    stack = [item]
    while stack:
        for other in before[stack.pop()]:
            if other not in done and other not in found:
                if len(found) > most:
                    return None
                found.add(other)
                stack.append(other)
    return found


def _reads(item: Item, base: Mapping[str, str]) -> list[str]:
    if isinstance(item, FusedKernel):
        stored = {v.name for v in item.group.stored}
        taken = [base.get(v.name, v.name) for v in taken_over(item)]
        return [*taken, *(name for name in item.lowered.values if name and name not in stored)]
    return [base.get(v.name, v.name) for v in item.values()]


def _makes(item: Item) -> list[str]:
    return [v.name for v in (item.group.stored if isinstance(item, FusedKernel) else item.outputs)]
