"""Train steps as one program against PyTorch: the loop that a user would write, with the same optimiser."""
from __future__ import annotations

import copy
import math
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import anyshape
from anyshape.base.errors import ConfigError, InputError
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.train_step import optimizer_rules
from anyshape.torch_compat.tracing import settings as torch_trace
from sampling import examples, rest

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adamw-amsgrad-maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, maximize=True),
    "adam-decay": lambda p: torch.optim.Adam(p, lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, eps=1e-6),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.01),
}


class Net(torch.nn.Module):
    """Linear layers, a norm, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(12, 24)
        self.norm = torch.nn.LayerNorm(24)
        self.last = torch.nn.Linear(24, 12, bias=False)
        self.last.weight = torch.nn.Parameter(self.first.weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(F.gelu(self.first(x)))) + F.linear(x, self.first.weight.T @ self.first.weight)


def mean_square(model: torch.nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, -1)).square().mean()


def nets(count: int = 2) -> list[Net]:
    torch.manual_seed(0)
    net = Net()
    return [copy.deepcopy(net) for _ in range(count)]


def batches(count: int, features: int = 12) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    sizes = [5, 2, 1, 7, 13]
    return [torch.randn(sizes[i % len(sizes)], features, generator=draw) for i in range(count)]


def eager(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Any, *given: Any) -> Tensor:
    optimizer.zero_grad()
    loss = loss_fn(model, *given)
    loss.backward()
    optimizer.step()
    return loss.detach()


def near(a: torch.nn.Module, b: torch.nn.Module, tolerance: float = 1e-6) -> None:
    for (name, one), other in zip(a.named_parameters(), b.parameters(), strict=True):
        scale = float(other.detach().abs().max())
        assert float((one - other).abs().max()) <= tolerance * max(scale, 1e-3), name


def one_trace(step: anyshape.TrainStep) -> bool:
    """Has the step been traced once, and is it two programs: its forward, and its backward with the update?"""
    return len(step._shown.compilation.captures) == 1 and [p.name for p in step.programs] == ["0.forward", "0.backward"]


def exact(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).double()


# a rule alone, of each: test_a_rule_alone
@pytest.mark.parametrize("name", rest(OPTIMIZERS, "adamw-amsgrad-maximize", "adam-decay", "sgd-nesterov"))
def test_an_update_is_that_of_torch(name: str) -> None:
    # both are compared with float64, for after many steps roundings have grown
    ours, theirs = nets()
    truth = exact(ours)
    a, b, c = (OPTIMIZERS[name](net.parameters()) for net in (ours, theirs, truth))
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    for x in batches(examples(50)):
        loss = step(x)
        wanted = eager(theirs, b, mean_square, x)
        eager(truth, c, mean_square, x.double())
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-6)
    for (key, one), two, three in zip(ours.named_parameters(), theirs.parameters(), truth.parameters(), strict=True):
        mine, its = (float((w.double() - three).norm() / three.norm()) for w in (one, two))
        assert mine <= max(1e-6, 2 * its), key
    assert one_trace(step)


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(one, marks=pytest.mark.full)
                                             for one in ("sgd-momentum", "adafactor"))])
def test_an_update_of_weights_in_float32_by_gradients_in_bfloat16(name: str) -> None:
    # what rounding does in 50 steps under autocast is no more than in PyTorch, and states are float32
    ours, theirs = nets()
    truth = exact(ours)
    a, b, c = (OPTIMIZERS[name](net.parameters()) for net in (ours, theirs, truth))

    def lower(model: torch.nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model, x)

    step = anyshape.train_step(ours, lower, a, strict=True)
    for x in batches(50):
        step(x)
        eager(theirs, b, lower, x)
        eager(truth, c, mean_square, x.double())
    mine, its, moved = (math.sqrt(sum(float((one.detach().double() - other.detach()).square().sum()) for one, other in
                                      zip(net.parameters(), truth.parameters(), strict=True)))
                        for net in (ours, theirs, nets(1)[0]))
    assert mine <= 1.5 * its and mine < 0.1 * moved, (mine, its, moved)
    for one, other in zip(a.state.values(), b.state.values(), strict=True):
        assert {key: state.dtype for key, state in one.items()} == {key: state.dtype for key, state in other.items()}
    assert one_trace(step)


@pytest.mark.parametrize("rule", optimizer_rules.RULES, ids=lambda rule: rule.classes[0].rsplit(".", 1)[-1])
def test_a_rule_alone(rule: optimizer_rules.Rule) -> None:
    # one weight, the same gradients for both: 50 steps in float32
    name = rule.classes[0].rsplit(".", 1)[-1]
    if not hasattr(torch.optim, name):
        pytest.skip(f"torch has no {name}")
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 10))
    twin = torch.nn.Parameter(weight.detach().clone())
    optimizer = getattr(torch.optim, name)([twin], lr=1e-2)
    group = optimizer.param_groups[0]
    states = {key: torch.zeros(tuple(shape)) for key, shape in rule.shapes(group, weight.shape).items()}
    for number in range(1, 51):
        twin.grad = torch.randn(6, 10)
        numbers = [torch.tensor(one, dtype=torch.float32) for one in rule.numbers(group, weight.shape, number,
                                                                                  number == 1)]
        new, states = rule.update(rule.choices(group), weight.detach(), twin.grad, states, numbers)
        weight = torch.nn.Parameter(new)
        optimizer.step()
    assert float((weight - twin).norm() / twin.norm()) < 1e-6
    for key, state in states.items():
        torch.testing.assert_close(state, optimizer.state[twin][key], rtol=1e-6, atol=1e-6 * float(state.abs().max()))


def test_states_go_both_ways() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.AdamW(net.parameters(), lr=3e-3) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    for x in batches(3):
        step(x)
        eager(theirs, b, mean_square, x)
    kept = copy.deepcopy(a.state_dict())
    assert kept["state"].keys() == b.state_dict()["state"].keys()
    assert all(kept["state"][n].keys() == s.keys() for n, s in b.state_dict()["state"].items())
    assert float(kept["state"][0]["step"]) == 3
    weights = copy.deepcopy(ours.state_dict())
    for x in batches(6)[3:]:  # theirs goes on with our state, ours with theirs
        step(x)
    theirs.load_state_dict(weights)
    b.load_state_dict(kept)
    for x in batches(6)[3:]:
        eager(theirs, b, mean_square, x)
    near(ours, theirs, 2e-5)
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    ours.load_state_dict(theirs.state_dict())
    for x in batches(8)[6:]:
        torch.testing.assert_close(step(x), eager(theirs, b, mean_square, x), rtol=1e-5, atol=1e-6)
    near(ours, theirs, 1e-5)
    eager(ours, a, mean_square, x)  # and a step of PyTorch on what the program holds
    eager(theirs, b, mean_square, x)
    near(ours, theirs, 1e-5)
    assert float(a.state_dict()["state"][0]["step"]) == 9
    assert one_trace(step)


def test_groups_and_schedulers_need_no_other_program() -> None:
    ours, theirs = nets()
    found = []
    for net in (ours, theirs):
        decayed = [p for p in net.parameters() if p.dim() > 1]
        rest = [p for p in net.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3,
                                                                                  "weight_decay": 0.0}], lr=1e-2)
        found.append((optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)))
    (a, first), (b, second) = found
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower")  # Dynamo says that of Python 3.13.0
        for x in batches(10):
            step(x)
            first.step()
    for x in batches(10):
        eager(theirs, b, mean_square, x)
        second.step()
    near(ours, theirs, 2e-5)
    assert one_trace(step)


def test_frozen_and_unused_weights_stay() -> None:
    ours, theirs = nets()
    for net in (ours, theirs):
        net.norm.weight.requires_grad_(False)
        net.spare = torch.nn.Parameter(torch.ones(3))
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    for x in batches(4):
        step(x)
        eager(theirs, b, mean_square, x)
    near(ours, theirs, 1e-5)
    assert torch.equal(ours.spare, torch.ones(3))
    assert a.state_dict()["state"].keys() == b.state_dict()["state"].keys()
    ours.norm.weight.requires_grad_(True)  # thawed: another program, with a state of its own
    theirs.norm.weight.requires_grad_(True)
    for x in batches(6)[4:]:
        step(x)
        eager(theirs, b, mean_square, x)
    near(ours, theirs, 1e-5)


def test_clipping_is_that_of_torch() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.SGD(net.parameters(), lr=0.5) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, clip_norm=0.2, strict=True)
    for x in batches(6):
        step(x)
        b.zero_grad()
        mean_square(theirs, x).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        b.step()
        torch.testing.assert_close(step.norm, norm, rtol=1e-5, atol=0)
    near(ours, theirs, 1e-5)


def test_accumulation_is_the_mean_of_gradients() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, accumulate=3, clip_norm=1.0, strict=True)
    given = batches(8)
    for start in (0, 3, 6):
        part = given[start:start + 3]
        before = [p.detach().clone() for p in ours.parameters()]
        for x in part[:-1]:
            step(x)
            assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))
        step(part[-1])
        b.zero_grad()
        for x in part:
            (mean_square(theirs, x) / len(part)).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        if len(part) == 3:
            b.step()
            near(ours, theirs, 1e-5)
    step.finish()  # the last step has two batches only
    b.step()
    near(ours, theirs, 1e-5)
    step.finish()
    near(ours, theirs, 1e-5)


def test_gathered_gradients_are_kept_with_the_state() -> None:
    ours, theirs = nets()
    given = batches(4)
    whole = anyshape.train_step(ours, mean_square, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9),
                                accumulate=2, ema=0.5)
    for x in given:
        whole(x)
    first = anyshape.train_step(theirs, mean_square, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
                                accumulate=2, ema=0.5)
    for x in given[:3]:
        first(x)
    kept = copy.deepcopy((theirs.state_dict(), first.settings.optimizer.state_dict(), first.state_dict()))
    again = nets(1)[0]
    again.load_state_dict(kept[0])
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(kept[1])
    second = anyshape.train_step(again, mean_square, optimizer, accumulate=2, ema=0.5)
    second.load_state_dict(kept[2])
    second(given[3])
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(average, second.averages[name]) for name, average in whole.averages.items())


class Twice(torch.autograd.Function):
    """Twice its operand; counts its backward."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Twice.backwards += 1
        return gradient * 2


