"""Who is alive at the fullest step, and which line of the model makes it."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from anyshape.plan.liveness import first_writes, live_bytes
from anyshape.plan.plan import Buffer, Plan
from anyshape.sym.formulas import function_of

if TYPE_CHECKING:
    from anyshape.run.executable import Executable


def alone(program: Executable, values: Mapping[str, int]) -> list[tuple[str, int]]:
    """What is alive at the fullest step of a program that no backward follows, the largest first."""
    plan, end = program.plan, len(program.plan.steps)
    buffers = [b for b in plan.buffers if b.home in ("arena", "saved", "output", "extern")]
    sizes = function_of([b.bytes for b in buffers], f"bytes of {program.name}")(values)
    there = first_writes(plan)
    ranges = [(size, there.get(b.name, b.first), end if b.home in ("saved", "output") else b.last)
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
