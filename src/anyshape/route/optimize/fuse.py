"""Dynamic horizontal fusion: the branches of a router run as one, whatever their loads.

    [conv, conv, conv]  -->  StackedBranches                             no padding: one program for all loads
                        -->  BucketedBranches(capacities)                batched, padded to a capacity
    [conv, mlp, conv]   -->  StackedClasses([conv, conv], [mlp])

Which one is measured, on random cells with loads of the profile and shares of these, compiled as the plan compiles:
branch by branch, as a stack, and at a few capacities. It is done where it was the fastest. The times stay in the
decision as points: for other loads it is made again from these (`adapt`), in milliseconds, and nothing is measured
beside calls that run. Without a compiler the batched form often is the fastest, for small branches; a compiled program
runs ragged products, for which padding is only work, so there it is no candidate.
No cell is dropped: a load beyond all capacities takes the stack, as does one of so few rows that padding costs more.
Parameters are copied: the stack has its own.

The optimisation is that of Brainstorm (OSDI'23, section 4.1), which tunes a kernel for each of three percentiles.
"""
from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anyshape.route.core.router import Router, run_split
from anyshape.route.core.stack import StackError, difference, stack
from anyshape.route.core.stacked_lowerings import BucketedBranches, StackedClasses
from anyshape.route.optimize.capacities import choose, piecewise
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext
from anyshape.route.profile.first_calls import first_calls, routed_cells
from anyshape.route.profile.profile import Profile
from anyshape.route.profile.routers import routers_of

Loads = NDArray[np.int64]  # [calls, branches], or [branches] of one call
NAME = "fuse"
PERCENTS = (50, 90, 100)  # of the profile's busiest loads, at which calls are timed
SCALES = (2, 1 / 2, 1 / 4, 1 / 8)  # times the middle one of these, too, for loads that are yet to come
MOST_PADDING = 4  # slots for each row: what needs more is not measured
REPEATS = 5
PRICE = 0.01  # of a call: what a capacity has to save to be worth having
MARGIN = 1.05  # how many times faster what replaces the branches has to be


def propose(context: DecisionContext) -> list[Decision]:
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


def _propose(context: DecisionContext, name: str, router: Router, cells: tuple[Tensor, ...] | None) -> Decision:
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
    kind = f"{len(branches)} equal branches" if len(classes) == 1 else \
        f"{len(branches)} branches of {len(classes)} structures"
    measured = {"kind": kind, "classes": classes,
                "cells": [[list(cell.shape[1:]), str(cell.dtype).removeprefix("torch.")] for cell in cells],
                **measure(branches, fused, cells, loads, context.compile)}
    return _decided(name, measured, loads)


def adapt(decision: Decision, profile: Profile) -> Decision:
    """The decision for other loads, by the times that were measured when it was first made; a refusal that measured
    nothing stays."""
    loads, options = profile.loads(decision.router), decision.options
    return _decided(decision.router, options, loads) if len(loads) and "split" in options else decision


def _decided(name: str, measured: Mapping[str, Any], loads: Loads) -> Decision:
    """The fastest way for these loads."""
    split, stacked = _seconds(measured, "split", loads), _seconds(measured, "stacked", loads)
    words = f"{measured['kind']}; {1e3 * split:.2f} ms branch by branch, {1e3 * stacked:.2f} ms as a stack"
    capacities: tuple[int, ...] = ()
    least_rows: list[int] = []
    best = stacked
    if measured["padded"]:
        busiest = np.maximum(loads.max(1), 1)
        general = {int(load): _seconds(measured, "stacked", loads[busiest == load]) for load in np.unique(busiest)}
        padded, plain = piecewise(measured["padded"]), piecewise(measured["stacked"])
        capacities = choose(busiest.tolist(), padded, PRICE * stacked, general.__getitem__)
        least_rows = [bisect_left(range(loads.shape[1] * one + 1), padded(one), key=plain) for one in capacities]
        best = _seconds(measured, "stacked", loads, capacities, least_rows)
        words += f", {1e3 * best:.2f} ms padded to {', '.join(map(str, capacities))}" if capacities else \
            ", no capacity pays"
    else:
        words += f"; padding is no candidate {measured['unpadded']}"
    gain = split / max(best, 1e-9)
    guard = "a branch has no more cells than the largest capacity, and all have at least " \
        f"{', '.join(map(str, least_rows))}, else the stack runs without padding" \
        if capacities else "none: every load runs"
    options = {**measured, "capacities": list(capacities), "least_rows": least_rows}
    return Decision(name, NAME, gain >= MARGIN, words, gain, guard, options)


def _seconds(measured: Mapping[str, Any], way: str, loads: Loads, capacities: Sequence[int] = (),
             least_rows: Sequence[int] = ()) -> float:
    """Seconds of a call in the mean over these loads, padded where BucketedBranches pads, else by `way`."""
    by_rows = piecewise(measured[way])
    padded = {one: piecewise(measured["padded"])(one) for one in capacities}
    total = 0.0
    for own in loads:
        rows, busiest = int(own.sum()), int(own.max())
        capacity, least = next(((one, few) for one, few in zip(capacities, least_rows, strict=True) if one >= busiest),
                               (0, 0))
        total += padded[capacity] if capacity and rows >= least else by_rows(rows)
    return total / len(loads)


