"""The table of extern calls: a program's operators of PyTorch, and what is allocated and let go when, worked out once
for all its calls."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from anyshape.plan.ir.home import Input, Output
from anyshape.plan.ir.liveness import first_writes, peak_bytes, saved_external
from anyshape.plan.ir.program import ExternStep, MemoryStep, Plan, Window, is_launch, touched
from anyshape.plan.ir.size_function import SizeFunction
from anyshape.runtime.call.program import result_order
from anyshape.runtime.memory.packed_weights import PackedWeights
from anyshape.runtime.specialize.specialization import Specialization
from anyshape.runtime.torch_ops.convolution import Convolution
from anyshape.runtime.torch_ops.extern_calls import compile_extern
from anyshape.sym.expr import evaluate
from anyshape.torch_compat.dtypes import TORCH_DTYPES

OWN = "anyshape."  # targets that are our own ops, run by the reference interpreter
MOST_NEEDS = 4096  # records whose need is remembered
CONVOLUTION = f"{OWN}convolution"  # but for this one


class ExternTable:
    """What calls of one plan need that does not depend on sizes."""

    def __init__(self, plan: Plan, layout: SizeFunction, packed: PackedWeights, packed_bytes: int,
                 allocate: Callable[..., Any]) -> None:
        self.plan = plan
        self.launches = any(map(is_launch, plan.steps))
        self.slots = layout.slots
        self.buffers = {b.name: b for b in plan.buffers}
        ordered = sorted((b for b in plan.buffers if b.is_output), key=lambda b: layout.slots[b.name])
        self.output_of = {b.name: i for i, b in enumerate(ordered)}
        self.order = result_order(plan, self.output_of)
        taken = {name for step in plan.steps if isinstance(step, MemoryStep) for name in step.take}
        self.dtypes = [TORCH_DTYPES[plan.outputs[b.index].type.dtype] for b in ordered]  # type: ignore[union-attr]
        self.early = [i for i, b in enumerate(ordered) if b.name not in taken]  # allocated at the start
        self.allocate = allocate
        self.functions: dict[int, Callable[..., Any]] = {}
        self.drops: dict[int, tuple[str, ...]] = {}  # let go before a step
        self.later: dict[int, tuple[str, ...]] = {}  # the same where the tape would keep them
        self.again = {one.buffer: one for one in plan.again if self.buffers[one.buffer].is_restored}
        self.position_of = {b.name: plan.parameter_number(b) for b in plan.buffers if b.is_parameter}  # of inputs
        self.checked = tuple(i for i, w in enumerate(plan.saved)
                             if isinstance(w, Window) and isinstance(self.buffers[w.buffer].home, (Input, Output)))
        externs = [b for b in plan.buffers if b.is_external]
        self.external = frozenset(b.name for b in externs)
        ends = {w.buffer for w in (*plan.outputs, *plan.saved) if isinstance(w, Window)}
        outside = {b.name for b in saved_external(plan)}
        used = {w.buffer: number for number, step in enumerate(plan.steps) for w in touched(step)}
        before = 0
        self.packed = packed
        self.packed_bytes = packed_bytes
        owner = next(packed.owners)
        for number, step in enumerate(plan.steps):
            if isinstance(step, ExternStep):
                if step.target == CONVOLUTION:
                    weights = step.inputs[1]
                    # a program that trains has others at every step
                    constant = isinstance(weights, Window) and self.buffers[weights.buffer].is_input and not (
                        plan.saved or plan.restored)
                    attributes: Any = step.template
                    self.functions[number] = Convolution(packed, (owner, number), dict(attributes), constant)
                elif not step.target.startswith(OWN):
                    self.functions[number] = compile_extern(step.target, step.template)
            if isinstance(step, (ExternStep, MemoryStep)):
                # what died before this step and after the last one that could drop it
                dead = [b.name for b in externs if before <= used.get(b.name, b.first) < number]
                self.drops[number] = tuple(name for name in dead if name not in ends)
                self.later[number] = tuple(name for name in dead if name in outside)
                if number not in plan.optional:
                    before = number
        # bytes of the weights that convolutions bring in PyTorch's order
        self.weights = [step.inputs[1].type.bytes for number, step in enumerate(plan.steps)  # type: ignore[union-attr]
                        if isinstance(self.functions.get(number), Convolution)]
        if self.weights:
            weakref.finalize(self, packed.forget, owner)
        self.needs: dict[Specialization, tuple[int, list[int]]] = {}

    def begin(self, record: Specialization) -> None:
        """A call with `record` begins: weights that are packed from before make room for it."""
        if not self.weights:
            return
        if record not in self.needs:
            if len(self.needs) >= MOST_NEEDS:
                self.needs.clear()
            self.needs[record] = (record.arena + held_bytes(self.plan, record.values),
                                  [evaluate(size, record.values) for size in self.weights])
        self.packed.begin(*self.needs[record], self.packed_bytes)


def held_bytes(plan: Plan, values: dict[str, int], ends: Mapping[str, int] | None = None) -> int:
    """The most bytes of results and of tensors made by PyTorch that a call holds at once. `ends`: the steps with which
    some of them go before their time."""
    first = first_writes(plan)
    ranges = [(evaluate(b.bytes, values), first[b.name], (ends or {}).get(b.name, b.last)) for b in plan.buffers
              if b.name in first]
    return peak_bytes(ranges, len(plan.steps))
