"""The computed watermark: the bytes of the arena that a run touches, by the plan's windows, and those it holds beside;
they are held against what a record and a limit predict."""
from __future__ import annotations

from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.plan.ir.liveness import saved_entry, saved_external
from anyshape.plan.ir.program import Plan, Window, touched
from anyshape.runtime.call.call_frame import CallFrame
from anyshape.runtime.specialize.specialization import Specialization
from anyshape.sym.expr import evaluate
from anyshape.torch_compat import storage_id


def counted_peak(plan: Plan, record: Specialization) -> int:
    """The bytes of the arena up to the highest that any step's window touches, rounded up to 64: what a run uses."""
    inside = {b.name for b in plan.buffers if b.in_arena}
    top = record.kept
    for step in plan.steps:
        for window in touched(step):
            if window.buffer in inside:
                top = max(top, record.offsets[window.buffer] + _extent(window, record.values))
    return align(top) - (record.kept if record.reused_output >= 0 else 0)


def counted_outside(call: CallFrame, forward: Plan | None = None) -> int:
    """The bytes of tensors outside the arena that a running call holds: results, what PyTorch made, and in a backward
    what its tape alone kept (`forward`: the plan of the forward). Memory that several of them share counts once."""
    plan = call.shared.plan
    tensors = [*call.externs.values(), *call.outputs]
    kept = {b.name for b in saved_external(forward)} if forward is not None else set()
    for buffer in plan.buffers:
        entry = saved_entry(forward, buffer.index) if forward is not None and buffer.is_restored else None
        if entry is not None and entry[0].name in kept:
            tensors.append(call.inputs[plan.parameter_number(buffer)])
    storages = {storage_id(tensor): tensor.untyped_storage() for tensor in tensors
                if tensor is not None and not tensor.is_meta}
    return sum(storage.nbytes() for storage in storages.values())


def _extent(window: Window, values: dict[str, int]) -> int:
    shape = [evaluate(size, values) for size in window.type.shape]
    if 0 in shape:
        return 0
    strides = [evaluate(stride, values) for stride in window.type.layout()]
    last = evaluate(window.offset, values) + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return (last + 1) * size_of(window.type.dtype)
