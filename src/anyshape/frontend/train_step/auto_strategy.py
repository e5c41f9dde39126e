"""Automatic strategy: what the search found (`anyshape.strategy`), as a strategy that processes run.

    data=16 tensor=8 cut+sequence fsdp   -->   mesh(fsdp=16, tensor=8), fsdp along the one and sp along the other

`strategy="auto"` searches at the first step, when there is a batch, among strategies that deal out batches: each rank
gives its own rows, so none may share them. Rank 0 searches, and the others take over what it found.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.dist.cost.strategy import Strategy as Found
from anyshape.dist.cost.strategy import strategy_of as found_of
from anyshape.dist.mesh import Axis, Mesh
from anyshape.dist.strategies import Strategy
from anyshape.frontend.strategy import StrategySearch, strategy
from anyshape.torch_compat.tree import tree_map_only

AUTO = "auto"
ROWS = {"tensor": 1, "context": 1, "pipe": 1}  # axes along which ranks would share rows, or layers
# by the search's words for a layer's data parallelism; those of a step are one for all layers, the last in this order
KINDS = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero1", "hsdp": "fsdp", "fsdp": "fsdp"}


def runnable(found: Found) -> Strategy:
    """The strategy of processes that a search's result stands for.

    Raises:
        ConfigError: it has axes that steps do not run along.
    """
    degrees = found.degrees
    cuts = {layer.choice.tensor for layer in found.layers}
    if degrees.pipe > 1 or degrees.context > 1 or (degrees.tensor > 1 and "sequence" in cuts):
        raise ConfigError("the strategy that was found is not run by this version", why=found.summary,
                          do='search with mesh={"pipe": 1, "context": 1}, and override(placement="cut")')
    axes, kinds = [], []
    if degrees.data > 1 or degrees.tensor == 1:
        kind = max((KINDS[layer.choice.data] for layer in found.layers), key=list(KINDS.values()).index, default="ddp")
        axes.append(Axis("fsdp" if kind == "fsdp" else "data", degrees.data))
        kinds.append(kind)
    if degrees.tensor > 1:
        axes.append(Axis("tensor", degrees.tensor))
        kinds.append("sp" if degrees.sequence else "tp")
    return Strategy(Mesh(tuple(axes)), tuple(kinds))


def searched(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Sequence[Any],
             memory_limit: int | None) -> Strategy:
    """What rank 0 finds for batches such as its own; all ranks call this.

    Raises:
        AnyShapeError: the search failed on rank 0; raised on all ranks.
    """
    world = dist.get_world_size()
    said: list[Any] = [None, None]
    if dist.get_rank() == 0:
        whole = tree_map_only(Tensor, lambda one: one.repeat(world, *[1] * (one.dim() - 1)) if one.dim() else one,
                              tuple(batch))
        try:
            search: StrategySearch = strategy(model, loss_fn, optimizer, whole, mesh=ROWS, world=world, machine="cpu",
                                              memory_limit=memory_limit or 0)
            said = [str(search.found.best.plan.strategies[-1]), None]
        except AnyShapeError as error:
            said = [None, str(error)]
    dist.broadcast_object_list(said, 0)
    if said[1] is not None:
        raise ConfigError("no strategy was found", why=said[1].replace("\n", " "), do="name one, such as \"ddp\"")
    return runnable(found_of(said[0]))
