"""How fast this machine is: measured once, by a product and a copy, when a call under a limit first has to choose.

    product   256 x 512 x 512 on one thread, as programs do it: our own routines, or the library's
    copy      16 MB a thread into other 16 MB, about what caches hold, on all threads: they share the memory

What was measured is kept (backend/measurements.py), so later processes choose as the first one did. Of several
turns the fastest counts, for other work on the machine only makes them slower.
"""
from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from anyshape.backend.interface import Target
from anyshape.backend.measurements import Measurements
from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.disk_cache import DiskCache, cache_of
from anyshape.ir.types import TensorType
from anyshape.kernel.schedule.hardware_params import Speeds
from anyshape.plan.ir.home import Input, Output
from anyshape.plan.ir.program import Buffer, CopyStep, LibraryStep, Plan, Window
from anyshape.plan.memory.symbolic_allocator import allocate
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.context.profiling import recorded
from anyshape.runtime.cost.step_cost import FLOATS
from anyshape.runtime.memory.pools import Block
from anyshape.sym.facts import Facts
from anyshape.torch_compat.dtypes import TORCH_DTYPES

ROWS, INNER, COLUMNS = 256, 512, 512  # of the product
COPIED = 16 << 20  # bytes of each thread
MOST_COPIED = 64 << 20  # of all together
TURNS = 4  # the first one finds caches and pages cold
COPY = "copy"


class Calibration:
    """What was measured by this process, or is in its cache. Threads may share one.

    Args:
        cache: None: only this process remembers.
        target: what programs run on; products: which of its routines multiply.
    """

    def __init__(self, cache: DiskCache | None, target: Target, products: str = "measured") -> None:
        self.measurements = Measurements(cache, target.machine_key)
        self.target = target
        self.products = products

    def speeds(self, dtypes: Iterable[str], threads: int) -> Speeds:
        """The speeds with so many threads, of products of `dtypes` (those of `FLOATS` that are left out: usual ones).
        """
        wanted, usual = set(dtypes), self.target.hardware.speeds
        products = {dtype: self._product(dtype) if dtype in wanted else usual.products[dtype] for dtype in FLOATS}
        copy = self.measurements.get(f"{COPY} on {threads} threads", lambda: copied(threads, self.target))
        return Speeds(products, copy or usual.bytes)

    def _product(self, dtype: str) -> float:
        found = self.measurements.get(f"products of {dtype}, {self.products}",
                                      lambda: multiplied(dtype, self.target))
        return found or self.target.hardware.speeds.products[dtype]


def multiplied(dtype: str, target: Target | None = None) -> float:
    """Operations of products that a thread does in a second."""
    left, right, result = (TensorType(dtype, shape) for shape in ((ROWS, INNER), (INNER, COLUMNS), (ROWS, COLUMNS)))
    windows = [Window(name, one) for name, one in (("left", left), ("right", right), ("result", result))]
    buffers = tuple(Buffer(one.buffer, one.type.bytes, home, 0, last) for one, home, last in zip(
        windows, (Input(0), Input(1), Output(0)), (0, 0, 1), strict=True))
    step = LibraryStep("matmul", tuple(windows[:2]), (windows[2],))
    plan = Plan("speed of products", (left, right), (windows[2],), (), buffers, (step,), (), 0, Facts())
    inputs = [torch.ones(one.shape, dtype=TORCH_DTYPES[dtype], device="cpu") for one in (left, right)]
    return 2.0 * ROWS * INNER * COLUMNS / _fastest(plan, inputs, 1, target)


def copied(threads: int, target: Target | None = None) -> float:
    """Bytes that each of so many threads reads and writes in a second, all together."""
    size = min(COPIED * threads, MOST_COPIED)
    type_ = TensorType("f32", (size // 4,))
    source, copy = Window("source", type_), Window("copy", type_)
    buffers = tuple(Buffer(one.buffer, size, Input(index), 0, 0) for index, one in enumerate((source, copy)))
    plan = Plan("speed of a copy", (type_, type_), (), (), buffers, (CopyStep(source, copy),), (), 0, Facts())
    blocks = [Block(size) for _ in range(2)]
    for block in blocks:
        block.tensor.zero_()
    inputs = [block.window(torch.float32, 0, (size // 4,), (1,)) for block in blocks]
    return 2.0 * size / _fastest(plan, inputs, threads, target) / threads


def _fastest(plan: Plan, inputs: list[torch.Tensor], threads: int, target: Target | None) -> float:
    """Seconds of the plan's only step in its fastest turn."""
    program = Executable(allocate(plan), threads=threads, target=target)
    with recorded() as runs:
        for _ in range(TURNS):
            program([*inputs])
    return min(run.seconds for run in runs if run.program is program)


@lru_cache(maxsize=16)
def _calibration(cache: DiskCache | None, target: Any, products: str) -> Calibration:
    return Calibration(cache, target, products)


def calibration_of(config: Config, target: Target | None = None) -> Calibration | None:
    """What `config` asks for, one object per cache; None: the usual speeds, as of a target with streams, whose memory
    is not the host's."""
    found: Any = target_of(config) if target is None else target  # one object for equal settings
    if not config.calibrate or found.streams is not None:
        return None
    return _calibration(cache_of(config), found, config.products_mode)
