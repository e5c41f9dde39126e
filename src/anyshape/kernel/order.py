"""The order in which kernels and single nodes run: dependencies first, otherwise as near to the program as can be."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyshape.ir.graph import Node
from anyshape.kernel.fusion import Kernel, NotFusable, taken_over

Item = Kernel | Node


def ordered(items: Sequence[Item], where: Sequence[int], base: Mapping[str, str]) -> tuple[Item, ...]:
    """Topological order: by `where` (place in the graph), each item right after those that it needs and that stand
    later. So what nobody needs yet does not run because something else has to wait.

    base: operand of a library or extern call -> the stored value that it is a window of. Raises NotFusable when the
    kernels depend on each other in a circle.
    """
    maker = {name: k for k, item in enumerate(items) for name in _makes(item)}
    before = [sorted({maker[name] for name in _reads(item, base) if name in maker and maker[name] != k},
                     key=lambda other: (-where[other], -other)) for k, item in enumerate(items)]
    done: set[int] = set()
    begun: set[int] = set()
    result: list[Item] = []
    for first in sorted(range(len(items)), key=lambda k: (where[k], k)):
        stack = [first]
        while stack:
            k = stack[-1]
            missing = [other for other in before[k] if other not in done]
            if k in done or not missing:
                stack.pop()
                if k not in done:
                    done.add(k)
                    result.append(items[k])
                continue
            if k in begun:
                raise NotFusable("the kernels depend on each other in a circle")
            begun.add(k)
            stack += missing
    return tuple(result)


def _reads(item: Item, base: Mapping[str, str]) -> list[str]:
    if isinstance(item, Kernel):
        stored = {v.name for v in item.group.stored}
        taken = [base.get(v.name, v.name) for v in taken_over(item)]
        return [*taken, *(name for name in item.lowered.values if name and name not in stored)]
    return [base.get(v.name, v.name) for v in item.values()]


def _makes(item: Item) -> list[str]:
    return [v.name for v in (item.group.stored if isinstance(item, Kernel) else item.outputs)]
