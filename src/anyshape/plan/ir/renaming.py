"""Buffer renaming: buffers whose lives follow one another become one (plan/memory/inplace_reuse.py,
plan/memory/output_as_scratch.py)."""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    ExternStep,
    KernelStep,
    LibraryStep,
    Plan,
    Step,
    TiledGemmStep,
    Window,
    touched,
)


def merged(plan: Plan, names: Mapping[str, str]) -> Plan:
    """`plan` (not allocated) in which buffers are known by other buffers' names, as `names` says."""
    if not names:
        return plan
    groups: dict[str, list[Buffer]] = {}
    for buffer in plan.buffers:
        groups.setdefault(names.get(buffer.name, buffer.name), []).append(buffer)
    buffers = tuple(united(b, groups[b.name]) for b in plan.buffers if b.name not in names)
    return dataclasses.replace(
        plan, steps=tuple(renamed_step(s, names) for s in plan.steps), buffers=buffers,
        outputs=tuple(_rename(o, names) if isinstance(o, Window) else o for o in plan.outputs),
        saved=tuple(_rename(o, names) if isinstance(o, Window) else o for o in plan.saved))


def united(buffer: Buffer, members: Sequence[Buffer]) -> Buffer:
    """`buffer` with the lives of all `members`; in the arena it becomes what the tape saves, if one of them is that."""
    owner = next((b for b in members if b.is_saved), buffer) if buffer.is_temp else buffer
    return Buffer(buffer.name, buffer.bytes, owner.home, min(b.first for b in members),
                  max(b.last for b in members), buffer.device)


def dtypes_of(plan: Plan) -> dict[str, str]:
    """Buffer -> dtype of its elements."""
    return {window.buffer: window.type.dtype for step in plan.steps for window in touched(step)}


def _rename(window: Window, names: Mapping[str, str]) -> Window:
    name = names.get(window.buffer)
    return window if name is None else Window(name, window.type, window.offset)


def renamed_step(step: Step, names: Mapping[str, str]) -> Step:
    """The step with its windows over other buffers."""
    if isinstance(step, KernelStep):
        return _kernel(step, names)
    if isinstance(step, LibraryStep):
        return _product(step, names)
    if isinstance(step, TiledGemmStep):
        return dataclasses.replace(step, product=_product(step.product, names), kernel=_kernel(step.kernel, names))
    if isinstance(step, CopyStep):
        return dataclasses.replace(step, source=_rename(step.source, names), target=_rename(step.target, names))
    assert isinstance(step, ExternStep)
    return dataclasses.replace(
        step, inputs=tuple(_rename(w, names) if isinstance(w, Window) else w for w in step.inputs),
        outputs=tuple(_rename(w, names) if isinstance(w, Window) else w for w in step.outputs))


def _kernel(step: KernelStep, names: Mapping[str, str]) -> KernelStep:
    return dataclasses.replace(step, params=tuple(_rename(w, names) for w in step.params),
                               handed=tuple(_rename(w, names) for w in step.handed))


def _product(step: LibraryStep, names: Mapping[str, str]) -> LibraryStep:
    return dataclasses.replace(step, inputs=tuple(_rename(w, names) for w in step.inputs),
                               outputs=tuple(_rename(w, names) for w in step.outputs))
