"""Dynamic networks: cells, routers and routes, in eager PyTorch and compiled."""
from __future__ import annotations

import pytest
import torch
from torch import nn

import anyshape
from anyshape import route

WIDTH = 32


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH))


class Layer(nn.Module):
    """A mixture of experts by hand, `loop`, and by a router."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(WIDTH, 4)
        experts = route.Experts(4, WIDTH, 48) if stacked else [mlp() for _ in range(4)]
        self.moe = route.Router(route.top_k(self.gate, k=2), experts)

    def forward(self, x):
        cells = route.annotate_cell(x, dims=(0, 1))
        return route.restore(self.moe(cells), like=x, dims=(0, 1))

    def expert(self, number, rows):
        if not self.moe.grouped:
            return self.moe.branches[number](rows)
        own = self.moe.branches
        hidden = torch.relu(rows @ own.weight_in[number] + own.bias_in[number])
        return hidden @ own.weight_out[number] + own.bias_out[number]

    def loop(self, x):
        cells = x.reshape(-1, WIDTH)
        routes = self.moe.router_fn(cells)
        out = torch.zeros_like(cells)
        for choice in range(2):
            for number in range(4):
                chosen = (routes.ids[:, choice] == number).nonzero()[:, 0]
                found = self.expert(number, cells[chosen]) * routes.weights[chosen, choice][:, None]
                out = out.index_put((chosen,), found, accumulate=True)
        return out.reshape(x.shape)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_mixture_of_experts_is_its_loop(stacked, compiled):
    layer = Layer(stacked)
    run = anyshape.compile(layer) if compiled else layer
    for shape in ((2, 5), (3, 7), (1, 1), (0, 4), (2, 9)):
        x = torch.randn(*shape, WIDTH, requires_grad=True)
        ours, expected = run(x), layer.loop(x)
        torch.testing.assert_close(ours, expected)
        if 0 in shape:
            continue
        for mine, theirs in zip(*(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
                                  for y in (ours, expected)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
