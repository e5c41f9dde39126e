"""Decisions of profile-guided optimisation, what they are made from, and what an optimisation is.

An optimisation is one file of this folder with

    NAME = "fuse"
    def propose(context: Context) -> list[Decision]: ...      # reads the model, changes nothing
    def apply(model: nn.Module, decision: Decision, compile: Compile | None) -> nn.Module: ...

and, where the same model runs faster or slower as loads change,

    def cost(decision: Decision, profile: Profile) -> float: ...   # expected seconds of a call under these loads;
                                                                    # of one that is refused: of the general path
    def adapt(decision: Decision, profile: Profile) -> Decision: ...  # the decision for these loads, by what `options`
                                                                      # holds; runs no model: calls are served meanwhile

Only `fuse` has these two. What the others decide stays when loads change; each call is checked all the same.
`apply` is given a copy of the model's modules that shares its parameters and buffers (`shared_copy`), may change it in
place, and returns it, or a module around it. What it puts there checks its guard in each call and falls back by itself.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from anyshape.route.core.router import Router
from anyshape.route.flow import Flow, analyze
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.routers import routers_of

Compile = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Decision:
    """One optimisation of one router, taken or refused.

    router: its name (routers_of); "" for the whole model. optimisation: NAME of the file. applied: whether it is done.
    why: the reason, in numbers of the profile. gain: how many times faster the part is expected to be on the profile's
    loads (memory: in `why`); None where nothing says so. guard: what each call checks, and what it falls back to.
    options: what `apply` needs, of numbers, texts, lists and dicts alone, so that a plan can be saved.
    """

    router: str
    optimisation: str
    applied: bool
    why: str
    gain: float | None = None
    guard: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class FlowSource:
    """The static flow map of a model, computed when it is first asked for: None where there are no example inputs."""

    def __init__(self, model: nn.Module, example: tuple[Any, ...] | None) -> None:
        self.model, self.example = model, example

    @cached_property
    def flow(self) -> Flow | None:
        return None if self.example is None else analyze(self.model, *self.example)


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """What optimisations decide from.

    memory_limit: bytes that weights may take, 0 for no limit. decisions: those of optimisations before this one.
    """

    model: nn.Module
    profile: Profile
    source: FlowSource
    memory_limit: int = 0
    compile: Compile | None = None
    decisions: tuple[Decision, ...] = ()

    @property
    def routers(self) -> dict[str, Router]:
        return routers_of(self.model)

    @property
    def flow(self) -> Flow | None:
        """route.analyze of the model; None where optimize was given no example inputs."""
        return self.source.flow

    @property
    def example(self) -> tuple[Any, ...] | None:
        return self.source.example

    def joint(self, first: str, second: str) -> NDArray[np.float64]:
        """How often a cell takes branch i of one router and branch j of a later one, [branches, branches], by the flow
        map; zeros where no cell of the later one is of a single cell. Without a flow map cells are taken to be the
        same."""
        if self.flow is None:
            return self.profile.joint(first, second)
        relation = self.flow.between(first, second)
        if not relation.apart or relation.kind == "none":
            return np.zeros((self.profile.of(first).branches, self.profile.of(second).branches))
        return self.profile.joint(first, second, None if relation.kind == "identity" else relation.map,
                                  relation.sources)

    def applied(self, router: str) -> tuple[Decision, ...]:
        """Decisions that are taken so far for a router."""
        return tuple(one for one in self.decisions if one.applied and one.router == router)


class Optimisation(Protocol):
    """A file of this folder; see its head."""

    @property
    def NAME(self) -> str: ...

    def propose(self, context: DecisionContext) -> list[Decision]: ...

    def apply(self, model: nn.Module, decision: Decision, compile: Compile | None) -> nn.Module: ...


def shared_copy(model: nn.Module) -> nn.Module:
    """The modules of a model copied, its parameters and buffers the same tensors: what is changed in the copy's modules
    leaves the model as it is, and training either trains both."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                memo[id(value)] = value
    return copy.deepcopy(model, memo)
