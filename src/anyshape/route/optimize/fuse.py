"""Dynamic horizontal fusion: the branches of a router run as one, whatever their loads.

    [conv, conv, conv]  -->  StackedBranches                             no padding: one program for all loads
                        -->  BucketedBranches(capacities)                batched, padded to a capacity
    [conv, mlp, conv]   -->  StackedClasses([conv, conv], [mlp])

Which one is measured, on random cells with loads of the profile, compiled as the plan compiles: branch by branch, as a
stack, and at a few capacities. It is done where it was the fastest. Without a compiler the batched form often is, for
small branches; a compiled program runs ragged products, for which padding is only work, so there it is no candidate.
No cell is dropped: a load beyond all capacities takes the stack. Parameters are copied: the stack has its own.

The optimisation is that of Brainstorm (OSDI'23, section 4.1), which tunes a kernel for each of three percentiles.
"""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyshape.route.core.router import Router, run_split
from anyshape.route.core.stack import StackError, difference, stack
from anyshape.route.core.stacked_lowerings import BucketedBranches, StackedClasses
from anyshape.route.optimize.capacities import choose, piecewise
from anyshape.route.optimize.decision import Compile, Context, Decision
from anyshape.route.profile.first_calls import first_calls, routed_cells
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.routers import routers_of

NAME = "fuse"
PERCENTS = (50, 90, 100)  # of the profile's busiest loads, at which calls are timed
REPEATS = 5
PRICE = 0.01  # of a call: what a capacity has to save to be worth having
MARGIN = 1.05  # how many times faster what replaces the branches has to be


def propose(context: Context) -> list[Decision]:
    """One decision for each router whose branches are a list."""
    routers = {name: router for name, router in context.routers.items() if not router.grouped}
    cells = {} if context.example is None else first_calls(context.model, routers, context.example, routed_cells)
    return [_propose(context, name, router, cells.get(name)) for name, router in routers.items()]


def classes_of(branches: Sequence[nn.Module]) -> list[list[int]]:
    """Numbers of branches of equal structure, in the order of the first of each."""
    found: list[list[int]] = []
    for number, branch in enumerate(branches):
        same = next((one for one in found if not difference([branches[one[0]], branch])), None)
        if same is None or difference([branches[other] for other in (*same, number)]):
            found.append([number])
        else:
            same.append(number)
    return found


def _propose(context: Context, name: str, router: Router, cells: tuple[Tensor, ...] | None) -> Decision:
    branches = list(router.branches)
    classes = classes_of(branches)
    if len(classes) == len(branches):
        reason = "there is one branch" if len(branches) == 1 else difference(branches)
        return Decision(name, NAME, False, f"no two branches are equal: {reason}")
    if cells is None:
        return Decision(name, NAME, False, "give optimize(example=...): what a cell is, is not known")
    loads = context.profile.loads(name)
    if not len(loads):
        return Decision(name, NAME, False, "the profile has no call of this router")
    try:
        fused = build(branches, classes, cells)
    except StackError as error:
        return Decision(name, NAME, False, error.why)
    times = measure(branches, fused, cells, loads, context.compile)
    options: dict[str, Any] = {
        "classes": classes, "cells": [[list(cell.shape[1:]), str(cell.dtype).removeprefix("torch.")] for cell in cells],
        "capacities": list(times.capacities), "split": times.branches, "stacked": times.stacked, "padded": times.padded}
    kind = f"{len(branches)} equal branches" if len(classes) == 1 else \
        f"{len(branches)} branches of {len(classes)} structures"
    words = f"{kind}; {1e3 * times.split:.2f} ms branch by branch, {1e3 * times.mean_stacked:.2f} ms as a stack"
    if times.padded:
        words += f", {1e3 * times.mean_padded:.2f} ms padded to {', '.join(map(str, times.capacities))}" \
            if times.capacities else ", no capacity pays"
    elif len(classes) == 1 and context.compile is not None:
        words += "; padding is no candidate in a compiled program, whose products are ragged"
    gain = times.split / times.best
    guard = "a branch has no more cells than the largest capacity, else the stack runs without padding" \
        if times.capacities else "none: every load runs"
    return Decision(name, NAME, gain >= MARGIN, words, gain, guard, options)


def build(branches: Sequence[nn.Module], classes: Sequence[Sequence[int]], cells: tuple[Tensor, ...]) -> nn.Module:
    """The stack of equal branches, or of each class.

    Raises:
        StackError: a class has no grouped form.
    """
    example = tuple(cell[:1] if cell.shape[0] else cell.new_zeros(1, *cell.shape[1:]) for cell in cells)
    parts = [stack([branches[number] for number in own], example) if len(own) > 1 else branches[own[0]]
             for own in classes]
    return parts[0] if len(classes) == 1 else StackedClasses(parts, classes)


