"""MSDNet (early exits over multi-scale features), plain and routed: Huang et al., ICLR 2018, as Brainstorm runs it.

    x (1, 3, h, w)  --  block 1, head 1  --  sure enough? exit : block 2, head 2  -- ...  -->  logits (1, classes)

Sizes are those of Brainstorm's benchmark: 5 blocks, 4 layers a block, 32 channels, growth 16, factors 1-2-4-4 of growth
and of bottlenecks. Weights are random; thresholds are set so that the portions of the exits are those that are asked.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from anyshape import route
from anyshape_bench.routes.case import Case, Forms
from anyshape_bench.routes.plans import speculated

BLOCKS, STEP, CHANNELS, GROWTH, FACTORS, CLASSES = 5, 4, 32, 16, (1, 2, 4, 4), 1000
SCALES = len(FACTORS)
LAYERS = BLOCKS * STEP
SIZE = 64  # of images
# portions of the inputs that leave at each exit: from all at the first to all at the last
PORTIONS = ((1.0, 0.0, 0.0, 0.0, 0.0), (0.7, 0.1, 0.1, 0.05, 0.05), (0.5, 0.2, 0.1, 0.1, 0.1),
            (0.0, 1.0, 0.0, 0.0, 0.0), (0.2, 0.2, 0.2, 0.2, 0.2), (0.1, 0.1, 0.2, 0.3, 0.3),
            (0.05, 0.05, 0.1, 0.1, 0.7), (0.0, 0.0, 0.0, 0.0, 1.0))


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs),
                         nn.ReLU(inplace=True))


def bottleneck(inputs: int, outputs: int, stride: int, factor: int) -> nn.Sequential:
    inner = min(inputs, factor * outputs)
    return nn.Sequential(conv(inputs, inner, 1), conv(inner, outputs, 3, stride))


class Stem(nn.Module):
    """The first layer: an image to one feature map a scale."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [CHANNELS * factor for factor in FACTORS]
        first = nn.Sequential(conv(3, sizes[0], 7, 2), nn.MaxPool2d(3, 2, 1))
        self.scales = nn.ModuleList([first, *(conv(a, b, 3, 2) for a, b in pairwise(sizes))])

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for scale in self.scales:
            x = scale(x)
            found.append(x)
        return found


class Layer(nn.Module):
    """A layer over scales; where it has fewer than came in, the finest is dropped. `sizes`: channels by scale."""

    def __init__(self, sizes: list[int], kept: int) -> None:
        super().__init__()
        first = len(sizes) - kept
        self.first = first
        self.same, self.down = nn.ModuleList(), nn.ModuleList()
        self.sizes = []
        for scale in range(first, len(sizes)):
            level = SCALES - len(sizes) + scale
            grown = GROWTH * FACTORS[level]
            half = grown // 2 if scale else grown
            self.same.append(bottleneck(sizes[scale], half, 1, FACTORS[level]))
            if scale:
                self.down.append(bottleneck(sizes[scale - 1], half, 2, FACTORS[level - 1]))
            self.sizes.append(sizes[scale] + grown)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        found = []
        for place, same in enumerate(self.same):
            scale = self.first + place
            parts = [features[scale], same(features[scale])]
            if scale:
                down = self.down[place - (0 if self.first else 1)]
                parts.insert(1, down(features[scale - 1]))
            found.append(torch.cat(parts, 1))
        return found


