"""Train steps as one program: bytes that are counted are those that were predicted, and a refusal changes nothing."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import anyshape
from anyshape.base.errors import LimitError
from limits import NO_LIMIT, counted

pytestmark = pytest.mark.usefixtures("quick_collections")
BATCHES = 3  # that make one update


class Tied(torch.nn.Module):
    """Layers whose hidden values are wide, between an embedding and an output of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.up = torch.nn.ModuleList(torch.nn.Linear(32, 256, bias=False) for _ in range(3))
        self.down = torch.nn.ModuleList(torch.nn.Linear(256, 32) for _ in range(3))
        self.last = torch.nn.Linear(32, 64, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)).sin())
        return self.last(x)


def loss_of(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(length: int) -> Tensor:
    return torch.arange(8 * length).reshape(8, length) * 7 % 64


@pytest.mark.unguarded
def test_a_step_takes_what_was_predicted_and_a_refused_one_changes_nothing() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = anyshape.train_step(model, loss_of, optimizer, accumulate=BATCHES, memory_limit=NO_LIMIT, strict=True)
    for _ in range(BATCHES):
        step(batch(150))  # two programs: one that gathers, and one that updates
    limits = [one.executable.limit for one in step.programs
              if one.executable.limit is not None and one.executable.limit.backward is not None]
    assert len(limits) == 2
    free = []
    for limit in limits:
        [record] = limit.program.specializations.values()
        free.append(limit.needed(record.values, record.policy))
    leasts = [limit.least(dict(next(iter(limit.program.specializations.values())).values)) for limit in limits]
    assert all(least < 0.7 * need for least, need in zip(leasts, free, strict=True))
    for bytes_ in (NO_LIMIT, int(0.8 * max(free)), max(leasts)):
        for limit in limits:
            limit.move(bytes_)
        for number in range(BATCHES):
            limit = limits[number == BATCHES - 1]
            limit.program.specializations.clear()
            with counted() as most:
                step(batch(150))
            [record] = limit.program.specializations.values()
            need = limit.needed(record.values, record.policy)
            assert need <= bytes_ and bool(record.policy.dropped) == (bytes_ < free[number == BATCHES - 1])
            assert need - 64 <= most[0] <= need, (bytes_, number)
            curves = step.memory(arguments_0=(8, 150)).curves
            assert need in [one.needs for one in curves]
    step(batch(150))
    assert step.position == 1
    before = [value.detach().clone() for value in kept(step, model)]
    for _ in range(2):
        with pytest.raises(LimitError) as refused:
            step(batch(600))
    assert step.position == 1
    assert all(torch.equal(a, b) for a, b in zip(before, kept(step, model), strict=True))
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}
    assert int(refused.value.do.split()[3]) > 3 * max(leasts)
    assert all(float(step(batch(length))) > 0 for length in (150, 149))
    assert step.position == 0 and {float(state["step"]) for state in optimizer.state.values()} == {5.0}


def kept(step: anyshape.TrainStep, model: torch.nn.Module) -> list[Tensor]:
    """Weights, states of the optimiser, and the gradients gathered so far."""
    states = [value for state in step.settings.optimizer.state.values() for value in state.values()]
    gathered = step.state_dict()["gathered"]
    assert len(gathered) == len(list(model.parameters()))
    return [*model.parameters(), *states, *gathered.values()]
