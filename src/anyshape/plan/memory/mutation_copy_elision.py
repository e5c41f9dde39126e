"""Copy elision for mutated inputs: the new value is computed into the input's memory, as early as dependences allow.

before:
    plan step  arena 0
      where 1 <= n
      in      w: f32[n]  4*n bytes  steps 0-2
      in      g: f32[n]  4*n bytes  steps 0-1
      buffer  v: f32[n]  4*n bytes  steps 0-2  arena
      buffer  y: f32[n]  4*n bytes  steps 1-3  output 0
      0  kernel update(w, g, &v; n)
           {reuse=[[0, 2]]}
      1  kernel scale(g, &y; n)
      2  copy v -> w
      out     y
after sink_mutations:
    plan step  arena 0
      where 1 <= n
      in      w: f32[n]  4*n bytes  steps 0-2
      in      g: f32[n]  4*n bytes  steps 0-1
      buffer  v: f32[n]  4*n bytes  steps 1-2  arena
      buffer  y: f32[n]  4*n bytes  steps 0-3  output 0
      0  kernel scale(g, &y; n)
      1  kernel update(w, g, &v; n)
           {reuse=[[0, 2]]}
      2  copy v -> w
      out     y
after elide_mutation_copies:
    plan step  arena 0
      where 1 <= n
      in      w: f32[n]  4*n bytes  steps 0-2
      in      g: f32[n]  4*n bytes  steps 0-1
      buffer  y: f32[n]  4*n bytes  steps 0-2  output 0
      0  kernel scale(g, &y; n)
      1  kernel update(w, g, &w; n)
           {reuse=[[0, 2]]}
      out     y

A value is made in the input where nothing reads the input as it was at a later step, and the step that makes it reads
it, if at all, element by element where it writes. Then a step that makes nothing else moves up to where the last of
what it needs is there: it takes no memory, and what it reads dies sooner, at every size. So a gradient goes with the
update that reads it. (Placing updates by memory: Shu et al., ROAM, 2023.)

Before an input is written, what may refuse the call has been done, as it is in the order of the program.
"""
from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from anyshape.ir.op import OPS
from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.program import CopyStep, KernelStep, LibraryStep, Plan, Step, Window, step_writes, touched
from anyshape.plan.ir.renaming import merged


