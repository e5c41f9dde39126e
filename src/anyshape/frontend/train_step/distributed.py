"""Distributed train step: the traced step is partitioned by a strategy, and every rank compiles and runs its part."""
from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from anyshape.dist.strategies import Roles
from anyshape.frontend.train_step.program import ROLE
from anyshape.ir.graph import Graph
from anyshape.ir.types import TensorType


def roles_of(gm: GraphModule, graph: Graph, static: Sequence[int], names: Sequence[str]) -> Roles:
    """What the inputs of a step's graph are.

    Args:
        gm: the traced step with its update; `graph` was made of it.
        static: places of inputs that stay at one address: all but the batch.
        names: of the parameters, in the order of the update.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    marks = [str(node.meta.get(ROLE, "")).split() for node in nodes]
    inputs = graph.inputs[:len(nodes)]
    owners = {mark[1]: value.name for mark, value in zip(marks, inputs, strict=True) if mark[:1] == ["weight"]}
    weights = {value: names[int(number)] for number, value in owners.items()}
    states = {value.name: owners[mark[1]] for mark, value in zip(marks, inputs, strict=True) if mark[:1] == ["state"]}
    data = tuple(value.name for place, value in enumerate(inputs)
                 if place not in static and isinstance(value.type, TensorType))
    return Roles(weights, states, data)
