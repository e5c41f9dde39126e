"""Train steps as one program under a limit in bytes: the same numbers, within the limit, or refused before anything."""
from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import anyshape
from anyshape.base.errors import LimitError
from anyshape.plan.ir.program import CopyStep, step_writes
from anyshape.runtime.budget.memory_budget import MemoryBudget


class Stale(torch.nn.Module):
    """A value of the forward that is needed after the weight that it is made of has been updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(32, 64) * 0.1)
        self.gate = torch.nn.Parameter(torch.ones(64))
        self.last = torch.nn.Parameter(torch.randn(64, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        stale = (x @ self.first).detach().sigmoid()
        gated = (stale * self.gate).square().mean()  # first in the forward: last in the backward
        hidden = torch.tanh(x @ self.first)
        for _ in range(3):
            hidden = torch.tanh(hidden @ self.last @ self.first)
        return (hidden @ self.last).square().mean() + gated


class Deep(torch.nn.Module):
    """Layers with much to keep, and batch norms, whose statistics are written too."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.ModuleList(torch.nn.Linear(48, 96) for _ in range(4))
        self.down = torch.nn.ModuleList(torch.nn.Linear(96, 48) for _ in range(4))
        self.norm = torch.nn.BatchNorm1d(48)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)).sin())
        return self.norm(x)


class Norms(torch.nn.Module):
    """Convolutions with batch norms of one width: the backward needs the variances of all of them early."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 12, 12, 12, 12, 12)
        self.parts = torch.nn.ModuleList(torch.nn.Conv2d(a, b, 3, padding=1, bias=False)
                                         for a, b in itertools.pairwise(sizes))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(size) for size in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 3, 4, 4)
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = torch.relu(norm(part(x)))
        return x.square().mean()


def loss_of(model: torch.nn.Module, x: Tensor) -> Tensor:
    found = model(x)
    return found if found.dim() == 0 else (found - x).square().mean()


def made(kind: type[torch.nn.Module], **settings: object) -> tuple[torch.nn.Module, anyshape.TrainStep]:
    torch.manual_seed(0)
    model = kind()
    if kind is Biased:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:  # no Adam: it divides what is only rounding, the gradient of a bias before a batch norm, by its own size
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, anyshape.train_step(model, loss_of, optimizer, strict=True, **settings)


def state_of(model: torch.nn.Module, step: anyshape.TrainStep) -> list[Tensor]:
    states = [value for state in step.settings.optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*model.state_dict().values(), *states)]


@pytest.mark.parametrize("kind", [Stale, Deep, Norms])
def test_the_same_numbers_under_a_limit(kind: type[torch.nn.Module]) -> None:
    free, plain = made(kind, memory_limit="1GB")
    size = 32 if kind is Stale else 48
    draw = torch.Generator().manual_seed(2)
    shapes = (300, 1000, 517, 1000)
    given = [torch.randn(rows, size, generator=draw) for rows in shapes]
    losses = [plain(x) for x in given]
    model, step = made(kind, memory_limit=sum(bounds_at(plain, 1)) // 2)
    for x, wanted in zip(given, losses, strict=True):
        torch.testing.assert_close(step(x), wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(model.state_dict().values(), free.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    limit = next(p.executable.limit for p in step.programs if p.executable.limit is not None)
    assert any(record.policy.dropped for record in limit.program.specializations.values())


def bounds(kind: type[torch.nn.Module], x: Tensor) -> tuple[int, int]:
    return bounds_of(made(kind, memory_limit="1GB")[1], x)


def bounds_of(step: anyshape.TrainStep, x: Tensor) -> tuple[int, int]:
    """What a step takes with everything kept, and the least limit that works."""
    step(x)
    return bounds_at(step, 0)


def bounds_at(step: anyshape.TrainStep, place: int) -> tuple[int, int]:
    """The same at the sizes that the step has met as those of that place."""
    limit = next(one.executable.limit for one in step.programs if one.executable.limit is not None)
    record = list(limit.program.specializations.values())[place]
    return limit.needed(record.values, record.policy), limit.least(record.values)


class Biased(torch.nn.Module):
    """The update of a wide bias is one kernel with the sum that makes its gradient, and has scratch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 32)
        self.up = torch.nn.ModuleList(torch.nn.Linear(32, 128) for _ in range(4))
        self.down = torch.nn.ModuleList(torch.nn.Linear(128, 32) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens[:, :-1])
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)).sin())
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), tokens[:, 1:].flatten())


def test_no_layer_is_computed_again_for_its_variances_alone() -> None:
    free, least = bounds(Norms, torch.randn(500, 48))
    assert least < 0.8 * free


def test_wide_gradients_die_with_the_updates_of_biases() -> None:
    _, step = made(Biased, memory_limit="1GB")
    free, least = bounds_of(step, torch.randint(0, 64, (8, 200)))
    assert least < 0.75 * free
    # a product that adds what comes later reads its weight behind the place of the update
    assert not any(isinstance(one, CopyStep) for one in step.programs[1].executable.plan.steps)


def test_a_refused_step_has_changed_nothing() -> None:
    model, step = made(Deep, memory_limit="1MB", accumulate=2)
    step(torch.randn(40, 48))
    step(torch.randn(30, 48))
    before = state_of(model, step)
    big = torch.randn(3000, 48)
    with pytest.raises(LimitError, match="memory_limit") as refused:
        step(big)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, step), strict=True))
    assert step.position == 0
    least = int(refused.value.do.split("set memory_limit to ")[1].split(" ")[0])
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    again = anyshape.train_step(twin, loss_of, optimizer, memory_limit=least, accumulate=2, strict=True)
    again(big)
    with pytest.raises(LimitError):
        anyshape.train_step(twin, loss_of, optimizer, memory_limit=least - 64, accumulate=2, strict=True)(big)


