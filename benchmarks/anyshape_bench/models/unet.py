"""A U-Net (Ronneberger and others, 2015, figure 1) with normalised convolutions, for any image size."""
from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = (16, 32, 64, 128)


class Level(nn.Module):
    """Two 3x3 convolutions, each with group norm and ReLU."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels, 3, 1, 1)
        self.norm_1 = nn.GroupNorm(8, channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, 1, 1)
        self.norm_2 = nn.GroupNorm(8, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(x)))


class UNet(nn.Module):
    """Returns the mean squared error of what it makes of `image` against `target`, both float32[batch, 3, height,
    width]. An odd size is rounded up on the way down, and cut on the way up."""

    def __init__(self) -> None:
        super().__init__()
        ins = (3, *CHANNELS[:-1])
        self.down = nn.ModuleList(Level(a, b) for a, b in zip(ins, CHANNELS, strict=True))
        above = list(reversed(CHANNELS))
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in itertools.pairwise(above))
        self.up = nn.ModuleList(Level(2 * b, b) for b in above[1:])
        self.head = nn.Conv2d(CHANNELS[0], 3, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = image
        skipped = []
        for number, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2, ceil_mode=True) if number else x)
            skipped.append(x)
        for shrink, level, skip in zip(self.shrink, self.up, reversed(skipped[:-1]), strict=True):
            x = F.interpolate(shrink(x), scale_factor=2.0, mode="nearest")[:, :, :skip.shape[2], :skip.shape[3]]
            x = level(torch.cat([skip, x], 1))
        return F.mse_loss(self.head(x), target)