@torch._dynamo.allow_in_graph
def twice(x: Tensor) -> Tensor:
    return Twice.apply(x)  # type: ignore[no-any-return]


def test_one_trace_serves_every_update() -> None:
    net, _ = nets()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    step = anyshape.train_step(net, lambda model, x: twice(mean_square(model, x)), optimizer, accumulate=2)
    Twice.backwards = 0
    for x in batches(4):
        step(x)
    assert Twice.backwards == 1  # while the graph was written, and not before
    assert [c.reason for c in step.compilation.captures] == ["", "another update behind the same trace"]
    assert [p.name for p in step.programs] == ["0.forward", "0.backward", "1.forward", "1.backward"]
    optimizer.param_groups[0]["maximize"] = True  # another choice: another program, by the same trace
    before = [p.detach().clone() for p in net.parameters()]
    for x in batches(2):
        step(x)
    assert any(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert Twice.backwards == 1
    assert len(step.programs) == 6


def test_a_loss_that_reads_averages() -> None:
    ours, theirs = nets()
    averages: dict[str, Tensor] = {}

    def near_averages(model: torch.nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) + (model.first.weight - averages["first.weight"]).square().mean()

    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, near_averages, a, ema=0.9, strict=True)
    averages.update(step.averages)
    for x in batches(4):
        step(x)
    averages = {name: p.detach().clone() for name, p in nets(1)[0].named_parameters()}
    for x in batches(4):
        eager(theirs, b, near_averages, x)
        for name, weight in theirs.named_parameters():
            averages[name].lerp_(weight.detach(), 0.1)
    near(ours, theirs, 1e-5)
    for name, average in step.averages.items():
        torch.testing.assert_close(average, averages[name], rtol=1e-5, atol=1e-6)