def sink_mutations(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (as `assemble` makes it) with steps that make only what the copies at its end put into inputs right before
    these: behind all that reads the inputs as they were. Where they can come earlier, `hoist_mutations` sees to it."""
    steps = plan.steps
    inputs = {b.name for b in plan.buffers if b.is_input}
    end = len(steps)
    for step in reversed(steps):
        if not isinstance(step, CopyStep) or step.target.buffer not in inputs:
            break
        end -= 1
    sources = {window.buffer for step in steps[end:] for window in touched(step)} - inputs
    last = {window.buffer: k for k, step in enumerate(steps[:end]) for window in step_writes(step)}
    uses = Counter(name for step in steps[:end] for name in {window.buffer for window in touched(step)})
    kept = {entry.buffer for entry in (*plan.outputs, *plan.saved) if isinstance(entry, Window)}
    # read nowhere else, or handed on inside of one step
    free = {name for name, count in uses.items() if count == 1 and name not in kept}
    moved = [k for k, step in enumerate(steps[:end])
             if isinstance(step, (KernelStep, LibraryStep)) and {w.buffer for w in step_writes(step)} <= free
             and not sources.isdisjoint(w.buffer for w in step_writes(step))
             and all(last.get(w.buffer, k) <= k for w in touched(step)) and not _refuses(step)]
    if not moved:
        return plan
    order = [k for k in range(end) if k not in set(moved)]
    return permuted(plan, [*order, *moved, *range(end, len(steps))])


def elide_mutation_copies(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (as `sink_mutations` gives it) with such values made in the inputs."""
    names = _names(plan)
    if not names:
        return plan
    copies = {k for k, step in enumerate(plan.steps) if isinstance(step, CopyStep)
              and names.get(step.source.buffer) == step.target.buffer}
    plan = merged(plan, names)
    return without(plan, copies)


def _refuses(step: Step) -> bool:
    """May the step refuse the call, for an index that is wrong?"""
    if isinstance(step, LibraryStep):
        return OPS[step.op].checks
    return isinstance(step, KernelStep) and any(window.buffer == "status" for window in step.params)


def _divides(step: Step) -> bool:
    """May the step find that it divides by 0? What it writes meanwhile is not an input."""
    return isinstance(step, KernelStep) and any(op == "divisor" for op, _, _ in step.checks)


def without(plan: Plan, left_out: set[int]) -> Plan:
    """`plan` (not allocated) without some steps, which do nothing any more."""
    kept = [k for k in range(len(plan.steps)) if k not in left_out]
    place = {k: sum(other < k for other in kept) for k in range(len(plan.steps) + 1)}
    buffers = tuple(dataclasses.replace(b, first=place[b.first], last=max(place[b.last], place[b.first]))
                    for b in plan.buffers)
    return dataclasses.replace(plan, steps=tuple(plan.steps[k] for k in kept), buffers=buffers)


def _names(plan: Plan) -> dict[str, str]:
    """Buffer -> the input that it is made in."""
    inputs = {b.name for b in plan.buffers if b.is_input}
    inside = {b.name for b in plan.buffers if b.is_temp}
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    refuses = -1
    for k, step in enumerate(plan.steps):
        for window in step_writes(step):
            made.setdefault(window.buffer, k)
        for window in touched(step):
            last[window.buffer] = k
        if _refuses(step):
            refuses = k
    names: dict[str, str] = {}
    targets = [step.target.buffer for step in plan.steps if isinstance(step, CopyStep)]
    for k, step in enumerate(plan.steps):
        if not isinstance(step, CopyStep) or step.target.buffer not in inputs or step.source.buffer not in inside:
            continue
        source, target = step.source, step.target
        maker = made[source.buffer]
        if (_is_same(source, target) and targets.count(target.buffer) == 1 and source.buffer not in names
                and maker >= refuses and not _divides(plan.steps[maker])
                and isinstance(plan.steps[maker], (KernelStep, LibraryStep))
                and not any(w.buffer == source.buffer for other in plan.steps[maker + 1:] for w in step_writes(other))
                and not any(w.buffer == target.buffer for other in (*plan.steps[maker + 1:k], *plan.steps[k + 1:])
                            for w in touched(other))
                and _fits(plan.steps[maker], source, target)):
            names[source.buffer] = target.buffer
    return names


def _is_same(source: Window, target: Window) -> bool:
    """Do both lie alike in their whole buffers?"""
    return (source.type.dtype == target.type.dtype and source.offset == 0 and target.offset == 0
            and source.type.shape == target.type.shape and source.type.layout() == target.type.layout())


def _fits(maker: Step, source: Window, target: Window) -> bool:
    """May the step write `source` over `target`, of which it has read what it needs by then?"""
    if not any(window.buffer == target.buffer for window in touched(maker)):
        return True
    if not isinstance(maker, KernelStep):
        return False
    pairs = {(maker.params[a].buffer, maker.params[b].buffer) for a, b in maker.reuse
             if _is_same(maker.params[a], maker.params[b])}
    reads = sum(window.buffer == target.buffer for window in maker.params)
    return reads == 1 and (target.buffer, source.buffer) in pairs


def permuted(plan: Plan, order: Sequence[int]) -> Plan:
    """`plan` (not allocated) with its steps in that order, and lives as follow from it."""
    place = {step: k for k, step in enumerate(order)}
    end = len(plan.steps)
    uses: dict[str, list[int]] = {}
    for position, step in enumerate(plan.steps):
        for window in touched(step):
            uses.setdefault(window.buffer, []).append(place[position])
    buffers = []
    for buffer in plan.buffers:
        found = uses.get(buffer.name)
        if found:
            first = 0 if buffer.is_parameter else min(found)
            buffer = dataclasses.replace(buffer, first=first, last=end if buffer.last == end else max(found))
        buffers.append(buffer)
    return dataclasses.replace(plan, steps=tuple(plan.steps[k] for k in order), buffers=tuple(buffers))


def hoist_mutations(plan: Plan, dependencies: list[set[int]]) -> list[int]:
    """The order of steps in which those that only write inputs, beside what is theirs alone (what a kernel hands from
    stage to stage), come as soon as they can."""
    uses = Counter(name for step in plan.steps for name in {window.buffer for window in touched(step)})
    free = {b.name for b in plan.buffers if b.is_input or uses[b.name] == 1}
    inputs = {b.name for b in plan.buffers if b.is_input}
    order: list[int] = []
    missing: dict[int, set[int]] = {}  # by step that waits, what of that which it needs is not there yet
    waiting: dict[int, list[int]] = {}
    for k, step in enumerate(plan.steps):
        targets = {window.buffer for window in step_writes(step)}
        if targets & inputs and targets <= free and dependencies[k]:
            missing[k] = set(dependencies[k])
            for other in dependencies[k]:
                waiting.setdefault(other, []).append(k)
        else:
            order.append(k)
    found: list[int] = []
    stack = order[::-1]
    while stack:
        k = stack.pop()
        found.append(k)
        ready = []
        for other in waiting.pop(k, ()):
            missing[other].discard(k)
            if not missing[other]:
                ready.append(other)
        stack += ready[::-1]
    return found
