"""Profile-guided placement: which device has which branches, so that cells seldom travel; proposed only where it pays.

    profile  -->  trace: calls to plan with | calls held out  -->  problem  -->  placement  -->  judged on the latter

It is taken where the gain on held-out calls is beyond chance (its mean over blocks of calls is more than SIGMAS
standard errors above 0) and, over the horizon, above the bytes that have to move. What comes out is a permutation of
branches, in which each device's are contiguous, and of what the router chooses. The run-time part, sending cells,
comes with several machines; on one device there is nothing to place.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router
from anyshape.route.core.routes import Routes, checked
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext
from anyshape.route.placement import Placement, PlacementProblem, RoutingTrace, contiguous, solve
from anyshape.route.placement import cost as placement_cost
from anyshape.route.placement.problem import problem
from anyshape.route.preload.layout import stacked_tensors
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.routers import routers_of

NAME = "place"
SIGMAS = 4.0  # standard errors: chance alone exceeds this in one proposal of 30,000
BLOCKS, LEAST_BLOCKS = 20, 8  # of held-out calls; neighbours are alike, so blocks are the sample
LEAST_GAIN = 0.01  # of the cost: a smaller one is not worth a change


@dataclass(frozen=True, slots=True, eq=False)
class PlacementVerdict:
    """What held-out calls say of a placement. taken: whether to change. gain: bytes saved in a mean call, with its
    standard error; before, after: traffic of a mean call; moved: bytes to move once."""

    taken: bool
    why: str
    placement: Placement
    gain: float
    error: float
    before: float
    after: float
    moved: float


def propose(context: DecisionContext) -> list[Decision]:
    """On one device there is nothing to place; see `place`."""
    return [Decision("", NAME, False, "there is one device; its run-time part comes with several machines "
                                      "(optimize.place.place plans for them)")] if context.routers else []


def place(profile: Profile, devices: int, routers: Sequence[str] = (), *, cell_bytes: float = 1.0,
          branch_bytes: float = 0.0, seed: int = 0, **more: Any) -> Decision:
    """The decision for the branches of routers that follow each other, on so many devices.

    Args:
        routers: names, in order; all of the profile where left out. cell_bytes: of a cell that travels. branch_bytes:
            of a branch that moves. The others: of placement.problem.problem.

    Raises:
        InputError: as problem.
    """
    names = list(routers) or list(profile.routers)
    found = plan(RoutingTrace.of(profile, names), devices, cell_bytes=cell_bytes, branch_bytes=branch_bytes, seed=seed,
                 **more)
    gain = found.before / found.after if found.after else None
    options = {"orders": {name: order.tolist() for name, order in zip(names, found.placement.orders(), strict=True)},
               "devices": {name: own.tolist() for name, own in zip(names, found.placement.devices, strict=True)},
               "replicas": found.placement.replicas}
    return Decision("", NAME, found.taken, found.why, gain if found.taken else None,
                    "it is a permutation: any placement has the same results", options if found.taken else {})


def plan(trace: RoutingTrace, devices: int, *, cell_bytes: float = 1.0, branch_bytes: float = 0.0,
         current: Placement | None = None, seed: int = 0, restarts: int = 6, **more: Any) -> PlacementVerdict:
    """A placement found on the earlier half of a trace and judged on the later half, against the current one
    (contiguous blocks where left out)."""
    known, held_out = trace.split()
    task = problem(known.loads(), known.joint(), devices, cell_bytes=cell_bytes, branch_bytes=branch_bytes, **more)
    now = contiguous(task) if current is None else current
    task = problem(known.loads(), known.joint(), devices, cell_bytes=cell_bytes, branch_bytes=branch_bytes, current=now,
                   **more)
    return judged(task, solve(task, restarts=restarts, seed=seed), now, held_out)


def judged(task: PlacementProblem, found: Placement, now: Placement, held_out: RoutingTrace) -> PlacementVerdict:
    """Whether calls that nobody planned with say that a change pays."""
    before, after = (np.stack(held_out.costs(task, one)) for one in (now, found))
    gains, moved = (before - after).sum(0), placement_cost(task, found).moved
    blocks = np.array([one.mean() for one in np.array_split(gains, min(BLOCKS, max(len(gains), 1))) if len(one)])
    gain = float(blocks.mean()) if len(blocks) else 0.0
    error = float(blocks.std(ddof=1) / np.sqrt(len(blocks))) if len(blocks) > 1 else 0.0
    traffic = [float(one[0].mean()) if one.size else 0.0 for one in (before, after)]
    whole = float(before.sum(0).mean()) if before.size else 0.0
    words = f"{gain:.4g} bytes less in a held-out call, of {whole:.4g} (standard error {error:.2g})"
    if len(blocks) < LEAST_BLOCKS:
        taken, why = False, f"{len(gains)} calls are held out, too few to tell a gain from chance"
    elif gain <= SIGMAS * error or gain < LEAST_GAIN * whole or gain <= 0:
        taken, why = False, f"the gain is within chance, or too small: {words}"
    elif gain * task.horizon <= moved:
        taken, why = False, f"{words}, and {moved:.4g} bytes to move do not pay within {task.horizon:g} calls"
    else:
        taken, why = True, f"{words}; traffic {traffic[0]:.4g} -> {traffic[1]:.4g}, {moved:.4g} bytes move once"
    return PlacementVerdict(taken, why, found, gain, error, traffic[0], traffic[1], moved)


# ---- apply


def apply(model: nn.Module, decision: Decision, compile: Compile | None = None) -> nn.Module:
    """The model with permuted branches, and ids of branches permuted with them; the same results. Replicas are for
    several machines, and none are made here."""
    every = routers_of(model)
    for name, order in decision.options["orders"].items():
        if name not in every or sorted(order) != list(range(every[name].branch_count)):
            raise InputError(f"the placement does not fit router {name!r}", why="it is of another model, or it is gone",
                             do="plan with a profile of this model")
    for name, order in decision.options["orders"].items():
        permute(every[name], torch.tensor(order))
    return model


def permute(router: Router, order: Tensor) -> None:
    """Puts branch order[p] at position p. Stacked weights are new tensors.

    Raises:
        InputError: a grouped module that does not say which of its tensors are stacked.
    """
    if not router.grouped:
        router.branches = nn.ModuleList(router.branches[number] for number in order.tolist())
    else:
        tensors = stacked_tensors(router.branches)
        if tensors is None:
            raise InputError(f"{type(router.branches).__name__} cannot be permuted", where=router.name,
                             why="it does not say which of its tensors are stacked", do="give it `tensors()`")
        _permute_tensors(router.branches, {id(tensor) for tensor in tensors}, order)
    router.router_fn = Relabelled(router.router_fn, order)


def _permute_tensors(module: nn.Module, chosen: set[int], order: Tensor) -> None:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if id(parameter) in chosen:
                setattr(owner, name, nn.Parameter(parameter.detach()[order], requires_grad=parameter.requires_grad))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if id(buffer) in chosen:
                setattr(owner, name, buffer[order])


def permuted_gate(gate: nn.Linear, order: Tensor) -> nn.Linear:
    """A gate whose scores [*, branches] are in the new order: for checkpoints of other programs. Here ids are
    relabelled, which keeps the bits of scores and the choice among equal ones."""
    found = nn.Linear(gate.in_features, gate.out_features, gate.bias is not None, gate.weight.device, gate.weight.dtype)
    with torch.no_grad():
        found.weight.copy_(gate.weight[order])
        if gate.bias is not None:
            found.bias.copy_(gate.bias[order])
    return found


class Relabelled(nn.Module):
    """A router function whose branches have new numbers: branch order[p] of it is p."""

    order: Tensor
    table: Tensor

    def __init__(self, router_fn: Any, order: Tensor) -> None:
        super().__init__()
        self.router_fn = router_fn
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("table", torch.argsort(order), persistent=False)

    def forward(self, *args: Any, **kw: Any) -> Routes:
        found = checked(self.router_fn(*args, **kw), args[0].shape[0], "a router")
        ids = found.ids.long()
        new = torch.where(ids < 0, ids, self.table[ids.clamp(min=0)]).to(found.ids.dtype)
        return Routes(new, found.weights, None if found.logits is None else found.logits.index_select(-1, self.order))