def test_a_loss_that_reads_a_part_of_an_average() -> None:
    ours, _ = nets()
    averages: dict[str, Tensor] = {}

    def near_part(model: torch.nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) + (model.first.weight[0] - averages["part"]).square().mean()

    step = anyshape.train_step(ours, near_part, torch.optim.SGD(ours.parameters(), lr=0.1), ema=0.9)
    averages["part"] = step.averages["first.weight"][0]
    apart(lambda: step(batches(1)[0]), "as another tensor")


def test_averages_follow_the_weights() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, ema=0.9, strict=True)
    wanted = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    for x in batches(5):
        step(x)
        eager(theirs, b, mean_square, x)
        for name, weight in theirs.named_parameters():
            wanted[name].lerp_(weight.detach(), 0.1)
    for name, average in wanted.items():
        torch.testing.assert_close(step.averages[name], average, rtol=1e-5, atol=1e-6)


def test_a_step_with_infinite_gradients_is_left_out() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (ours, theirs))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    step = anyshape.train_step(ours, mean_square, a, scaler=scalers[0], strict=True)
    given = batches(6)
    given[2] = torch.full_like(given[2], torch.inf)
    for x in given:
        step(x)
        b.zero_grad()
        scalers[1].scale(mean_square(theirs, x)).backward()
        scalers[1].step(b)
        scalers[1].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    near(ours, theirs, 1e-5)
    assert float(a.state_dict()["state"][0]["step"]) == 5


