"""Drift of loads (Brainstorm, section 8): a plan tuned for 4 and 27 patches a branch, when each gets 8.

Branches are small convolutional networks over patches, as in LiveSR, in eager PyTorch, where a plan may pad to
capacities. Compared are the plan that watches, the general path, and a plan newly tuned for the new loads. Patches are
of two sizes: padding 4 and 27 to 27 pays for small ones, and hardly for the larger ones, whose plan is a near thing.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from anyshape import route
from anyshape_bench.measure.statistics import median
from anyshape_bench.routes.case import Study

BRANCHES, CHANNELS, PATCHES, DEPTH = 8, 8, (8, 16), 4
TUNED, DRIFTED = (4, 27), (8, 8)  # patches of each branch, in turns
SECONDS, ALLOWED = 3.0, 1.0  # of calls after the drift, of which so many are allowed to settle


def network() -> nn.Sequential:
    layers = [layer for _ in range(DEPTH) for layer in (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())]
    return nn.Sequential(*layers)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return route.Router(lambda cells, ids: ids, [network() for _ in range(BRANCHES)], name="patches").eval()


def batches(counts: Sequence[int], patch: int, number: int) -> list[tuple[Tensor, Tensor]]:
    """Calls in which branches have these numbers of patches in turns, shuffled."""
    found = []
    for call in range(number):
        loads = [counts[(branch + call) % len(counts)] for branch in range(BRANCHES)]
        ids = torch.repeat_interleave(torch.arange(BRANCHES), torch.tensor(loads))
        ids = ids[torch.randperm(len(ids))]
        found.append((torch.randn(len(ids), CHANNELS, patch, patch), ids))
    return found


def plan_for(model: nn.Module, calls: list[tuple[Tensor, Tensor]]) -> route.Plan:
    with route.profile(model, budget=1.0) as profile:
        for batch in calls:
            model(*batch)
    return route.optimize(model, profile, passes=["fuse"], example=calls[0])


def timed(call: Callable[..., object], batch: tuple[Tensor, Tensor]) -> float:
    begin = time.perf_counter()
    call(*batch)
    return time.perf_counter() - begin


def measure(quick: bool) -> dict[str, float]:
    """What `drift` says of each size of a patch, with it behind the name; and the least of both."""
    found = {patch: drift(patch, SECONDS / 2 if quick else SECONDS) for patch in PATCHES}
    each = {f"{name}_{patch}": value for patch, one in found.items() for name, value in one.items()}
    return each | {name: min(one[name] for one in found.values()) for name in ("least_ratio", "after_one_second")}


def drift(patch: int, seconds: float) -> dict[str, float]:
    """Numbers by name: before, how many times as fast as the general path the plan is at the loads that it is for;
    least_ratio, the least of that in any half second after the drift; after_one_second, the speed of the newly tuned
    plan that is reached from one second on; events, of the watch."""
    model = model_of()
    known, new = batches(TUNED, patch, 40), batches(DRIFTED, patch, 40)
    with torch.no_grad():
        watched = plan_for(model, known).apply(model)
        tuned = plan_for(model, new).apply(model, drift=None)
        before = [_in_turn((model, watched), batch, number) for number, batch in enumerate(known[:10] + known)]
        windows: dict[int, list[list[float]]] = {}
        begin, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            windows.setdefault(int(2 * passed), []).append(
                _in_turn((model, watched, tuned), new[calls % len(new)], calls))
            calls += 1
    middles = {number: [median(column) or 0.0 for column in zip(*found, strict=True)]
               for number, found in windows.items()}
    settled = [one for number, found in windows.items() if number >= 2 * ALLOWED for one in found]
    reached = [median(column) or 0.0 for column in zip(*(settled or next(iter(windows.values()))), strict=True)]
    events = len(watched.history) if isinstance(watched, nn.Module) and hasattr(watched, "history") else 0
    general, ours = (median(column) or 0.0 for column in zip(*before[10:], strict=True))
    return {"before": general / ours,
            "least_ratio": min(one / other for one, other, _ in middles.values()),
            "after_one_second": reached[2] / reached[1], "events": events}


def _in_turn(ways: Sequence[Callable[..., object]], batch: tuple[Tensor, Tensor], number: int) -> list[float]:
    """Seconds of each way. Each begins in its turn: the one behind the general path, which uses the most memory, finds
    caches that are cold."""
    times = [0.0] * len(ways)
    for place in range(len(ways)):
        at = (number + place) % len(ways)
        times[at] = timed(ways[at], batch)
    return times


def cases() -> list[Study]:
    return [Study("drift", "drift", measure, quick=True)]
