"""Automatic strategy of a step: `strategy="auto"`.

It searches at the first step, when there is a batch, among strategies that deal out batches: each rank
gives its own rows, so none may share them. Rank 0 searches, and the others take over what it found.

A limit of a step is of what the step takes beside weights and states, and of the search of all that a device has; and
what a call computes again is decided by its own sizes when it runs. So under a limit the search is one of placements
that keep to it by estimate, without micro-batches; where none does, what takes least of all is tried, and the first
call says in bytes whether it fits.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base.errors import AnyShapeError, ConfigError, LimitError
from anyshape.dist.cost.machine import machine_of
from anyshape.dist.cost.strategy import strategy_of as found_of
from anyshape.dist.simulate.step import RESERVED
from anyshape.dist.strategies import Strategy
from anyshape.frontend.strategy import StrategySearch, strategy
from anyshape.frontend.strategy.runnable import runnable
from anyshape.runtime.collectives.agreement import told_once
from anyshape.torch_compat.tree import tree_flatten, tree_map_only, tree_unflatten

AUTO = "auto"
MACHINE = "cpu"
ROWS = {"tensor": 1, "context": 1, "pipe": 1}  # axes along which ranks would share rows, or layers


@dataclass(frozen=True, slots=True)
class Searched:
    """What was found: a strategy that processes run, and on rank 0 the search with all that it tried."""

    strategy: Strategy
    search: StrategySearch | None


def search_rows(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Sequence[Any],
                world: int, memory_limit: int | None, keywords: Mapping[str, Any] | None = None) -> StrategySearch:
    """The search over strategies that deal out rows. batch, keywords: what one of `world` ranks gives to a step, in
    containers or not. memory_limit: of a step, beside what is alive when it is called.

    Raises:
        LimitError: nothing keeps to the limit, by estimate. AnyShapeError: the step cannot be traced.
    """
    leaves, containers = tree_flatten((tuple(batch), dict(keywords or {})))

    def loss(model: torch.nn.Module, *given: Any) -> Any:
        arguments, named = tree_unflatten(given, containers)
        return loss_fn(model, *arguments, **named)

    whole = tree_map_only(Tensor, lambda one: one.repeat(world, *[1] * (one.dim() - 1)) if one.dim() else one,
                          tuple(leaves))
    device = RESERVED + alive(model, optimizer) + memory_limit if memory_limit else 0
    return strategy(model, loss, optimizer, whole, mesh=ROWS, world=world, machine=MACHINE, memory_limit=int(device))


def alive(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, buffers and optimiser state."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    return sum(one.numel() * one.element_size() for one in tensors)


def searched(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Sequence[Any],
             memory_limit: int | None, keywords: Mapping[str, Any] | None = None) -> Searched:
    """What rank 0 finds for batches such as its own; all ranks call this.

    Raises:
        ConfigError: the search failed on rank 0; raised on all ranks.
    """
    said: list[Any] = [None, None]
    search = None
    if dist.get_rank() == 0:
        try:
            search = _search_once(model, loss_fn, optimizer, batch, memory_limit, keywords)
            said = [str(search.found.best.plan.strategies[-1]), None]
        except Exception as error:  # the others wait for what it says
            said = [None, str(error) if isinstance(error, AnyShapeError) else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(said, 0)
    if said[1] is not None:
        raise told_once(dist.get_rank(), ConfigError(
            "no strategy was found", where='strategy="auto", before the first step: no rank has run any of it',
            why=said[1].replace("\n", " "), do="name one, such as \"ddp\""))
    found = found_of(said[0])
    if memory_limit:  # what micro-batches are for, calls that compute again do
        found = replace(found, micro=1)
    return Searched(runnable(found, machine_of(MACHINE), mixed=True), search)


def _search_once(model: torch.nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer, batch: Sequence[Any],
                 memory_limit: int | None, keywords: Mapping[str, Any] | None) -> StrategySearch:
    """The search; where nothing keeps to the limit by estimate, one among what takes least."""
    world = dist.get_world_size()
    try:
        return search_rows(model, loss_fn, optimizer, batch, world, memory_limit, keywords)
    except LimitError:
        search = search_rows(model, loss_fn, optimizer, batch, world, None, keywords)
        search.override("*", data="fsdp", recompute="full")
        return search