def test_buffers_change_as_in_eager() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 12))
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    for x in [batch for batch in batches(10) if len(batch) > 2]:
        step(x)
        eager(theirs, b, mean_square, x)
    near(ours, theirs, 1e-5)
    for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_is_given_beside_the_loss() -> None:
    ours, _ = nets()

    def with_output(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = model(batch["x"])
        return found.square().mean(), found

    step = anyshape.train_step(ours, with_output, torch.optim.SGD(ours.parameters(), lr=0.1), strict=True)
    for x in batches(3):
        wanted = ours(x).detach()
        loss, found = step({"x": x})
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert not loss.requires_grad
        assert not found.requires_grad


def apart(step: Callable[[], Any], words: str) -> Any:
    with pytest.warns(FallbackWarning, match=words):
        return step()


def test_what_is_no_rule_runs_apart() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.RMSprop(net.parameters(), lr=1e-3) for net in (ours, theirs))
    step = apart(lambda: anyshape.train_step(ours, mean_square, a, clip_norm=1.0, accumulate=2), "no update rule")
    for x in batches(5):
        step(x)
    step.finish()
    given = batches(5)
    for part in (given[:2], given[2:4], given[4:]):
        b.zero_grad()
        for x in part:
            (mean_square(theirs, x) / len(part)).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        b.step()
    near(ours, theirs, 1e-4)
    assert "no update rule for RMSprop" in str(step.explain())


def test_hooks_run() -> None:
    ours, _ = nets()
    seen = []
    ours.first.weight.register_hook(lambda gradient: seen.append(1))
    step = apart(lambda: anyshape.train_step(ours, mean_square, torch.optim.SGD(ours.parameters(), lr=0.1)), "hooks")
    step(batches(1)[0])
    assert seen == [1]


def test_an_optimizer_with_a_closure() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3) for net in (ours, theirs))
    step = apart(lambda: anyshape.train_step(ours, mean_square, a), "closure")
    for x in batches(2):
        loss = step(x)

        def closure(x: Tensor = x) -> Tensor:
            b.zero_grad()
            found = mean_square(theirs, x)
            found.backward()
            return found

        torch.testing.assert_close(loss, b.step(closure).detach(), rtol=1e-4, atol=1e-6)
    near(ours, theirs, 1e-4)


