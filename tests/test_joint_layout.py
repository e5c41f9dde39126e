"""One block for both halves of a whole step (runtime/specialize/joint_layout.py)."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape.compiler import link
from anyshape.plan.verify import judge
from anyshape.runtime.specialize.joint_layout import WORTH
from limits import counted

pytestmark = pytest.mark.usefixtures("quick_collections")


class Words(nn.Module):
    """A table that is larger than what few words keep for a backward; its gradient is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3000, 48)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).sin()
        return x


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


def words(rows: int) -> Tensor:
    return torch.arange(rows) * 7 % 3000


def stepped(model: nn.Module, **options: Any) -> anyshape.TrainStep:
    return anyshape.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strict=True,
                               **options)


def records(step: anyshape.TrainStep) -> list[Any]:
    """Of a shape just met, the forward's executable and record and the backward's."""
    found = [one.executable for one in step.programs]
    return [(one, [*one.specializations.values()][-1]) for one in found]


@pytest.mark.unguarded
@pytest.mark.parametrize("options", ({}, {"memory_limit": "1GiB"}), ids=("free", "limited"))
def test_both_halves_lie_in_one_block_where_that_takes_less(monkeypatch: pytest.MonkeyPatch,
                                                            options: dict[str, str]) -> None:
    torch.manual_seed(0)
    ours = Words()
    theirs = copy.deepcopy(ours)
    one = stepped(ours, **options)
    with monkeypatch.context() as patch:
        patch.setattr(link, "joined", lambda *both: both)
        two = stepped(theirs, **options)
        two(words(2))
    one(words(2))
    joined = 0
    for rows in (41, 97, 149, 300, 2001, 1):
        assert torch.equal(one(words(rows)), two(words(rows)))
        with counted() as most:
            one(words(rows))
        with counted() as others:
            two(words(rows))
        (forward, before), (backward, after) = records(one)
        assert before.kept == after.kept
        for executable, record in ((forward, before), (backward, after)):
            judge(executable.plan, record.values, record.offsets, record.arena, record.kept)
            assert executable.specializer.arena(record.values) == record.arena
        apart = max(half.specializer.apart({**dict.fromkeys(half.layout.symbols, 0), **record.values}).top
                    for half, record in ((forward, before), (backward, after)))
        assert before.temporary == after.temporary == 0 and before.bound <= before.kept <= apart
        joined += before.kept <= WORTH * apart and most[0] < others[0]
        assert most[0] <= others[0]
        if options:
            assert most[0] <= forward.limit.needed(before.values, before.policy)
    assert joined >= 3
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


class Linear(nn.Module):
    """Nothing is kept for its gradient, which is large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(400, 300))

    def forward(self, x: Tensor) -> Tensor:
        return (x.sum(0) * self.weight).sum() + (x * 2).exp().sum()


def test_halves_without_a_tape_stay_apart() -> None:
    torch.manual_seed(0)
    ours = Linear()
    theirs = copy.deepcopy(ours)
    step = anyshape.train_step(ours, lambda model, x: model(x), torch.optim.SGD(ours.parameters(), lr=0.1), strict=True)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for rows in (7, 1, 5, 0, 300):
        x = torch.randn(rows, 400, 300)
        step(x)
        optimizer.zero_grad()
        theirs(x).backward()
        optimizer.step()
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-4)
