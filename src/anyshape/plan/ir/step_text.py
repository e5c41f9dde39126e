"""Labels of plan steps: a step in a few words, for tables and profiles."""
from __future__ import annotations

from anyshape.plan.ir.program import (
    CopyStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Step,
    TiledGemmStep,
    Window,
    parts_of,
)


def step_text(step: Step) -> str:
    """What a step of a plan does, in a few words."""
    if isinstance(step, KernelStep):
        results = [step.params[i].buffer for i in step.outputs]
        return f"kernel {step.regimes[-1].kernel[:9]} -> {', '.join(results)}"
    if isinstance(step, TiledGemmStep):
        return f"bands of {step.rows} rows: {'; '.join(map(step_text, parts_of(step)))}"
    if isinstance(step, CopyStep):
        return f"copy {step.source.buffer} -> {step.target.buffer}"
    if isinstance(step, MemoryStep):
        return f"memory: take {len(step.take)}, drop {len(step.drop)}"
    results = [window.buffer for window in step.outputs if isinstance(window, Window)]
    name = step.op if isinstance(step, LibraryStep) else step.target
    return f"{name} -> {', '.join(results)}"