def test_a_loss_that_is_not_one_graph() -> None:
    ours, theirs = nets()

    def loss_fn(model: torch.nn.Module, x: Tensor) -> Tensor:
        found = mean_square(model, x)
        torch._dynamo.graph_break()
        return found * 2

    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, loss_fn, a)
    apart(lambda: step(batches(1)[0]), "one program")
    eager(theirs, b, loss_fn, batches(1)[0])
    near(ours, theirs, 1e-5)


@pytest.mark.parametrize("place", [
    lambda x: int(torch.empty(1).uniform_(0.0, 3.0).item()),  # as detectors choose among their sizes
    lambda x: int(x.abs().max().item()) % 3], ids=["drawn", "asked"])
def test_a_list_at_a_place_that_the_data_tell(place: Callable[[Tensor], int]) -> None:
    ours, theirs = nets()

    def loss_fn(model: torch.nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) * [1.0, 2.0, 3.0][place(x)]

    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, loss_fn, a)
    first, *_ = batches(1)
    torch.manual_seed(0)
    apart(lambda: step(first), "one program")
    torch.manual_seed(0)
    eager(theirs, b, loss_fn, first)
    near(ours, theirs, 1e-5)


def _asks_about_data(model: torch.nn.Module, x: Tensor) -> Tensor:
    return mean_square(model, x) * (2 if x.sum().item() > 0 else 1)


class Counted(Net):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_a_loss_that_asks_about_data_runs_apart_and_once() -> None:
    torch.manual_seed(0)
    ours = Counted()
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, _asks_about_data, a)
    given = batches(4)
    apart(lambda: step(given[0]), "data-dependent")
    eager(theirs, b, _asks_about_data, given[0])
    for x in given[1:]:
        step(x)
        eager(theirs, b, _asks_about_data, x)
    near(ours, theirs, 1e-5)
    assert ours.calls == 4


class Bag(torch.nn.Module):
    """A table whose gradient is sparse, or whose rows are shortened while it is read."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(20, 12, **settings)
        self.last = torch.nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x[:, 0].abs().mul(5).long() % 20))


@pytest.mark.parametrize("settings", [{"sparse": True}, {"max_norm": 1.0}], ids=["sparse", "renormed"])
def test_what_only_pytorch_updates_runs_apart(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = Bag(**settings)
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a)
    given = batches(3)
    apart(lambda: step(given[0]), "sparse|differentiate")
    eager(theirs, b, mean_square, given[0])
    for x in given[1:]:
        step(x)
        eager(theirs, b, mean_square, x)
    near(ours, theirs, 1e-5)


def test_a_step_that_would_be_traced_too_often_goes_on_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step of several batches."""
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setitem(torch_trace.DYNAMO_SETTINGS, limit, 2)
    ours, theirs = nets()

    def scaled(model: torch.nn.Module, x: Tensor) -> Tensor:
        return mean_square(model, x) * len(model.mode)

    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, scaled, a, accumulate=2)
    given = batches(8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for place, x in enumerate(given):
            ours.mode = theirs.mode = "x" * (place + 1)
            step(x)
            (scaled(theirs, x) / 2).backward()
            if place % 2:
                b.step()
                b.zero_grad()
    near(ours, theirs, 1e-5)
    assert any("one program" in str(one.message) for one in said) and step.position == 0


def in_parts(model: torch.nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return mean_square(model, x)


def test_gathered_gradients_go_to_a_step_in_parts_and_back() -> None:
    whole, parted, whole_again = nets(3)
    given = batches(3)
    steps = [anyshape.train_step(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), accumulate=3)
             for net, loss in ((whole, mean_square), (parted, in_parts), (whole_again, mean_square))]
    expected = copy.deepcopy(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for x, step, later in zip(given, steps, (*steps[1:], None), strict=True):
            step(x)
            if later is not None:
                later(given[2]), later(given[2]), later(given[2])  # compiled, or known to be none
                later.settings.model.load_state_dict(expected.state_dict())
                later.load_state_dict(step.state_dict())
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    eager(expected, optimizer, lambda net: sum(mean_square(net, x) for x in given) / 3)
    near(whole_again, expected, 1e-5)


def test_weights_of_others_are_named() -> None:
    ours, _ = nets()
    with pytest.warns(UserWarning, match="norm.weight"):
        anyshape.train_step(ours, mean_square, torch.optim.SGD([ours.first.weight], lr=0.1))


@pytest.mark.parametrize(("loss_fn", "words"), [
    (lambda model, x: model(x), "shape"),
    (lambda model, x: 1.0, "float"),
    (lambda model, x: model(x).detach().mean(), "no weight"),
])
def test_what_is_no_loss(loss_fn: Any, words: str) -> None:
    ours, _ = nets()
    before = [p.detach().clone() for p in ours.parameters()]
    step = anyshape.train_step(ours, loss_fn, torch.optim.SGD(ours.parameters(), lr=0.1))
    with pytest.raises(InputError, match=words):
        step(batches(1)[0])
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))


