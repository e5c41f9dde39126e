"""Constant folding of routers: where the decision is proved not to depend on any cell, the branch is called at once.

    cells -- router function: always branch 2 -- plan, dispatch, branch, combine -->  branch 2 (cells)

The proof is on the router function's captured graph, with a symbol for the number of cells: ids have no input in them,
and are the same for each cell. A decision that is constant in the profile only is no constant: it is for speculation.
What Python reads beside the cells (numbers and texts that the function's modules hold, closure variables) is compared
with what it was, in each call; where it has changed, the router runs as it is.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.route.core.router import Router
from anyshape.route.core.routes import checked
from anyshape.route.flow import constant_rows
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext
from anyshape.route.profile.first_calls import first_calls, routed_cells
from anyshape.route.profile.routers import routers_of

NAME = "constant_routes"
GUARD = "each call compares what the router function reads beside its cells; where it has changed, the router runs"
Plain = (int, float, bool, str, type(None), torch.dtype)


class FoldedRouter(Router):
    """A router of which every cell takes the same branches. choices: their numbers, -1 for a dropped choice."""

    def __init__(self, router: Router, choices: tuple[int, ...]) -> None:
        super().__init__(router.router_fn, router.branches, combine=router.combine, drop=router.drop, name=router.name)
        self.choices = choices
        self.training = router.training
        self.read = held(router.router_fn)

    def forward(self, cells: Any, *args: Any, routes: Any = None, **kw: Any) -> Any:
        watched = any(getattr(self, name, None) is not None for name in ("recorder", "forced"))  # of a profile
        if args or kw or routes is not None or watched or held(self.router_fn) != self.read:
            return super().forward(cells, *args, routes=routes, **kw)
        tensors = cells if isinstance(cells, tuple) else (cells,)
        decided = checked(self.router_fn(*tensors), tensors[0].shape[0], self.name or "a router") \
            if self.weighted else None
        results: dict[int, Any] = {}
        for branch in self.choices:
            if branch >= 0 and branch not in results:
                results[branch] = self._branch(branch, tensors)
        first = next(iter(results.values()))
        if not isinstance(first, tuple):
            return self._sum(results, decided)
        return tuple(self._sum({branch: one[place] for branch, one in results.items()}, decided)
                     for place in range(len(first)))

    weighted = False  # whether the router function gives weights, which it then has to be asked for

    def _branch(self, branch: int, tensors: tuple[Tensor, ...]) -> Any:
        if not self.grouped:
            return self.branches[branch](*tensors)
        count = tensors[0].shape[0]
        groups = torch.arange(self.branch_count, device=tensors[0].device)
        ends = torch.where(groups >= branch, count, 0).int()
        return self.branches(*tensors, ends)

    def _sum(self, results: dict[int, Tensor], decided: Any) -> Tensor:
        """The combine of choices, in order, as core.operators.combine adds them."""
        kept = [branch >= 0 for branch in self.choices]
        total: Tensor | None = None
        for place, branch in enumerate(self.choices):
            if branch < 0:
                continue
            taken = results[branch]
            weight: Any = None if decided is None else decided.weights[:, place]
            if self.combine == "first":
                chosen = not any(kept[:place])
                weight = (weight if chosen else torch.zeros_like(weight)) if weight is not None else float(chosen)
            elif self.combine == "mean":
                weight = 1.0 / sum(kept) * (1.0 if weight is None else weight)
            if isinstance(weight, Tensor):
                weight = weight.to(taken.dtype).reshape(-1, *(1,) * (taken.dim() - 1))
            taken = taken if weight is None or (isinstance(weight, float) and weight == 1.0) else taken * weight
            total = taken if total is None else total + taken
        assert total is not None
        return total


def held(function: Callable[..., Any]) -> tuple[Any, ...] | None:
    """What a router function reads beside its arguments, as plain values; None where others may change."""
    modules = [function] if isinstance(function, nn.Module) else []
    found: list[Any] = []
    if not modules:
        if not inspect.isfunction(function):
            return None
        variables = inspect.getclosurevars(function)
        for name, value in (*variables.nonlocals.items(), *variables.globals.items()):
            if isinstance(value, nn.Module):
                modules.append(value)
            elif isinstance(value, Plain):
                found.append((name, value))
            elif not (inspect.ismodule(value) or inspect.isroutine(value) or inspect.isclass(value)):
                return None
    own = vars(nn.Module())
    for module in modules:
        for path, one in module.named_modules():
            for name, value in vars(one).items():
                if isinstance(value, Plain):
                    found.append((path, name, value))
                elif name not in own and not (inspect.isroutine(value) or isinstance(value, nn.Module)):
                    return None
    return tuple(found)


class _Decision(nn.Module):
    """The ids of a router function."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router_fn, self.training = router.router_fn, router.training

    def forward(self, *cells: Tensor) -> Any:
        routes = checked(self.router_fn(*cells), cells[0].shape[0], "a router")
        return routes.ids if routes.weights is None else (routes.ids, routes.weights)


def propose(context: DecisionContext) -> list[Decision]:
    if context.example is None:
        return [Decision(name, NAME, False, "there are no example inputs") for name in context.routers]
    cells = first_calls(context.model, context.routers, context.example, _cells_alone)
    return [_decided(name, router, cells.get(name)) for name, router in context.routers.items()]


def _decided(name: str, router: Router, cells: tuple[Tensor, ...] | None) -> Decision:
    def refused(why: str) -> Decision:
        return Decision(name, NAME, False, why)

    if cells is None:
        return refused("the example does not call it with cells alone")
    if type(router) is not Router or held(router.router_fn) is None:
        return refused("its router function holds values that may change")
    choices, reason = constant_rows(_Decision(router), *cells)
    if choices is None:
        return refused(reason)
    if all(branch < 0 for branch in choices[0]) or max(choices[0]) >= router.branch_count:
        return refused("every cell is dropped" if max(choices[0]) < 0 else "a branch is not there")
    text = ", ".join(map(str, choices[0]))
    return Decision(name, NAME, True, f"every cell goes to branch {text}, whatever it is", None, GUARD,
                    {"choices": list(choices[0]), "weighted": choices[1] > 1})


def apply(model: nn.Module, decision: Decision, compile: Compile | None = None) -> nn.Module:
    """The model with the router folded; `model` is changed in place."""
    router = routers_of(model)[decision.router]
    if type(router) is not Router:
        return model
    folded = FoldedRouter(router, tuple(decision.options["choices"]))
    folded.weighted = bool(decision.options["weighted"])
    return replaced(model, router, folded)


def replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The model with one module in the place of another, wherever it stands."""
    if model is old:
        return new
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)
    return model


def _cells_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """The cells of a call of a router that has nothing else."""
    return routed_cells(args, kwargs) if len(args) == 1 and not kwargs else None
