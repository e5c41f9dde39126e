"""The router, the place where a network chooses: a function decides routes, branches take their cells, results combine.

    cells [N, *c]  -- router function -->  Routes  -- route plan, dispatch -->  rows sorted by branch
                   -- branches -->  rows  -- combine -->  [N, *c]

Two lowerings: *grouped*, where the branches are one module over all sorted rows and the ends of groups (stacked
weights), and *split*, where each branch is a module of its own and gets its rows as a tensor. Both are fixed programs:
which branch gets how many cells is data.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core import operators as ops
from anyshape.route.core.routes import Routes, checked
from anyshape.route.core.uniform import choice_of, run_uniform

COMBINE = ("sum", "mean", "first")
DROP = ("zero", "identity")


class Router(nn.Module):
    """Sends each cell to the branches that a function chooses.

    Args:
        router_fn: (cells, ...) -> Routes; a module or a function.
        branches: a list of modules or functions from rows [n, *cell] to rows [n, *out], for any n; or one module with
            `branch_count` and `forward(rows, ends)` over rows sorted by branch (`route.Experts`, `route.stack`).
        combine: what becomes of a cell's k results: "sum", "mean" (both with the weights of the routes; mean divides
            by the number of choices that were not dropped), "first" (the first choice that was not dropped).
        drop: the value of a cell all of whose choices are dropped: "zero", or "identity", the cell itself.
        name: for reports and profiles; left out, the name of the module in its model.

    Calls: router(cells, ...) with cells [N, *cell], further arguments for the router function; a tuple of tensors with
    N rows each is routed by one decision, and branches get as many arguments. `routes=` gives the routes instead.
    """

    recorder: Any = None  # of a profile that is being recorded
    forced: Any = None  # routes of a profile that is being replayed
    watch: Any = None  # who is told each decision, ids [N, k]

    def __init__(self, router_fn: Callable[..., Any], branches: Any, *, combine: str = "sum", drop: str = "zero",
                 name: str = "") -> None:
        super().__init__()
        for word, words, what in ((combine, COMBINE, "combine"), (drop, DROP, "drop")):
            if word not in words:
                raise InputError(f"{what}={word!r} is unknown", why=f"it is one of {', '.join(words)}", do="choose one")
        self.router_fn = router_fn
        self.grouped = isinstance(branches, nn.Module) and not isinstance(branches, nn.ModuleList)
        if self.grouped and not hasattr(branches, "branch_count"):
            raise InputError(f"{type(branches).__name__} is one branch, not several",
                             why="branches are a list, or a module that says branch_count",
                             do="give a list of modules, or route.stack(modules)")
        if not self.grouped:
            branches = _listed(branches)
        self.branches = branches
        self.branch_count = branches.branch_count if self.grouped else len(branches)
        self.combine, self.drop, self.name = combine, drop, name
        self.recorder = self.forced = self.watch = None

    def forward(self, cells: Tensor | tuple[Tensor, ...], *args: Any, routes: Routes | None = None, **kw: Any) -> Any:
        tensors = cells if isinstance(cells, tuple) else (cells,)
        decided = routes if routes is not None else self.router_fn(*tensors, *args, **kw)
        routes = checked(decided, tensors[0].shape[0], self.name or "a router")
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch(routes.ids)
        if self.forced is not None:
            routes = self.forced.instead_of(routes)
        alike = choice_of(routes.ids, self.branch_count) if self.recorder is None else None
        if alike is not None:
            return run_uniform(self, tensors, routes, alike)
        choices = routes.ids.shape[1]
        order, inverse, ends = ops.route_plan(routes.ids, self.branch_count)
        if self.recorder is not None:
            self.recorder.note(routes.ids, ends)
        rows = [ops.dispatch(tensor, order, ends, choices, inverse) for tensor in tensors]
        results = self._run(rows, ends)
        found = results if isinstance(results, tuple) else (results,)
        combined = tuple(self._combined(result, tensor, routes, order, inverse, ends)
                         for result, tensor in zip(found, (*tensors, *tensors[:1] * len(found))))
        return combined if isinstance(results, tuple) else combined[0]

    def _run(self, rows: list[Tensor], ends: Tensor) -> Any:
        if self.grouped:
            return self.branches(*rows, ends)
        return run_split(self.branches, rows, ends)

    def _combined(self, rows: Tensor, cells: Tensor, routes: Routes, order: Tensor, inverse: Tensor,
                  ends: Tensor) -> Tensor:
        ids, weights = routes.ids, routes.weights
        kept = ids >= 0
        if self.combine == "first":
            first = kept & (kept.cumsum(1) == 1)
            weights = first.to(rows.dtype) if weights is None else torch.where(first, weights, weights.new_zeros(()))
        elif self.combine == "mean":
            share = 1.0 / kept.sum(1, keepdim=True).clamp(min=1).to(rows.dtype)
            weights = share.expand(ids.shape) if weights is None else weights * share
        found = ops.combine(rows, inverse, ends, weights, ids.shape[1], order)
        if self.drop == "identity":
            if found.shape != cells.shape:
                raise InputError(f"dropped cells of shape {tuple(cells.shape[1:])} do not stand beside results of "
                                 f"shape {tuple(found.shape[1:])}", where=self.name, why="drop is 'identity'",
                                 do="use drop='zero', or branches that keep the shape of a cell")
            alive = kept.any(1).reshape(-1, *(1,) * (found.dim() - 1))
            found = torch.where(alive, found, cells.to(found.dtype))
        return found

    @property
    def way(self) -> str:
        """How its branches run: "grouped" is all in one, "split" each by itself."""
        return getattr(self.branches, "way", "grouped") if self.grouped else "split"

    def extra_repr(self) -> str:
        return f"{self.branch_count} branches, {self.way}, combine={self.combine!r}, drop={self.drop!r}"


def run_split(branches: Iterable[Callable[..., Any]], rows: list[Tensor], ends: Tensor) -> Any:
    """The results of branches that each take their own rows, sorted by branch as the rows are; a tuple where a branch
    returns one."""
    total = rows[0].shape[0]
    parts = [ops.split_rows(rows[0], ends)]
    loads = [part.shape[0] for part in parts[0]]
    parts += [ops.split_like(tensor, ends, loads) for tensor in rows[1:]]
    results = [branch(*own) for branch, own in zip(branches, zip(*parts, strict=True), strict=True)]
    _check_results(results, [own[0] for own in zip(*parts, strict=True)])
    if not isinstance(results[0], tuple):
        return ops.merge_rows(results, ends, total)
    return tuple(ops.merge_rows(list(same), ends, total) for same in zip(*results, strict=True))


def _check_results(results: list[Any], rows: list[Tensor]) -> None:
    """Raises InputError where branches' results have not one kind and, but for the number of rows, one shape."""
    for number, (result, own) in enumerate(zip(results, rows, strict=True)):
        if not _alike(result, results[0], own.shape[0]):
            raise InputError("the results of a router's branches do not fit together",
                             why=f"for n cells branch 0 gives {_words(results[0], rows[0].shape[0])}, "
                                 f"branch {number} gives {_words(result, own.shape[0])}",
                             do="return rows of one shape and dtype, one for each cell, from every branch")


