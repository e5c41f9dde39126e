"""The Conformer, a speech encoder (Gulati and others, 2020): attention and convolution over frames, in plain torch."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MELS = 80


class FeedForward(nn.Sequential):
    """Norm, two layers and Swish; added with half its weight."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


class ConvolutionModule(nn.Module):
    """Gated pointwise layer, a depthwise convolution over frames, batch norm and Swish."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depthwise = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x float32[batch, frames, width]."""
        y = F.glu(self.gate(self.norm(x).transpose(1, 2)), dim=1)
        return self.out(F.silu(self.batch_norm(self.depthwise(y)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, norm."""

    def __init__(self, width: int, heads: int, kernel: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = FeedForward(width)
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.convolution = ConvolutionModule(width, kernel)
        self.after = FeedForward(width)
        self.norm_out = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, frames, width = x.shape
        x = x + 0.5 * self.before(x)
        q, k, v = self.attention(self.norm(x)).split(width, dim=2)
        q, k, v = (t.view(batch, frames, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, frames, width))
        x = x + self.convolution(x)
        return self.norm_out(x + 0.5 * self.after(x))


class Conformer(nn.Module):
    """Two convolutions that keep every fourth frame, sinusoidal positions, blocks, and scores of tokens per frame."""

    def __init__(self, width: int = 256, layers: int = 6, heads: int = 4, kernel: int = 31, tokens: int = 256) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, 2, 1)
        self.second = nn.Conv2d(32, 32, 3, 2, 1)
        self.project = nn.Linear(32 * MELS // 4, width)
        self.blocks = nn.Sequential(*(ConformerBlock(width, heads, kernel) for _ in range(layers)))
        self.head = nn.Linear(width, tokens)
        speeds = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        self.register_buffer("speeds", speeds)
        self.speeds: Tensor

    def forward(self, spectrum: Tensor) -> Tensor:
        """spectrum float32[batch, frames, MELS] to float32[batch, frames / 4, tokens]."""
        x = F.relu(self.second(F.relu(self.first(spectrum[:, None]))))
        x = self.project(x.permute(0, 2, 1, 3).flatten(2))
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.speeds
        x = x + torch.cat([angles.sin(), angles.cos()], dim=1)
        return self.head(self.blocks(x)).log_softmax(-1)
