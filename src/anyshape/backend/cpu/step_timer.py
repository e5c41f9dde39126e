"""The step profiler: while somebody watches a run, each step of the host that has ended writes three words (seconds,
nanoseconds, its number), one after another; the first are those of the begin."""
from __future__ import annotations

import itertools
from array import array

from anyshape.plan.ir.program import KernelStep, Plan


def clock_of(plan: Plan, actions: int) -> array[int]:
    """One with room for a run of the plan's steps and of so many actions of Python."""
    marks = sum(max(len(regime.kernels) for regime in step.regimes) if isinstance(step, KernelStep) else 1
                for step in plan.steps)
    return array("q", bytes(24 * (2 * marks + actions + 2)))


def durations(clock: array[int], steps: int) -> list[tuple[int, float]]:
    """(step number, seconds) of those of the plan's `steps` that ran."""
    marks = [(clock[i + 2], clock[i] + clock[i + 1] * 1e-9) for i in range(0, len(clock), 3)
             if clock[i] or clock[i + 1]]  # a thread that is young has used no second yet
    return [(number, now - before) for (_, before), (number, now) in itertools.pairwise(marks) if number < steps]