class Transition(nn.Module):
    """Halves the channels of every scale."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = [size // 2 for size in sizes]
        self.scales = nn.ModuleList(conv(size, size // 2, 1) for size in sizes)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        return [scale(feature) for scale, feature in zip(self.scales, features, strict=True)]


class Head(nn.Sequential):
    """A classifier over the coarsest scale."""

    def __init__(self, size: int) -> None:
        super().__init__(conv(size, size, 3, 2), conv(size, size, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(size, CLASSES))


def parts() -> tuple[list[nn.Module], list[nn.Module]]:
    """The blocks, the stem before the first, and the heads, with weights of seed 0, in evaluation mode."""
    torch.manual_seed(0)
    sizes = [CHANNELS * factor for factor in FACTORS]
    blocks, heads = [], []
    interval = math.ceil(LAYERS / SCALES)
    layer = 0
    for block in range(BLOCKS):
        modules: list[nn.Module] = [Stem()] if block == 0 else []
        for _ in range(STEP):
            layer += 1
            kept = SCALES - (layer - 1) // interval
            modules.append(Layer(sizes, kept))
            shrunk = kept < len(sizes)
            sizes = modules[-1].sizes
            if shrunk:
                modules.append(Transition(sizes))
                sizes = modules[-1].sizes
        blocks.append(nn.Sequential(*modules).eval())
        heads.append(Head(sizes[-1]).eval())
    for module in (*blocks, *heads):
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0, 0.05)
                norm.running_var.uniform_(0.5, 1.5)
    return blocks, heads


def surest(logits: Tensor) -> Tensor:
    """The highest probability of each sample."""
    return torch.softmax(logits, 1).amax(1)


class Plain(nn.Module):
    """MSDNet with exits as Python ifs; a batch of one."""

    def __init__(self, blocks: Sequence[nn.Module], heads: Sequence[nn.Module], thresholds: Sequence[float]) -> None:
        super().__init__()
        self.blocks, self.heads, self.thresholds = nn.ModuleList(blocks), nn.ModuleList(heads), list(thresholds)

    def forward(self, x: Tensor) -> Tensor:
        for block, head, threshold in zip(self.blocks, self.heads, self.thresholds, strict=True):
            x = block(x)
            logits = head(x[-1])
            if surest(logits) >= threshold:
                break
        return logits


class Routed(nn.Module):
    """The same network, from one block on: a router sends each sample to its exit or to the rest."""

    def __init__(self, blocks: Sequence[nn.Module], heads: Sequence[nn.Module], thresholds: Sequence[float]) -> None:
        super().__init__()
        self.block, self.head, self.threshold, self.router = blocks[0], heads[0], thresholds[0], None
        if len(blocks) > 1:
            rest = Routed(blocks[1:], heads[1:], thresholds[1:])
            self.router = route.Router(self.decide, [lambda logits, *features: logits, Rest(rest)])

    def decide(self, logits: Tensor, *features: Tensor) -> Tensor:
        return (surest(logits) < self.threshold).long()

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        features = self.block(x)
        logits = self.head(features[-1])
        return logits if self.router is None else self.router((logits, *features))


class Rest(nn.Module):
    """The blocks behind an exit, of which the logits before it are no input."""

    def __init__(self, rest: Routed) -> None:
        super().__init__()
        self.rest = rest

    def forward(self, logits: Tensor, *features: Tensor) -> Tensor:
        return self.rest(list(features))


def thresholds_of(blocks: Sequence[nn.Module], heads: Sequence[nn.Module], portions: Sequence[float],
                  inputs: Sequence[Tensor]) -> list[float]:
    """Thresholds by which `portions` of the inputs leave at each exit: quantiles of what is left before it."""
    found = []
    left = []
    with torch.no_grad():
        for x in inputs:
            sure = []
            for block, head in zip(blocks, heads, strict=True):
                x = block(x)
                sure.append(float(surest(head(x[-1]))))
            left.append(sure)
    remaining = len(left)
    for exit_number, portion in enumerate(portions):
        count = min(round(portion * len(inputs)), remaining)
        order = sorted((sure[exit_number] for sure in left), reverse=True)
        if count == 0 or exit_number == len(portions) - 1:
            found.append(2.0 if exit_number < len(portions) - 1 else 0.0)
            continue
        bound = (order[count - 1] + order[count]) / 2 if count < len(order) else 0.0
        found.append(bound)
        left = [sure for sure in left if sure[exit_number] < bound]
        remaining = len(left)
    return found


def cases() -> list[Case]:
    """One case for each of the settings."""
    def make(portions: Sequence[float]) -> Forms:
        blocks, heads = parts()
        inputs = [torch.randn(1, 3, SIZE, SIZE) for _ in range(200)]
        thresholds = thresholds_of(blocks, heads, portions, inputs)
        plain, routed = (form(blocks, heads, thresholds).eval() for form in (Plain, Routed))
        return Forms(plain, routed, [(x,) for x in inputs[100:]],
                     planned=lambda model, _: speculated(model, inputs[:100]))
    return [Case(f"msdnet-{number}", "msdnet", partial(make, portions), quick=number == 3)
            for number, portions in enumerate(PORTIONS, 1)]
