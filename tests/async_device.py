"""A fake asynchronous device: streams put their work off until somebody waits for it, and then do it in an order that
the marks allow: as issued, the last stream first, or at random. A missing wait gives wrong numbers in one of them.

Results are the host's memory, which knows no streams: who calls a program holds them until their runs have ended."""
from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import plan_interpreter
from anyshape.backend import targets
from anyshape.backend.interface import ISSUED, PlacedPlan, PythonSteps
from anyshape.plan.ir.program import KernelStep, Step, TiledGemmStep
from plan_interpreter import Frame, Payload

ORDERS = ("as issued", "last stream first", *map(str, range(6)))
Mark = tuple[int, int]  # a stream, and how much of its work lies before


class Device:
    """Streams (backend/interface.py) on the host's memory. order: one of ORDERS; a number is a seed."""

    def __init__(self, order: str = "as issued") -> None:
        self.set(order)
        self.works: dict[int, list[Callable[[], None] | Mark]] = {}
        self.done: dict[int, int] = {}
        self.issued: list[int] = []  # the stream of each work, in order
        self.memory: list[torch.Tensor] = []  # never used again: the allocator keeps to its contract
        self.stream = 0

    def set(self, order: str) -> None:
        self.order = order
        self.random = random.Random(order)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def current(self) -> int:
        return self.stream

    def allocate(self, bytes_: int, stream: int) -> torch.Tensor:
        memory = torch.full((bytes_ + 64,), 0xFF, dtype=torch.uint8)  # NaN
        self.memory.append(memory)
        skip = -memory.data_ptr() % 64
        return memory[skip:skip + bytes_]

    def uses(self, memory: torch.Tensor, stream: int) -> None:
        assert memory.numel()

    def mark(self, stream: int) -> Mark:
        return stream, len(self.works.get(stream, ()))

    def passed(self, mark: Mark) -> bool:
        return self.done.get(mark[0], 0) >= mark[1]

    def wait(self, stream: int, mark: Mark) -> None:
        self.issue(stream, mark)

    def issue(self, stream: int, work: Callable[[], None] | Mark) -> None:
        self.works.setdefault(stream, []).append(work)
        self.issued.append(stream)

    def synchronize(self, stream: int) -> None:
        while not self.passed(self.mark(stream)):
            ready = [one for one in sorted(self.works) if self._ready(one)]
            if self.order == "as issued":
                ready = [next(one for one in self.issued if one in ready)]
            chosen = self.random.choice(ready) if self.order.isdigit() else ready[-1]
            work = self.works[chosen][self.done.get(chosen, 0)]
            self.issued.remove(chosen)
            self.done[chosen] = self.done.get(chosen, 0) + 1
            if callable(work):
                work()

    def _ready(self, stream: int) -> bool:
        if self.passed(self.mark(stream)):
            return False
        work = self.works[stream][self.done.get(stream, 0)]
        return callable(work) or Device.passed(self, work)


class Runner(plan_interpreter.Runner):
    """Puts a plan's kernels on the current stream. A plan that Python has a part in waits for the stream."""

    def __init__(self, plan: Any, kernels: Sequence[Any], device: Device) -> None:
        super().__init__(plan, kernels)
        self.device = device

    def specialize(self, placement: PlacedPlan) -> Payload:
        native = all(isinstance(step, (KernelStep, TiledGemmStep)) for step in self.plan.steps)
        return dataclasses.replace(super().specialize(placement), calls=not native or bool(placement.actions))

    def run(self, frame: Frame, steps: PythonSteps | None = None) -> int:
        stream = self.device.stream
        if frame.payload.calls:
            self.device.synchronize(stream)
            return super().run(frame, steps)
        frame.over = False
        for number, step in enumerate(self.plan.steps):
            if number not in frame.payload.placement.skipped:
                self.device.issue(stream, partial(self._later, frame, number, step))
        self.device.issue(stream, lambda: setattr(frame, "over", True))
        return ISSUED

    def _later(self, frame: Frame, number: int, step: Step) -> None:
        if not frame.status[0]:
            frame.step = number
            self._step(frame, number, step, None)

    def ended(self, frame: Frame, wait: bool) -> int:
        while wait and not frame.over:
            for stream in sorted(self.device.works):
                self.device.synchronize(stream)
        return super().ended(frame, wait) if frame.over else ISSUED


class Target(plan_interpreter.Target):
    """The second runner on a device with streams."""

    def __init__(self, cpu: Any, device: Device) -> None:
        super().__init__(cpu)
        self.streams = device

    def runner(self, plan: Any, kernels: Sequence[Any]) -> Runner:
        return Runner(plan, kernels, self.streams)


DEVICE = [Device()]  # that of programs compiled now


def target_of(cache: Any, products: str) -> Target:
    return Target(targets._module(targets.TARGETS["cpu"]).target_of(cache, products), DEVICE[0])
