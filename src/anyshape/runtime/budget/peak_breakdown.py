"""Tensors alive at the peak, with the source line that made each."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from anyshape.plan.ir.liveness import first_writes, live_bytes
from anyshape.plan.ir.program import Buffer, Plan
from anyshape.sym.python_codegen import SizesFunction

if TYPE_CHECKING:
    from anyshape.runtime.call.executable import Executable


def peak_breakdown(program: Executable, values: Mapping[str, int]) -> list[tuple[str, int]]:
    """What is alive at the fullest step of a program that no backward follows, the largest first."""
    plan, end = program.plan, len(program.plan.steps)
    buffers = [b for b in plan.buffers if b.is_allocated]
    sizes = SizesFunction([b.bytes for b in buffers], f"bytes of {program.name}")(values)
    there = first_writes(plan)
    ranges = [(size, there.get(b.name, b.first), end if b.survives_call else b.last)
              for b, size in zip(buffers, sizes, strict=True)]
    curve = live_bytes(ranges, end)
    at = curve.index(max(curve))
    found = [(named(b, plan), size) for b, (size, first, last) in zip(buffers, ranges, strict=True)
             if first <= at <= last]
    return sorted(found, key=lambda one: -one[1])


def named(buffer: Buffer, plan: Plan) -> str:
    """The buffer with the line of the model that makes it."""
    where = source_of(buffer, plan)
    return f"{buffer.name} ({where})" if where else buffer.name


def source_of(buffer: Buffer, plan: Plan) -> str:
    """The line of the model that makes the buffer; "" where it is not known."""
    if not plan.steps:
        return ""
    step = plan.steps[min(buffer.first, len(plan.steps) - 1)]
    return str(getattr(step, "where", "").split("; ")[-1])  # of a group, what its last node computes
