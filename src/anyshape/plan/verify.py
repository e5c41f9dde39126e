"""The verifier of plans: the judge of a plan's order, lives and launch groups; the one of its layout at given sizes is
plan/layout_judge.py."""
from __future__ import annotations

import itertools
from collections.abc import Mapping
from itertools import pairwise

from anyshape.base.errors import VerifyError
from anyshape.plan.ir.launch_groups import kernels_from
from anyshape.plan.ir.program import (
    Buffer,
    ExternStep,
    KernelStep,
    LibraryStep,
    MemoryStep,
    Plan,
    Step,
    Window,
    is_launch,
    is_wait,
    step_writes,
    touched,
)
from anyshape.plan.layout_judge import LayoutJudge, life_of
from anyshape.sym.expr import evaluate, evaluate_all


def verify(plan: Plan, stage: str = "") -> None:
    """Checks what can be checked of a plan at that stage: its order, lives and launch groups, and, once there are
    offsets, its layout at the hints, where the program takes these sizes.

    Raises:
        VerifyError: see `judge`; or what is returned or saved is not made; a buffer that a call makes is touched
            outside of its life, or a tensor that is let go is needed later; steps of a launch group cannot be done as
            one. It names the stage.
    """
    try:
        _check_order(plan)
        _check_lives(plan)
        buffers = {buffer.name: buffer for buffer in plan.buffers}
        for first, last in plan.together:
            _check_group(plan, first, last, buffers)
        values = _usual_sizes(plan) if plan.offsets else None
        if values is not None:
            _check_layout(plan, values)
    except VerifyError as error:
        where = f"after {stage}" if stage else ""
        raise VerifyError(error.what, where=where, why=error.why, do=error.do) from None


def _usual_sizes(plan: Plan) -> dict[str, int] | None:
    """The hints, and one number for the other sizes, such that no size inside is below 0; None where none was found: a
    layout is judged at the sizes of a call anyway."""
    hints = dict(plan.facts.hints)
    names = {name for name, *_ in plan.facts.ranges} | hints.keys()
    for number in (64, 1 << 10, 1 << 16):
        values = {name: hints.get(name, number) for name in names}
        if min(evaluate_all(plan.nonnegative, values), default=0) >= 0:
            return values
    return None


def judge(plan: Plan, values: Mapping[str, int], offsets: Mapping[str, int] | None = None, arena: int | None = None,
          kept: int | None = None) -> int:
    """Checks that the layout is right at the symbols' `values`, and returns the least bytes that any layout needs.

    Args:
        plan: an allocated plan.
        values: symbol name -> value.
        offsets: buffer name -> byte offset; the plan's own formulas when left out.
        arena, kept: bytes of the arena and of the block at its bottom; the plan's own formulas when left out.

    Raises:
        VerifyError: a step reads a value that no step before it makes; calls with effects are not in the order of the
            program; a collective is not waited for once, or its message touched by another step; two buffers overlap
            while both are alive; one is misaligned, outside the arena, or crosses the border of the kept block; or the
            arena is not the top of the highest buffer.
    """
    _check_order(plan)
    _check_layout(plan, values, offsets, arena, kept)
    return lower_bound(plan, values)


def _check_layout(plan: Plan, values: Mapping[str, int], offsets: Mapping[str, int] | None = None,
                  arena: int | None = None, kept: int | None = None) -> None:
    """The part of `judge` that depends on sizes."""
    if offsets is None:
        numbers = evaluate_all([offset for _, offset in plan.offsets], values)
        offsets = {name: number for (name, _), number in zip(plan.offsets, numbers, strict=True)}
    LayoutJudge(plan).check(values, offsets, evaluate(plan.arena, values) if arena is None else arena,
                            evaluate(plan.kept, values) if kept is None else kept)


def _check_order(plan: Plan) -> None:
    made = {buffer.name for buffer in plan.buffers if not buffer.is_allocated}
    for number, step in enumerate(plan.steps):
        makes = {window.buffer for window in step_writes(step)}
        early = {window.buffer for window in touched(step)} - makes - made
        if early:
            _fail(plan, f"step {number} reads {', '.join(sorted(early))}, which is not made by then")
        made |= makes
    effects = [step.effect for step in plan.steps if isinstance(step, ExternStep) and step.effect and not is_wait(step)]
    for one, other in pairwise(effects):
        if one >= other:
            _fail(plan, f"effect {other} comes after effect {one}")
    _check_messages(plan)


