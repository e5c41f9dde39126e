"""Limits in bytes on a device: values are computed again, or moved out to pinned memory on side streams; what is
counted is what was predicted, and every wait that is left out is found."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fake_device
from anyshape.backend import targets
from anyshape.runtime.budget import greedy_search
from anyshape.runtime.specialize import offload_schedule
from fake_driver import ORDERS, FakeDriver
from fake_limits import counted, moving, need, store_of
from limits import limit_of, step


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setitem(targets.TARGETS, "fake", fake_device.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "fake")
    # moving costs nothing, so that everything is moved that can be
    monkeypatch.setattr(greedy_search, "EACH", 0.0)
    monkeypatch.setattr(offload_schedule.Clock, "seconds", lambda self, bytes_: 0.0 * bytes_)
    found = FakeDriver()
    monkeypatch.setattr(fake_device, "DEVICE", [found])
    yield found


def test_values_are_moved_out_and_back(fake: FakeDriver) -> None:
    run, module, x, points = moving(fake)
    wanted = step(module, module, x)
    assert points[-1].moved
    for point in (points[-1], points[len(points) // 2]):
        bytes_ = need(run, x, point)
        limit_of(run).move(bytes_)
        for order in ORDERS[:4]:
            fake.set(order)
            before, found = store_of(run).moved, []
            module.zero_grad(set_to_none=True)
            with counted(fake, run) as most:
                found = step(run, module, x)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
            incoming = x.nbytes  # the gradient of the result, which PyTorch makes: no memory of the fake
            assert most[0] + incoming == bytes_
            assert store_of(run).moved > before or not point.moved
    assert store_of(run).used == 0 and not fake.alarms
