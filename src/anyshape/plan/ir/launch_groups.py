"""Launch groups: runs of steps that the host does in one parallel region, and where their kernels begin."""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.plan.ir.program import KernelStep, Plan, Step


def is_run(steps: Sequence[Step]) -> bool:
    """Whether steps that may be done as one are several for the host: a step may be a chain of kernels."""
    chain = len(steps) == 1 and isinstance(steps[0], KernelStep) and any(one.then for one in steps[0].regimes)
    return len(steps) > 1 or chain


def kernels_from(steps: Sequence[Step], first: int, last: int) -> int:
    """Where the kernels of a run of steps begin; behind it where there are none."""
    return next((k for k in range(first, last + 1) if isinstance(steps[k], KernelStep)), last + 1)


def unbroken(plan: Plan, moved: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """What is left of a run of steps where memory steps stand between them."""
    starts = [k for k in range(first, last + 1) if k == first or moved[k] - moved[k - 1] > 1]
    parts = zip(starts, [*(start - 1 for start in starts[1:]), last], strict=True)
    return [(moved[a], moved[b]) for a, b in parts if is_run(plan.steps[a:b + 1])]
