"""A backward without some of the gradients that it takes: those of outputs that nobody used.

    loss, logits = model(batch); loss.backward()      there is no gradient of logits: zeros, if one has to be made

    2 k0(tangent_2, probabilities, &g)   r3: f32 = load tangent_2[5000*i0 + i1]   as it is compiled
    2 k1(tangent_2, probabilities, &g)   r3: f32 = 0.0                            without it; a scalar stands in

Steps and places stay as they are, so that either runs on any tape of the forward, under any limit, and has the same
numbers to the bit. Where PyTorch, or a product, reads such a gradient, zeros have to be made.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from anyshape.base.config import Config
from anyshape.frontend.compilation import Boxed
from anyshape.frontend.program import NativeProgram
from anyshape.ir.types import TensorType, size_of
from anyshape.kernel.loop import Instruction, LoopProgram
from anyshape.kernel.show import content_name
from anyshape.plan.plan import KernelStep, LibraryStep, Plan, Regime, Step, Window, touched
from anyshape.road import rebuilt
from anyshape.run.dtypes import TORCH_DTYPES
from anyshape.run.executable import Executable


@dataclasses.dataclass(frozen=True, slots=True)
class Without:
    """A backward for calls in which some gradients are absent. stand_ins: by number of the gradient, what is given in
    its place; zeros have to be made for the others."""

    program: Boxed
    stand_ins: Mapping[int, torch.Tensor]


def without(forward: Boxed, backward: Boxed, absent: tuple[int, ...], config: Config) -> Without:
    """The backward for calls in which the gradients of these numbers are absent."""
    before, native = _native(forward), _native(backward)
    if before is None or native is None:
        return Without(backward, {})
    plan, programs = native.compiled.plan, dict(native.compiled.programs)
    there = programs.copy()
    stand_ins = {}
    for number in absent:
        position = _given(plan)[number]
        less = _left_out(plan, position, programs)
        kind = plan.inputs[position]
        if less is not None and isinstance(kind, TensorType):
            plan = less
            stand_ins[number] = torch.zeros((), dtype=TORCH_DTYPES[kind.dtype])
    if not stand_ins:
        return Without(backward, {})
    executable = rebuilt(native.compiled, plan, {name: program for name, program in programs.items()
                                                 if name not in there}, config)
    known = {source.name for one in (before.executable, executable) for source in one.binder.sources}
    if not known.issuperset(executable.layout.symbols):
        return Without(backward, {})  # it needs a size that only such a gradient has
    if not native.constants:
        return Without(executable, stand_ins)
    compiled = dataclasses.replace(native.compiled, plan=plan, executable=executable, programs=programs)
    return Without(NativeProgram(native.name, compiled, native.notes), stand_ins)


def _native(program: Boxed) -> NativeProgram | None:
    """The record of a program that is one executable."""
    found = getattr(program, "program", None) if isinstance(program, Executable) else program
    return found if isinstance(found, NativeProgram) else None


def _given(plan: Plan) -> list[int]:
    """The positions among a backward's inputs that do not come from the tape: gradients first."""
    restored = set(plan.restored)
    return [position for position in range(len(plan.inputs)) if position not in restored]


def _left_out(plan: Plan, position: int, programs: dict[str, LoopProgram]) -> Plan | None:
    """The plan with a scalar for an input, taken as zeros; None where something other than kernels reads it. What
    kernels become is added to `programs`."""
    kind = plan.inputs[position]
    buffers = [b for b in plan.buffers if b.home == "input" and b.index == position]
    if not isinstance(kind, TensorType) or len(buffers) > 1:
        return None
    name = buffers[0].name if buffers else ""
    if any(isinstance(one, Window) and one.buffer == name for one in plan.outputs):
        return None
    steps: list[Step] = []
    for step in plan.steps:
        less = _step_without(step, name, programs) if any(w.buffer == name for w in touched(step)) else step
        if less is None:
            return None
        steps.append(less)
    scalar = TensorType(kind.dtype, ())
    return dataclasses.replace(
        plan, steps=tuple(steps), inputs=(*plan.inputs[:position], scalar, *plan.inputs[position + 1:]),
        buffers=tuple(dataclasses.replace(b, bytes=size_of(kind.dtype)) if b.name == name else b
                      for b in plan.buffers))


def _step_without(step: Step, name: str, programs: dict[str, LoopProgram]) -> Step | None:
    if isinstance(step, KernelStep):
        return _kernel_without(step, name, programs)
    places = [i for i, window in enumerate(step.inputs) if isinstance(window, Window) and window.buffer == name] \
        if isinstance(step, LibraryStep) else []
    if isinstance(step, LibraryStep) and step.op == "matmul_add" and places == [2]:
        window = step.inputs[2]
        zeros = dataclasses.replace(window.type, strides=(0,) * window.type.rank)
        return dataclasses.replace(step, inputs=(*step.inputs[:2], Window(name, zeros)))
    return None


def _kernel_without(step: KernelStep, name: str, programs: dict[str, LoopProgram]) -> Step | None:
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
