"""Models of images by train steps that are dealt out, against PyTorch on one process: one rank of two."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import anyshape
from anyshape.base.errors import AnyShapeError

CLASSES = 6
SHAPES = [(6, 16, 16), (7, 16, 24), (9, 24, 16), (5, 32, 8)]  # rows that two ranks do not divide, too


class Layer(nn.Module):
    """A layer of a vision transformer as timm writes it: one product for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, width, 3, 3))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        places = F.interpolate(self.places, size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = (x + places).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1)
        return self.head(self.norm(self.layers(x))[:, 0])


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.down(x))


class ResidualNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 12, 2))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(images))), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


MODELS: dict[str, type[nn.Module]] = {"transformer": VisionTransformer, "convolutions": ResidualNet}


def loss_fn(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp_min(1e-9))


def trained(kind: str, strategy: str) -> dict[str, Any]:
    """Steps of changing shapes, beside a model that PyTorch trains on all rows: losses, weights and buffers."""
    torch.manual_seed(0)
    model, alone = MODELS[kind]().double(), MODELS[kind]().double()
    alone.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (model, alone)]
    step = anyshape.train_step(model, loss_fn, optimizers[0], strategy=strategy, strict=True, threads=1)
    shared, worst = strategy in ("tp", "pp"), 0.0
    for number, (rows, height, width) in enumerate(SHAPES):
        torch.manual_seed(number)
        images, labels = torch.randn(rows, 3, height, width).double(), torch.randint(0, CLASSES, (rows,))
        own = [one if shared else one.tensor_split(dist.get_world_size())[dist.get_rank()] for one in (images, labels)]
        try:
            loss = step(*own)
        except AnyShapeError as error:
            return {"refused": str(error)}
        wanted = loss_fn(alone, images, labels)
        wanted.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        worst = max(worst, difference(loss, wanted))
    with step.whole():
        for one, other in zip(model.state_dict().values(), alone.state_dict().values(), strict=True):
            worst = max(worst, difference(one, other))
    return {"worst": worst, "programs": len(step.programs), "eager_calls": anyshape.stats()["eager_calls"]}


def images() -> dict[str, Any]:
    """Every model under every strategy."""
    return {f"{kind} {strategy}": trained(kind, strategy)
            for kind in MODELS for strategy in ("ddp", "fsdp", "tp", "pp")}
