"""Benchmark cases of LiveSR: patches of a video, each enlarged by the super-resolution network of its cluster.

NAS-MDSR networks (Yeo et al., OSDI'18): 4 to 10 of them with 20 to 8 channels, of which there are 8 residual blocks in
place of 80; patches of 32x32, enlarged 4 times. Loads are those that Brainstorm (OSDI'23) publishes, ALL_SUBNET_BS, in
another order for each batch: which network is the busy one changes. Routes are given, as they are there.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from anyshape import route
from anyshape_bench.routes.case import Case, Forms, Inputs

LOADS = {10: (6, 7, 12, 27, 8, 8, 8, 12, 12, 4), 8: (21, 8, 16, 11, 20, 8, 7, 15), 6: (9, 32, 18, 16, 18, 7),
         4: (19, 25, 18, 36)}
CHANNELS = {10: 8, 8: 12, 6: 16, 4: 20}
BLOCKS, PATCH, TIMES, BATCHES, QUICK = 8, 32, 4, 6, 10


class Block(nn.Module):
    """Residual block: convolution, activation, convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Network(nn.Module):
    """One network. x f32 [patches, 3, PATCH, PATCH] -> f32 [patches, 3, TIMES * PATCH, TIMES * PATCH]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.Sequential(*(Block(channels) for _ in range(BLOCKS)))
        self.tail = nn.Sequential(nn.Conv2d(channels, 3 * TIMES * TIMES, 3, padding=1), nn.PixelShuffle(TIMES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        return self.tail(x + self.body(x))


class Plain(nn.Module):
    """Patches by a loop over networks."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], 3, TIMES * PATCH, TIMES * PATCH)
        for number, network in enumerate(self.networks):
            chosen = (ids == number).nonzero()[:, 0]
            out[chosen] = network(x[chosen])
        return out


class Routed(nn.Module):
    """Patches by a router."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = route.Router(lambda x, ids: ids, route.stack(networks, torch.zeros(1, 3, PATCH, PATCH)))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.networks(x, ids)


def forms(count: int) -> Forms:
    """The networks of this number, with their published loads."""
    networks: list[nn.Module] = [Network(CHANNELS[count]) for _ in range(count)]
    draw = torch.Generator().manual_seed(count)
    batches: list[Inputs] = []
    for _ in range(BATCHES):
        loads = torch.tensor(LOADS[count])[torch.randperm(count, generator=draw)]
        ids = torch.repeat_interleave(torch.arange(count), loads)
        ids = ids[torch.randperm(len(ids), generator=draw)]
        batches.append((torch.randn(len(ids), 3, PATCH, PATCH, generator=draw), ids))
    return Forms(Plain(networks).eval(), Routed(networks).eval(), batches)


def cases() -> list[Case]:
    """Every published number of networks."""
    return [Case(f"livesr-{count}", "livesr", functools.partial(forms, count), quick=count == QUICK) for count in LOADS]