def cost(decision: Decision, profile: Profile) -> float:
    """Expected seconds of a call of the router's branches under these loads; 0 where nothing was measured."""
    options, loads = decision.options, profile.loads(decision.router)
    if not len(loads) or "split" not in options:
        return 0.0
    return _seconds(options, "stacked", loads, options["capacities"], options["least_rows"]) if decision.applied else \
        _seconds(options, "split", loads)


def build(branches: Sequence[nn.Module], classes: Sequence[Sequence[int]], cells: tuple[Tensor, ...]) -> nn.Module:
    """The stack of equal branches, or of each class.

    Raises:
        StackError: a class has no grouped form.
    """
    example = tuple(cell[:1] if cell.shape[0] else cell.new_zeros(1, *cell.shape[1:]) for cell in cells)
    parts = [stack([branches[number] for number in own], example) if len(own) > 1 else branches[own[0]]
             for own in classes]
    return parts[0] if len(classes) == 1 else StackedClasses(parts, classes)


# ---- measured times


class _Calls(nn.Module):
    """Branches on rows sorted by branch."""

    def __init__(self, branches: Any) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, ends: Tensor, *rows: Tensor) -> Any:
        if isinstance(self.branches, nn.ModuleList):
            return run_split(self.branches, list(rows), ends)
        return self.branches(*rows, ends)


def measure(branches: Sequence[nn.Module], fused: nn.Module, cells: tuple[Tensor, ...], loads: Loads,
            compile: Compile | None) -> dict[str, Any]:
    """Least seconds of calls that take turns, as points by way.

    split, stacked: [rows in all, seconds], branch by branch and of the stack. padded: [capacity, seconds], none where
    padding is no candidate, for the reason `unpadded`.
    """
    chosen = _timed_loads(loads)
    rows, busiest = [int(own.sum()) for own in chosen], [max(int(own.max()), 1) for own in chosen]
    unpadded = "in a compiled program, whose products are ragged" if compile is not None else \
        "for branches of several structures" if isinstance(fused, StackedClasses) else \
        "in training" if fused.training else ""
    count = len(branches)
    points = set() if unpadded else {one for one in (*busiest, *(-(-one // count) or 1 for one in rows))
                                     if one * count <= MOST_PADDING * max(max(rows), count)}
    ways = {"split": _Calls(nn.ModuleList(branches)), "stacked": _Calls(fused)}
    if compile is not None:
        ways = {name: compile(way) for name, way in ways.items()}
    whole = tuple(_rows(cell, max((*rows, *(one * count for one in points)))) for cell in cells)
    jobs: list[tuple[str, int, Callable[..., Any], Loads]] = [
        (name, total, way, own) for own, total in zip(chosen, rows, strict=True) for name, way in ways.items()]
    jobs += [("padded", one, _Calls(BucketedBranches(fused, (one,))), np.full(count, one))  # type: ignore[arg-type]
             for one in sorted(points)]
    found: dict[str, dict[int, list[float]]] = {"split": {}, "stacked": {}, "padded": {}}
    for (name, place, _, _), seconds in zip(jobs, _timed(jobs, whole), strict=True):
        found[name].setdefault(place, []).append(seconds)
    named = {name: [[place, statistics.fmean(every)] for place, every in sorted(points.items())]
             for name, points in found.items()}
    return {**named, "unpadded": unpadded or "with so many branches without cells"}


def _timed_loads(loads: Loads) -> list[Loads]:
    """Load vectors of the profile, and the middle one's multiples."""
    order = loads.max(1).argsort(kind="stable")
    own = [loads[order[min(int(len(order) * percent / 100), len(order) - 1)]] for percent in PERCENTS]
    every = [*own, *(np.ceil(own[0] * scale).astype(np.int64) for scale in SCALES)]
    return list({tuple(one.tolist()): one for one in every}.values())


def _rows(cell: Tensor, count: int) -> Tensor:
    """So many cells like these."""
    if not cell.shape[0]:
        return cell.new_zeros(count, *cell.shape[1:])
    return cell.repeat(-(-count // cell.shape[0]) or 1, *(1,) * (cell.dim() - 1))[:count].contiguous()


@torch.no_grad()
def _timed(jobs: Sequence[tuple[str, int, Callable[..., Any], Loads]], cells: tuple[Tensor, ...]) -> list[float]:
    """Seconds of each, the least of some calls, for which they take turns; the first calls are not counted."""
    least = [float("inf")] * len(jobs)
    for repeat in range(REPEATS + 2):
        for number, (_, _, way, loads) in enumerate(jobs):
            ends = torch.as_tensor(loads.cumsum(), dtype=torch.int32, device=cells[0].device)
            given = [cell[:int(loads.sum())] for cell in cells]
            begin = time.perf_counter()
            way(ends, *given)
            if repeat > 1:
                least[number] = min(least[number], time.perf_counter() - begin)
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
        fused = BucketedBranches(fused, options["capacities"], options["least_rows"])  # type: ignore[arg-type]
    router.branches, router.grouped = fused, True
    return model
