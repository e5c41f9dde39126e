"""Undefined gradients: a backward without the gradients of outputs that nobody used.

    loss, logits = model(batch); loss.backward()      there is no gradient of logits: zeros, if one has to be made

    2 k0(tangent_2, probabilities, &g)   r3: f32 = load tangent_2[5000*i0 + i1]   as it is compiled
    2 k1(tangent_2, probabilities, &g)   r3: f32 = 0.0                            without it; a scalar stands in

Steps and places stay as they are, so that either runs on any tape of the forward, under any limit, and has the same
numbers to the bit. Where PyTorch, or a product, reads such a gradient, zeros have to be made.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from anyshape.ir.types import TensorType, size_of
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.kernel.loop_ir.show import content_name
from anyshape.plan.ir.program import KernelStep, MemoryStep, Plan, Regime, Step, Window, touched
from anyshape.sym.expr import Size


@dataclasses.dataclass(frozen=True, slots=True)
class SpecializedBackward:
    """A backward's plan that reads nothing of some gradients. dtypes: of these, by number; the others are read.
    programs: by name, the kernels that are new."""

    plan: Plan
    programs: Mapping[str, LoopProgram]
    dtypes: Mapping[int, str]


def specialize_to_undefined(plan: Plan, kernels: Mapping[str, LoopProgram],
                            absent: Iterable[int]) -> SpecializedBackward:
    """The plan of a backward without the gradients of these numbers, as far as only kernels read them. kernels: by
    name, those of the plan."""
    programs = dict(kernels)
    positions = given(plan)
    dtypes: dict[int, str] = {}
    for number in absent:
        found = dict(programs)
        kind, without = plan.inputs[positions[number]], _without(plan, positions[number], found)
        if without is not None and isinstance(kind, TensorType):
            plan, programs, dtypes[number] = without, found, kind.dtype
    return SpecializedBackward(plan, {name: one for name, one in programs.items() if name not in kernels},
                               dtypes)


def zeros_of(plan: Plan, kernels: Mapping[str, LoopProgram], count: int, every: bool) -> list[tuple[Size, int]]:
    """The zeros that a backward of `count` gradients probably takes: bytes, and the last step that they are there. A
    number among the outputs is probably the loss, and the only one that has a gradient. every: none is left out."""
    kinds = {number: plan.inputs[position] for number, position in enumerate(given(plan)[:count])}
    larger = {number: kind for number, kind in kinds.items() if isinstance(kind, TensorType) and kind.rank}
    if len(larger) == len(kinds):
        return []
    left_out = {} if every else specialize_to_undefined(plan, kernels, larger).dtypes
    ends = {name: number - 1 for number, step in enumerate(plan.steps) if isinstance(step, MemoryStep)
            for name in step.drop}
    names = {b.index: b.name for b in plan.buffers if b.is_input}
    return [(kind.bytes, ends.get(names.get(given(plan)[number], ""), len(plan.steps)))
            for number, kind in larger.items() if number not in left_out]


def given(plan: Plan) -> list[int]:
    """The positions among a backward's inputs that do not come from the tape: gradients first."""
    restored = set(plan.restored)
    return [position for position in range(len(plan.inputs)) if position not in restored]


def _without(plan: Plan, position: int, programs: dict[str, LoopProgram]) -> Plan | None:
    """The plan with a scalar for an input, taken as zeros; None where something other than kernels reads it. What
    kernels become is added to `programs`."""
    kind = plan.inputs[position]
    buffers = [b for b in plan.buffers if b.is_input and b.index == position]
    if not isinstance(kind, TensorType) or len(buffers) > 1:
        return None
    name = buffers[0].name if buffers else ""
    if any(isinstance(one, Window) and one.buffer == name for one in plan.outputs):
        return None
    steps: list[Step] = []
    for step in plan.steps:
        if any(window.buffer == name for window in touched(step)):
            blind = _kernel_without(step, name, programs) if isinstance(step, KernelStep) else None
            if blind is None:
                return None
            step = blind
        steps.append(step)
    scalar = TensorType(kind.dtype, ())
    return dataclasses.replace(
        plan, steps=tuple(steps), inputs=(*plan.inputs[:position], scalar, *plan.inputs[position + 1:]),
        buffers=tuple(dataclasses.replace(b, bytes=size_of(kind.dtype)) if b.name == name else b
                      for b in plan.buffers))


def _kernel_without(step: KernelStep, name: str, programs: dict[str, LoopProgram]) -> KernelStep | None:
    places = [i for i, window in enumerate(step.params) if window.buffer == name]
    if set(places) & set(step.outputs):
        return None
    regimes: list[Regime] = []
    for regime in step.regimes:
        made = [_program_without(programs[kernel], places) for kernel in regime.kernels]
        if None in made:
            return None
        names = []
        for program in made:
            assert program is not None
            names.append(content_name(program))
            programs.setdefault(names[-1], dataclasses.replace(program, name=names[-1]))
        regimes.append(dataclasses.replace(regime, kernel=names[0], then=tuple(names[1:])))
    params = tuple(Window(name, TensorType(w.type.dtype, ())) if i in places else w for i, w in enumerate(step.params))
    return dataclasses.replace(step, regimes=tuple(regimes), params=params)


def _program_without(program: LoopProgram, places: list[int]) -> LoopProgram | None:
    """The kernel with zeros for what it loads from some params; None where it does more with them."""
    names = {program.params[i].name for i in places}
    stages = []
    for stage in program.stages:
        instructions = []
        for one in stage.instructions:
            if one.buffer in names:
                if one.op != "load" or one.dtype not in ("f32", "f64") or (one.args and one.value != 0):
                    return None
                one = Instruction(one.result, "constant", (), one.dtype, value=0.0)
            instructions.append(one)
        stages.append(dataclasses.replace(stage, instructions=tuple(instructions)))
    return dataclasses.replace(program, stages=tuple(stages))
