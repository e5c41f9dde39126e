"""Convolutional networks whose train steps `anyshape bench plan` plans; image float32[batch, 3, height, width] to
float32[batch, classes]. Random weights. Dropout is left out, for it has no part in a plan."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # channels; 0: a pooling
# expansion, channels, blocks, stride
MOBILE = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
# expansion, channels, blocks, stride, kernel
EFFICIENT = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
             (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))


def alexnet(classes: int = 1000) -> nn.Module:
    """AlexNet on one device (Krizhevsky, One weird trick, 2014), for images of 224 by 224."""
    features = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, 1, 2), nn.ReLU(),
                nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, 1, 1), nn.ReLU(), nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(),
                nn.Conv2d(256, 256, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2)]
    return nn.Sequential(*features, nn.Flatten(), *_head(256 * 36, classes))


def vgg16(classes: int = 1000) -> nn.Module:
    """VGG16 (Simonyan and Zisserman, 2014, table 1, D), for images of 224 by 224."""
    layers: list[nn.Module] = []
    before = 3
    for channels in VGG16:
        layers += [nn.Conv2d(before, channels, 3, 1, 1), nn.ReLU()] if channels else [nn.MaxPool2d(2, 2)]
        before = channels or before
    return nn.Sequential(*layers, nn.Flatten(), *_head(512 * 49, classes))


def _head(width: int, classes: int) -> Sequence[nn.Module]:
    return nn.Linear(width, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)


class Narrowing(nn.Module):
    """An inverted residual: expand, convolve by channel, squeeze and excite where `squeezed`, project."""

    def __init__(self, before: int, channels: int, expansion: int, stride: int, kernel: int, squeezed: bool) -> None:
        super().__init__()
        inner = before * expansion
        active = nn.SiLU if squeezed else nn.ReLU6
        parts: list[nn.Module] = []
        if expansion > 1:
            parts += [nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), active()]
        parts += [nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
                  nn.BatchNorm2d(inner), active()]
        if squeezed:
            parts.append(Excitation(inner, max(before // 4, 1)))
        self.parts = nn.Sequential(*parts, nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.residual = stride == 1 and before == channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts(x)
        return x + y if self.residual else y


class Excitation(nn.Module):
    """Scales channels by what a small network makes of their means (Hu and others, 2017)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, inner, 1)
        self.up = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(torch.nn.functional.silu(self.down(mean))))


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    """MobileNetV2 (Sandler and others, 2018, table 2)."""
    return _narrowing([(*row, 3) for row in MOBILE], 32, False, classes)


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    """EfficientNet-B0 (Tan and Le, 2019, table 1), without stochastic depth."""
    return _narrowing(EFFICIENT, 32, True, classes)


def _narrowing(rows: Sequence[tuple[int, ...]], before: int, squeezed: bool, classes: int) -> nn.Module:
    active = nn.SiLU if squeezed else nn.ReLU6
    layers: list[nn.Module] = [nn.Conv2d(3, before, 3, 2, 1, bias=False), nn.BatchNorm2d(before), active()]
    for expansion, channels, blocks, stride, kernel in rows:
        for block in range(blocks):
            layers.append(Narrowing(before, channels, expansion, stride if block == 0 else 1, kernel, squeezed))
            before = channels
    return nn.Sequential(*layers, nn.Conv2d(before, 1280, 1, bias=False), nn.BatchNorm2d(1280), active(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))
