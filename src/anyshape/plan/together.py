"""Products of one left operand that follow each other run as one step of the host.

    0 matmul(x, wq) -> q         -->      together 0-2: rows of x are packed once, and threads are called together once
    1 matmul(x, wk) -> k
    2 matmul(x, wv) -> v

They run side by side. So what they touch is kept from the first of them to the last, and none reads or writes what
another one writes. Whether the host can is seen when sizes are known (`joined` in run/words.py). In half precision
only: in f32 packing is a small part of the work.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anyshape.plan.plan import LibraryStep, Plan, Step, touched

MOST = 4  # products in a run
_HALF = ("bf16", "f16")


def together(plan: Plan) -> Plan:
    """`plan` (not allocated) with its runs of such products, and the lives of what they touch."""
    runs: list[tuple[int, int]] = []
    first = 0
    for position in range(1, len(plan.steps) + 1):
        if position < len(plan.steps) and _joins(plan.steps[first:position], plan.steps[position]):
            continue
        if position - first > 1:
            runs.append((first, position - 1))
        first = position
    lives = {b.name: (b.first, b.last) for b in plan.buffers}
    for begin, end in runs:
        for name in {window.buffer for step in plan.steps[begin:end + 1] for window in touched(step)}:
            lives[name] = min(lives[name][0], begin), max(lives[name][1], end)
    buffers = tuple(dataclasses.replace(b, first=lives[b.name][0], last=lives[b.name][1]) for b in plan.buffers)
    return dataclasses.replace(plan, buffers=buffers, together=tuple(runs))


def _joins(before: Sequence[Step], step: Step) -> bool:
    """Whether a product can run beside those before it."""
    first = before[0]
    if not (isinstance(first, LibraryStep) and isinstance(step, LibraryStep)) or len(before) >= MOST:
        return False
    if not first.op.startswith("matmul") or not step.op.startswith("matmul") or first.inputs[0] != step.inputs[0]:
        return False
    if first.inputs[0].type.dtype not in _HALF:
        return False
    written = {window.buffer for one in before if isinstance(one, LibraryStep) for window in one.outputs}
    seen = {window.buffer for one in before for window in touched(one)}
    return not (written & {window.buffer for window in touched(step)}
                or seen & {window.buffer for window in step.outputs})
