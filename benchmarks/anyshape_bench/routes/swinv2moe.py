"""Benchmark case of SwinV2-MoE (Hwang et al., Tutel, 2022), scaled for two cores: top-1 of 16 experts in window blocks.

SwinV2's blocks (Liu et al., 2022): attention by cosine in windows that are shifted in every other block, a bias from
relative places by a small network, norms after each part. Every other block of the last stage has experts.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape import route
from anyshape_bench.routes.case import Case, Forms
from anyshape_bench.routes.weights import stack_weights

EXPERTS, WINDOW, PATCH = 16, 4, 4
WIDTHS, DEPTHS, HEADS, CLASSES = (32, 64), (2, 6), (2, 4), 100
SIZES = ((4, 64, 64), (3, 64, 96), (4, 64, 64), (2, 96, 96), (6, 32, 64), (1, 128, 64))  # (batch, height, width)


class Gate(nn.Module):
    """Top-1 with its probability."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scores = nn.Linear(width, EXPERTS, bias=False)

    def forward(self, cells: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(self.scores(cells), -1).max(-1)
        return ids, weights


class Plain(nn.Module):
    """Layer of experts, as a loop."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = Gate(width)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        cells = x.reshape(-1, x.shape[-1])
        ids, weights = self.gate(cells)
        out = torch.zeros_like(cells)
        for number, expert in enumerate(self.experts):
            chosen = (ids == number).nonzero()[:, 0]
            out.index_add_(0, chosen, expert(cells[chosen]) * weights[chosen, None])
        return out.reshape(x.shape)


class Routed(nn.Module):
    """Layer of experts, as a router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = Gate(width)
        self.moe = route.Router(self.gate, route.Experts(EXPERTS, width, 4 * width, activation="gelu"))

    def forward(self, x: Tensor) -> Tensor:
        cells = route.annotate_cell(x, dims=(0, 1, 2))
        return route.restore(self.moe(cells), like=x, dims=(0, 1, 2))


class Padded(nn.Module):
    """Baseline: as many rows for every expert as the busiest has, in batched products."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.gate, self.experts = routed.gate, routed.moe.branches

    def forward(self, x: Tensor) -> Tensor:
        cells, own = x.reshape(-1, x.shape[-1]), self.experts
        ids, weights = self.gate(cells)
        mine = F.one_hot(ids, EXPERTS)
        place = (mine.cumsum(0) - 1).gather(1, ids[:, None])[:, 0]
        rows = cells.new_zeros(EXPERTS, int(mine.sum(0).max()), cells.shape[1])
        rows[ids, place] = cells
        hidden = F.gelu(torch.baddbmm(own.bias_in[:, None], rows, own.weight_in))
        found = torch.baddbmm(own.bias_out[:, None], hidden, own.weight_out)[ids, place]
        return (found * weights[:, None]).reshape(x.shape)


class GroupedMM(nn.Module):
    """Baseline: rows sorted by expert, products by `grouped_mm`, biases looked up by row."""

    def __init__(self, routed: Routed) -> None:
        super().__init__()
        self.gate, self.experts = routed.gate, routed.moe.branches

    def forward(self, x: Tensor) -> Tensor:
        cells, own = x.reshape(-1, x.shape[-1]), self.experts
        ids, weights = self.gate(cells)
        order = ids.argsort(stable=True)
        ends, of_row = torch.bincount(ids, minlength=EXPERTS).cumsum(0).int(), ids[order]
        hidden = F.gelu(F.grouped_mm(cells[order], own.weight_in, offs=ends) + own.bias_in[of_row])
        found = (F.grouped_mm(hidden, own.weight_out, offs=ends) + own.bias_out[of_row]) * weights[order, None]
        return torch.empty_like(found).index_copy_(0, order, found).reshape(x.shape)


class Block(nn.Module):
    """Window attention and a feed-forward part. x f32 [batch, height, width, channels], sizes multiples of WINDOW."""

    def __init__(self, width: int, heads: int, shift: int, feed: nn.Module) -> None:
        super().__init__()
        self.heads, self.shift, self.feed = heads, shift, feed
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.bias = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, heads, bias=False))
        places = torch.cartesian_prod(torch.arange(WINDOW), torch.arange(WINDOW)).float()
        away = places[:, None] - places[None]
        self.register_buffer("places", torch.sign(away) * torch.log2(1 + away.abs() * 8 / (WINDOW - 1)) / 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norms[0](self.attention(x))
        return x + self.norms[1](self.feed(x))

    def attention(self, x: Tensor) -> Tensor:
        """Shifted windows wrap around the borders, and are not masked there."""
        batch, height, width, channels = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.reshape(batch, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, channels)
        heads = self.project(x).reshape(x.shape[0], x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = F.normalize(heads[0], dim=-1), F.normalize(heads[1], dim=-1)
        scores = query @ key.transpose(-2, -1) * self.scale.clamp(max=math.log(100.0)).exp()
        scores = scores + 16 * torch.sigmoid(self.bias(self.places)).permute(2, 0, 1)
        found = self.out((scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(x.shape))
        found = found.reshape(batch, height // WINDOW, width // WINDOW, WINDOW, WINDOW, channels)
        found = found.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        return torch.roll(found, (self.shift, self.shift), (1, 2)) if self.shift else found


class Swin(nn.Module):
    """Patches, two stages of blocks with a merge of patches between, and a classifier. x f32 [batch, 3, h, w]."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        left = iter(layers)
        self.embed = nn.Conv2d(3, WIDTHS[0], PATCH, PATCH)
        self.first = nn.ModuleList(Block(WIDTHS[0], HEADS[0], number % 2 * WINDOW // 2, dense(WIDTHS[0]))
                                   for number in range(DEPTHS[0]))
        self.merge, self.norm = nn.Linear(4 * WIDTHS[0], WIDTHS[1], bias=False), nn.LayerNorm(WIDTHS[1])
        self.last = nn.ModuleList(Block(WIDTHS[1], HEADS[1], number % 2 * WINDOW // 2,
                                        next(left) if number % 2 else dense(WIDTHS[1])) for number in range(DEPTHS[1]))
        self.head = nn.Linear(WIDTHS[1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        for block in self.first:
            x = block(x)
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 4, 2, 5)
        x = self.norm(self.merge(x.reshape(batch, height // 2, width // 2, 4 * channels)))
        for block in self.last:
            x = block(x)
        return self.head(x.mean((1, 2)))


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def forms() -> Forms:
    """The network; loads are those of random images."""
    count = DEPTHS[1] // 2
    loops, layers = [Plain(WIDTHS[1]) for _ in range(count)], [Routed(WIDTHS[1]) for _ in range(count)]
    for one, other in zip(loops, layers, strict=True):
        other.gate.load_state_dict(one.gate.state_dict())
        stack_weights(one.experts, other.moe.branches)
    plain, routed = Swin([*loops]), Swin([*layers])
    padded, grouped = Swin([Padded(one) for one in layers]), Swin([GroupedMM(one) for one in layers])
    same = {name: value for name, value in plain.state_dict().items()
            if not (".feed.gate." in name or ".feed.experts." in name)}
    for form in (routed, padded, grouped):
        form.load_state_dict(same, strict=False)
    draw = torch.Generator().manual_seed(0)
    return Forms(plain, routed, [(torch.randn(batch, 3, *size, generator=draw),) for batch, *size in SIZES],
                 padded=padded, grouped_mm=grouped)


def cases() -> list[Case]:
    """One."""
    return [Case("swinv2moe", "swinv2moe", forms, quick=True)]
