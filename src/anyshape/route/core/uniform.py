"""Uniform routes, all cells on one way: a router's result without a route plan, dispatch and merge.

    cells [N, *c], choice (branch for each of k)  -->  branches on the cells as they are  --  combine  -->  [N, *out]

What the rows of a branch are, and the sums of the combine, are those of the router: the same bits, but that a combine
makes zeros positive.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyshape.base.errors import InputError
from anyshape.route.core.routes import Routes

Choice = tuple[int, ...]  # the k branches that every cell takes, -1 for a choice that is dropped
FEW = 64  # ids that the host looks at


def choice_of(ids: Tensor, branches: int) -> Choice | None:
    """What all cells choose, where they are few, choose the same, and the host may look; else None."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # asked first: a capture guards no size then
        return None
    if not 0 < ids.numel() <= FEW or type(ids) is not Tensor or ids.device.type != "cpu":
        return None
    rows = ids.tolist()
    if any(row != rows[0] for row in rows) or not all(-1 <= branch < branches for branch in rows[0]):
        return None
    return tuple(rows[0])


def run_uniform(router: Any, tensors: Sequence[Tensor], routes: Routes, choice: Choice) -> Any:
    """The router's result where all cells choose `choice`."""
    results, several = by_choice(router, tensors, choice)
    return combine_uniform(router, results, several, tensors, routes, choice)


def combine_uniform(router: Any, results: list[list[Tensor | None]], several: bool, tensors: Sequence[Tensor],
                    routes: Routes, choice: Choice) -> Any:
    """The router's result from what `by_choice` found."""
    combined = tuple(_combined(router, rows, own, routes, choice)
                     for rows, own in zip(results, (*tensors, *[tensors[0]] * len(results)), strict=False))
    return combined if several else combined[0]


def by_choice(router: Any, cells: Sequence[Tensor], choice: Choice) -> tuple[list[list[Tensor | None]], bool]:
    """For each tensor that branches return: the rows [N, *out] of each of the k choices, None for a dropped one; and
    whether branches return a tuple. Where all are dropped, the rows are zeros of what the first branch returns."""
    taken = sorted({branch for branch in choice if branch >= 0})
    if not taken:
        [sample], several = _results(router, [own[:0] for own in cells], [0], [1])
        zeros = [torch.zeros((cells[0].shape[0], *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
                 for rows in sample]
        return [[own] for own in zeros], several
    results, several = _results(router, cells, taken, [choice.count(branch) for branch in taken])
    by_branch = dict(zip(taken, results, strict=True))
    found: list[list[Tensor | None]] = [[] for _ in results[0]]
    for place, branch in enumerate(choice):
        times, again = choice.count(branch), choice[:place].count(branch)
        for number, own in enumerate(found):
            rows = by_branch[branch][number] if branch >= 0 else None
            own.append(rows[again::times] if rows is not None and times > 1 else rows)
    return found, several


def _results(router: Any, cells: Sequence[Tensor], taken: list[int], times: list[int]
             ) -> tuple[list[tuple[Tensor, ...]], bool]:
    """What each branch that is taken returns, and whether it is a tuple; a cell that takes it twice has two rows, side
    by side."""
    rows = [[one if count == 1 else one.repeat_interleave(count, 0) for one in cells] for count in times]
    if not router.grouped:
        found = [router.branches[branch](*own) for branch, own in zip(taken, rows, strict=True)]
        return [one if isinstance(one, tuple) else (one,) for one in found], isinstance(found[0], tuple)
    count = cells[0].shape[0]
    load = [times[taken.index(branch)] * count if branch in taken else 0 for branch in range(router.branch_count)]
    ends = torch.tensor(load, dtype=torch.int32, device=cells[0].device).cumsum(0).int()
    together = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*rows, strict=True)]
    merged = router.branches(*together, ends)
    several = isinstance(merged, tuple)
    sizes = [count * number for number in times]
    parts = zip(*(one.split(sizes) for one in (merged if several else (merged,))), strict=True)
    return [tuple(own) for own in parts], several


def _combined(router: Any, rows: list[Tensor | None], cells: Tensor, routes: Routes, choice: Choice) -> Tensor:
    """The sum of Router._combined, where what is kept and dropped is known."""
    some = next(one for one in rows if one is not None)
    kept = [place for place, branch in enumerate(choice) if branch >= 0]
    if not kept:
        if router.drop == "identity" and some.shape != cells.shape:
            raise InputError("dropped cells do not stand beside results of another shape", where=router.name,
                             why="drop is 'identity'", do="use drop='zero', or branches that keep the shape of a cell")
        return cells.to(some.dtype) if router.drop == "identity" else some
    weights = routes.weights
    total: Tensor | None = None
    for place in kept:
        taken = rows[place]
        assert taken is not None
        factor = _factor(router, weights, place, kept, taken)
        if factor is not None:
            taken = taken * factor.reshape(-1, *(1,) * (taken.dim() - 1))
        total = taken if total is None else total + taken
    assert total is not None
    return total


def _factor(router: Any, weights: Tensor | None, place: int, kept: list[int], rows: Tensor) -> Tensor | None:
    """What a choice is multiplied by, as the router computes it."""
    own = None if weights is None else weights[:, place]
    if router.combine == "first":
        if place != kept[0]:
            return rows.new_zeros(rows.shape[0])
        own = rows.new_ones(rows.shape[0]) if own is None else own
    elif router.combine == "mean":
        share = 1.0 / torch.full((rows.shape[0],), len(kept), dtype=torch.int64, device=rows.device).to(rows.dtype)
        own = share if own is None else own * share
    return None if own is None else own.to(rows.dtype)
