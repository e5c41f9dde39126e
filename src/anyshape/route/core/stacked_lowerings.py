"""Lowerings of equal branches: batched products of branches padded to a capacity, and classes of equal branches.

    BucketedBranches    rows [S, *c]  -->  [E, capacity, *c] by one batched call  -->  [S, *out]
    StackedClasses      rows [S, *c], of branches of several structures  -->  one stack a structure

Both take rows sorted by branch and the ends of groups, as route.Router gives them, and lose none: where a load exceeds
every capacity, the stack runs them without padding.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core import operators as ops
from anyshape.route.core.stack import StackedBranches


class BucketedBranches(nn.Module):
    """A stack whose branches are padded to the least capacity that holds the busiest of a call (one read of the ends by
    the host), and run as one batched call (torch.vmap). A traced call, one in training mode, one of rows that have no
    grouped form, and one whose busiest branch exceeds all capacities run the stack as it is.

    That padding does no harm, cells being independent, is what the stack has proved of its body.

    Args:
        capacities: rows of a branch, at least 1, in ascending order.
        least_rows: for each capacity, rows of all branches from which padding to it pays; calls with less run the stack
            as it is. 0 for each where left out.
    """

    def __init__(self, stack: StackedBranches, capacities: Sequence[int], least_rows: Sequence[int] = ()) -> None:
        super().__init__()
        if not capacities or list(capacities) != sorted(set(capacities)) or capacities[0] < 1:
            raise InputError(f"capacities {list(capacities)!r:.80} are no capacities",
                             why="they are whole numbers of at least 1, each larger than the one before",
                             do="see route.optimize")
        self.stack, self.capacities = stack, tuple(int(one) for one in capacities)
        self.least_rows = tuple(least_rows) or (0,) * len(self.capacities)
        self.branch_count = stack.branch_count

    def forward(self, *operands: Tensor) -> Any:
        """As of StackedBranches."""
        rows, ends = operands[:-1], operands[-1]
        if torch.compiler.is_compiling() or not self.stack.pads(rows):
            return self.stack(*operands)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        busiest, total = (int(number) for number in (counts.max(), ends[-1]))
        capacity, least = next((one for one in zip(self.capacities, self.least_rows, strict=True) if one[0] >= busiest),
                               (0, 0))
        if not capacity or total < max(least, 1):
            return self.stack(*operands)
        branch = torch.repeat_interleave(torch.arange(self.branch_count, device=ends.device), counts, output_size=total)
        places = torch.arange(total, device=ends.device) + branch * capacity - (ends - counts)[branch]
        padded = [row.new_zeros(self.branch_count * capacity, *row.shape[1:]).index_copy(0, places, row[:total])
                  .unflatten(0, (self.branch_count, capacity)) for row in rows]
        found = self.stack.run_batched(tuple(padded))
        results = [_back(result.flatten(0, 1).index_select(0, places), rows[0].shape[0])
                   for result in (found if isinstance(found, tuple) else (found,))]
        return tuple(results) if isinstance(found, tuple) else results[0]

    def extra_repr(self) -> str:
        return f"capacities {', '.join(map(str, self.capacities))}"


def _back(found: Tensor, count: int) -> Tensor:
    """With zeros for the rows past the last end."""
    if len(found) == count:
        return found
    return torch.cat([found, found.new_zeros(count - found.shape[0], *found.shape[1:])])


class StackedClasses(nn.Module):
    """Branches of several structures: those of one structure are one stack, the classes run one after another.

    Args:
        parts: a stack, or one branch, for each class. classes: the numbers of the branches of each, in order.
    """

    def __init__(self, parts: Sequence[nn.Module], classes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.sizes = tuple(len(one) for one in classes)
        order = [number for one in classes for number in one]
        self.branch_count = len(order)
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.sorted = order == sorted(order)

    def forward(self, *operands: Tensor) -> Any:
        """As of StackedBranches."""
        rows, ends = operands[:-1], operands[-1]
        count = rows[0].shape[0]
        places = None
        if not self.sorted:  # rows of a class side by side
            counts = torch.diff(ends, prepend=ends.new_zeros(1))
            own = counts[self.order]
            begins = torch.empty_like(ends).scatter(0, self.order, own.cumsum(0).to(ends.dtype) - own)
            shift = ops.grouped_take(begins - (ends - counts), ends, count)
            places = torch.arange(count, device=ends.device) + shift
            source = ops.inverse_of(places)
            rows, ends = tuple(row.index_select(0, source) for row in rows), own.cumsum(0).to(ends.dtype)
        lasts = torch.tensor(self.sizes, device=ends.device).cumsum(0) - 1
        results = self._run(rows, ends, ends[lasts])
        if places is None:
            return results
        if isinstance(results, tuple):
            return tuple(result.index_select(0, places) for result in results)
        return results.index_select(0, places)

    def _run(self, rows: tuple[Tensor, ...], ends: Tensor, class_ends: Tensor) -> Any:
        parts = [ops.split_rows(row, class_ends) for row in rows]
        found, first = [], 0
        for module, size, own in zip(self.parts, self.sizes, zip(*parts, strict=True), strict=True):
            begin = ends[first - 1] if first else ends.new_zeros(())
            found.append(module(*own) if not hasattr(module, "branch_count")
                         else module(*own, ends[first:first + size] - begin))
            first += size
        if not isinstance(found[0], tuple):
            return ops.merge_rows(found, class_ends, rows[0].shape[0])
        return tuple(ops.merge_rows(list(same), class_ends, rows[0].shape[0]) for same in zip(*found, strict=True))

    def extra_repr(self) -> str:
        return f"{self.branch_count} branches in {len(self.sizes)} classes of {', '.join(map(str, self.sizes))}"
