"""The demo's language model: a small Llama in plain torch that says nothing about the size of any batch.

Root mean square norm (Zhang and Sennrich 2019), rotary position embedding (Su et al. 2021), SwiGLU (Shazeer 2020),
causal attention through `scaled_dot_product_attention`, embedding and output projection tied (Press and Wolf 2017).
No Python branch looks at a size, so one program can serve every batch and every length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # the target of a padded place: cross entropy leaves it out


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Sizes of the model; the defaults have 3.7 million weights."""

    vocabulary: int = 2048
    hidden: int = 256
    inner: int = 688
    layers: int = 4
    heads: int = 4
    rotary_base: float = 10000.0
    epsilon: float = 1e-5


class RootMeanSquareNorm(nn.Module):
    """`x / sqrt(mean(x**2) + epsilon) * weight` over the last dim."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return x * scale * self.weight


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of the last dim by its position's angle; x: [rows, heads, length, width]."""
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; [rows, length, hidden] to the same."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.width = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, config.hidden, bias=False)
        self.value = nn.Linear(config.hidden, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        split = (rows, length, self.heads, self.width)
        query = rotate(self.query(x).reshape(split).transpose(1, 2), cosine, sine)
        key = rotate(self.key(x).reshape(split).transpose(1, 2), cosine, sine)
        value = self.value(x).reshape(split).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(rows, length, hidden))


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.inner, bias=False)
        self.up = nn.Linear(config.hidden, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: norm, attention, residual; norm, feed forward, residual."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.attention_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class DemoLlama(nn.Module):
    """`model(tokens)` gives logits; `model(tokens, targets)` the mean loss over the places that are not ignored."""

    inverse_frequency: Tensor

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        if config.hidden % (2 * config.heads):
            raise ValueError(f"hidden={config.hidden} must be a multiple of 2 * heads={2 * config.heads}")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        width = config.hidden // config.heads
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self.register_buffer("inverse_frequency", config.rotary_base**-exponents, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; what is added to the residual stream is made smaller by the depth (Radford et al. 2019)."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        inside = self.config.hidden**-0.5
        residual = inside / (2 * self.config.layers) ** 0.5
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual if name.endswith(("output.weight", "down.weight")) else inside)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens: int64[rows, length]; targets: int64[rows, length] with `IGNORED` at padded places.

        Returns logits f32[rows, length, vocabulary], or with targets the loss f32[]. Padding stands at the right, so
        the causal mask alone keeps it from every real place.
        """
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device, dtype=torch.float32)
        angles = positions[:, None] * self.inverse_frequency
        cosine, sine = angles.cos(), angles.sin()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        if targets is None:
            return logits
        flat = logits.view(-1, self.config.vocabulary).float()
        return F.cross_entropy(flat, targets.view(-1), ignore_index=IGNORED)


def complete(
    model: nn.Module, tokens: list[int], count: int, end: int, seed: int, temperature: float = 0.7
) -> list[int]:
    """Draw up to `count` more token numbers after `tokens`, one at a time, stopping before `end`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = list(tokens)
    device = next(model.parameters()).device
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([drawn], device=device))[0, -1].cpu()
            chances = torch.softmax(logits / temperature, dim=-1)
            following = int(torch.multinomial(chances, 1, generator=generator))
            if following == end:
                break
            drawn.append(following)
    return drawn
