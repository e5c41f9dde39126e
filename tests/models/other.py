"""Models of speech, of clicks and of sequences: convolution with attention, embedding bags, a recurrent loop."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.case import Case, normal, tokens


class Conformer(nn.Module):
    """Attention with a mask of lengths, then a gated depthwise convolution over time."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        batch, time, width = x.shape
        real = torch.arange(time, device=x.device)[None, :] < lengths[:, None]
        x = x + 0.5 * self.mlp(self.norms[0](x))
        q, k, v = self.qkv(self.norms[1](x)).view(batch, time, 3, 3, width // 3).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // 3) ** 0.5
        scores = scores.masked_fill(~real[:, None, None, :], -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))
        y = F.glu(self.gate(self.norms[2](x).transpose(1, 2)), dim=1)
        y = F.silu(self.depth(y * real[:, None, :]))
        return (x + y.transpose(1, 2)) * real[..., None]


class Clicks(nn.Module):
    """In the manner of DLRM: embedding tables and a bag, pairwise products of the features, then an MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in (11, 29))
        self.bag = nn.EmbeddingBag(31, width, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, width))
        self.top = nn.Sequential(nn.Linear(width + 6, 10), nn.ReLU(), nn.Linear(10, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, dense: Tensor, sparse: Tensor, history: Tensor) -> Tensor:
        first = self.bottom(dense)
        found = [first, *(table(sparse[:, k]) for k, table in enumerate(self.tables)), self.bag(history)]
        features = torch.stack(found, 1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat((first, products[:, self.pairs[0], self.pairs[1]]), 1)).squeeze(-1)


class Recurrent(nn.Module):
    """An LSTM written as a loop over five steps."""

    def __init__(self, width: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, hidden)
        self.head = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        state = (x.new_zeros(x.shape[1], 8), x.new_zeros(x.shape[1], 8))
        found = []
        for step in x.unbind(0):
            state = self.cell(step, state)
            found.append(self.head(state[0]))
        return torch.stack(found)


class Ragged(nn.Module):
    """Pooling of rows by segment: cumulative sums, scatter, comparisons of sizes' ranges, rotary positions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        count, width = x.shape
        ends = lengths.cumsum(0)
        places = torch.arange(count, device=x.device)
        segment = torch.searchsorted(ends, places, right=True).clamp(max=lengths.shape[0] - 1)
        angle = torch.arange(count, device=x.device)[:, None] * torch.exp(
            -torch.arange(width // 2, device=x.device) / width)
        first, second = self.proj(x).chunk(2, -1)
        turned = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
        total = x.new_zeros(lengths.shape[0], width).index_add(0, segment, turned.to(x.dtype))
        return total / lengths.clamp(min=1)[:, None]


def _speech(shape, draw):
    lengths = torch.randint(1, shape[1] + 1, (shape[0],), generator=draw)
    return normal((*shape, 12), draw), lengths


def _clicks(shape, draw):
    batch, history = shape
    return normal((batch, 5), draw), tokens((batch, 2), 11, draw), tokens((batch, history), 31, draw)


def _ragged(shape, draw):
    rows, segments = shape
    return normal((rows, 8), draw), torch.randint(1, 5, (segments,), generator=draw)


OTHER = (
    Case("conformer", Conformer, _speech, ((1, 5), (1, 31))),
    Case("clicks", Clicks, _clicks, ((1, 41), (1, 9))),
    # an input with a dimension of 0 in the middle has strides that do not follow from its sizes, which Dynamo guards on
    Case("recurrent", Recurrent, lambda shape, draw: (normal((5, shape[0], 6), draw),), ((1, 40),), programs=2),
    Case("ragged", Ragged, _ragged, ((1, 50), (1, 9)), half=False),
)
