"""The least limit that the tradeoff offers, beside the best of all sets of values that a call could drop.

Every set is laid out and judged as a call would be (`MemoryBudget.needed`), so that a `LimitError` is known to be right
for what can be dropped at all. The greedy tradeoff may miss the best by a little where values of very different bytes
meet: by at most 2.3 % on 23 small models (2026-11-22).
"""
from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyshape
from anyshape.base.errors import LimitError
from anyshape.runtime.budget.memory_budget import CHEAPER, MemoryBudget
from anyshape.runtime.memory.pools import PAGE
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape_bench.experiments.memory_budget.calls import bound
from limits import NO_LIMIT, limit_of, sizes, step

pytestmark = pytest.mark.unguarded
MISSED = 1.03  # of the best of all sets, what the tradeoff may need
MOST = 10  # values that can be dropped, of which all sets are tried


class Uneven(nn.Module):
    """Hidden values of very different widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, 16) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x


class Attentive(nn.Module):
    """Two layers of a transformer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape
        for i in range(2):
            q, k, v = self.qkv[i](self.norms[i](x)).view(1, rows, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
            x = x + self.out[i](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, width))
            x = x + self.down[i](F.gelu(self.up[i](self.norms[i + 2](x))))
        return x


class Gated(nn.Module):
    """What is made first is read last; softmax and gates between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in ((16, 64), (64, 16), (16, 128), (128, 16), (16, 32),
                                                                  (16, 32), (32, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, gate, wide, narrow = self.layers
        y = x * torch.sigmoid(b(torch.relu(a(x))))
        z = y + d(torch.softmax(c(y), -1))
        return x * torch.sin(z) + narrow(F.silu(gate(z)) * wide(z))


@pytest.mark.parametrize("make", (lambda: Uneven(16, 256, 32, 128), Attentive, Gated),
                         ids=("uneven", "attentive", "gated"))
def test_no_set_of_values_needs_much_less_than_the_ladder(make) -> None:
    torch.manual_seed(0)
    module = make()
    run = anyshape.compile(module, memory_limit=NO_LIMIT, calibrate=False, strict=True)
    for rows in (100, 1000):
        x = torch.randn(rows, 16)
        step(run, module, x)
        limit = limit_of(run)
        values = sizes(run, x)
        most = limit.needed(values, SAVE_ALL)
        best = _best(limit, values)
        assert best < most
        least = limit.least(values)
        assert 0.8 * best < bound(limit, values) <= best
        # a block is whole pages: scratch of one more thread can be one more, which counts at few rows
        assert best <= least <= MISSED * best + PAGE
        assert limit.needed(values, limit.choose(values, least)) <= least
        with pytest.raises(LimitError):
            limit.choose(values, best - 1)
        _takes_about_the_first_rung_that_fits(limit, values, least, most)


def _takes_about_the_first_rung_that_fits(limit: MemoryBudget, values: dict[str, int], least: int, most: int) -> None:
    """Though not all points before it are laid out."""
    tradeoff = limit.tradeoff(values)
    assert tradeoff is not None
    points = [*tradeoff]
    needs = [limit.needed(values, point.policy) for point in points]
    for room in range(least, most, max((most - least) // 20, 1)):
        first = next(point for point, need in zip(points, needs, strict=True) if need <= room)
        [found] = [(point, need) for point, need in zip(points, needs, strict=True)
                   if point.policy == limit.choose(values, room)]
        assert found[1] <= room
        assert CHEAPER * found[0].seconds <= first.seconds


def _best(limit: MemoryBudget, values: dict[str, int]) -> int:
    """The fewest bytes that a forward and its backward take, whatever is dropped."""
    assert limit.backward is not None
    names = sorted({one.saved for one in limit.backward.plan.again})
    assert 2 < len(names) <= MOST
    sets = (set_ for count in range(len(names) + 1) for set_ in itertools.combinations(names, count))
    return min(limit.needed(values, SAVE_ALL),
               *(limit.needed(values, SavePolicy(frozenset(one), apart=True)) for one in sets))
