"""Limits in bytes on a device: values are computed again, or moved out to pinned memory on side streams; what is
counted is what was predicted, and every wait that is left out is found."""
from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fake_device
from anyshape.backend import targets
from anyshape.base.errors import LimitError
from anyshape.runtime.budget import greedy_search
from anyshape.runtime.memory.pinned_store import PinnedReservation
from anyshape.runtime.specialize import offload_schedule
from fake_driver import ORDERS, FakeDriver
from fake_limits import counted, moving, need, store_of
from limits import limit_of, sizes, step

Moved = tuple[FakeDriver, Any, Any, torch.Tensor, list[tuple[Any, int]], list[torch.Tensor]]


@pytest.fixture(scope="module")
def moved() -> Iterator[Moved]:
    """A program on the fake device that moves out everything that it can, as that costs nothing; the device, its
    module, an input, the points of its curve, and what PyTorch gives."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fake = FakeDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(targets.TARGETS, "fake", fake_device.__name__)
        patch.setattr(targets, "DEFAULT", "fake")
        patch.setattr(greedy_search, "EACH", 0.0)
        patch.setattr(offload_schedule.Clock, "seconds", lambda self, bytes_: 0.0 * bytes_)
        patch.setattr(fake_device, "DEVICE", [fake])
        run, module, x, points = moving(fake)
        needs = [(point, need(run, x, point)) for point in points]
        limit_of(run).move(needs[-1][1])
        gc.collect()
        gc.freeze()  # what is there now is not looked at again, each time that bytes are counted
        yield fake, run, module, x, needs, step(module, module, x)
        gc.unfreeze()


def right(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


def test_predicted_is_counted(moved: Moved) -> None:
    fake, run, module, x, points, wanted = moved
    assert points[-1][0].moved and len(points) > 5
    for point, bytes_ in (points[len(points) // 2], points[-1]):
        limit_of(run).move(bytes_)
        for order in ORDERS[:3]:
            fake.set(order)
            before, found = store_of(run).moved, []
            module.zero_grad(set_to_none=True)
            with counted(fake, run) as most:
                found = step(run, module, x)
            assert right(found, wanted)
            incoming = x.nbytes  # the gradient of the result, which PyTorch makes: no memory of the fake
            assert most[0] + incoming == bytes_
            assert store_of(run).moved > before or not point.moved
    assert store_of(run).used == 0 and not fake.alarms


def alarms(moved: Moved, seeds: int) -> int:
    """How many of so many orders give something else than PyTorch, or an alarm."""
    fake, run, module, x, _, wanted = moved
    found = 0
    for order in (*ORDERS[:2], *map(str, range(seeds - 2))):
        fake.set(order)
        fake.alarms.clear()
        result = step(run, module, x)
        fake.everything()
        found += not right(result, wanted) or bool(fake.alarms)
    fake.alarms.clear()
    return found


def test_no_order_gives_an_alarm(moved: Moved) -> None:
    assert alarms(moved, 12) == 0


@pytest.mark.full
def test_a_thousand_orders(moved: Moved) -> None:
    assert alarms(moved, 1000) == 0


def without_waits_of(side: str) -> Callable[[Moved, pytest.MonkeyPatch], None]:
    """A side stream copies as soon as it can."""
    def mutate(moved: Moved, patch: pytest.MonkeyPatch) -> None:
        streams = limit_of(moved[1]).program.streams
        wait, own = streams.wait, streams.side(side)
        patch.setattr(streams, "wait", lambda stream, mark: None if stream == own else wait(stream, mark))
    return mutate


def without_waiting_for(name: str) -> Callable[[Moved, pytest.MonkeyPatch], None]:
    """The call's stream does not wait for a copy."""
    def mutate(moved: Moved, patch: pytest.MonkeyPatch) -> None:
        begin = getattr(PinnedReservation, name)

        def begun(self: PinnedReservation, *arguments: Any) -> Any:
            copy = begin(self, *arguments)
            copy.wait = copy.end = lambda: None
            return copy
        patch.setattr(PinnedReservation, name, begun)
    return mutate


MUTANTS = {"values go out before they are made": without_waits_of("out"),
           "values come back into memory that is used": without_waits_of("back"),
           "memory is used again while values go out": without_waiting_for("put"),
           "values are read before they are back": without_waiting_for("get")}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_found(moved: Moved, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        MUTANTS[name](moved, patch)
        assert alarms(moved, 8) > 0
        moved[0].everything()
    assert alarms(moved, 3) == 0


def over_limits(moved: Moved, seed: int, shapes: int) -> int:
    """How many calls take more than their limit, or less than what was predicted where nothing is rounded: so many
    shapes under 6 limits each, from all that a step takes to the least that works. Below the least nothing runs."""
    fake, run, module, _, _, _ = moved
    fake.set("last stream first")
    numbers = random.Random(seed)
    over = 0
    for _ in range(shapes):
        x = torch.randn(numbers.randrange(1, 200), 32)
        limit_of(run).move(1 << 40)
        module.zero_grad(set_to_none=True)
        wanted = step(run, module, x)
        points = list(limit_of(run).tradeoff(sizes(run, x)))
        least = limit_of(run).least(sizes(run, x))
        chosen = [points[number * (len(points) - 1) // 4] for number in range(5)]
        for bytes_ in (*(max(need(run, x, point), least) for point in chosen), least):
            limit_of(run).move(bytes_)
            module.zero_grad(set_to_none=True)
            found = []
            with counted(fake, run) as most:
                found = step(run, module, x)
            assert right(found, wanted)
            over += most[0] + x.nbytes > bytes_
        limit_of(run).move(least - 4096)
        with pytest.raises(LimitError):
            step(run, module, x)
    assert not fake.alarms
    return over


def test_shapes_and_limits(moved: Moved) -> None:
    assert over_limits(moved, 0, 2) == 0


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_many_shapes_and_limits(moved: Moved, seed: int) -> None:
    """With the others, 200 shapes under 6 limits."""
    assert over_limits(moved, 1 + seed, 10) == 0
