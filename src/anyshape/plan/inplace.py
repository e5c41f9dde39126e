"""Lets a kernel's output take the place of an input that dies there.

    0 k0(a) -> b   (a's last use)      -->      buffers a and b become one: b's bytes are never taken

The input may also be a tensor that PyTorch made, such as the result of a convolution: what follows is written over it.
"""
from __future__ import annotations

import dataclasses

from anyshape.plan.plan import Buffer, CopyStep, ExternStep, KernelStep, LibraryStep, Plan, Step, Window, touched


def reuse_inputs(plan: Plan) -> Plan:
    """The plan with such buffers merged, of equal byte formulas: in the arena, or over what PyTorch made."""
    dtypes = dtypes_of(plan)
    owned = {w.buffer for step in plan.steps if isinstance(step, ExternStep) and may_be_written(step)
             for w in step.outputs if w is not None}
    buffers = {b.name: b for b in plan.buffers}
    renamed: dict[str, str] = {}
    for position, step in enumerate(plan.steps):
        if not isinstance(step, KernelStep):
            continue
        for source_index, output_index in step.reuse:
            source_window, output_window = step.params[source_index], step.params[output_index]
            source = buffers[renamed.get(source_window.buffer, source_window.buffer)]
            output = buffers[output_window.buffer]
            uses = [w for k, w in enumerate(step.params) if w.buffer == source_window.buffer and k != source_index]
            homes = ("arena", "saved") if source.home == "arena" else ("arena",) if source.name in owned else ()
            if (output.home not in homes or source.last != position
                    or output.first != position or source.bytes != output.bytes or uses
                    or source_window.offset != 0 or output_window.offset != 0 or source.name in renamed
                    or output.name in renamed
                    or (source.home == "extern" and dtypes[source.name] != dtypes[output.name])):
                continue
            home, index = (output.home, output.index) if source.home == "arena" else (source.home, source.index)
            merged = Buffer(source.name, source.bytes, home, index, source.first, output.last)
            renamed[output.name] = source.name
            del buffers[output.name]
            buffers[source.name] = merged
    return renamed_buffers(plan, renamed, tuple(buffers.values()))


def may_be_written(step: ExternStep) -> bool:
    """Is the result memory of its own? An operator of PyTorch makes a new tensor, or returns an operand, which the
    call then copies (run/call.py); a custom one may return anything that it keeps."""
    return step.target.startswith("aten.")


def dtypes_of(plan: Plan) -> dict[str, str]:
    """Buffer -> dtype of its elements."""
    return {window.buffer: window.type.dtype for step in plan.steps for window in touched(step)}


def renamed_buffers(plan: Plan, names: dict[str, str], buffers: tuple[Buffer, ...]) -> Plan:
    """`plan` with these buffers, its windows renamed."""
    if not names:
        return plan
    steps = tuple(_rename_step(s, names) for s in plan.steps)
    return dataclasses.replace(
        plan, steps=steps, buffers=buffers,
        outputs=tuple(_rename(o, names) if isinstance(o, Window) else o for o in plan.outputs),
        saved=tuple(_rename(o, names) if isinstance(o, Window) else o for o in plan.saved))


def _rename(window: Window, names: dict[str, str]) -> Window:
    name = window.buffer
    while name in names:
        name = names[name]
    return window if name == window.buffer else Window(name, window.type, window.offset)


def _rename_step(step: Step, names: dict[str, str]) -> Step:
    if isinstance(step, KernelStep):
        return dataclasses.replace(step, params=tuple(_rename(w, names) for w in step.params))
    if isinstance(step, CopyStep):
        return dataclasses.replace(step, source=_rename(step.source, names), target=_rename(step.target, names))
    if isinstance(step, LibraryStep):
        return dataclasses.replace(step, inputs=tuple(_rename(w, names) for w in step.inputs),
                                   outputs=tuple(_rename(w, names) for w in step.outputs))
    assert isinstance(step, ExternStep)
    return dataclasses.replace(
        step, inputs=tuple(_rename(w, names) if isinstance(w, Window) else w for w in step.inputs),
        outputs=tuple(_rename(w, names) if isinstance(w, Window) else w for w in step.outputs))
