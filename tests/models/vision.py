"""Models of images: transformer, residual network, U-Net, mixer, autoencoder with batch norm in training."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.case import Case, normal


class Patches(nn.Module):
    """A vision transformer on images of any multiple of the patch size; positions are sums of row and column."""

    def __init__(self, width: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.rows = nn.Parameter(torch.randn(16, width) * 0.1)
        self.columns = nn.Parameter(torch.randn(16, width) * 0.1)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        batch, width, rows, columns = x.shape
        place = self.rows[:rows, None] + self.columns[None, :columns]
        x = x.flatten(2).transpose(1, 2) + place.reshape(rows * columns, width)
        x = torch.cat((self.token.expand(batch, 1, width), x), 1)
        q, k, v = self.mix(self.norms[0](x)).reshape(batch, x.shape[1], 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, x.shape[1], width))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x[:, 0])


class Residual(nn.Module):
    """A residual network in eval mode, with a strided block and average pooling."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.a = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
        self.a_bn = nn.BatchNorm2d(2 * width)
        self.b = nn.Conv2d(2 * width, 2 * width, 3, 1, 1, bias=False)
        self.b_bn = nn.BatchNorm2d(2 * width)
        self.short = nn.Conv2d(width, 2 * width, 1, 2, bias=False)
        self.head = nn.Linear(2 * width, 5)
        self.eval()

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(image)))
        y = self.b_bn(self.b(F.relu(self.a_bn(self.a(x)))))
        x = F.relu(y + self.short(x))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Down, up, and a skip connection; group norm; transposed convolution."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)
        self.down = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = nn.Conv2d(2 * width, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(image)))
        y = F.silu(self.down(F.max_pool2d(x, 2)))
        return self.last(torch.cat((x, self.up(y)), 1))


class Mixer(nn.Module):
    """An MLP mixer; the token mixing goes through transposes, with weights cut to the number of tokens."""

    def __init__(self, width: int = 12, tokens: int = 40) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(tokens, tokens) * 0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 20), nn.GELU(approximate="tanh"), nn.Linear(20, width))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        y = self.norms[0](x).transpose(1, 2)
        y = F.gelu(y @ self.tokens[:count, :count].t())
        x = x + y.transpose(1, 2)
        return (x + self.mlp(self.norms[1](x))).permute(1, 0, 2).contiguous()


class Autoencoder(nn.Module):
    """Batch norm in training mode (its running statistics change) and dropout of probability 0."""

    def __init__(self, width: int = 14) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Linear(width, 10), nn.BatchNorm1d(10), nn.LeakyReLU(0.1), nn.Dropout(0.0), nn.Linear(10, 4))
        self.decode = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encode(x)
        return self.decode(code), F.normalize(code, dim=-1)


def _image(channels: int):
    return lambda shape, draw: (normal((shape[0], channels, *shape[1:]), draw),)


def _rows(width: int):
    return lambda shape, draw: (normal((*shape, width), draw),)


VISION = (
    Case("patches", Patches, _image(3), ((1, 5), (4, 40), (4, 40)), step=(1, 4, 4)),
    Case("residual", Residual, _image(3), ((1, 5), (1, 23), (1, 23))),
    Case("unet", UNet, _image(2), ((1, 4), (2, 22), (2, 22)), step=(1, 2, 2)),
    Case("mixer", Mixer, _rows(12), ((1, 7), (1, 40))),
    Case("autoencoder", Autoencoder, _rows(14), ((2, 64),), zero=False),
)
