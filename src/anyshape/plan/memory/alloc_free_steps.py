"""Allocation and release steps: outputs are allocated at their first write, tensors freed after their last use.

before:
    plan late  arena 64*((n + 15)//16)
      where 1 <= n, n near 1048576
      in      x: f32[n]  4*n bytes  steps 0-0
      buffer  a: f32[n]  4*n bytes  steps 1-2  arena @ 0
      buffer  t: f32[n]  4*n bytes  steps 0-1  extern
      buffer  y: f32[n]  4*n bytes  steps 2-3  output 0
      0  call aten.sort.default(x) -> t
           {template=["args", ["operand", 0]]}
      1  kernel k1(t, &a; n)
      2  kernel k2(a, &y; n)
      out     y
after insert_alloc_free:
    plan late  arena 64*((n + 15)//16)
      where 1 <= n, n near 1048576
      in      x: f32[n]  4*n bytes  steps 0-0
      buffer  a: f32[n]  4*n bytes  steps 1-3  arena @ 0
      buffer  t: f32[n]  4*n bytes  steps 0-1  extern
      buffer  y: f32[n]  4*n bytes  steps 3-4  output 0
      0  call aten.sort.default(x) -> t
           {template=["args", ["operand", 0]]}
      1  kernel k1(t, &a; n)
      2  memory take y; drop t
      3  kernel k2(a, &y; n)
      out     y

Without it all gradients would be allocated before the first step, while everything saved is still there.
"""
from __future__ import annotations

import dataclasses

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.launch_groups import unbroken
from anyshape.plan.ir.liveness import caller_owned
from anyshape.plan.ir.program import MemoryStep, Plan, Step, Window
from anyshape.sym.expr import symbols_of

WORTH = 262144  # bytes at the hints below which a buffer is not worth a step of its own


def insert_alloc_free(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (allocated) with memory steps. The forward tells which tape entries own memory outside the kept block.
    Under a limit, what is small at the hints may be large in a call, and counts."""
    forward, limited = context.forward, context.config.limited
    placed = {name for name, _ in plan.offsets}
    elsewhere = caller_owned(plan, forward)
    if forward is not None:
        # what the caller of a whole step holds is let go, too: there, pieces of the call's own memory can follow
        # each other under a limit (runtime/specialize/saved_policy.py)
        elsewhere |= {b.name for b in plan.buffers if b.is_input}
    ends = {o.buffer for o in (*plan.outputs, *plan.saved) if isinstance(o, Window)}
    take: dict[int, list[str]] = {}
    drop: dict[int, list[str]] = {}
    for buffer in plan.buffers:
        small = plan.facts.hint(buffer.bytes) < WORTH and not (limited and symbols_of(buffer.bytes))
        if small or buffer.name in placed:
            continue
        if buffer.is_output and buffer.first > 0:
            take.setdefault(buffer.first, []).append(buffer.name)
        elif buffer.name in elsewhere and buffer.name not in ends and buffer.last + 1 < len(plan.steps):
            drop.setdefault(buffer.last + 1, []).append(buffer.name)
    if not take and not drop:
        return plan
    steps: list[Step] = []
    moved: list[int] = []
    for position, step in enumerate(plan.steps):
        if position in take or position in drop:
            steps.append(MemoryStep(tuple(take.get(position, ())), tuple(drop.get(position, ()))))
        moved.append(len(steps))
        steps.append(step)
    moved.append(len(steps))
    buffers = tuple(dataclasses.replace(b, first=moved[b.first], last=moved[min(b.last, len(plan.steps))])
                    for b in plan.buffers)
    together = tuple(part for run in plan.together for part in unbroken(plan, moved, *run))
    return dataclasses.replace(plan, steps=tuple(steps), buffers=buffers, together=together,
                               optional=tuple(moved[position] for position in plan.optional))


