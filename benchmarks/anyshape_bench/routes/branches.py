"""Benchmark cases of many small branches: 2 to 256 convolutions of 3x3 with 8 channels over images of 32x32.

Brainstorm (OSDI'23, figure 15) gives every branch a batch of 4. Loads here are 1 and 4 in the mean, in proportion to
1/rank (Zipf) for some, and which branch is the busy one changes with each batch.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape import route
from anyshape_bench.routes.case import Case, Forms, Inputs
from anyshape_bench.routes.loads import routes

COUNTS, EACH, BATCHES, QUICK = (2, 4, 8, 16, 32, 64, 128, 256), (1, 4), 5, "branches-64-1-uniform"
CHANNELS, SIZE = 8, 32


class Plain(nn.Module):
    """Images by a loop over branches."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for number, branch in enumerate(self.branches):
            chosen = (ids == number).nonzero()[:, 0]
            out[chosen] = branch(x[chosen])
        return out


class Routed(nn.Module):
    """Images by a router."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = route.Router(lambda x, ids: ids, route.stack(branches, torch.zeros(1, CHANNELS, SIZE, SIZE)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.branches(x, ids)


class Padded(nn.Module):
    """Baseline: every branch computes as many images as the busiest has, in one convolution of groups."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.count = len(branches)
        self.weight = nn.Parameter(torch.cat([one.weight.detach() for one in branches]))  # type: ignore[operator,misc]
        self.bias = nn.Parameter(torch.cat([one.bias.detach() for one in branches]))  # type: ignore[operator,misc]

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mine = F.one_hot(ids, self.count)
        place = (mine.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
        rows = x.new_zeros(int(mine.sum(0).max()), self.count, *x.shape[1:])
        rows[place, ids] = x
        found = F.conv2d(rows.flatten(1, 2), self.weight, self.bias, padding=1, groups=self.count)
        return found.reshape(rows.shape)[place, ids]


def forms(count: int, each: int, load: str) -> Forms:
    """So many branches with so many images each in the mean."""
    branches: list[nn.Module] = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(count)]
    draw = torch.Generator().manual_seed(count)
    batches: list[Inputs] = []
    for _ in range(BATCHES):
        ids = routes(load, count * each, count, draw)
        batches.append((torch.randn(len(ids), CHANNELS, SIZE, SIZE, generator=draw), ids))
    return Forms(Plain(branches), Routed(branches), batches, padded=Padded(branches))


def cases() -> list[Case]:
    """Every number of branches."""
    return [Case(name, "branches", functools.partial(forms, count, each, load), quick=name == QUICK)
            for count in COUNTS for each in EACH for load in (("uniform", "zipf") if count == 64 else ("uniform",))
            for name in [f"branches-{count}-{each}-{load}"]]