def _alike(result: Any, first: Any, count: int) -> bool:
    if isinstance(first, tuple):
        return isinstance(result, tuple) and len(result) == len(first) and all(
            isinstance(one, Tensor) and _alike(one, other, count) for one, other in zip(result, first, strict=True))
    return isinstance(result, Tensor) and isinstance(first, Tensor) and result.dim() == first.dim() > 0 \
        and result.dtype == first.dtype and result.shape[1:] == first.shape[1:] and _are(result.shape[0], count)


def _are(rows: int, count: int) -> bool:
    """Whether two numbers of rows are one; a compiled program asks that when it runs, for it finds them there."""
    if torch.compiler.is_compiling():
        torch._check(rows == count)
        return True
    return rows == count


def _words(result: Any, count: int) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(_words(item, count) for item in result)})"
    if not isinstance(result, Tensor):
        return type(result).__name__
    sizes = ["n" if dim == 0 and size == count else str(size) for dim, size in enumerate(result.shape)]
    return f"{str(result.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def _listed(branches: Any) -> nn.ModuleList:
    found = list(branches)
    if not found or not all(callable(branch) for branch in found):
        raise InputError("branches are no list of modules or functions", why=f"{branches!r:.80} was given",
                         do="give at least one module or function")
    return nn.ModuleList(branch if isinstance(branch, nn.Module) else _Function(branch) for branch in found)


class _Function(nn.Module):
    """A function as a branch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *rows: Tensor) -> Any:
        return self.function(*rows)
