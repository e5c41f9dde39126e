"""Dispatch and combine as parts of grouped products and convolutions: results, dropped, empty; what is fused."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape import route
from anyshape.plan.ir.program import LibraryStep


def steps(program):
    """(op, what is fused) of the library steps of a compiled program."""
    return [(step.op, sorted({"gathered", "scattered"} & dict(step.attrs).keys()))
            for step in program.programs[0].compiled.plan.steps if isinstance(step, LibraryStep)]


class Convolutions(nn.Module):
    """Images by a router over convolutions; `after`: what a branch does besides."""

    def __init__(self, after: str = "", stride: int = 1, choices: int = 1, weighted: bool = False) -> None:
        super().__init__()
        branches = [nn.Conv2d(3, 3, 3, stride, 1) for _ in range(4)]
        if after == "relu":
            branches = [nn.Sequential(one, nn.ReLU()) for one in branches]
        if after == "twice":
            branches = [nn.Sequential(one, nn.ReLU(), nn.Conv2d(3, 3, 3, 1, 1)) for one in branches]
        if after == "residual":
            branches = [Residual() for _ in range(4)]
        self.weighted, self.choices = weighted, choices
        self.router = route.Router(self.decide, route.stack(branches, torch.zeros(1, 3, 9, 10)))

    def decide(self, x: Tensor, ids: Tensor) -> route.Routes:
        ids = torch.stack([ids[:, choice] for choice in range(self.choices)], 1)
        weights = x.flatten(1).mean(1, keepdim=True).expand(ids.shape) if self.weighted else None
        return route.Routes(ids, weights, None)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.router(x, ids)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) + x).relu()


def ids_of(count: int, choices: int, drop: bool = True) -> Tensor:
    """Choices of four branches, the third of which nobody takes; some are dropped."""
    ids = torch.randint(-1 if drop else 0, 3, (count, choices))
    return torch.where(ids == 2, 3, ids)


BOTH = ["gathered", "scattered"]


@pytest.mark.parametrize(("model", "choices", "fused"), [
    (Convolutions(), 1, [BOTH]),
    (Convolutions("relu", 2), 1, [BOTH]),
    (Convolutions("twice"), 1, [["gathered"], ["scattered"]]),
    (Convolutions("residual"), 1, [["scattered"]]),
    (Convolutions(weighted=True), 1, [BOTH]),
    (Convolutions(choices=2), 2, [["gathered"]]),
], ids=["plain", "relu", "twice", "residual", "weighted", "two"])
def test_convolutions(model: nn.Module, choices: int, fused: list[list[str]]) -> None:
    torch.manual_seed(0)
    fast = anyshape.compile(model)
    with torch.no_grad():
        for count in (7, 40, 1, 0, 2):
            x = torch.randn(count, 3, 9, 10)
            for ids in (ids_of(count, choices), torch.full((count, choices), -1), torch.full((count, choices), 3)):
                torch.testing.assert_close(fast(x, ids), model(x, ids), rtol=1e-4, atol=1e-4)
        strided = torch.randn(12, 3, 9, 10)[::2]
        ids = ids_of(6, choices)
        torch.testing.assert_close(fast(strided, ids), model(strided, ids), rtol=1e-4, atol=1e-4)
        last = torch.randn(6, 3, 9, 10).to(memory_format=torch.channels_last)
        torch.testing.assert_close(fast(last, ids), model(last, ids), rtol=1e-4, atol=1e-4)
    assert [one for op, one in steps(fast) if op == "grouped_conv"] == fused
