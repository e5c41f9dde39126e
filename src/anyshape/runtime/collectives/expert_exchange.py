"""Sparse all-to-all of experts: cells travel to the ranks that have their experts, and back, without padding.

    cells [N, *c], ids [N, k]  -->  rows [R, *c] of this rank's experts, sorted by slot, and where each slot's end
    rows [R, *c]               -->  [N, *c]: each cell's rows, weighted and added

A message has as many rows as there are: first the ranks tell each other how many (one small message), then rows travel
by an all_to_all with unequal splits. Both directions are each other's derivatives. Sorting, gathers and sums are the
operators of routers (route/core/operators.py). Lepikhin et al., "GShard" (2020), section 3, for the exchange; there
each message is padded to a capacity.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base import counters
from anyshape.base.errors import IndexRangeError, InputError
from anyshape.dist.experts import ExpertMap
from anyshape.route.core.operators import combine, dispatch, route_plan
from anyshape.runtime.collectives.messages import Line


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """Rows at their experts, and the way back.

    Attributes:
        rows: [R, *c], sorted by slot of this rank, and of a slot by the rank they come from.
        ends: [slots] (i32), where the rows of each slot end.
        order, inverse, sent_ends: the route plan of this rank's own cells over the slots of all ranks.
        sent, received: rows to and from each rank.
        by_slot: [R], the place among what was received of each of `rows`; by_source: the inverse.
    """

    rows: Tensor
    ends: Tensor
    order: Tensor
    inverse: Tensor
    sent_ends: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    by_slot: Tensor
    by_source: Tensor
    choices: int


class ExpertExchange:
    """Exchanges cells between the ranks along a line. All ranks call each method together.

    Args:
        experts: where experts are; the same on all ranks.
    """

    def __init__(self, line: Line, experts: ExpertMap) -> None:
        if experts.ranks != line.ranks:
            raise InputError(f"a placement over {experts.ranks} ranks does not fit a line of {line.ranks}",
                             why="each rank of the line has a column", do="make a placement for as many ranks")
        self.line = line
        self.experts = experts
        places, begins = experts.places(line.rank)
        self.places = torch.from_numpy(places)
        self.begins = begins.tolist()

    def dispatch(self, cells: Tensor, ids: Tensor) -> Dispatched:
        """Sends each cell to the experts that it was routed to.

        Args:
            cells: [N, *c], of this rank; ranks may have other numbers of cells, also none.
            ids: [N, k], experts; -1 drops a choice.

        Raises:
            IndexRangeError: on all ranks, where one has an id of no expert; no cell has travelled.
        """
        inside = ids.numel() == 0 or (int(ids.min()) >= -1 and int(ids.max()) < self.experts.experts)
        known = ids if inside else torch.full_like(ids, -1)
        keys = torch.where(known < 0, -1, self.places[known.clamp(min=0)])
        order, inverse, ends = route_plan(keys, self.begins[-1])
        counts = ends.diff(prepend=ends.new_zeros(1)) if inside else torch.full_like(ends, -1)
        sent = [int(counts[a:b].sum()) for a, b in zip(self.begins, self.begins[1:], strict=False)]
        table = self.counts(counts)
        self._check(table, inside)
        received = table.sum(1).tolist()
        by_slot = _by_slot(table)
        by_source = torch.empty_like(by_slot)
        by_source[by_slot] = torch.arange(len(by_slot))
        rows = dispatch(cells, order, ends, ids.shape[1], inverse)[:sum(sent)]
        arrived = exchanged(rows, sent, received, self.line.group)
        return Dispatched(arrived[by_slot], table.sum(0).cumsum(0).int(), order, inverse, ends, tuple(sent),
                          tuple(received), by_slot, by_source, ids.shape[1])

    def combine(self, rows: Tensor, found: Dispatched, weights: Tensor | None = None) -> Tensor:
        """Brings what experts made of `found.rows` back, [N, *c]: weighted by `weights` [N, k], and added."""
        returned = exchanged(rows[found.by_source], found.received, found.sent, self.line.group)
        dropped = len(found.order) - len(returned)
        if dropped:
            returned = torch.cat([returned, returned.new_zeros(dropped, *returned.shape[1:])])
        return combine(returned, found.inverse, found.sent_ends, weights, found.choices, found.order)  # type: ignore

    def _check(self, table: Tensor, inside: bool) -> None:
        """Raises IndexRangeError where a rank has said that it has an id of no expert."""
        if not inside:
            raise IndexRangeError(f"a cell of rank {self.line.rank} goes to an expert that there is not",
                                  where="found before cells travelled",
                                  why=f"experts are 0 to {self.experts.experts - 1}, and -1 drops a choice",
                                  do="look at what the router returns")
        wrong = (table < 0).any(1).nonzero().flatten().tolist()
        if wrong:
            raise IndexRangeError(f"a cell goes to an expert that there is not (see rank {wrong[0]})")

    def counts(self, counts: Tensor) -> Tensor:
        """How many rows this rank gets from each rank for each of its slots, [ranks, slots]. counts: that it sends, for
        the slots of all ranks."""
        own = self.begins[self.line.rank + 1] - self.begins[self.line.rank]
        splits = [b - a for a, b in zip(self.begins, self.begins[1:], strict=False)]
        found = counts.new_empty(self.line.ranks * own)
        dist.all_to_all_single(found, counts.contiguous(), [own] * self.line.ranks, splits, group=self.line.group)
        return found.view(self.line.ranks, own).long()


def _by_slot(table: Tensor) -> Tensor:
    """The places of what arrived, which lies by rank and of a rank by slot, in the order by slot and of a slot by rank.
    table: [ranks, slots]."""
    starts = (table.flatten().cumsum(0) - table.flatten()).view_as(table)
    turned, lengths = starts.t().flatten(), table.t().flatten()
    ends = lengths.cumsum(0)
    shift = turned - (ends - lengths)
    return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.splits = sent, received, group
        counters.count("collectives")
        found = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), list(received), list(sent), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent, received, group = ctx.splits
        return exchanged(gradients[0], received, sent, group), None, None, None


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    return _Exchange.apply(rows, sent, received, group)  # type: ignore[no-any-return]
