"""What limits are kept to on the fake device: programs, steps, and counted bytes."""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

import anyshape
from anyshape.runtime.memory.pinned_store import PinnedStore
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
