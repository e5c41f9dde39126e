"""Launch grouping: products of one left operand, and kernels, that follow each other become one step of the host.

before:
    plan heads  arena 0
      where 1 <= n
      in      x: f32[n, 64]  256*n bytes  steps 0-1
      in      wq: f32[64, 64]  16384 bytes  steps 0-0
      in      wk: f32[64, 64]  16384 bytes  steps 0-1
      buffer  q: f32[n, 64]  256*n bytes  steps 0-2  arena
      buffer  k: f32[n, 64]  256*n bytes  steps 1-3  arena
      buffer  y: f32[n, 64]  256*n bytes  steps 2-4  output 0
      buffer  z: f32[n, 64]  256*n bytes  steps 3-4  output 1
      0  matmul(x, wq) -> q
      1  matmul(x, wk) -> k
      2  kernel k0(q, &y; n)
      3  kernel k1(k, &z; n)
      out     y, z
after group_launches:
    plan heads  arena 0
      where 1 <= n
      in      x: f32[n, 64]  256*n bytes  steps 0-1
      in      wq: f32[64, 64]  16384 bytes  steps 0-1
      in      wk: f32[64, 64]  16384 bytes  steps 0-1
      buffer  q: f32[n, 64]  256*n bytes  steps 0-2  arena
      buffer  k: f32[n, 64]  256*n bytes  steps 0-3  arena
      buffer  y: f32[n, 64]  256*n bytes  steps 2-4  output 0
      buffer  z: f32[n, 64]  256*n bytes  steps 3-4  output 1
      0  matmul(x, wq) -> q
      1  matmul(x, wk) -> k
      2  kernel k0(q, &y; n)
      3  kernel k1(k, &z; n)
      together  0-3
      out     y, z

Products run side by side. So what they touch is kept from the first of them to the last, and none reads or writes what
another one writes. Whether the host can is seen when sizes are known (`fill_joined` in
backend/cpu/routines/encoding/fill.py).
Kernels run one after another, and after the products (backend/cpu/routines/parallel_region.py): they may touch what
they like.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.launch_groups import is_run, kernels_from
from anyshape.plan.ir.program import KernelStep, LibraryStep, Plan, Step, touched

MOST = 4  # products in a run
DTYPES = ("bf16", "f16", "f32", "u8")  # of products that the host has panels for


def group_launches(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (not allocated) with its runs of such steps, and the lives of what products side by side touch.
    Kernels run with the products before them unless epilogues are left out."""
    runs: list[tuple[int, int]] = []
    first = 0
    for position in range(1, len(plan.steps) + 1):
        if position < len(plan.steps) and _joins(plan.steps[first:position], plan.steps[position], context.epilogues):
            continue
        if is_run(plan.steps[first:position]):
            runs.append((first, position - 1))
        first = position
    lives = {b.name: (b.first, b.last) for b in plan.buffers}
    for begin, last in runs:
        end = kernels_from(plan.steps, begin, last) - 1
        for name in {window.buffer for step in plan.steps[begin:end + 1] for window in touched(step)}:
            lives[name] = min(lives[name][0], begin), max(lives[name][1], end)
    buffers = tuple(dataclasses.replace(b, first=lives[b.name][0], last=lives[b.name][1]) for b in plan.buffers)
    return dataclasses.replace(plan, buffers=buffers, together=tuple(runs))


def _joins(before: Sequence[Step], step: Step, epilogues: bool) -> bool:
    """Whether a step can be done with those before it: a kernel with kernels, or with products that it reads, a product
    beside products."""
    first = before[0]
    if isinstance(before[-1], KernelStep) or isinstance(step, KernelStep):
        return isinstance(step, KernelStep) and (isinstance(before[-1], KernelStep) or (
            epilogues and _reads(step, before)))
    if not (isinstance(first, LibraryStep) and isinstance(step, LibraryStep)) or len(before) >= MOST:
        return False
    if not first.op.startswith("matmul") or not step.op.startswith("matmul") or first.inputs[0] != step.inputs[0]:
        return False
    if first.inputs[0].type.dtype not in DTYPES:
        return False
    written = {window.buffer for one in before if isinstance(one, LibraryStep) for window in one.outputs}
    seen = {window.buffer for one in before for window in touched(one)}
    return not (written & {window.buffer for window in touched(step)}
                or seen & {window.buffer for window in step.outputs})


def _reads(kernel: KernelStep, before: Sequence[Step]) -> bool:
    """Whether a kernel reads what products write."""
    made = {window.buffer for step in before if isinstance(step, LibraryStep) and step.op.startswith("matmul")
            for window in step.outputs}
    return any(window.buffer in made for window in kernel.params)
