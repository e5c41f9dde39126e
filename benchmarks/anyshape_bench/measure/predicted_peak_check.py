"""The predicted peak of the arena against the counted one, at every shape of a run; a pass of its own, never timed."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from anyshape.runtime.inspect.watermark import watched
from anyshape_bench.models.bench_models import Inputs, Step
from anyshape_bench.models.suite import Shape


def predicted_and_counted(step: Step, inputs: Callable[[Shape], Inputs], shapes: Sequence[Shape],
                          programs: Sequence[Any]) -> list[list[Any]]:
    """One row per shape and program that ran at it; in training the forward's and the backward's.

    Predicted is what `memory()` says at these sizes, from the plan's formulas; counted is what the run wrote.
    """
    rows: list[list[Any]] = []
    for shape in shapes:
        arguments = inputs(shape)
        with contextlib.ExitStack() as stack:
            seen = [(one, stack.enter_context(watched(one.executable))) for one in programs]
            step(arguments)
        rows += [[list(shape), one.name, one.executable.ran(run.record).specializer.arena(run.record.values),
                  run.counted]
                 for one, runs in seen for run in runs]
    return rows
