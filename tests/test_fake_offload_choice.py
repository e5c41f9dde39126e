"""What a limit in bytes on a device has computed again, and what moved out to pinned memory: by cost, in one search."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fake_device
from anyshape.backend import targets
from anyshape.runtime.memory.pinned_store import PinnedStore
from anyshape.runtime.specialize.saved_policy import SAVE_ALL
from fake_driver import ORDERS, FakeDriver
from fake_limits import counted, moving, need, right, store_of
from limits import limit_of, sizes, step

ROWS = 2000
# bytes a second each way: copies take seconds; all are done beside the steps; a part of them are
WAYS = {"computed again": 1e6, "moved out": 1e12, "both": 1e8}


@pytest.fixture(scope="module")
def priced() -> Iterator[tuple[FakeDriver, Any, Any, torch.Tensor]]:
    """A program on the fake device; its module, and an input."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fake = FakeDriver("last stream first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(targets.TARGETS, "fake", fake_device.__name__)
        patch.setattr(targets, "DEFAULT", "fake")
        patch.setattr(fake_device, "DEVICE", [fake])
        run, module, x, _ = moving(fake, rows=ROWS)
        yield fake, run, module, x


@pytest.mark.parametrize("name", WAYS)
def test_the_cheaper_way_is_chosen(priced: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what computing again takes, and what copying takes that no step hides; calls keep to what was predicted."""
    fake, run, module, x = priced
    limit, values = limit_of(run), sizes(run, x)
    monkeypatch.setattr(PinnedStore, "seconds", lambda self, bytes_, out: bytes_ / WAYS[name])
    limit.forget()
    # below that only one way is left for what is to be freed
    least = 0.79 * limit.needed(values, SAVE_ALL)
    points = [point for point in limit.tradeoff(values) if need(run, x, point) >= least]
    assert len(points) >= 3
    assert {"computed again": any(point.dropped for point in points),
            "moved out": any(point.moved for point in points)} == {
        "computed again": name != "moved out", "moved out": name != "computed again"}
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    bytes_ = need(run, x, points[-1])
    wanted = step(module, module, x)
    limit.move(bytes_)
    for order in ORDERS[:2]:
        fake.set(order)
        module.zero_grad(set_to_none=True)
        before, found = store_of(run).moved, []
        with counted(fake, run) as most:
            found = step(run, module, x)
        assert right(found, wanted) and most[0] + x.nbytes <= bytes_
        assert (store_of(run).moved > before) == (name != "computed again")
    assert not fake.alarms


def test_the_hosts_threads_do_not_compute(priced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice for a device is the same however many there are."""
    _, run, _, x = priced
    limit, values = limit_of(run), sizes(run, x)
    monkeypatch.setattr(PinnedStore, "seconds", lambda self, bytes_, out: bytes_ / WAYS["both"])
    found = []
    for threads in (1, 7, 4096):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        limit.forget()
        found.append([(point.dropped, point.moved, limit.seconds(point)) for point in limit.tradeoff(values)])
    assert found[0] == found[1] == found[2]
