"""A forward and its backward as one plan, for who asks about a whole step at once; nothing runs it.

    forward  0 k0(x) -> h                        0 k0(x) -> h
             saved h                    -->      1 k1(h) -> b.g
    backward 0 k1(tape 0) -> g

What the step takes is all in the arena there: saved values, results, tensors of PyTorch. Inputs stay the caller's; one
that both programs read is one buffer. Names of the backward get "b." in front.
"""
from __future__ import annotations

import dataclasses

from anyshape.plan.ir.home import Temp
from anyshape.plan.ir.liveness import saved_entry
from anyshape.plan.ir.program import Buffer, MemoryStep, Plan, Window
from anyshape.plan.ir.renaming import renamed_step
from anyshape.plan.schedule.beam_search import Problem
from anyshape.plan.schedule.reorder import problem_of


def joined(forward: Plan, backward: Plan | None) -> Plan:
    """The steps of both, neither allocated and without optional steps, one after another. Lives are not filled in."""
    plans = [forward] if backward is None else [forward, backward]
    end = sum(len(plan.steps) for plan in plans)
    buffers: dict[str, Buffer] = {}
    steps = []
    outputs = []
    for plan, before in zip(plans, ("", "b.")):
        names = {}
        for buffer in plan.buffers:
            if buffer.is_restored:
                entry = saved_entry(forward, buffer.index)
                names[buffer.name] = buffer.name if entry is None else entry[0].name
            elif buffer.is_input:
                buffers.setdefault(buffer.name, dataclasses.replace(buffer, first=0, last=end))
            else:
                names[buffer.name] = before + buffer.name
                buffers[before + buffer.name] = Buffer(before + buffer.name, buffer.bytes, Temp(), 0, 0, buffer.device)
        for step in plan.steps:
            assert not isinstance(step, MemoryStep), "the plan is one that nothing is held for yet"
            steps.append(renamed_step(step, names))
        outputs += [Window(names.get(one.buffer, one.buffer), one.type, one.offset) if isinstance(one, Window) else one
                    for one in plan.outputs]
    return Plan(forward.name, (), tuple(outputs), (), tuple(buffers.values()), tuple(steps), (), 0, forward.facts)


def step_problem(forward: Plan, backward: Plan | None) -> Problem:
    """The problem of planning both as one, at the forward's hints; every step is a unit."""
    plan = joined(forward, backward)
    return problem_of(plan, None, [[k] for k in range(len(plan.steps))])
