"""`anyshape.train_step` over loss functions and models of many kinds, against the same steps in eager PyTorch."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anyshape
from anyshape.frontend.capture.dynamo_backend import FallbackWarning
from anyshape.sym.expr import evaluate


def test_tensors_in_a_dictionary_beside_the_loss_are_given_back_detached() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    own = torch.optim.SGD(twin.parameters(), lr=0.1)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = model(batch)
        return found.square().mean(), {"found": found}

    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        step = anyshape.train_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
        for size in (5, 1, 7):
            batch = torch.randn(size, 4)
            loss, beside = step(batch)
            expected, other = loss_fn(twin, batch)
            own.zero_grad()
            expected.backward()
            own.step()
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(beside["found"], other["found"].detach())
            assert not beside["found"].requires_grad
    torch.testing.assert_close(model.weight, twin.weight)


def like_eager(model: torch.nn.Module, loss_fn: Any, **keywords: Any) -> anyshape.TrainStep:
    """Some steps of `model` and of a copy in PyTorch, with the same results; strict."""
    twin = copy.deepcopy(model)
    a, b = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin))
    step = anyshape.train_step(model, loss_fn, a, strict=True, **keywords)
    for size in (5, 1, 7):
        batch = torch.randn(size, 4)
        found, wanted = step(batch), loss_fn(twin, batch)
        loss = wanted[0] if isinstance(wanted, tuple) else wanted
        b.zero_grad()
        loss.backward()
        b.step()
        expected = tuple(map(Tensor.detach, wanted)) if isinstance(wanted, tuple) else loss.detach()
        torch.testing.assert_close(found, expected)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    return step


class Routed(torch.nn.Module):
    """Leaves a part of its loss in an attribute, as mixtures of experts do, and outputs in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.beside = torch.zeros(())
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        shares = self.inner(x).softmax(-1)
        self.beside = shares.mean(0).square().sum()
        self.seen["shares"] = shares
        return x * shares


def test_tensors_that_a_model_leaves_in_attributes() -> None:
    torch.manual_seed(0)
    model = Routed()
    like_eager(model, lambda model, x: (model(x) - 1).square().mean() + model.beside)
    assert not model.beside.requires_grad and not model.seen["shares"].requires_grad
    assert model.seen["shares"].shape == (7, 4)


def test_arguments_beside_the_loss() -> None:
    torch.manual_seed(0)
    like_eager(torch.nn.Linear(4, 3), lambda model, x: (model(x).square().mean(), x, x[:1]))


class Scaled(torch.nn.Module):
    """Weights of one element, with and without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 3)
        self.scales = torch.nn.ParameterList([torch.tensor(1.5), torch.ones(1), torch.ones(1, 1), torch.zeros(0)])

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x) + self.scales[3].sum()
        for i in range(3):  # no slice of the list: Dynamo of torch 2.11 does not trace that
            found = found * self.scales[i]
        return found


def test_weights_of_one_element() -> None:
    torch.manual_seed(0)
    like_eager(Scaled(), lambda model, x: model(x).square().mean())


class Checkpointed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]


def test_dropout_under_a_checkpoint() -> None:
    """PyTorch refuses it in a graph with its backward, so it is for a step of two parts."""
    torch.manual_seed(0)
    model = Checkpointed()
    twin = copy.deepcopy(model)
    fast = anyshape.compile(model, strict=True)
    for size in (5, 1, 7):
        batch = torch.randn(size, 4)
        gradients = []
        for one in (fast, twin):
            torch.manual_seed(size)
            loss = one(batch).square().sum()
            gradients.append(torch.autograd.grad(loss, list((twin if one is twin else model).parameters())))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Block(torch.nn.Module):
    """Attention and a feed-forward part of 16 features, for `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
        self.inner = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.inner(x)


@pytest.mark.parametrize("whole", [False, True], ids=["forward and backward", "whole step"])
def test_attention_in_checkpointed_layers(whole: bool) -> None:
    """PyTorch takes the fused attention for random: in a checkpoint it would be called with the generator's state."""
    torch.manual_seed(0)
    ours = torch.nn.Sequential(*(Block() for _ in range(2)))
    theirs = copy.deepcopy(ours)

    def loss_fn(model: torch.nn.Sequential, x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    one, two = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    fast = anyshape.train_step(ours, loss_fn, one, strict=True) if whole else anyshape.compile(
        lambda x: loss_fn(ours, x), strict=True)
    for rows, length in ((4, 300), (2, 7), (1, 1), (3, 31)):
        x = torch.randn(rows, length, 16)
        if whole:
            loss = fast(x)
        else:
            one.zero_grad()
            (loss := fast(x)).backward()
            one.step()
        two.zero_grad()
        (wanted := loss_fn(theirs, x)).backward()
        two.step()
        torch.testing.assert_close(loss.detach(), wanted.detach())
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    assert [program.name for program in fast.programs] == ["0.forward", "0.backward"]
    forward = fast.programs[0].compiled
    kept = max(sum(evaluate(one.bytes, record.values) for one in forward.plan.buffers if one.is_saved)
               for record in forward.executable.specializations.values())
    assert kept <= 2 * 4 * 300 * 16 * 4 + 65536  # what goes into each layer, and nothing from inside
