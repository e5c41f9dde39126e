"""`anyshape.train_step` over loss functions and models of many kinds, against the same steps in eager PyTorch."""
from __future__ import annotations

import copy
import warnings

import torch

import anyshape
from anyshape.frontend.dynamo import FallbackWarning


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
