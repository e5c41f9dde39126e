"""Private names of torch: without any one of them a user's call gives the same numbers, with one warning."""
from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import anyshape
from anyshape import torch_compat as compat
from anyshape.frontend.dynamo import FallbackWarning
from anyshape.torch_compat.names import NAMES, NEEDED

OPTIONAL = sorted(NAMES.keys() - NEEDED.keys())


class Small(nn.Module):
    """A few kernels and a library call; a size in Python; a result that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = nn.functional.dropout(self.linear(x).sigmoid(), 0.5, self.training) * x.shape[0]
        return y.softmax(-1), y[:, 1:]


def agrees(model: nn.Module, fast: nn.Module, sizes: tuple[int, ...]) -> None:
    for n in sizes:
        x, y = (torch.arange(4.0 * n).reshape(n, 4).div(n).requires_grad_() for _ in range(2))
        expected, found = model(x), fast(y)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one)
        sum(one.square().sum() for one in expected).backward()
        sum(one.square().sum() for one in found).backward()
        torch.testing.assert_close(y.grad, x.grad)


def said_without(name: str) -> tuple[list[str], anyshape.Explanation]:
    """What is warned of when a small program runs on a torch without `name`, and its explanation."""
    model = Small().eval()
    with warnings.catch_warnings(record=True) as caught, compat.pretending(name):
        warnings.simplefilter("always")
        fast = anyshape.compile(copy.deepcopy(model))
        agrees(model, fast, (3, 2, 1))
        told = fast.explain()
    return [str(one.message) for one in caught
            if issubclass(one.category, (compat.TorchVersionWarning, FallbackWarning))], told


def test_all_names_are_there() -> None:
    assert compat.refusal() is None and not compat.lacking()
    if compat.version() >= (2, 13):
        assert [name for name in NAMES if compat.get(name) is None] == []


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_without_a_name_that_is_needed_all_runs_as_pytorch(name: str) -> None:
    said, told = said_without(name)
    assert len(said) == 1 and name in said[0] and torch.__version__ in said[0]
    assert not told.programs and name in str(told)


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_another_name_it_is_compiled_all_the_same(name: str) -> None:
    said, told = said_without(name)
    assert all(name in one and torch.__version__ in one for one in said), said
    assert len(said) <= 1
    assert told.programs
    assert not said or name in [one.stage for one in told.fallbacks]