def test_bad_arguments() -> None:
    ours, _ = nets()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for arguments, keywords in (((mean_square, mean_square, optimizer), {}), ((ours, 3, optimizer), {}),
                                ((ours, mean_square, ours), {}), ((ours, mean_square, optimizer), {"clip_norm": -1.0}),
                                ((ours, mean_square, optimizer), {"accumulate": 0}),
                                ((ours, mean_square, optimizer), {"ema": 1.5}),
                                ((ours, mean_square, optimizer), {"ema": "0.9"}),
                                ((ours, mean_square, optimizer), {"clip_norm": "1"}),
                                ((ours, mean_square, optimizer), {"scaler": 65536.0}),
                                ((ours, mean_square, optimizer), {"nonsense": 1})):
        with pytest.raises(ConfigError):
            anyshape.train_step(*arguments, **keywords)
    with pytest.raises(ConfigError, match="got a SGD for loss_fn") as swapped:
        anyshape.train_step(ours, optimizer, mean_square)
    assert "train_step(model, loss_fn, optimizer)" in swapped.value.do
    with pytest.raises(ConfigError, match="got the class SGD for optimizer"):
        anyshape.train_step(ours, mean_square, torch.optim.SGD)


@contextmanager
def raised_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt; where tests run in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    theirs = copy.deepcopy(ours)
    a, b = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    x = torch.randn(512, 256)
    step(x)
    eager(theirs, b, mean_square, x)
    done = 1
    for wait in (0.0, 0.001, 0.002, 0.004, 0.008):
        timer = threading.Timer(wait, lambda: os.kill(os.getpid(), signal.SIGINT))
        with raised_interrupts(), pytest.raises(KeyboardInterrupt):
            timer.start()
            for _ in range(10000):
                step(x)
        timer.join()
        now = int(step._states.update.steps[0])
        for _ in range(now - done):
            eager(theirs, b, mean_square, x)
        done = now
        near(ours, theirs, 1e-4)


def test_an_interrupt_does_not_lose_its_place_among_gathered_batches() -> None:
    """Ctrl-C at the last batch of a step comes after the update: the next batch begins another step."""
    ours, theirs = nets()
    a, b = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, accumulate=2, strict=True)
    given = batches(6)
    for x in given[:2]:
        step(x)
    step(given[2])
    whole = step._compiled
    step._compiled = _Interrupted(whole)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        step(given[3])
    step._compiled = whole
    assert step.position == 0
    for x in given[4:]:
        step(x)
    for part in (given[:2], given[2:4], given[4:]):
        b.zero_grad()
        for x in part:
            (mean_square(theirs, x) / 2).backward()
        b.step()
    near(ours, theirs, 1e-5)


