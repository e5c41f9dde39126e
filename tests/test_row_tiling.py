"""Chains of products in bands of rows: what they compute, and the bytes that they take."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyshape
from anyshape.base.config import Config
from anyshape.dist import row_tiling
from anyshape.dist.halves import gathered_first, halves_of
from anyshape.dist.strategies import partitioned, strategy_of
from anyshape.frontend.train_step.distributed import forward_of
from anyshape.frontend.train_step.tiled import in_bands
from anyshape.ops.collective import COLLECTIVES
from anyshape.plan.ir.program import LibraryStep
from dist_model import Llama, capture, worst_difference

WORDS = 67


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands of three rows and more, of any product."""
    monkeypatch.setattr(row_tiling, "LEAST_BYTES", 1)
    monkeypatch.setattr(row_tiling, "LEAST_ROWS", 3)
    monkeypatch.setattr(row_tiling, "BANDS", 4)


class Words(nn.Module):
    """Two weights, or one for both ends."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8, dtype=dtype)
        self.head = nn.Linear(8, WORDS, bias=not tied, dtype=dtype)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(x + torch.tanh(x).cumsum(1))


def in_two(model: nn.Module, tokens: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def smoothed(model: nn.Module, both: Tensor) -> Tensor:
    scores = model(both[0]).flatten(0, 1)
    loss = F.cross_entropy(scores, both[1].flatten(), label_smoothing=0.1, reduction="sum")
    return loss + 1e-2 * scores.logsumexp(-1).square().mean()


def squared(model: nn.Module, both: Tensor) -> Tensor:
    return F.cross_entropy(model(both[0]).flatten(0, 1), both[1].flatten()).square()


def with_scores(model: nn.Module, both: Tensor) -> tuple[Tensor, Tensor]:
    scores = model(both[0]).flatten(0, 1)
    return F.cross_entropy(scores, both[1].flatten()), scores


def bands(step: anyshape.TrainStep) -> int:
    """How many products the forward has over what one would be."""
    plan = step.programs[0].compiled.plan
    return sum(isinstance(one, LibraryStep) for one in plan.steps)


@pytest.mark.parametrize(("loss_fn", "tied", "products"), [
    (in_two, True, 12), (smoothed, False, 12), (squared, False, 1), (with_scores, True, 1)])
def test_a_step_in_bands_is_eager_s(loss_fn: object, tied: bool, products: int) -> None:
    torch.manual_seed(0)
    model, other = Words(tied, torch.float64), Words(tied, torch.float64)
    other.load_state_dict(model.state_dict())
    optimizer, its = (torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, other))
    step = anyshape.train_step(model, loss_fn, optimizer, strict=True, check=1, memory_limit="1GB")
    for rows, length in ((4, 31), (2, 2), (1, 3)):
        both = torch.randint(0, WORDS, (2, rows, length))
        both[1, 0, 1] = -100
        batch = both if loss_fn is in_two else (both,)
        found, expected = step(*batch), loss_fn(other, *batch)
        its.zero_grad()
        (expected[0] if isinstance(expected, tuple) else expected).backward()
        its.step()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert bands(step) == products


def test_bands_of_a_rank_s_rows_are_those_of_one_process() -> None:
    """All ranks in one process. The head's weight is gathered for the bands, and not again for the backward."""
    torch.manual_seed(0)
    captured = capture(Llama(layers=1, tied=True).double(), in_halves=True)
    for mode in ("ddp", "fsdp"):
        strategy = strategy_of(mode, 2)
        chain = partitioned(captured.graph, strategy, captured.roles)
        local = gathered_first(chain[-1].graph, captured.roles.data)
        first = forward_of(local, captured.first)
        assert in_bands(local, first, (), Config()) is None  # there is no limit
        banded = in_bands(local, first, (), Config(memory_limit=1 << 30))
        assert banded is not None
        found, plain = (halves_of(*one, captured.roles.data, True) for one in (banded, (local, first)))
        products = [sum(node.op.startswith("matmul") for node in one.forward.nodes) for one in (found, plain)]
        assert products[0] >= products[1] + 3 * 3
        assert worst_difference(captured, strategy, chain, 5, 12, found) < 1e-12
        sent = [[sum(node.op in COLLECTIVES for node in half.nodes) for half in (one.forward, one.backward)]
                for one in (found, plain)]
        assert sent[0][0] == sent[1][0] and sent[0][1] <= sent[1][1], sent  # none for each band
