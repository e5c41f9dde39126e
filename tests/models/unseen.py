"""Models that were written to find what the others miss: attention over a graph, a gated mixer in time, a VAE."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.case import Case, normal, tokens


class GraphAttention(nn.Module):
    """Attention over the edges of a graph, by scatters and gathers; a node may have no edge."""

    def __init__(self, width: int = 7, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(width, heads * 4)
        self.source = nn.Parameter(torch.randn(heads, 4))
        self.target = nn.Parameter(torch.randn(heads, 4))
        self.out = nn.Linear(heads * 4, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        count = x.shape[0]
        z = self.linear(x).view(count, self.heads, 4)
        source, target = edges[0], edges[1]
        score = F.leaky_relu((z * self.source).sum(-1)[source] + (z * self.target).sum(-1)[target], 0.2)
        top = torch.full((count, self.heads), -1e9, device=x.device).scatter_reduce(
            0, target[:, None].expand(-1, self.heads), score, "amax")
        weight = (score - top[target]).exp()
        total = x.new_zeros(count, self.heads).index_add(0, target, weight)
        share = (weight / total[target].clamp(min=1e-9))[..., None]
        mixed = x.new_zeros(count, self.heads, 4).index_add(0, target, share * z[source])
        degree = x.new_zeros(count).scatter_add(0, target, x.new_ones(edges.shape[1]))
        return self.out(mixed.flatten(1)) + degree[:, None].log1p()


class GatedMixer(nn.Module):
    """Gated units, depthwise convolutions over time (causal, and dilated), flips, rolls, sums along time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width)
        self.causal = nn.Conv1d(width, width, 4, groups=width)
        self.wide = nn.Conv1d(width, width, 3, dilation=2, padding="same", groups=width)
        self.out = nn.Linear(width, width)
        self.register_buffer("decay", torch.linspace(0.1, 0.9, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.glu(self.gate(self.norm(x)), -1).transpose(1, 2)
        y = F.silu(self.causal(F.pad(y, (3, 0)))) + self.wide(y)
        y = torch.flip(y, (-1,)) + torch.roll(y, 1, -1)
        y = y.transpose(1, 2) * torch.outer(torch.arange(x.shape[1], device=x.device), self.decay).neg().exp()
        return x + self.out(torch.cumsum(y, 1)), y.amax(2)


class Variational(nn.Module):
    """A VAE whose noise is an input; the loss reads what is returned too."""

    def __init__(self, width: int = 11) -> None:
        super().__init__()
        self.encode = nn.Linear(width, 8)
        self.mean = nn.Linear(8, 4)
        self.spread = nn.Linear(8, 4)
        self.decode = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, width))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.elu(self.encode(x))
        mean, spread = self.mean(hidden), self.spread(hidden).clamp(-5, 5)
        found = self.decode(mean + noise * (0.5 * spread).exp())
        distance = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1)
        missed = F.binary_cross_entropy_with_logits(found, x.sigmoid(), reduction="none").sum(-1)
        return found, distance, missed + distance


UNSEEN = (
    Case("graph_attention", GraphAttention, lambda shape, draw: (
        normal((shape[0], 7), draw), tokens((2, shape[1]), shape[0], draw)), ((1, 19), (1, 41)), zero=False,
        half=False),
    Case("gated_mixer", GatedMixer, lambda shape, draw: (normal((*shape, 8), draw),), ((1, 5), (1, 31)), half=False),
    Case("variational", Variational, lambda shape, draw: (
        normal((shape[0], 11), draw), normal((shape[0], 4), draw)), ((1, 61),)),
)