def test_what_is_computed_again_is_so_before_its_weight_is_updated() -> None:
    _, step = made(Stale, memory_limit="1GB")
    step(torch.randn(300, 32))
    plan = step.programs[1].executable.plan
    inputs = {b.name for b in plan.buffers if b.is_input}
    optional = set(plan.optional)
    changed: set[str] = set()
    for position, one in enumerate(plan.steps):
        if position in optional and hasattr(one, "params"):
            assert not changed & {window.buffer for window in one.params}
        elif position in optional and hasattr(one, "inputs"):
            assert not changed & {window.buffer for window in one.inputs}
        changed |= {window.buffer for window in step_writes(one)} & inputs
    assert changed
    assert plan.again


class Heads(torch.nn.Module):
    """Attention whose operands are turned round: each is a view with memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 96, bias=False) for _ in range(3))
        self.back = torch.nn.ModuleList(torch.nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        for part, back in zip(self.parts, self.back, strict=True):
            q, k, v = part(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).reshape(3, batch * 4, length, 8)
            weights = torch.bmm(q.sin(), k.sin().transpose(1, 2)).sigmoid()  # no attention that is known
            mixed = torch.bmm(weights, v).view(batch, 4, length, 8).transpose(1, 2).reshape(batch, length, 32)
            x = x + torch.tanh(back(mixed))
        return x


def test_views_with_memory_of_their_own_come_again() -> None:
    draw = torch.Generator().manual_seed(5)
    given = [torch.randn(*size, 32, generator=draw) for size in ((3, 50), (4, 61), (2, 97), (4, 61))]
    model, plain = made(Heads, memory_limit="1GB")
    losses = [plain(x) for x in given]
    free, least = bounds_at(plain, 1)
    assert least < 0.7 * free
    other, step = made(Heads, memory_limit=(free + least) // 2)
    for x, wanted in zip(given, losses, strict=True):
        torch.testing.assert_close(step(x), wanted, rtol=1e-5, atol=1e-6)
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


class Noisy(torch.nn.Module):
    """Wide weights with few rows of data, random numbers, and statistics that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(64)
        self.up = torch.nn.ModuleList(torch.nn.Linear(64, 128) for _ in range(2))
        self.down = torch.nn.ModuleList(torch.nn.Linear(128, 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.dropout(torch.tanh(up(x)), 0.2))
        return x


def clipped(limit: int | str, loss_fn: object = loss_of) -> anyshape.TrainStep:
    torch.manual_seed(0)
    model = Noisy()
    return anyshape.train_step(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clip_norm=0.05, strict=True,
        scaler=torch.amp.GradScaler("cpu", init_scale=64.0), memory_limit=limit)


def limits_of(step: anyshape.TrainStep) -> list[MemoryBudget]:
    found = [p.executable.limit for p in step.programs]
    return [limit for limit in found if limit is not None and limit.backward is not None]


def move(step: anyshape.TrainStep, bytes_: int) -> None:
    for limit in limits_of(step):
        limit.move(bytes_)


def refused(step: anyshape.TrainStep, x: Tensor) -> int:
    """The least limit of a step, as its refusal names it."""
    before, random = state_of(step.settings.model, step), torch.random.get_rng_state()
    with pytest.raises(LimitError) as error:
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(step.settings.model, step), strict=True))
    assert torch.equal(random, torch.random.get_rng_state())
    return error.value.least


def test_a_step_whose_gradients_would_have_to_live_runs_twice() -> None:
    draw = torch.Generator().manual_seed(2)
    given = [torch.randn(rows, 64, generator=draw) for rows in (24, 17, 24)]
    plain = clipped("1GB")
    torch.manual_seed(7)
    wanted = [(plain(x), plain.norm) for x in given]
    left = torch.random.get_rng_state()
    step = clipped(1000)
    least = refused(step, given[0])
    one_run = limits_of(plain)[-1]
    known = one_run.least(dict(next(iter(one_run.program.specializations.values())).values))
    assert least < 0.7 * known
    move(step, least - 1)
    assert refused(step, given[0]) == least
    move(step, least)
    torch.manual_seed(7)
    for x, (loss, norm) in zip(given, wanted, strict=True):
        torch.testing.assert_close(step(x), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(step.norm, norm, rtol=1e-5, atol=1e-6)
    assert torch.equal(left, torch.random.get_rng_state())  # drawn twice, and once as seen from outside
    for one, other in zip(state_of(step.settings.model, step), state_of(plain.settings.model, plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert sum("runs twice" in capture.reason for capture in step.compilation.captures) == 2


@torch.library.custom_op("test::counted", mutates_args=())
def counted_twin(x: Tensor) -> Tensor:
    return x.clone()


@counted_twin.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_may_have_effects_is_not_run_twice() -> None:
    def loss_fn(model: torch.nn.Module, x: Tensor) -> Tensor:
        return loss_of(model, x + counted_twin(x))

    bytes_of_weights = 4 * sum(p.numel() for p in Noisy().parameters())
    assert refused(clipped(1000, loss_fn=loss_fn), torch.randn(24, 64)) > bytes_of_weights


def test_gradients_die_with_updates_of_several_kernels() -> None:
    torch.manual_seed(0)
    model = Noisy()
    step = anyshape.train_step(model, loss_of, torch.optim.Adafactor(model.parameters()), memory_limit="1GB",
                               strict=True)
    step(torch.randn(4, 64))
    [limit] = limits_of(step)
    [record] = limit.program.specializations.values()
    gradients = 4 * sum(p.numel() for p in model.parameters())
    assert limit.needed(record.values, record.policy) < 0.75 * gradients
