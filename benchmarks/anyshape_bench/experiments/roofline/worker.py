"""The roofline: how near functions that are bound by memory come to the speed of a copy, measured in turn with it.

In each round come a copy, our program and eager PyTorch, in this order; a share is a ratio of medians. Bytes are those
that have to be moved at least; that a store first reads the line it writes is counted nowhere, nor for the copy, whose
stores are the same. The C library keeps what is freed (`keep_freed`), so that no page of a result is faulted in twice.
"""
from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import anyshape
from anyshape_bench.experiments.roofline.functions import FUNCTIONS, Arguments, Function
from anyshape_bench.experiments.roofline.results import Answer, Line
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure.launch_count import Launches, counted
from anyshape_bench.measure.statistics import median
from anyshape_bench.models.bench_models import flatten

COPIED = 64 << 20  # bytes of the tensor that is copied; twice that are moved
WARM_UP = 2
TOLERANCE = 1e-3
BUSY = 4.0  # seconds after which a function gets no further round, if it had LEAST_ROUNDS
LEAST_ROUNDS = 3


def keep_freed() -> bool:
    """Has the C library keep freed memory of this process rather than give it back. False: it is not glibc."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    most_mapped, trim = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD
    return bool(library.mallopt(most_mapped, 0)) and bool(library.mallopt(trim, (1 << 31) - 1))


class Copy:
    """The yardstick: one big tensor into another, on the threads of torch."""

    def __init__(self, bytes_: int = COPIED) -> None:
        self.source = torch.ones(bytes_ // 4)
        self.target = torch.zeros_like(self.source)
        self.moved = 2 * self.source.numel() * 4

    def __call__(self) -> float:
        """Seconds of one copy."""
        start = time.perf_counter()
        self.target.copy_(self.source)
        return time.perf_counter() - start


@dataclass(slots=True)
class _Side:
    """A function as one backend runs it, with the times of its calls."""

    call: Callable[..., Any]
    inputs: Arguments
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)  # gradients of the results, other memory than theirs

    def run(self, backward: bool) -> tuple[list[Tensor], list[Tensor]]:
        """One call: its results, and the gradients of the inputs that want one."""
        with torch.set_grad_enabled(backward):
            start = time.perf_counter()
            results = flatten(self.call(*self.inputs))
            self.forward.append(time.perf_counter() - start)
        if not backward:
            return results, []
        if not self.given:
            torch.manual_seed(2)
            self.given = [torch.randn_like(result) for result in results]
        start = time.perf_counter()
        found = torch.autograd.grad(results, asking(self.inputs), self.given)
        self.backward.append(time.perf_counter() - start)
        return [one.detach() for one in results], list(found)


def asking(inputs: Arguments) -> list[Tensor]:
    """The inputs that want a gradient."""
    return [one for one in inputs if one.requires_grad]


def lines_of(function: Function, rounds: int, copy: Copy) -> list[Line]:
    """The lines of one function: forward, and backward where it has one. An error of the compiler or of PyTorch is
    recorded in them: one function that fails must not end the run."""
    ways = ("forward", "backward") if function.backward else ("forward",)
    lines = [Line(function.name, way, list(function.large), list(function.small)) for way in ways]
    try:
        _measure(function, rounds, copy, lines)
    except Exception as error:
        for line in lines:
            line.error = f"{type(error).__name__}: {error}"[:1000]
    return lines


def _measure(function: Function, rounds: int, copy: Copy, lines: list[Line]) -> None:
    torch.manual_seed(0)
    small, large = function.inputs(*function.small), function.inputs(*function.large)
    compiled = anyshape.compile(function.call)
    _Side(compiled, small).run(function.backward)
    ours, eager = _Side(compiled, large), _Side(function.call, large)
    for _ in range(WARM_UP):
        torch.manual_seed(1)
        found = ours.run(function.backward)
        torch.manual_seed(1)
        wanted = eager.run(function.backward)
    with counted(compiled.programs) as seen:
        ours.run(function.backward)
    results, gradients = wanted
    lines[0].moved = function.moved(large, results, ())
    if function.backward:
        lines[1].moved = function.moved_back(large, gradients, eager.given)
    for line, few, many in zip(lines, found, wanted, strict=False):
        line.wrong = differs(few, many)
    del found, wanted, results, gradients
    times: list[float] = []
    for side in (ours, eager):
        side.forward, side.backward = [], []
    begun = time.perf_counter()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() - begun > BUSY:
            break
        times.append(copy())
        for side in (ours, eager):
            side.run(function.backward)
    for line in lines:
        line.copied, line.copy, line.rounds = copy.moved, median(times), len(times)
        line.ours, line.eager = median(getattr(ours, line.way)), median(getattr(eager, line.way))
        line.launches = asdict(_of_way(seen, line.way))


def _of_way(seen: dict[str, Launches], way: str) -> Launches:
    """What the programs of one way ran."""
    total = Launches()
    for name, launches in seen.items():
        if name.endswith(".backward") == (way == "backward"):
            total += launches
    return total


def differs(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """How results differ from eager's, in words; empty when they do not."""
    for number, (few, many) in enumerate(zip(found, wanted, strict=True)):
        if few.shape != many.shape or few.dtype != many.dtype:
            return f"result {number} is {few.dtype}{list(few.shape)}, eager gives {many.dtype}{list(many.shape)}"
        if not few.is_floating_point():
            if not torch.equal(few, many):
                return f"result {number} has other numbers than eager's"
            continue
        tolerance = max(TOLERANCE, 2 * torch.finfo(many.dtype).eps)
        scale = float(many.double().square().mean().sqrt())
        if not torch.allclose(few.double(), many.double(), rtol=tolerance, atol=tolerance * scale):
            return f"result {number} is off by {float((few - many).abs().max()):.3g}, values of size {scale:.3g}"
    return ""


def answer(job: dict[str, Any]) -> Answer:
    """No lines yet."""
    return Answer(torch.get_num_threads(), keep_freed())


def measure(job: dict[str, Any], found: Answer, tell: Tell) -> None:
    """Measures the functions one after another, beside one copy."""
    copy = Copy()
    for _ in range(WARM_UP):
        copy()
    for place, name in enumerate(job["functions"]):
        tell(name, place, len(job["functions"]))
        found.lines += lines_of(FUNCTIONS[name], job["rounds"], copy)
