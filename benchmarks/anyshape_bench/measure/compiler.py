"""Compiles models with the backends that are compared, and times and counts single steps of them."""
from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import anyshape
from anyshape_bench.measure import launch_count, static_shape_baseline
from anyshape_bench.measure.memory_counter import Meter, settled
from anyshape_bench.models import padding
from anyshape_bench.models.bench_models import BenchModel, Compiled, Inputs
from anyshape_bench.models.suite import Shape


class Compiler:
    """Compiles a module with a backend, and remembers when it was asked to and what was held right before: the
    parameters and, in training, the optimiser's state."""

    def __init__(self, backend: str, autocast: str = "", counter: Meter | None = None) -> None:
        self.backend = backend
        self.autocast = autocast
        self.counter = counter
        self.started = 0.0
        self.held = 0
        self.compiled: Compiled | None = None

    def __call__(self, module: nn.Module) -> Compiled:
        if self.counter is not None:
            self.held = settled(self.counter)[1]
        self.started = time.perf_counter()
        if self.backend == "eager":
            self.compiled = module
        elif self.backend == "anyshape":
            self.compiled = anyshape.compile(module)
        elif self.backend == static_shape_baseline.BACKEND:
            self.compiled = static_shape_baseline.Single(module)
        elif self.backend == padding.BACKEND:
            torch._dynamo.config.recompile_limit = 256  # of one function; a bucket is a program
            self.compiled = torch.compile(module, dynamic=False)
        else:
            self.compiled = torch.compile(module, dynamic=True, backend=self.backend)
        return under(self.autocast, self.compiled)

    def uncompiled(self) -> int:
        """Parts that AnyShape says it ran as PyTorch would; a second way of tracing, which it also notes, is none."""
        tell = getattr(self.compiled, "explain", None)
        noted = tell().fallbacks if callable(tell) else ()
        return sum(one.name != "trace" for one in noted)

    def stats(self) -> dict[str, Any]:
        """What AnyShape counted, as JSON; what it says about its own work goes into the log."""
        tell = getattr(self.compiled, "explain", None)
        print(str(tell()) if callable(tell) else "", file=sys.stderr)
        return plain(anyshape.stats()) | {"uncompiled": self.uncompiled()}


def under(autocast: str, call: Compiled) -> Compiled:
    """`call` with torch.autocast around it, if a dtype is named; backward and optimiser stay outside, as torch
    advises."""
    if not autocast:
        return call
    dtype: torch.dtype = getattr(torch, autocast)

    def run(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return call(*arguments, **keywords)

    return run


def programs(backend: str) -> int | None:
    """How many programs were compiled so far in this process; forward and backward of one graph are two."""
    if backend == "eager":
        return None
    if backend in launch_count.OURS:
        return int(anyshape.stats()["programs"])
    counters = torch._dynamo.utils.counters
    if backend in ("inductor", padding.BACKEND):
        return sum(counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss", "bypass"))
    return counters["stats"]["unique_graphs"]


def timed(step: Callable[[Inputs], object], inputs: Inputs) -> float:
    start = time.perf_counter()
    step(inputs)
    return time.perf_counter() - start


def step_peak(step: Callable[[Inputs], object], model: BenchModel, shape: Shape, counter: Meter,
              baseline: int) -> int:
    """Peak bytes of one step, its inputs not counted."""
    return peak_of(step, lambda: model.inputs(shape), counter, baseline)


def peak_of(step: Callable[[Inputs], object], make: Callable[[], Inputs], counter: Meter,
            baseline: int) -> int:
    """The same, with inputs that `make` makes."""
    idle = settled(counter)[1] - baseline
    inputs = make()
    before = settled(counter)[0]
    counter.reset()
    result = step(inputs)
    peak = counter.peak()
    del result
    return max(0, idle) + peak - before


def plain(value: Any) -> Any:
    """The part of a value that JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