def test_an_interrupt_leaves_out_nothing_that_comes_after_an_update() -> None:
    ours, _ = nets()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    step = anyshape.train_step(ours, mean_square, torch.optim.SGD(ours.parameters(), lr=0.1), accumulate=3,
                               scaler=scaler, clip_norm=1.0, strict=True)
    given = batches(5)
    for x in given[:2]:
        step(x)
    whole = step._compiled
    step._compiled = _Interrupted(whole)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        step(given[2])
    step._compiled = whole
    assert (step.position, scaler.get_scale()) == (0, 8.0) and step.norm is not None
    step(given[3])
    make = step._states.make

    def interrupted(parts: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        make(parts)

    step._states.make = interrupted  # type: ignore[method-assign]
    with raised_interrupts(), pytest.raises(KeyboardInterrupt):
        step.finish()
    assert (step.position, scaler.get_scale()) == (0, 16.0)


class _Interrupts(torch.optim.Optimizer):
    """An optimiser without a rule, in the middle of whose step Ctrl-C is pressed."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_a_step_in_parts() -> None:
    ours, theirs = nets()
    with pytest.warns(FallbackWarning):
        step = anyshape.train_step(ours, mean_square, _Interrupts(ours.parameters()), accumulate=2)
    given = batches(2)
    step(given[0])
    with raised_interrupts(), pytest.raises(KeyboardInterrupt):
        step(given[1])
    b = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for x in given:
        (mean_square(theirs, x) / 2).backward()
    b.step()
    near(ours, theirs, 1e-5)
    assert step.position == 0 and all(weight.grad is None for weight in ours.parameters())


class _Interrupted:
    """A compiled object that Ctrl-C interrupts after its program."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def call(self, arguments: Any, keywords: Any) -> Any:
        self.inner.call(arguments, keywords)
        raise KeyboardInterrupt


def test_a_copy_is_a_step_of_its_own() -> None:
    ours, theirs = nets()
    a, b = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (ours, theirs))
    step = anyshape.train_step(ours, mean_square, a, strict=True)
    given = batches(4)
    for x in given[:2]:
        step(x)
        eager(theirs, b, mean_square, x)
    before = [p.detach().clone() for p in ours.parameters()]
    twin = copy.deepcopy(step)
    for x in given[2:]:
        twin(x)
        eager(theirs, b, mean_square, x)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))
    near(twin.settings.model, theirs, 2e-5)
    with pytest.raises(InputError, match="pickled"):
        pickle.dumps(step)


def test_a_loss_that_is_made_of_gradients() -> None:
    """A gradient penalty: there is no one place where the backward begins."""
    ours, theirs = nets()

    def penalty(model: torch.nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return mean_square(model, x) + (slope.norm(dim=1) - 1).square().mean()

    def asks(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        return torch.autograd.grad(x.square().sum(), x)[0]

    try:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            torch.compile(asks, backend="eager", fullgraph=True)(torch.ones(2))
        is_traced = True
    except torch._dynamo.exc.Unsupported:  # torch 2.11: docs/limitations.md
        is_traced = False
    a, b = (torch.optim.SGD(net.parameters(), lr=0.001) for net in (ours, theirs))
    step = anyshape.train_step(ours, penalty, a, strict=is_traced)
    with nullcontext() if is_traced else pytest.warns(FallbackWarning, match="requires_grad_"):
        for x in batches(4):
            torch.testing.assert_close(step(x), eager(theirs, b, penalty, x), rtol=1e-4, atol=1e-6)
    near(ours, theirs, 1e-5)


def test_the_backward_of_a_step_points_at_the_lines_of_the_forward() -> None:
    """Each gradient is said to come from the line that it is the gradient of, not from the step's own call."""
    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)
    model = torch.nn.ModuleList([embed, head])

    def loss_of(_model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        embedded = embed(ids)
        logits = head(embedded.tanh())
        return F.cross_entropy(logits, labels)

    step = anyshape.train_step(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)
    step(torch.arange(9), torch.arange(9))
    backward = next(one for one in step.explain().programs if "backward" in one.role)
    lines = " ".join(note.where for note in backward.steps)
    assert "gradients_of(" not in lines
    assert "cross_entropy(logits, labels)" in lines
    products = [note.where for note in backward.steps if "matmul" in note.what]
    assert products and all("logits = head(" in where for where in products)
