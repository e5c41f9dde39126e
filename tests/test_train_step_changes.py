"""What users do to a model, its optimiser and a train step between two batches, and what they do wrong."""
from __future__ import annotations

import threading
import types
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import anyshape
from anyshape.base.errors import ConfigError, InputError
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.frontend.train_step.validation import why_apart

# Adadelta: before torch 2.13 Adagrad has no state for a group that is added
WHOLE, APART = torch.optim.SGD, torch.optim.Adadelta


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False), torch.nn.Linear(8, 6, bias=False))


def mean_square(model: torch.nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn((5, 2, 7)[i % 3], 6, generator=draw) for i in range(count)]


def quiet_step(*arguments: Any, **keywords: Any) -> anyshape.TrainStep:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return anyshape.train_step(*arguments, **keywords)


def quietly(step: Any, *arguments: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return step(*arguments)


def eager(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *given: Tensor) -> None:
    """One step of PyTorch, by the mean of the batches' gradients."""
    optimizer.zero_grad()
    for x in given:
        (mean_square(model, x) / len(given)).backward()
    optimizer.step()


def near(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [WHOLE, APART])
def test_averages_follow_weights_that_rest_and_weights_that_come(kind: type[torch.optim.Optimizer]) -> None:
    ours, theirs = net(), net()
    a, b = kind(ours.parameters(), lr=0.1), kind(theirs.parameters(), lr=0.1)
    step = quiet_step(ours, mean_square, a, ema=0.5)
    wanted = {name: weight.detach().clone() for name, weight in theirs.named_parameters()}
    for number, x in enumerate(batches(6)):
        for model, optimizer in ((ours, a), (theirs, b)):
            if number == 2:
                model[0].requires_grad_(False)
                optimizer.zero_grad()
            if number == 4:
                torch.manual_seed(2)
                model.append(torch.nn.Linear(6, 6, bias=False))
                optimizer.add_param_group({"params": list(model[2].parameters())})
        step(x)
        for name, weight in theirs.named_parameters():
            wanted.setdefault(name, weight.detach().clone())
        eager(theirs, b, x)
        for name, weight in theirs.named_parameters():
            wanted[name].lerp_(weight.detach(), 0.5)
    near(ours, theirs)
    assert step.averages.keys() == wanted.keys()
    for name, average in wanted.items():
        torch.testing.assert_close(step.averages[name], average, rtol=1e-5, atol=1e-6)


def one_of_two(model: torch.nn.Module, x: Tensor, first: bool) -> Tensor:
    return (x @ model[0].weight.T if first else x @ model[1].weight).square().mean()


@pytest.mark.parametrize("kind", [WHOLE, APART])
def test_an_average_follows_a_weight_that_a_step_does_not_use_and_rests_with_a_step_that_is_left_out(
        kind: type[torch.optim.Optimizer]) -> None:
    model = net()
    step = quiet_step(model, one_of_two, kind(model.parameters(), lr=0.1), ema=0.5,
                      scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    wanted = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for number, x in enumerate(batches(6)):
        is_left_out = number == 3
        step(x * torch.inf if is_left_out else x, number % 3 == 0)
        for name, weight in model.named_parameters() if not is_left_out else ():
            wanted[name].lerp_(weight.detach(), 0.5)
    for name, average in wanted.items():
        torch.testing.assert_close(step.averages[name], average, rtol=1e-5, atol=1e-6)


def test_gradients_that_others_left_are_not_of_the_step() -> None:
    ours, theirs = net(), net()
    a, b = APART(ours.parameters()), APART(theirs.parameters())
    step = quiet_step(ours, mean_square, a, accumulate=2)
    given = batches(4)
    for start in (0, 2):
        ours(given[0]).sum().backward()
        for x in given[start:start + 2]:
            step(x)
        eager(theirs, b, *given[start:start + 2])
    near(ours, theirs)


def may_refuse(model: torch.nn.Module, x: Tensor, refuses: bool = False) -> Tensor:
    if refuses:
        raise ValueError("not this batch")
    return mean_square(model, x)


@pytest.mark.parametrize("kind", [WHOLE, APART])
def test_an_error_of_the_loss_is_the_users_own_and_loses_no_batch(kind: type[torch.optim.Optimizer]) -> None:
    ours, theirs = net(), net()
    step = quiet_step(ours, may_refuse, kind(ours.parameters(), lr=0.1), accumulate=2)
    given = batches(2)
    step(given[0])
    with pytest.raises(ValueError, match="not this batch"):
        step(given[0], True)
    assert step.position == 1
    step(given[1])
    assert step.position == 0
    eager(theirs, kind(theirs.parameters(), lr=0.1), *given)
    near(ours, theirs)


def may_ask(model: torch.nn.Module, x: Tensor, asks: bool = False) -> Tensor:
    found = mean_square(model, x)
    return found * 1.0 if asks and found.item() > -1 else found


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


CHANGES: dict[str, tuple[Any, str]] = {
    "hook": (lambda model, _: model[0].weight.register_hook(halve), "hooks"),
    "data": (lambda _, __: None, "data-dependent"),
}


def test_a_step_of_the_optimizer_that_was_replaced() -> None:
    model = net()
    optimizer = WHOLE(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert why_apart(optimizer) == ""
    optimizer.step = types.MethodType(WHOLE.zero_grad, optimizer)  # type: ignore[method-assign]
    assert "replaced" in why_apart(optimizer)


@pytest.mark.parametrize("name", CHANGES)
def test_what_comes_later_and_cannot_be_one_program_goes_on_apart(name: str) -> None:
    change, words = CHANGES[name]
    ours, theirs = net(), net()
    a, b = WHOLE(ours.parameters(), lr=0.1, momentum=0.9), WHOLE(theirs.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.ExponentialLR(a, 0.9)  # puts a function around the optimiser's step, which is no change
    step = anyshape.train_step(ours, may_ask, a, accumulate=2)
    given = batches(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for x in given[:2]:
            step(x)
    eager(theirs, b, *given[:2])
    change(ours, a)
    change(theirs, b)
    with pytest.warns(FallbackWarning, match=words):
        step(given[2])
        step(given[3], name == "data")
    eager(theirs, b, *given[2:])
    near(ours, theirs)


def test_batches_of_several_threads_come_one_after_another() -> None:
    ours, theirs = net(), net()
    step = anyshape.train_step(ours, mean_square, WHOLE(ours.parameters(), lr=0.1), accumulate=2, strict=True)
    x = batches(1)[0]

    def work() -> None:
        for _ in range(20):
            step(x)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer = WHOLE(theirs.parameters(), lr=0.1)
    for _ in range(20):
        eager(theirs, optimizer, x)
    assert step.position == 0
    near(ours, theirs)


def test_an_optimizer_without_states_is_taken_over_once() -> None:
    model = net()
    step = anyshape.train_step(model, mean_square, WHOLE(model.parameters(), lr=0.1))
    step(batches(1)[0])
    before = step._states.update
    step(batches(1)[0])
    assert step._states.update is before


def test_gradients_of_arguments_are_missed_aloud() -> None:
    model = net()
    step = anyshape.train_step(model, mean_square, WHOLE(model.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"does not make: of arguments\[0\]"):
        step(batches(1)[0].requires_grad_())


def test_a_complex_loss() -> None:
    model = net()
    step = anyshape.train_step(model, lambda model, x: model(x).mean() * 1j, WHOLE(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match="complex"):
        quietly(step, batches(1)[0])


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As that of accelerate, which is not installed where tests run."""

    def __init__(self, optimizer: torch.optim.Optimizer, parts: int = 1, scaler: Any = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = types.SimpleNamespace(num_steps=parts)
        self.accelerator_state = types.SimpleNamespace(distributed_type="DistributedType.NO")

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


AcceleratedOptimizer.__module__ = "accelerate.optimizer"


def test_an_optimizer_of_accelerate_is_looked_into() -> None:
    ours, theirs = net(), net()
    a, b = WHOLE(ours.parameters(), lr=0.1), WHOLE(theirs.parameters(), lr=0.1)
    step = anyshape.train_step(ours, mean_square, AcceleratedOptimizer(a), strict=True)
    for x in batches(2):
        step(x)
        eager(theirs, b, x)
    near(ours, theirs)
    with pytest.raises(ConfigError, match="accumulate=4"):
        anyshape.train_step(ours, mean_square, AcceleratedOptimizer(a, parts=4))
    with pytest.warns(FallbackWarning, match="no update rule for AcceleratedOptimizer"):
        anyshape.train_step(ours, mean_square, AcceleratedOptimizer(a, scaler=object()))


class Lion(torch.optim.Optimizer):
    """The settings of lion_pytorch's, which is not installed where tests run."""

    def __init__(self, parameters: Any, **more: Any) -> None:
        self.decoupled_wd = more.pop("decoupled_weight_decay", False)
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, **more})


Lion.__module__ = "lion_pytorch.lion_pytorch"


@pytest.mark.parametrize("name", ["decoupled_weight_decay", "cautious_factor"])
def test_a_setting_that_a_rule_does_not_know(name: str) -> None:
    model = net()
    with pytest.warns(FallbackWarning, match=f"Lion does not know {name}"):
        anyshape.train_step(model, mean_square, Lion(model.parameters(), **{name: True}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anyshape.train_step(model, mean_square, Lion(model.parameters()))
