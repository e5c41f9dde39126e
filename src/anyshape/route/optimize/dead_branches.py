"""Dead-branch elimination behind a guard: branches that the profile never saw leave the program that usually runs.

    branches 0 .. 7, of which 2 and 5 had no cell  -->  ends say that 2 and 5 have none? run the six : run all eight

The guard reads the ends of the groups in each call. A cell that goes to a dead branch takes the general path, on the
same rows: nothing is dropped, and results are the same bit for bit. Of a router that a compiler traces all branches
stay.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from anyshape.route.core.router import run_split
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext
from anyshape.route.profile.routers import routers_of

NAME = "dead_branches"
GUARD = "each call reads the ends of the groups: where a dead branch has a cell, all branches run"
CONFIDENT = 3.0  # of n cells none was seen: with 95 % confidence fewer than 3/n go there (the rule of three)


class GuardedBranches(nn.ModuleList):
    """All branches of a router under their names, of which those that are not `live` run only where they have cells.

    `branch_count`, and `forward(*rows, ends)`, are what route.Router asks for. misses: calls on the general path.
    """

    def __init__(self, branches: Iterable[nn.Module], live: Iterable[int]) -> None:
        super().__init__(branches)
        self.branch_count = len(self)
        self.live = tuple(sorted(set(live)))
        self.dead = tuple(number for number in range(self.branch_count) if number not in self.live)
        self.misses = 0

    def forward(self, *operands: Tensor) -> Any:
        rows, ends = list(operands[:-1]), operands[-1]
        if torch.compiler.is_compiling():  # one program for all loads: it has every branch
            return run_split(self, rows, ends)
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        if bool(counts[list(self.dead)].any()):
            self.misses += 1
            return run_split(self, rows, ends)
        return run_split([self[number] for number in self.live], rows, ends[list(self.live)])  # no row is of a dead one


def propose(context: DecisionContext) -> list[Decision]:
    if context.compile is not None:
        return [Decision(name, NAME, False, "the guard reads data, which a program that is compiled whole does not")
                for name in context.routers]
    found = []
    for name, router in context.routers.items():
        others = [one.optimisation for one in context.decisions if one.applied and one.router in (name, "")]
        found.append(Decision(name, NAME, False, f"{', '.join(others)} runs its branches") if others
                     else _decided(name, router.grouped, context.profile.loads(name)))
    return found


def _decided(name: str, grouped: bool, loads: Any) -> Decision:
    totals = loads.sum(0) if len(loads) else loads.reshape(0)
    cells = int(totals.sum())
    dead = [number for number, load in enumerate(totals) if load == 0]
    if grouped:
        return Decision(name, NAME, False, "branches run as one module, where a group without cells costs nothing")
    if not cells or not dead:
        return Decision(name, NAME, False, "no cell was seen" if not cells else "every branch had cells")
    live = [number for number in range(len(totals)) if number not in dead]
    why = f"{len(dead)} of {len(totals)} branches had none of {cells} choices (95 %: fewer than " \
          f"{min(CONFIDENT / cells, 1):.2%} go there)"
    return Decision(name, NAME, True, why, None, GUARD, {"live": live})


def apply(model: nn.Module, decision: Decision, compile: Compile | None = None) -> nn.Module:
    """The model, changed in place; a router whose branches another optimisation has made one module stays as it is."""
    router = routers_of(model)[decision.router]
    if not router.grouped:
        router.branches = GuardedBranches(router.branches, decision.options["live"])
        router.grouped = True
    return model
