"""Mispredictions of speculative routing, forced from none to all calls: results and speed of the unspeculated run.

The network leaves after its first part where the first element of a sample is positive, as all did in the profile; the
inputs decide how many calls leave it at another exit than predicted.
"""
from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from anyshape import route
from anyshape_bench.measure.statistics import median
from anyshape_bench.routes.case import Study

WIDTH, DEPTH = 384, 6
RATES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0)


def part() -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


class Exits(nn.Module):
    """Two parts; the first is an exit for some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = part()
        self.exit = route.Router(lambda features, x: (x[:, 0] <= 0).long(),
                                 [lambda features, x: features, Rest()])

    def forward(self, x: Tensor) -> Tensor:
        return self.exit((self.first(x), x))


class Rest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second = part()

    def forward(self, features: Tensor, x: Tensor) -> Tensor:
        return self.second(features)


def sample(wrong: bool) -> Tensor:
    x = torch.randn(1, WIDTH)
    x[:, 0] = -x[:, 0].abs() if wrong else x[:, 0].abs()
    return x


def measure(quick: bool) -> dict[str, float]:
    """Numbers by name: unequal, calls whose results have other bits than the unspeculated run's; ratio_P, how many
    times as fast as that a call is in the median of blocks, where P % are mispredicted; least_ratio, of all P."""
    torch.manual_seed(0)
    model = Exits().eval()
    with torch.no_grad(), route.profile(model) as profile:
        for _ in range(100):
            model(sample(False))
    unequal, ratios = 0, {}
    blocks, calls = (6, 20) if quick else (40, 40)
    for rate in RATES:
        fast = route.optimize(model, profile, passes=["speculate"], example=(sample(False),)).apply(model)
        found = []
        with torch.no_grad():
            for block in range(blocks + 2):
                inputs = [sample(bool(torch.rand(()) < rate)) for _ in range(calls)]
                seconds = [0.0, 0.0]
                results: list[list[Tensor]] = [[], []]
                for turn in (0, 1) if block % 2 else (1, 0):
                    begin = time.perf_counter()
                    results[turn] = [(model, fast)[turn](x) for x in inputs]
                    seconds[turn] = time.perf_counter() - begin
                unequal += sum(not torch.equal(a, b) for a, b in zip(*results, strict=True))
                if block >= 2:  # the first ones capture
                    found.append(seconds[0] / seconds[1])
        ratios[f"ratio_{round(100 * rate)}"] = median(found) or 0.0
    return {"unequal": unequal, "least_ratio": min(ratios.values()), **ratios}


def cases() -> list[Study]:
    return [Study("misprediction", "misprediction", measure, quick=True)]
