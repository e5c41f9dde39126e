"""Expert capacity: at most so many cells for a branch, with token dropping by order or by priority.

    ids [N, k] of E branches, factor f  -->  ids, -1 beyond ceil(f * N * k / E) choices of a branch

First choices of all cells come before second ones, as in GShard (Lepikhin et al., 2020, algorithm 1). Among them, cells
come in order (Switch Transformer, Fedus et al., 2021, section 2.2), or by the weight of their first choice, largest
first: batch-prioritised routing (Riquelme et al., V-MoE, 2021, section 4.1).
"""
from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from anyshape.base.errors import InputError
from anyshape.route.core import operators as ops
from anyshape.route.core.routes import Routes


def fraction_of(factor: float) -> tuple[int, int]:
    """A capacity factor as a ratio of whole numbers, which sizes can be multiplied with.

    Raises:
        InputError: it is not above 0.
    """
    if not 0 < factor < 1e6:
        raise InputError(f"a capacity factor of {factor} leaves no cell", why="it is a number above 0",
                         do="give 1.25, or None for no limit")
    ratio = Fraction(factor).limit_denominator(10_000)
    return ratio.numerator, ratio.denominator


def capacity_of(cells: int, branches: int, choices: int, factor: float) -> int:
    """ceil(factor * cells * choices / branches), at least 1 where there is a cell."""
    above, below = fraction_of(factor)
    return (above * cells * choices + below * branches - 1) // (below * branches)


def limited(routes: Routes, branches: int, factor: float, *, batch_prioritised: bool = False) -> Routes:
    """The routes with -1 where a branch has no room left.

    Args:
        routes: ids [N] or [N, k]; with `batch_prioritised` also weights.
        branches: how many there are. factor: of the capacity; 1 is room for all cells where they spread evenly.

    Raises:
        InputError: a factor not above 0; batch_prioritised without weights.
    """
    if batch_prioritised and routes.weights is None:
        raise InputError("routes without weights have no priority", why="batch_prioritised sorts by the first weight",
                         do="let the router function give weights, or leave batch_prioritised out")
    ids = routes.ids if routes.ids.dim() == 2 else routes.ids[:, None]
    count, choices = ids.shape
    room = capacity_of(count, branches, choices, factor)
    if batch_prioritised:
        assert routes.weights is not None
        first = routes.weights.detach().reshape(count, choices).amax(1)
        turn = torch.argsort(first, descending=True, stable=True)
        place = ops.inverse_of(turn)
        rank = _ranks(ids.index_select(0, turn), branches).index_select(0, place)
    else:
        rank = _ranks(ids, branches)
    kept = torch.where(rank < room, ids, -1)
    return Routes(kept.reshape(routes.ids.shape), routes.weights, routes.logits)


def _ranks(ids: Tensor, branches: int) -> Tensor:
    """How many choices of the same branch come before each [N, k]; first choices come before second ones."""
    turned = ids.t().contiguous()
    _, inverse, ends = ops.route_plan(turned, branches)
    begins = torch.cat([ends.new_zeros(1), ends])  # that of a dropped choice, the last, is not asked
    begin = begins.long().index_select(0, torch.where(turned < 0, branches, turned).long().reshape(-1))
    return (inverse - begin).reshape(turned.shape).t()
