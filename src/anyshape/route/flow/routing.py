"""Transfer rules of the routing operators: cells keep their identity through a router whose branches keep rows apart.

Rows stand in the order of their cells here, row i * k + j for choice j of cell i; at run time the plan sorts them.
Where every row of a body comes from its own row alone, the sort and its inverse cancel. Where that is not proved (`apart`), a
result may be of any cell. A branch stands for any load: it is given all rows.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from anyshape.route.flow.call import Call, Value, union
from anyshape.route.flow.owners import TOP, uniform
from anyshape.route.flow.regions import Region, scale_of


def transfer(call: Call, name: str, node: Node, apart: Mapping[Node, Region], ids: Value | None,
             size: Callable[[Any], int]) -> list[Tensor] | None:
    """Owners of the results of a routing operator; None: it is not known here.

    apart: regions proved to keep rows apart, by the nodes of their plans. ids: of the region of a combine. size: the
    number that a size stands for.
    """
    first = call.args[0]
    if name == "route_plan":
        return [uniform(union(call.sets, [first]), len(shape)) for shape in call.shapes]
    if name == "dispatch":
        return [first.owners.repeat_interleave(call.named["choices"], 0) if first.owners.shape[0] > 1 else first.owners]
    if name == "combine":
        return _combined(call, ids)
    if name == "merge_rows":
        return [call.sets.join(*(part.owners for part in first))]
    if name in ("split_rows", "grouped_linear", "grouped_take") and not _own_ends(node, apart, call, size):
        return [uniform(union(call.sets, call.values()), len(shape)) for shape in call.shapes]
    if name == "split_rows":
        return [first.owners] * len(call.shapes)
    if name == "grouped_linear":
        others = [one for one in (call.named["weight"], call.named["bias"]) if isinstance(one, Value)]
        rows = call.sets.reduce(first.owners, (1,))
        return [call.sets.join(rows, uniform(union(call.sets, others), 2))]
    if name == "grouped_take":
        return [uniform(union(call.sets, [first]), len(call.shapes[0]))]
    return None


def _own_ends(node: Node, apart: Mapping[Node, Region], call: Call, size: Callable[[Any], int]) -> bool:
    """Whether the ends that an operator reads are those of a plan of which its rows are."""
    name = _named(node)
    ends = node.args[2] if name == "grouped_linear" else node.args[1]
    rows = call.shapes[0][0]
    for region in apart.values():
        factor = scale_of(ends, region)
        if factor is not None and region.order is not None:
            return size(region.order.meta["val"].shape[0]) * factor == rows
    return False


def _named(node: Node) -> str:
    return str(node.target.name()).split("::")[1].split(".")[0]  # type: ignore[union-attr,operator]


def _combined(call: Call, ids: Value | None) -> list[Tensor]:
    rows, choices, shape = call.args[0], int(call.named["choices"]), call.shapes[0]
    weights = call.named.get("weights")
    others = [one for one in (ids, weights) if isinstance(one, Value)]
    if ids is None:  # rows are not apart, or the plan is not known
        return [uniform(TOP, len(shape))]
    owners = rows.owners
    if owners.shape[0] > 1:
        grouped = owners.reshape(-1, choices, *owners.shape[1:])
        owners = call.sets.reduce(grouped, (1,)).squeeze(1)
    for one in others:
        own = call.sets.reduce(one.owners.reshape(one.owners.shape[0], -1), (1,))
        owners = call.sets.join(owners, own.reshape(-1, *(1,) * (len(shape) - 1)))
    return [owners]
