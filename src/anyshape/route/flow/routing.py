"""Transfer rules of the routing operators: cells keep their identity through a router whose branches keep rows apart.

Rows stand in the order of their cells here, row i * k + j for choice j of cell i; at run time the plan sorts them.
Where every row of a body comes from its own row alone, the sort and its inverse cancel. Where that is not proved
(`apart`), a result may be of any cell. A branch stands for any load: it is given all rows.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from anyshape.route.flow.call import OperatorCall, TensorValue, union
from anyshape.route.flow.owners import TOP, uniform
from anyshape.route.flow.regions import RouterCall, scale_of

ENDS = {"split_rows": 1, "grouped_take": 1, "grouped_linear": 2, "grouped_conv": 2}  # the place of the argument


def transfer(call: OperatorCall, name: str, node: Node, apart: Mapping[Node, RouterCall], ids: TensorValue | None,
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
    if name in ENDS and not _own_ends(node, apart, call, size):
        return [uniform(union(call.sets, call.values()), len(shape)) for shape in call.shapes]
    if name == "split_rows":
        return [first.owners] * len(call.shapes)
    if name in ("grouped_linear", "grouped_conv"):
        others = [one for one in (call.named["weight"], call.named["bias"]) if isinstance(one, TensorValue)]
        rows = call.sets.reduce(first.owners, range(1, first.rank))
        return [call.sets.join(rows, uniform(union(call.sets, others), first.rank))]
    if name == "grouped_take":
        if ids is None:
            return [uniform(TOP, len(call.shapes[0]))]
        each = call.shapes[0][0] // max(torch.Size(ids.shape).numel(), 1)  # its row's branch is what its id says
        own = ids.owners.expand(ids.shape).reshape(-1).repeat_interleave(max(each, 1))
        own = call.sets.join(own, uniform(union(call.sets, [first]), 1))
        return [own.reshape(-1, *(1,) * (len(call.shapes[0]) - 1))]
    return None


def _own_ends(node: Node, apart: Mapping[Node, RouterCall], call: OperatorCall, size: Callable[[Any], int]) -> bool:
    """Whether the ends that an operator reads are those of a plan of which its rows are."""
    ends = node.args[ENDS[_named(node)]]
    rows = call.shapes[0][0]
    for region in apart.values():
        factor = scale_of(ends, region)
        if factor is not None and region.order is not None and node in region.body:
            return size(region.order.meta["val"].shape[0]) * factor == rows
    return False


def _named(node: Node) -> str:
    return str(node.target.name()).split("::")[1].split(".")[0]  # type: ignore[union-attr,operator]


def _combined(call: OperatorCall, ids: TensorValue | None) -> list[Tensor]:
    rows, choices, shape = call.args[0], int(call.named["choices"]), call.shapes[0]
    weights = call.named.get("weights")
    others = [one for one in (ids, weights) if isinstance(one, TensorValue)]
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
