"""What limits are kept to on the fake device: programs, steps, and counted bytes."""
from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import anyshape
import fake_device
from anyshape.backend import targets
from anyshape.base.errors import LimitError
from anyshape.runtime.memory.pinned_store import PinnedStore
from anyshape.runtime.specialize import offload_schedule
from fake_driver import FakeDriver
from limits import NO_LIMIT, limit_of, net, sizes, step


def moving(fake: FakeDriver, count: int = 3, rows: int = 40, **settings: Any) -> tuple[Any, Any, torch.Tensor, Any]:
    """A program whose backward follows, without a limit yet: it, its module, an input, and its points."""
    module, x = net(count=count), torch.randn(rows, 32)
    fake.reads = True
    run = anyshape.compile(module, memory_limit=NO_LIMIT, strict=True, **settings)
    step(run, module, x)
    return run, module, x, list(limit_of(run).tradeoff(sizes(run, x)))


def store_of(run: Any) -> PinnedStore:
    store: PinnedStore = limit_of(run).store
    return store


def need(run: Any, x: torch.Tensor, point: Any) -> int:
    """The limit that a point needs."""
    found: int = limit_of(run).needed(sizes(run, x), point.policy)
    return found


@contextlib.contextmanager
def counted(fake: FakeDriver, run: Any) -> Iterator[list[int]]:
    """A list that receives the most bytes of device memory that programs take beyond what is there."""
    context = limit_of(run).program.context
    context.kept.release_idle()
    context.temporary.release_idle()
    gc.collect()
    fake.everything()
    fake.peak = before = fake.live
    found = [0]
    yield found
    found[0] = fake.peak - before


Moved = tuple[FakeDriver, Any, Any, torch.Tensor, list[tuple[Any, int]], list[torch.Tensor]]


@contextlib.contextmanager
def moving_device() -> Iterator[Moved]:
    """A program on the fake device that moves out everything that it can, as that costs nothing; the device, its
    module, an input, the points of its curve, and what PyTorch gives."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fake = FakeDriver()
    with mock.patch.dict(targets.TARGETS, {"fake": fake_device.__name__}), mock.patch.object(
            targets, "DEFAULT", "fake"), mock.patch.object(PinnedStore, "each", 0.0), mock.patch.object(
            offload_schedule.Clock, "seconds", lambda self, bytes_: 0.0 * bytes_), mock.patch.object(
            fake_device, "DEVICE", [fake]):
        run, module, x, points = moving(fake)
        needs = [(point, need(run, x, point)) for point in points]
        limit_of(run).move(needs[-1][1])
        gc.collect()
        gc.freeze()  # what is there now is not looked at again, each time that bytes are counted
        yield fake, run, module, x, needs, step(module, module, x)
        gc.unfreeze()


def right(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


@dataclass
class Kept:
    """How many steps there were under limits, how many took more, and just what was predicted; how many were refused
    below the least limit."""

    steps: int = 0
    over: int = 0
    exact: int = 0
    refused: int = 0


def under_limits(moved: Moved, seed: int, shapes: int) -> Kept:
    """So many shapes under 6 limits each, from all that a step takes to the least that works; then below that, where
    nothing runs. Results are PyTorch's."""
    fake, run, module, _, _, _ = moved
    fake.set("last stream first")
    numbers, kept = random.Random(seed), Kept()
    for _ in range(shapes):
        x = torch.randn(numbers.randrange(1, 200), 32)
        limit_of(run).move(NO_LIMIT)
        module.zero_grad(set_to_none=True)
        wanted = step(run, module, x)
        values = sizes(run, x)
        points, least = list(limit_of(run).tradeoff(values)), limit_of(run).least(values)
        chosen = [points[number * (len(points) - 1) // 4] for number in range(5)]
        for bytes_ in (*(max(need(run, x, point), least) for point in chosen), least):
            limit_of(run).move(bytes_)
            predicted = limit_of(run).needed(values, limit_of(run).choose(values))
            module.zero_grad(set_to_none=True)
            found = []
            with counted(fake, run) as most:
                found = step(run, module, x)
            assert right(found, wanted)
            kept.steps += 1
            kept.over += most[0] + x.nbytes > bytes_
            kept.exact += most[0] + x.nbytes == predicted
        limit_of(run).move(least - 4096)
        try:
            step(run, module, x)
        except LimitError:
            kept.refused += 1
    return kept
