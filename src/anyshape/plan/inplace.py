"""Lets a kernel's output take the place of an input that dies there.

    0 k0(a) -> b   (a's last use)      -->      buffers a and b become one: b's bytes are never taken
"""
from __future__ import annotations

import dataclasses

from anyshape.plan.plan import Buffer, CopyStep, ExternStep, KernelStep, LibraryStep, Plan, Step, Window


def reuse_inputs(plan: Plan) -> Plan:
    """The plan with such buffers merged. Only memory of the arena is shared, of equal byte formulas."""
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
            if (source.home != "arena" or output.home not in ("arena", "saved") or source.last != position
                    or output.first != position or source.bytes != output.bytes or uses
                    or source_window.offset != 0 or output_window.offset != 0 or source.name in renamed
                    or output.name in renamed):
                continue
            merged = Buffer(source.name, source.bytes, output.home, output.index, source.first, output.last)
            renamed[output.name] = source.name
            del buffers[output.name]
            buffers[source.name] = merged
    if not renamed:
        return plan
    steps = tuple(_rename_step(s, renamed) for s in plan.steps)
    return dataclasses.replace(
        plan, steps=steps, buffers=tuple(buffers.values()),
        outputs=tuple(_rename(o, renamed) if isinstance(o, Window) else o for o in plan.outputs),
        saved=tuple(_rename(o, renamed) if isinstance(o, Window) else o for o in plan.saved))


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
