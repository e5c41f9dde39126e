"""Streams: memory is used again in the order of streams, and a status that is read after a run loses nothing: on a fake
asynchronous device (tests/async_device.py) that finds every missing wait."""
from __future__ import annotations

from typing import Any

import pytest
import torch

import anyshape
import async_device
from anyshape.backend import targets
from anyshape.base.errors import DivisionError, IndexRangeError
from anyshape.runtime.call import executable as calls
from anyshape.runtime.call.unread_status import settle
from anyshape.runtime.memory.pools import Pool
from anyshape.runtime.memory.stream_pools import StreamPool
from async_device import ORDERS, Device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setitem(targets.TARGETS, "streams", async_device.__name__)
    monkeypatch.setattr(targets, "DEFAULT", "streams")
    found = Device()
    monkeypatch.setattr(async_device, "DEVICE", [found])
    return found


def model(x: torch.Tensor) -> torch.Tensor:
    """Several kernels, with values in the arena between them."""
    y = torch.softmax(x, 0)
    return torch.softmax(y.t().contiguous() * 3, 0).cumsum(1).t() + y.sum(1, keepdim=True)


def program(fast: Any) -> Any:
    return fast.programs[0].executable


def two_streams(device: Device, fast: Any) -> bool:
    """Whether calls that two streams take turns at are right."""
    inputs = [torch.randn(5, 7) for _ in range(8)]
    outputs = []
    for i, x in enumerate(inputs):
        with device.on(i % 2 + 1):
            outputs.append(fast(x))
        if i == 3:
            device.synchronize(1)
    for stream in (1, 2):
        device.synchronize(stream)
    run = program(fast)
    assert isinstance(run.context.temporary, StreamPool) and run.context.temporary.takes >= len(inputs)
    assert not run.context.unread or all(one.frame.over for one in run.context.unread)
    return all(torch.allclose(found, model(x), atol=1e-5) for found, x in zip(outputs, inputs, strict=True))


def test_two_streams(device: Device) -> None:
    fast = anyshape.compile(model, strict=True)
    for order in ORDERS:
        device.set(order)
        assert two_streams(device, fast), order


def test_a_block_without_a_wait_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "passed", lambda mark: True, raising=False)
    monkeypatch.setattr(device, "synchronize", lambda stream: None)
    fast = anyshape.compile(model, strict=True)
    inputs = [torch.randn(5, 7) for _ in range(2)]
    outputs = []
    for i, x in enumerate(inputs):
        with device.on(i + 1):
            outputs.append(fast(x))
    monkeypatch.undo()
    assert program(fast).context.temporary.held  # both took one block
    # steps in turns, as two streams at once would do them
    queues = [list(device.works[stream]) for stream in (1, 2)]
    for works in zip(*queues, strict=True):
        for work in works:
            assert callable(work)
            work()
    device.done = {stream: len(works) for stream, works in device.works.items()}
    assert not all(torch.allclose(found, model(x), atol=1e-5) for found, x in zip(outputs, inputs, strict=True))


def test_a_stream_has_its_memory_at_once(device: Device) -> None:
    """A second call on one stream needs no more memory; on another one it does, until the first one is done."""
    pool = StreamPool(device)
    with device.on(1):
        first = pool.take(5000)
        device.issue(1, lambda: None)
        pool.give(first)
        assert pool.take(4000) is first
        pool.give(first)
    with device.on(2):
        second = pool.take(5000)
        assert second is not first
        device.synchronize(1)
        assert pool.take(5000) is first
        pool.give(first)
    with device.on(1):
        assert pool.take(5000) is first  # nothing is on stream 2


def test_memory_that_is_short_comes_from_other_streams(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, allocate, failed = StreamPool(device), device.allocate, []

    def short(bytes_: int, stream: int) -> torch.Tensor:
        if pool.free:
            failed.append(stream)
            raise RuntimeError("out of memory")
        return allocate(bytes_, stream)

    with device.on(1):
        block = pool.take(5000)
        device.issue(1, lambda: None)
        pool.give(block)
    monkeypatch.setattr(device, "allocate", short)
    with device.on(2):
        assert pool.take(9000).bytes >= 9000
    assert failed == [2] and not pool.free


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1).cumsum(0).exp()


