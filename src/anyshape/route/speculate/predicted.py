"""Predicted routers: modules that stand for routers while a path is captured, and take the branch that is foretold.

    Router: ids -> route plan, dispatch, branches, combine
    -->  PredictedRouter: ids -> noted; the predicted branch on all cells

The decision is still computed, and noted for the check. Where it turns out as predicted the result is that of the
router: the same rows go through the same branch, and are combined by the same sums.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router
from anyshape.route.core.routes import Routes, checked

Choice = tuple[int, ...]  # the k branches that every cell takes, -1 for a choice that is dropped
Prediction = Mapping[str, Sequence[Choice]]  # router -> its choice in each of its calls, in order


class UnknownPath(LookupError):
    """A router is called for which the path has no choice: `args` are its name, and the number of the call."""


@dataclass
class Tape:
    """What is noted of one run: the choices to take, and the decisions that were computed, in order."""

    prediction: Prediction
    ids: list[Tensor] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def rewind(self) -> None:
        """To the beginning."""
        for noted in (self.ids, self.choices, self.names):
            noted.clear()

    def choose(self, name: str, ids: Tensor) -> Choice:
        """The choice that is predicted for this call of a router; the decision is noted."""
        number = self.names.count(name)
        known = self.prediction.get(name, ())
        if number >= len(known):
            raise UnknownPath(name, number)
        choice = tuple(known[number])
        if len(choice) != ids.shape[1]:
            raise UnknownPath(name, number)
        self.ids.append(ids)
        self.choices.append(choice)
        self.names.append(name)
        return choice


class _Current(threading.local):
    tape: Tape | None = None
    watched: list[tuple[str, Tensor]] | None = None


_CURRENT = _Current()


@contextmanager
def taped(tape: Tape) -> Iterator[Tape]:
    """Predicted routers of this thread follow the tape."""
    before, _CURRENT.tape = _CURRENT.tape, tape
    try:
        yield tape
    finally:
        _CURRENT.tape = before


def current_tape() -> Tape:
    """The tape of this thread."""
    assert _CURRENT.tape is not None, "a predicted router runs on a tape"
    return _CURRENT.tape


@contextmanager
def watching() -> Iterator[list[tuple[str, Tensor]]]:
    """Decisions of watched routers in this thread, as (router, ids [cells, k]) in order."""
    found: list[tuple[str, Tensor]] = []
    before, _CURRENT.watched = _CURRENT.watched, found
    try:
        yield found
    finally:
        _CURRENT.watched = before


class WatchedFunction(nn.Module):
    """A router function whose decisions `watching` sees."""

    def __init__(self, function: Any, name: str) -> None:
        super().__init__()
        self.function, self.name = function, name

    def forward(self, *cells: Any, **keywords: Any) -> Any:
        found = self.function(*cells, **keywords)
        seen = _CURRENT.watched
        if seen is not None:
            seen.append((self.name, checked(found, cells[0].shape[0], self.name).ids))
        return found


class PredictedRouter(nn.Module):
    """A router that follows the tape of its thread."""

    def __init__(self, router: Router, name: str) -> None:
        super().__init__()
        self.router, self.name = router, name

    def forward(self, cells: Any, *args: Any, routes: Routes | None = None, **keywords: Any) -> Any:
        router, tape = self.router, current_tape()
        tensors = cells if isinstance(cells, tuple) else (cells,)
        decided = routes if routes is not None else router.router_fn(*tensors, *args, **keywords)
        routes = checked(decided, tensors[0].shape[0], self.name)
        choice = tape.choose(self.name, routes.ids)
        results, several = by_choice(router, tensors, choice)
        combined = tuple(_combined(router, rows, own, routes, choice)
                         for rows, own in zip(results, (*tensors, *tensors[:1] * len(results)), strict=False))
        return combined if several else combined[0]


def by_choice(router: Router, cells: Sequence[Tensor], choice: Choice) -> tuple[list[list[Tensor | None]], bool]:
    """For each tensor that branches return: the rows [N, *out] of each of the k choices, None for a dropped one; and
    whether branches return a tuple. Where all are dropped, the rows are zeros of what the first branch returns."""
    taken = sorted({branch for branch in choice if branch >= 0})
    if not taken:
        [sample], several = _results(router, cells, [0], [1])
        return [[torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)] for rows in sample], several
    results, several = _results(router, cells, taken, [choice.count(branch) for branch in taken])
    by_branch = dict(zip(taken, results, strict=True))
    found: list[list[Tensor | None]] = [[] for _ in results[0]]
    for place, branch in enumerate(choice):
        times, again = choice.count(branch), choice[:place].count(branch)
        for number, own in enumerate(found):
            rows = by_branch[branch][number] if branch >= 0 else None
            own.append(rows[again::times] if rows is not None and times > 1 else rows)
    return found, several


def _results(router: Router, cells: Sequence[Tensor], taken: list[int], times: list[int]
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


def _combined(router: Router, rows: list[Tensor | None], cells: Tensor, routes: Routes, choice: Choice) -> Tensor:
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
        total = taken + taken.new_zeros(()) if total is None else total + taken
    assert total is not None
    return total


def _factor(router: Router, weights: Tensor | None, place: int, kept: list[int], rows: Tensor) -> Tensor | None:
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


def replaced(model: nn.Module, names: Mapping[str, Router], make: Any) -> nn.Module:
    """The model with `make(router, name)` in place of each router, everywhere it stands."""
    by_router = {id(router): make(router, name) for name, router in names.items()}
    for module in list(model.modules()):
        if isinstance(module, PredictedRouter):
            continue
        for key, child in list(module._modules.items()):
            if child is not None and id(child) in by_router and by_router[id(child)] is not module:
                module._modules[key] = by_router[id(child)]
    return by_router.get(id(model), model)
