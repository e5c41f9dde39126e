"""Limits in bytes on a device: values are computed again, or moved out to pinned memory on side streams; what is
counted is what was predicted, and every wait that is left out is found."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anyshape.runtime.memory.pinned_store import PinnedReservation
from fake_driver import ORDERS
from fake_limits import Moved, counted, moving_device, right, store_of, under_limits
from limits import limit_of, step


@pytest.fixture(scope="module")
def moved() -> Iterator[Moved]:
    with moving_device() as found:
        yield found


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


def check_limits(moved: Moved, seed: int, shapes: int) -> None:
    found = under_limits(moved, seed, shapes)
    assert (found.steps, found.over, found.exact, found.refused) == (6 * shapes, 0, 6 * shapes, shapes)
    assert not moved[0].alarms


def test_shapes_and_limits(moved: Moved) -> None:
    check_limits(moved, 0, 2)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_many_shapes_and_limits(moved: Moved, seed: int) -> None:
    """With the others, 200 shapes under 6 limits."""
    check_limits(moved, 1 + seed, 10)
