"""Plans on a device behind a driver: the real launch loop, streams, arena and status on the fake driver, whose streams
do their work in adversarial orders."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyshape
import fake_device
from anyshape.backend import targets
from anyshape.backend.triton.runner import StreamRunner
from fake_driver import ORDERS, FakeDriver
from models import ZOO
from test_models import check_shapes, check_train_steps
from test_seam import check_limits, check_train_step


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setitem(targets.TARGETS, "fake", fake_device.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "fake")
    found = FakeDriver()
    monkeypatch.setattr(fake_device, "DEVICE", [found])
    yield found
    assert not found.alarms


def program(fast: Any) -> Any:
    return fast.programs[0].executable


def two(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.softmax(x, 0).t().contiguous() * 3, 0)


def test_two_kernels_run(fake: FakeDriver) -> None:
    fast = anyshape.compile(two, strict=True)
    for order in ORDERS:
        fake.set(order)
        for shape in ((5, 7), (1, 3), (0, 4), (4, 0), (33, 2)):
            x = torch.randn(shape)
            y = fast(x)
            fake.everything()
            torch.testing.assert_close(y, two(x))
    assert isinstance(program(fast).runner, StreamRunner) and fake.counts["launch"] >= 2 * len(ORDERS)


def mixed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels, a product, a copy and steps of PyTorch."""
    y = torch.softmax(x @ w, -1)
    return y.t().contiguous() + 1, torch.cat((y.cumsum(0), x.sort(0)[0]), 1)


def test_results_are_memory_of_the_device(fake: FakeDriver) -> None:
    """Results are given back in the order of their stream: nobody has to hold them until their runs have ended."""
    fast = anyshape.compile(mixed, strict=True)
    w = torch.randn(4, 6)
    memory = program_target(fast, torch.randn(3, 4), w).memory
    for order in ORDERS:
        fake.set(order)
        for rows in (3, 5, 1, 0):
            x = torch.randn(rows, 4)
            fast(x, w)  # dropped before it has run
            found = fast(x, w)
            assert found[0].untyped_storage().data_ptr() in memory.pieces or not rows
            fake.everything()
            torch.testing.assert_close(found, mixed(x, w))


def program_target(fast: Any, *args: torch.Tensor) -> Any:
    fast(*args)
    return program(fast).target


@pytest.mark.parametrize("order", ORDERS[1:3])
@pytest.mark.parametrize("name", ("mixer", "clicks"))
def test_models(fake: FakeDriver, name: str, order: str) -> None:
    fake.set(order)
    fake.reads = True
    check_shapes(ZOO[name], ZOO[name].shapes(3))


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_every_model(fake: FakeDriver, name: str) -> None:
    fake.set("last stream first")
    fake.reads = True
    check_shapes(ZOO[name], ZOO[name].shapes(6), strict=True)
    check_train_steps(ZOO[name])


def test_train_steps(fake: FakeDriver) -> None:
    fake.reads = True
    check_train_step()


def test_limits(fake: FakeDriver) -> None:
    fake.reads = True
    check_limits()
