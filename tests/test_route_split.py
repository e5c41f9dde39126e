"""Routers whose branches are modules of their own, compiled: one program for every load, a part for each branch."""
from __future__ import annotations

import io
import warnings

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route
from anyshape.frontend.programs.eager_fallback import FallbackWarning

WIDTH = 6
LOADS = ([3, 2, 4], [0, 5, 1], [1, 0, 0], [0, 0, 7], [1, 1, 1], [2, 0, 3], [0, 1, 0])


def given(cells, ids):
    return route.Routes(ids)


def ids_of(loads, seed=0):
    ids = torch.cat([torch.full((count,), branch) for branch, count in enumerate(loads)])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Routed(nn.Module):
    def __init__(self, branches, **how):
        super().__init__()
        torch.manual_seed(0)
        self.router = route.Router(given, branches() if callable(branches) else branches, **how)

    def forward(self, x, ids):
        return self.router(x, ids)


class Norm(nn.Module):
    def forward(self, rows):
        return rows / (1 + rows.abs().amax(1, keepdim=True)) + rows.mean(0, keepdim=True) * 0


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU(),
                                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, WIDTH))

    def forward(self, rows):
        return self.layers(rows.reshape(-1, 2, 1, 3))


class Attention(nn.Module):
    """Each row is a sequence of two."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, rows):
        x = rows.reshape(-1, 2, 3)
        return self.inner(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)


BRANCHES = {
    "linear": lambda: [linear() for _ in range(3)],
    "mlp": lambda: [nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear()) for _ in range(3)],
    "unlike": lambda: [linear(), nn.Identity(), nn.Sequential(linear(), nn.ReLU(inplace=True), linear())],
    "functions": lambda: [lambda rows: rows * 2, torch.sin, lambda rows: torch.zeros_like(rows)],
    "convolution": lambda: [Convolution() for _ in range(3)],
    "attention": lambda: [Attention(), linear(), Attention()],
    "softmax": lambda: [nn.Softmax(1), nn.Sequential(linear(), nn.Softmax(-1)), linear()],
}


def programs_traced(run):
    return run.explain().graphs


def compiled(model, **how):
    return anyshape.compile(model, strict=True, **how)


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("train", [False, True], ids=["inference", "train"])
def test_one_program_serves_every_load(kind, train):
    """No call runs as PyTorch, in the first call and after it, and gradients of branches without cells are zero."""
    model = Routed(BRANCHES[kind])
    run = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for loads in LOADS:
            x, ids = torch.randn(sum(loads), WIDTH, requires_grad=train), ids_of(loads)
            ours, expected = run(x, ids), model(x, ids)
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
            if train:
                wanted = [x, *(p for p in model.parameters())]
                for mine, its in zip(*(torch.autograd.grad(y.square().sum(), wanted, allow_unused=True,
                                                           materialize_grads=True)
                                       for y in (ours, expected)), strict=True):
                    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    explained = run.explain()
    assert explained.graphs == 1 and not explained.fallbacks and not explained.eager
    assert explained.cuts
