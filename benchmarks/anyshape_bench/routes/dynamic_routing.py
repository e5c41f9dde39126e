"""DynamicRouting (paths over scales that gates choose), plain and routed: Li et al., CVPR 2020, as Brainstorm runs it.

    image --stem--> scale 0 -+- cell --gates--> up, keep, down to the scales of the next layer -- ... -- sum of scales
                    scale 1 -+- cell ...

16 layers with 2, 3, 4, 4, ... cells, one a scale. A cell's gates say which of its paths run, and weigh them; where none
does, the cell does not run. Channels are fewer than the paper's 64, and images smaller. Weights are random; biases of
gates are set so that each is open for a given share of the inputs: most always or never, a few nearly always.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyshape import route
from anyshape_bench.routes.case import Case, Forms
from anyshape_bench.routes.plans import speculated

LAYERS, SCALES, CHANNELS, CLASSES = 16, 4, 16, 19
SIZE = (64, 128)
UP, KEEP, DOWN = -1, 0, 1
VARIED = 4  # gates that are open for OFTEN of the inputs
OFTEN = 0.97


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs),
                         nn.ReLU())


class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = conv(channels, channels // 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(self.conv(x), scale_factor=2.0, mode="nearest")


class Cell(nn.Module):
    """What runs at one scale of one layer. directions: of its paths, as steps of scale."""

    def __init__(self, scale: int, widest: int) -> None:
        super().__init__()
        channels = CHANNELS << scale
        self.directions = [step for step in (UP, KEEP, DOWN) if 0 <= scale + step < widest]
        self.body = nn.Sequential(conv(channels, channels, 3), conv(channels, channels, 3))
        paths = {UP: lambda: Up(channels), KEEP: nn.Identity, DOWN: lambda: conv(channels, 2 * channels, 3, 2)}
        self.paths = nn.ModuleList(paths[step]() for step in self.directions)
        self.gate = nn.Linear(channels, len(self.directions))

    def gates(self, x: Tensor) -> Tensor:
        """[samples, paths]: weights; 0 where a gate is shut."""
        return torch.relu(torch.tanh(self.gate(x.mean((2, 3)))))

    def run(self, x: Tensor) -> list[Tensor | None]:
        gates = self.gates(x)
        if not bool((gates > 0).any()):
            return [None] * len(self.paths)
        y = self.body(x)
        return [path(y) * gates[:, number, None, None, None] if bool(gates[0, number] > 0) else None
                for number, path in enumerate(self.paths)]


class RoutedCell(nn.Module):
    """A cell whose body and paths are branches of routers."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.body = route.Router(lambda x, gates: ids((gates > 0).any(1)), [Body(cell.body)])
        self.paths = nn.ModuleList(route.Router(open_gate, [path]) for path in cell.paths)

    def run(self, x: Tensor) -> list[Tensor | None]:
        gates = self.cell.gates(x)
        y = self.body((x, gates))
        return [path(y, gates[:, number]) for number, path in enumerate(self.paths)]


class Body(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        return self.body(x)


def ids(is_open: Tensor) -> Tensor:
    return torch.where(is_open, 0, -1)


def open_gate(y: Tensor, gate: Tensor) -> route.Routes:
    return route.Routes(ids(gate > 0), gate)


class Network(nn.Module):
    """cells: one a scale and layer; plain or routed ones."""

    def __init__(self, stem: nn.Module, cells: list[list[nn.Module]], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = stem, head
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in cells)

    def forward(self, x: Tensor) -> Tensor:
        scales: list[Tensor | None] = [self.stem(x)]
        for layer in self.layers:
            after: list[Tensor | None] = [None] * min(len(layer) + 1, SCALES)
            for scale, (cell, own) in enumerate(zip(layer, scales, strict=True)):
                if own is None:
                    continue
                steps = getattr(cell, "cell", cell).directions
                for step, found in zip(steps, cell.run(own), strict=True):
                    if found is not None:
                        before = after[scale + step]
                        after[scale + step] = found if before is None else before + found
            scales = after
        return self.head(scales[0])


def networks() -> tuple[Network, Network, list[Tensor]]:
    """The network plain and routed, with the same weights, and inputs of the kind that its gates were set for."""
    torch.manual_seed(0)
    stem = nn.Sequential(conv(3, CHANNELS, 3, 2), conv(CHANNELS, CHANNELS, 3, 2))
    layers = [[Cell(scale, min(layer + 2, SCALES)) for scale in range(min(layer + 1, SCALES))]
              for layer in range(LAYERS)]
    head = nn.Sequential(conv(CHANNELS, CHANNELS, 3), nn.Conv2d(CHANNELS, CLASSES, 1))
    plain = Network(stem, layers, head).eval()  # type: ignore[arg-type]
    inputs = [torch.randn(1, 3, *SIZE) * (0.5 + torch.rand(1)) for _ in range(256)]
    with torch.no_grad():
        _set_gates(plain, torch.cat(inputs[:64]))
    routed = Network(stem, [[RoutedCell(cell) for cell in layer] for layer in layers], head).eval()
    return plain, routed, inputs


def _set_gates(model: Network, images: Tensor) -> None:
    """Sets biases so that a third of the paths never run, VARIED gates are open for OFTEN of the inputs, and the others
    always are; scale 0 always goes on."""
    scales = [model.stem(images)]
    kinds = _kinds()
    for layer in model.layers:
        after: list[Tensor | None] = [None] * min(len(layer) + 1, SCALES)
        for scale, cell in enumerate(layer):
            for number, step in enumerate(cell.directions):
                share = 1.0 if scale == 0 or step == KEEP else next(kinds)
                logits = cell.gate(scales[scale].mean((2, 3)))[:, number] - cell.gate.bias[number]
                bounds = torch.quantile(logits, 1 - share)
                bias = {0.0: -logits.max() - 1, 1.0: -logits.min() + 0.1}.get(share, -bounds)
                cell.gate.bias[number] = bias
            gates, y = cell.gates(scales[scale]), cell.body(scales[scale])
            for number, (step, path) in enumerate(zip(cell.directions, cell.paths, strict=True)):
                found = path(y) * gates[:, number, None, None, None]
                before = after[scale + step]
                after[scale + step] = found if before is None else before + found
        scales = after


def _kinds() -> Iterator[float]:
    """Shares of inputs for which a gate is open."""
    number = 0
    while True:
        number += 1
        yield OFTEN if number % 10 == 0 and number <= 10 * VARIED else (0.0 if number % 3 == 0 else 1.0)


def cases() -> list[Case]:
    def make() -> Forms:
        plain, routed, inputs = networks()
        return Forms(plain, routed, [(x,) for x in inputs[192:]],
                     planned=lambda model, _: speculated(model, inputs[:128]))
    return [Case("dynamic_routing", "dynamic_routing", make)]