def _check_messages(plan: Plan) -> None:
    """Each collective that is launched is waited for once, and until then nothing touches its messages; nor behind the
    wait, but what the wait has written there."""
    for number, step in enumerate(plan.steps):
        if is_wait(step) and not any(is_launch(other) and _written(other) == _read(step)
                                     for other in plan.steps[:number]):
            _fail(plan, f"step {number} waits for a collective that no step before it launches")
        if is_launch(step):
            names = set(_written(step))
            waits = [place for place, other in enumerate(plan.steps) if is_wait(other) and names & set(_read(other))]
            if len(waits) != 1:
                _fail(plan, f"step {number} launches a collective, and it is not waited for once")
            for place, other in enumerate(plan.steps):
                own = names - set(_written(plan.steps[waits[0]])) if place > waits[0] else names
                wrong = own & {window.buffer for window in touched(other)}
                if wrong and place not in (number, waits[0]):
                    _fail(plan, f"step {place} touches {min(wrong)}, which is under way")


def _written(step: Step) -> list[str]:
    return [window.buffer for window in step_writes(step)]


def _read(step: Step) -> list[str]:
    return [one.buffer for one in step.inputs if isinstance(one, Window)] if isinstance(step, ExternStep) else []


def _check_lives(plan: Plan) -> None:
    lives = {b.name: (b.first, len(plan.steps) if b.survives_call else b.last) for b in plan.buffers if b.is_allocated}
    for number, step in enumerate(plan.steps):
        for name in {window.buffer for window in touched(step)} & lives.keys():
            first, last = lives[name]
            if not first <= number <= last:
                _fail(plan, f"step {number} touches {name}, which is there from step {first} to {last}")
    results = {entry.buffer for entry in (*plan.outputs, *plan.saved) if isinstance(entry, Window)}
    missing = results & lives.keys() - {window.buffer for step in plan.steps for window in step_writes(step)}
    if missing:
        _fail(plan, f"{', '.join(sorted(missing))} is handed on, and no step makes it")
    for number, step in enumerate(plan.steps):
        if isinstance(step, MemoryStep):
            late = {window.buffer for other in plan.steps[number:] for window in touched(other)} | results
            early = {window.buffer for other in plan.steps[:number] for window in touched(other)}
            wrong = sorted({*late & set(step.drop), *early & set(step.take)})
            if wrong:
                _fail(plan, f"step {number} drops what is needed later, or takes what is there: {', '.join(wrong)}")


def _check_group(plan: Plan, first: int, last: int, buffers: Mapping[str, Buffer]) -> None:
    """Products side by side, of which none touches what another writes, and which all find their buffers; kernels."""
    if not 0 <= first <= last < len(plan.steps):
        _fail(plan, f"there are no steps {first}-{last} to be done as one")
    end = kernels_from(plan.steps, first, last)
    products = plan.steps[first:end]
    for step in products:
        if not isinstance(step, LibraryStep):
            _fail(plan, f"steps {first}-{last} cannot be done as one: some are neither products nor kernels")
        others = {window.buffer for other in products if other is not step for window in touched(other)}
        if others & {window.buffer for window in step_writes(step)}:
            _fail(plan, f"steps {first}-{end - 1} cannot run side by side: one writes what another touches")
    if not all(isinstance(step, KernelStep) for step in plan.steps[end:last + 1]):
        _fail(plan, f"steps {first}-{last} cannot be done as one: a kernel comes before a product")
    for name in dict.fromkeys(window.buffer for step in products for window in touched(step)):
        if name in buffers and not (buffers[name].first <= first and buffers[name].last >= end - 1):
            _fail(plan, f"{name} is not there in all of steps {first}-{end - 1}, which run side by side")


def lower_bound(plan: Plan, values: Mapping[str, int]) -> int:
    """The largest number of bytes of arena buffers alive at one step."""
    places = dict(plan.offsets)
    inside = [b for b in plan.buffers if b.in_arena or (b.is_restored and b.name in places)]
    change = [0] * (len(plan.steps) + 2)
    for buffer in inside:
        bytes_ = evaluate(buffer.bytes, values)
        first, last = life_of(buffer, len(plan.steps))
        if first <= last:
            change[max(first, 0)] += bytes_
            change[min(last, len(plan.steps)) + 1] -= bytes_
    return max(itertools.accumulate(change))


def _fail(plan: Plan, why: str) -> None:
    raise VerifyError(f"the plan of {plan.name} is wrong", why=why, do="report this plan: a bug of AnyShape")
