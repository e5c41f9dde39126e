"""PyTorch's own road to a device: modules, gradients, both entrances and byte counts on a test accelerator that is
built here (tests/torch_device.cpp), behind the fake driver."""
from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import anyshape
import torch_device
from anyshape.backend import targets
from fake_driver import FakeDriver
from limits import limit_of, net, sizes

pytestmark = [pytest.mark.full, pytest.mark.skipif(
    bool(torch_device.MISSING), reason=f"the accelerator is built by {torch_device.MISSING}, which is not here")]
NAME = torch_device.NAME


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found, fake = torch_device.loaded(tmp_path_factory.mktemp("accelerator")), FakeDriver("last stream first")
    fake.reads = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(targets.TARGETS, NAME, torch_device.__name__)
        patch.setattr(torch_device, "DEVICE", [(fake, found)])
        yield found
    assert not fake.alarms


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1))


ENTRANCES: dict[str, Callable[[nn.Module], Any]] = {
    "anyshape.compile": lambda one: anyshape.compile(one, strict=True),
    "torch.compile": lambda one: torch.compile(one, backend="anyshape", dynamic=True)}


@pytest.mark.parametrize("name", ENTRANCES)
def test_forward_and_backward(extension: Any, name: str) -> None:
    torch._dynamo.reset()
    own = model()
    there = copy.deepcopy(own).to(NAME)
    run = ENTRANCES[name](there)
    anyshape.reset_stats()
    for rows in (5, 7, 1, 30):
        x = torch.randn(rows, 16)
        own.zero_grad()
        there.zero_grad()
        found, wanted = run(x.to(NAME)), own(x)
        assert found.device == torch.device(NAME, 0)
        torch.testing.assert_close(found.cpu(), wanted)
        found.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(there.parameters(), own.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)
    assert anyshape.stats()["eager_calls"] == 0


def test_memory_is_counted_and_given_back(extension: Any) -> None:
    torch._dynamo.reset()
    there = net(count=3).to(NAME)
    run = anyshape.compile(there, memory_limit=1 << 40, strict=True)

    def step(x: torch.Tensor) -> None:
        there.zero_grad(set_to_none=True)
        run(x).square().mean().backward()

    x = torch.randn(40, 32).to(NAME)
    step(x)
    limit = limit_of(run)
    values = sizes(run, x)
    points = list(limit.tradeoff(values))
    for point in (points[0], points[len(points) // 2], points[-1]):
        bytes_ = limit.needed(values, point.policy)
        limit.move(bytes_)
        there.zero_grad(set_to_none=True)
        limit.program.context.release()
        gc.collect()
        extension.reset()
        before = extension.bytes()[0]
        step(x)
        assert extension.bytes()[1] - before <= bytes_ + 3 * x.nbytes  # what PyTorch makes between them
    there.zero_grad(set_to_none=True)
    limit.program.context.release()
    gc.collect()
    assert extension.bytes()[0] <= before


def test_a_tensor_on_the_cpu_is_told(extension: Any) -> None:
    torch._dynamo.reset()
    fast = anyshape.compile(lambda x, y: torch.softmax(x, 1) + y)
    x, y = torch.randn(3, 4), torch.randn(())
    with pytest.warns(UserWarning, match="several devices: cpu, testdev"):
        found = fast(x.to(NAME), y)
    torch.testing.assert_close(found.cpu(), torch.softmax(x, 1) + y)
