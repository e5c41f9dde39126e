"""In-place reuse: lets what a step makes take the place of an input that dies there: of a kernel, of a product with an
addend, of attention, whose rows of queries are read before the same rows of the result are written, or of a wait for a
message that lies as its result does.

    0 k0(a) -> b   (a's last use)      -->      buffers a and b become one: b's bytes are never taken

The input may also be a tensor that PyTorch made, such as the result of a convolution: what follows is written over it.
"""
from __future__ import annotations

from anyshape.ir.asynchronous import apart_of
from anyshape.ir.types import TensorType
from anyshape.plan.ir.liveness import tape_entry
from anyshape.plan.ir.program import (
    ExternStep,
    KernelStep,
    LibraryStep,
    Plan,
    Step,
    TiledGemmStep,
    Window,
    is_wait,
    step_writes,
    touched,
)
from anyshape.plan.ir.renaming import dtypes_of, united
from anyshape.sym.expr import Size


def in_place(plan: Plan, results: bool = False, forward: Plan | None = None) -> dict[str, str]:
    """Buffer -> the buffer that it can be one with, of an equal byte formula: in the arena, over what PyTorch made,
    over what `forward` kept, where nothing else needs that, or, with `results`, in a result from an earlier step on.
    Only of the plan as `assemble` makes it; plan/ir/renaming.py carries it out."""
    dtypes = dtypes_of(plan)
    owned = written_over(plan) | (_spent(plan, forward) if forward is not None and forward.spent else set())
    buffers = {b.name: b for b in plan.buffers}
    names: dict[str, str] = {}
    for position, step in enumerate(plan.steps):
        taken: set[str] = set()  # by this step
        for source_window, output_window in possible(step):
            if {source_window.buffer, output_window.buffer} & taken:
                continue
            source = buffers[names.get(source_window.buffer, source_window.buffer)]
            output = buffers[output_window.buffer]
            uses = [w for w in touched(step) if w.buffer == source_window.buffer and w is not source_window]
            takes = (output.in_arena or (results and output.is_output) if source.is_temp
                     else output.is_temp and source.name in owned)
            if (not takes or source.last != position or output.first != position
                    or source.bytes != output.bytes or uses or output.name in names
                    or source_window.offset != 0 or output_window.offset != 0
                    or (not (source.in_arena and output.in_arena)
                        and dtypes[source.name] != dtypes[output.name])):
                continue
            names[output.name] = source.name
            taken |= {source_window.buffer, output_window.buffer}
            buffers[source.name] = united(source, [source, output])
    # what is waited for is known by its own name, which is the one in the graph
    come = {window.buffer for step in plan.steps if is_wait(step) for window in step_writes(step)}
    return _ended(names, come, {b.name for b in plan.buffers if b.is_output})


def pairs(step: Step) -> list[tuple[Window, Window]]:
    """What a step reads and may write over, with the result that does: each once."""
    found: list[tuple[Window, Window]] = []
    for source, output in possible(step):
        if all(source is not one and output is not other for one, other in found):
            found.append((source, output))
    return found


def possible(step: Step) -> list[tuple[Window, Window]]:
    """What a step reads and may write over, with every result that could: a kernel says it; a product adds to what is
    there."""
    if isinstance(step, KernelStep):
        return [(step.params[source], step.params[output]) for source, output in step.reuse]
    if isinstance(step, TiledGemmStep):  # the product reads its operands to the end, and of its result there is a band
    # only
        apart = {window.buffer for window in touched(step.product)}
        return [(source, output) for source, output in possible(step.kernel)
                if source.buffer not in apart and output.buffer not in apart]
    if isinstance(step, LibraryStep) and step.op == "matmul_add":
        addend, result = step.inputs[2], step.outputs[0]
        return [(addend, result)] if addend.type.layout() == result.type.layout() else []
    if isinstance(step, LibraryStep) and step.op == "attention":
        query, result = step.inputs[0], step.outputs[0]
        batch, heads, rows, depth = query.type.layout()
        same = query.type.count == result.type.count and (batch, rows, heads, depth) == result.type.layout()
        return [(query, result)] if same else []
    if is_wait(step):
        assert isinstance(step, ExternStep)
        count = apart_of(step.template)
        return list(zip(step.inputs[:count], step.outputs[:count], strict=True))  # type: ignore[arg-type]
    return []


def _ended(names: dict[str, str], *known: set[str]) -> dict[str, str]:
    """The same groups; one that has a member of `known` is known by its name, of several sets by the last one's."""
    ends: dict[str, str] = {}
    for those in known:
        ends |= {first: name for name, first in names.items() if name in those}
    turned = {name: ends.get(first, first) for name, first in names.items() if name not in ends.values()}
    return turned | ends


def written_over(plan: Plan) -> set[str]:
    """Buffers made by PyTorch that are memory of their own. An operator of PyTorch, or one of ours that it does, makes
    a new tensor, or returns an operand, which the call then copies (runtime/call/call_frame.py); a custom one may
    return anything that it keeps. A result that is spread over less memory than its elements would fill (a broadcast)
    is none."""
    ends = {w.buffer for w in (*plan.outputs, *plan.saved) if isinstance(w, Window)}
    return {w.buffer for step in plan.steps
            if isinstance(step, ExternStep) and step.target.startswith(("aten.", "anyshape."))
            for w in step.outputs if w is not None and w.buffer not in ends and _fills(w.type)}


def _spent(plan: Plan, forward: Plan) -> set[str]:
    """Entries of the tape that are whole buffers that may be written over, and the only ones that lie there."""
    entries = {b.name: tape_entry(forward, b.index) for b in plan.buffers if b.is_restored}
    homes = [entry[0].name for entry in entries.values() if entry is not None]
    return {name for name, entry in entries.items() if entry is not None and entry[0].name in forward.spent
            and homes.count(entry[0].name) == 1 and entry[1].offset == 0 and _fills(entry[1].type)
            and entry[1].type.bytes == entry[0].bytes}


def _fills(kind: TensorType) -> bool:
    """Does every element have a place of its own, with no place between them, in whatever order of the dims?"""
    rest = [(size, stride) for size, stride in zip(kind.shape, kind.layout(), strict=True) if size != 1]
    step: Size = 1
    while rest:
        found = next((dim for dim in rest if dim[1] == step), None)
        if found is None:
            return False
        rest.remove(found)
        step = step * found[0]
    return True
