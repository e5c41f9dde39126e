"""Tensors alive at the peak, with the source line that made each."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from anyshape.plan.ir.program import Buffer, Plan
from anyshape.plan.memory.alloc_free_steps import first_writes
from anyshape.sym.python_codegen import function_of

if TYPE_CHECKING:
    from anyshape.runtime.call.executable import Executable


def peak_breakdown(program: Executable, values: Mapping[str, int]) -> list[tuple[str, int]]:
    """What is alive at the fullest step of a program that no backward follows, the largest first."""
    end = len(program.plan.steps)
    buffers = [b for b in program.plan.buffers if b.home in ("arena", "saved", "output", "extern")]
    sizes = function_of([b.bytes for b in buffers], f"bytes of {program.name}")(values)
    there = first_writes(program.plan)
    lives = [(b, size, there.get(b.name, b.first), end if b.home in ("saved", "output") else b.last)
             for b, size in zip(buffers, sizes, strict=True)]
    curve = np.zeros(end + 2, np.int64)
    for _, size, first, last in lives:
        curve[first:last + 1] += size
    at = int(curve.argmax())
    found = [(named(b, program.plan), size) for b, size, first, last in lives if first <= at <= last]
    return sorted(found, key=lambda one: -one[1])


def named(buffer: Buffer, plan: Plan) -> str:
    """The buffer with the line of the model that makes it."""
    step = plan.steps[min(buffer.first, len(plan.steps) - 1)]
    where = getattr(step, "where", "").split("; ")[-1]  # of a group, what its last node computes
    return f"{buffer.name} ({where})" if where else buffer.name