def backward_elsewhere(device: Device, fast: Any) -> bool:
    """Whether a backward is right whose forward is on another stream, and has not begun to run."""
    x = torch.randn(6, 9, requires_grad=True)
    with device.on(1):
        y = fast(x)
    seed = torch.randn(6, 9)
    with device.on(2):
        (found,) = torch.autograd.grad(y, x, seed)
    for stream in (2, 1):
        device.synchronize(stream)
    (wanted,) = torch.autograd.grad(chain(x), x, seed)
    return torch.allclose(found, wanted, atol=1e-4)


def test_a_backward_on_another_stream(device: Device) -> None:
    fast = anyshape.compile(chain, strict=True)
    for order in ORDERS:
        device.set(order)
        assert backward_elsewhere(device, fast), order


def test_a_backward_without_a_wait_is_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "follow", lambda kept, stream: None)
    device.set("last stream first")
    assert not backward_elsewhere(device, anyshape.compile(chain, strict=True))


def test_an_index_out_of_range_is_told_later(device: Device) -> None:
    fast = anyshape.compile(lambda x, i: x[i] * 2, strict=True)
    x, good, bad = torch.randn(5), torch.tensor([1, 2]), torch.tensor([1, 7])
    first, second, third = fast(x, good), fast(x, bad), fast(x, good)
    fourth = fast(x, bad)
    unread = program(fast).context.unread
    assert len(unread) == 4 and len(second) == len(fourth) == 2
    for left in (1, 0):
        with pytest.raises(IndexRangeError, match="index is out of range") as error:
            settle(unread, wait=True)
        assert error.value.where and "earlier call" in error.value.__notes__[0]
        assert len(unread) == left or left
    settle(unread, wait=True)
    assert not unread
    for found in (first, third):
        torch.testing.assert_close(found, x[good] * 2)


def test_the_next_call_tells_and_runs_nothing(device: Device) -> None:
    fast = anyshape.compile(lambda x, y: torch.div(x, y, rounding_mode="floor") + 1, strict=True)
    x, good, bad = torch.arange(6), torch.full((6,), 2), torch.tensor([1, 2, 0, 1, 1, 1])
    results = [fast(x, good), fast(x, bad)]  # the fake's memory of results is the host's: held until their runs end
    device.synchronize(0)
    issued = len(device.works[0])
    with pytest.raises(DivisionError):
        fast(x, good)
    assert len(device.works[0]) == issued
    results.append(fast(x, good))
    settle(program(fast).context.unread, wait=True)
    for found in (results[0], results[2]):
        torch.testing.assert_close(found, x // 2 + 1)


def test_a_backward_that_is_told_of_an_error_keeps_its_tape(device: Device) -> None:
    gather = anyshape.compile(lambda x, i: x[i] * 2, strict=True)
    fast = anyshape.compile(lambda x: torch.softmax(x, 1).exp(), strict=True)
    x = torch.randn(4, 5, requires_grad=True)
    y = fast(x)
    held = [torch.randn(5), torch.tensor([1, 7]), torch.ones(4, 5)]
    held.append(gather(*held[:2]))
    device.synchronize(0)
    with pytest.raises(IndexRangeError):
        torch.autograd.grad(y, x, held[2], retain_graph=True)
    (found,) = torch.autograd.grad(y, x, held[2])
    device.synchronize(0)
    (wanted,) = torch.autograd.grad(torch.softmax(x, 1).exp(), x, held[2])
    torch.testing.assert_close(found, wanted)


def test_the_cpu_has_one_stream() -> None:
    fast = anyshape.compile(lambda x: torch.softmax(x, 1), strict=True)
    fast(torch.randn(3, 4))
    context = program(fast).context
    assert type(context.temporary) is type(context.kept) is Pool and not context.unread
    assert program(fast).streams is None
