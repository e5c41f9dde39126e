"""The backend `anyshape-single`: a program of our own for each shape, with every size a number in it.

What is dynamic has its price: formulas in place of numbers, tiles chosen without knowing the size. The backend says
what that costs: its process also measures the program for all sizes in turn with the one for the shape.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import anyshape
from anyshape_bench.measure.statistics import median
from anyshape_bench.models.bench_models import BenchModel, Step, flatten
from anyshape_bench.models.suite import Shape

BACKEND = "anyshape-single"
SHAPES = 4  # each costs a compilation
PASSES = 5  # of the comparison, at least


class Single:
    """A module, compiled anew for the shapes of each call that no earlier call had."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.by_shape: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        key = tuple(tuple(one.shape) for one in flatten((arguments, keywords)))
        compiled = self.by_shape.get(key)
        if compiled is None:
            # what Dynamo remembers of sizes that differed would make them symbols
            torch._dynamo.pgo.reset_code_state()
            compiled = self.by_shape[key] = anyshape.compile(self.module, dynamic=False)
        return compiled(*arguments, **keywords)

    @property
    def programs(self) -> list[Any]:
        """The programs of all shapes so far."""
        return [program for compiled in self.by_shape.values() for program in compiled.programs]


def gap(model: BenchModel, single: Step, around: Callable[[Any], Any], shapes: Sequence[Shape], passes: int,
        progress: Callable[[int, int], None]) -> list[list[Any]]:
    """Times the program for all sizes and those for one in turn, at shapes that `single` has seen.

    Args:
        around: puts what a call needs around a compiled module: torch.autocast.

    Returns:
        a row per shape: the shape, medians of the program for all sizes and of the one for this shape.
    """
    torch._dynamo.pgo.reset_code_state()
    step = model.make(lambda module: around(anyshape.compile(module)))
    step.load(single.state())
    rows: list[list[Any]] = []
    for number, shape in enumerate(shapes):
        inputs = model.inputs(shape)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(max(passes, PASSES) + 1):
            for one, kept in zip((step, single), times, strict=True):
                start = time.perf_counter()
                one(inputs)
                if turn:  # in the first one the program for all sizes may compile
                    kept.append(time.perf_counter() - start)
        rows.append([list(shape), *map(median, times)])
        progress(number + 1, len(shapes))
    return rows