# ---- measured costs


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call, in the mean over the loads at which calls were timed.

    branches, stacked: points (rows in all, seconds), branch by branch and of the stack. padded: points (capacity,
    seconds); none where padding is no candidate. capacities: those that pay.
    """

    split: float
    mean_stacked: float
    mean_padded: float
    branches: list[list[float]]
    stacked: list[list[float]]
    padded: list[list[float]]
    capacities: tuple[int, ...]

    @property
    def best(self) -> float:
        return self.mean_padded if self.capacities else self.mean_stacked


class _Calls(nn.Module):
    """Branches on rows sorted by branch."""

    def __init__(self, branches: Any) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, ends: Tensor, *rows: Tensor) -> Any:
        if isinstance(self.branches, nn.ModuleList):
            return run_split(self.branches, list(rows), ends)
        return self.branches(*rows, ends)


def measure(branches: Sequence[nn.Module], fused: nn.Module, cells: tuple[Tensor, ...], loads: np.ndarray,
            compile: Compile | None) -> Times:
    """Times of the branches, their stack and, without a compiler, padded ones, at loads of the profile."""
    busiest = loads.max(1)
    order = busiest.argsort(kind="stable")
    chosen = [loads[order[min(int(len(order) * percent / 100), len(order) - 1)]] for percent in PERCENTS]
    inputs = [(torch.as_tensor(own.cumsum(), dtype=torch.int32), *(_rows(cell, int(own.sum())) for cell in cells))
              for own in chosen]
    ways: dict[str, Callable[..., Any]] = {"split": _Calls(nn.ModuleList(branches)), "stack": _Calls(fused)}
    if compile is not None:
        ways = {name: compile(way) for name, way in ways.items()}
    points = sorted({max(int(own.max()), 1) for own in chosen})
    padding = compile is None and not isinstance(fused, StackedClasses) and not fused.training
    if padding:
        ways |= {f"pad {one}": _Calls(BucketedBranches(fused, (one,))) for one in points}  # type: ignore[arg-type]
    seconds: dict[tuple[str, int], float] = {}
    with torch.no_grad():
        for place, given in enumerate(inputs):
            for name, value in _timed(ways, given).items():
                seconds[name, place] = value
    split, stacked = ([[float(own.sum()), seconds[name, place]] for place, own in enumerate(chosen)]
                      for name in ("split", "stack"))
    means = {name: statistics.fmean(seconds[name, place] for place in range(len(inputs))) for name in ways}
    padded = [[float(point), min(seconds[f"pad {point}", place] for place, own in enumerate(chosen)
                                 if max(int(own.max()), 1) == point)] for point in points] if padding else []
    if not padded:
        return Times(means["split"], means["stack"], 0.0, split, stacked, [], ())
    general = [(max(int(own.max()), 1), seconds["stack", place]) for place, own in enumerate(chosen)]
    cost, plain = piecewise([(a, b) for a, b in padded]), piecewise(_distinct(general))
    capacities = choose([int(load) for load in busiest], cost, PRICE * means["stack"], plain)
    mean = statistics.fmean(min((cost(one) for one in capacities if one >= own.max()), default=plain(int(own.max())))
                            for own in chosen)
    return Times(means["split"], means["stack"], mean, split, stacked, padded, capacities)


def _distinct(points: list[tuple[int, float]]) -> list[tuple[float, float]]:
    """One point for each place, the mean of its values."""
    return [(float(x), statistics.fmean(y for place, y in points if place == x)) for x in {x for x, _ in points}]


def _rows(cell: Tensor, count: int) -> Tensor:
    """So many cells like these."""
    if not cell.shape[0]:
        return cell.new_zeros(count, *cell.shape[1:])
    return cell.repeat(-(-count // cell.shape[0]) or 1, *(1,) * (cell.dim() - 1))[:count].contiguous()


def _timed(ways: dict[str, Callable[..., Any]], given: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of a call of each, the least of some that take turns; the first calls are not counted."""
    least = dict.fromkeys(ways, float("inf"))
    for repeat in range(REPEATS + 2):
        for name, way in ways.items():
            if name.startswith("pad ") and int(name[4:]) < int(torch.diff(given[0], prepend=given[0][:1] * 0).max()):
                continue
            begin = time.perf_counter()
            way(*given)
            if repeat > 1:
                least[name] = min(least[name], time.perf_counter() - begin)
    return least


# ---- application


def apply(model: nn.Module, decision: Decision, compile: Compile | None = None) -> nn.Module:
    """The model with this router's branches fused; `model` is changed in place. The stack's parameters are copies.

    Raises:
        StackError: the branches are not those that were proposed for.
    """
    router = routers_of(model)[decision.router]
    options = decision.options
    cells = tuple(torch.zeros(1, *shape, dtype=getattr(torch, dtype)) for shape, dtype in options["cells"])
    device = next((tensor.device for tensor in router.branches.parameters()), None)
    fused = build(list(router.branches), options["classes"], tuple(cell.to(device) for cell in cells))
    if options["capacities"]:
        fused = BucketedBranches(fused, options["capacities"])  # type: ignore[arg-type]
    router.branches, router.grouped = fused, True
    return model


def cost(decision: Decision, profile: Profile) -> float:
    """Expected seconds of a call of the router's branches under these loads; 0 where nothing was measured."""
    options, loads = decision.options, profile.loads(decision.router)
    if not len(loads) or "stacked" not in options:  # a refusal measured nothing
        return 0.0
    points = options["stacked" if decision.applied else "split"]
    by_rows = piecewise(_distinct([(int(rows), seconds) for rows, seconds in points]))
    by_capacity = piecewise([(a, b) for a, b in options["padded"]]) if options["padded"] else by_rows
    capacities = options["capacities"] if decision.applied else ()
    total = 0.0
    for own in loads:
        capacity = min((one for one in capacities if one >= own.max()), default=0)
        total += by_capacity(capacity) if capacity else by_rows(int(own.sum()))
    return total / len(loads)
