"""Automatic strategy of a step: `strategy="auto"`.

It searches at the first step, when there is a batch, among strategies that deal out batches: each rank
gives its own rows, so none may share them. Rank 0 searches, and the others take over what it found.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape.dist.cost.machine import machine_of
from anyshape.dist.cost.strategy import strategy_of as found_of
from anyshape.dist.strategies import Strategy
from anyshape.frontend.strategy import StrategySearch, strategy
from anyshape.frontend.strategy.runnable import runnable
from anyshape.torch_compat.tree import tree_map_only

AUTO = "auto"
MACHINE = "cpu"
ROWS = {"tensor": 1, "context": 1, "pipe": 1}  # axes along which ranks would share rows, or layers


@dataclass(frozen=True, slots=True)
class Searched:
    """What was found: a strategy that processes run, and on rank 0 the search with all that it tried."""

    strategy: Strategy
    search: StrategySearch | None


def search_rows(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Sequence[Any],
                world: int, memory_limit: int | None) -> StrategySearch:
    """The search over strategies that deal out rows. batch: what one of `world` ranks gives to a step.

    Raises:
        AnyShapeError: the step cannot be traced, or nothing keeps to the limit.
    """
    whole = tree_map_only(Tensor, lambda one: one.repeat(world, *[1] * (one.dim() - 1)) if one.dim() else one,
                          tuple(batch))
    return strategy(model, loss_fn, optimizer, whole, mesh=ROWS, world=world, machine=MACHINE,
                    memory_limit=memory_limit or 0)


def searched(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Sequence[Any],
             memory_limit: int | None) -> Searched:
    """What rank 0 finds for batches such as its own; all ranks call this.

    Raises:
        ConfigError: the search failed on rank 0; raised on all ranks.
    """
    said: list[Any] = [None, None]
    search = None
    if dist.get_rank() == 0:
        try:
            search = search_rows(model, loss_fn, optimizer, batch, dist.get_world_size(), memory_limit)
            said = [str(search.found.best.plan.strategies[-1]), None]
        except AnyShapeError as error:
            said = [None, str(error)]
    dist.broadcast_object_list(said, 0)
    if said[1] is not None:
        raise ConfigError("no strategy was found", why=said[1].replace("\n", " "), do="name one, such as \"ddp\"")
    return Searched(runnable(found_of(said[0]), machine_of(MACHINE), mixed=True), search)
