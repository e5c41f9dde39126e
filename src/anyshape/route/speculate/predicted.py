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

from torch import Tensor, nn

from anyshape.route.core.router import Router
from anyshape.route.core.routes import Routes, checked
from anyshape.route.core.uniform import Choice, run_uniform

Prediction = Mapping[str, Sequence[Choice]]  # router -> its choice in each of its calls, in order


class UnknownPath(LookupError):
    """A router is called for which the path has no choice: `args` are its name, and the number of the call."""


@dataclass
class ChoiceTape:
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
    tape: ChoiceTape | None = None
    watched: list[tuple[str, Tensor]] | None = None


_CURRENT = _Current()


@contextmanager
def taped(tape: ChoiceTape) -> Iterator[ChoiceTape]:
    """Predicted routers of this thread follow the tape."""
    before, _CURRENT.tape = _CURRENT.tape, tape
    try:
        yield tape
    finally:
        _CURRENT.tape = before


def current_tape() -> ChoiceTape:
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


class DecisionWatch:
    """What a router tells its decisions, so that `watching` sees them."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, ids: Tensor) -> None:
        seen = _CURRENT.watched
        if seen is not None:
            seen.append((self.name, ids))


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
        return run_uniform(router, tensors, routes, choice)


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
