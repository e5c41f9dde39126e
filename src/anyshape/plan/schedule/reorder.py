"""Memory-aware reordering: steps in another order, where that takes less memory and nothing else of it can be seen.

before:
    plan sums  arena 0
      where 1 <= n, n near 4096
      in      x: f32[n]  4*n bytes  steps 0-1
      buffer  a: f32[n, 16]  64*n bytes  steps 0-2  arena
      buffer  b: f32[n, 16]  64*n bytes  steps 1-3  arena
      buffer  c: f32[16]  64 bytes  steps 2-4  output 0
      buffer  d: f32[16]  64 bytes  steps 3-4  output 1
      0  kernel k0(x, &a; n)
      1  kernel k1(x, &b; n)
      2  kernel sum(a, &c; n)
      3  kernel sum(b, &d; n)
      out     c, d
after reorder:
    plan sums  arena 0
      where 1 <= n, n near 4096
      in      x: f32[n]  4*n bytes  steps 0-2
      buffer  a: f32[n, 16]  64*n bytes  steps 0-1  arena
      buffer  b: f32[n, 16]  64*n bytes  steps 2-3  arena
      buffer  c: f32[16]  64 bytes  steps 1-4  output 0
      buffer  d: f32[16]  64 bytes  steps 3-4  output 1
      0  kernel k0(x, &a; n)
      1  kernel sum(a, &c; n)
      2  kernel k1(x, &b; n)
      3  kernel sum(b, &d; n)
      out     c, d

The search (plan/schedule/beam_search.py, of parts: plan/schedule/divide_and_conquer.py) goes by the hints: where it is
proved for every size that one step makes more than another, it does so at the hints too. What it finds stands in place
of the program's order if at every size it needs no more: the bytes alive at each of its steps are, as formulas, at most
those at some step of the order of the program. And it has to be better at the hints by more than a little. What is
better there and not proved to be so at every size may stand beside: calls then take the order that needs less at their
sizes (runtime/budget/order_selection.py). Where no order can be much better, which a bound tells, nothing is searched.

What is seen from outside keeps its order: calls with effects (random numbers, operators that are not PyTorch's own),
kernels that check indices; what writes an input stays behind those. Products that run side by side stay together.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.launch_groups import kernels_from
from anyshape.plan.ir.liveness import arena_ranges, caller_owned, live_bytes, outside_ranges, tape_entry
from anyshape.plan.ir.program import (
    ExternStep,
    KernelStep,
    Plan,
    Step,
    Window,
    is_launch,
    is_wait,
    step_writes,
    touched,
)
from anyshape.plan.memory.inplace_reuse import pairs
from anyshape.plan.memory.mutation_copy_elision import hoist_mutations, permuted
from anyshape.plan.memory.output_as_scratch import alias_buffers
from anyshape.plan.schedule.beam_search import Problem, search
from anyshape.plan.schedule.divide_and_conquer import order_by_parts
from anyshape.plan.schedule.ilp import improved
from anyshape.plan.schedule.launch_grouping import group_launches
from anyshape.sym.expr import Size
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_at_most

WORTH = 0.97  # of the bytes that the program's order needs at the hints, those that another may need at most
WORTH_PARTING = 0.9  # the same for one that parts products which would run side by side
LEAST = 65536  # bytes below which nothing is gained
LOOKS, LOOKS_EACH, MOST_LOOKS = 60000, 100, 400000  # steps that the search may look at, some 1.5 us each
SMALL = 0.9  # where no order can need less than this part of the bytes, it may look at a quarter of them
PART_LOOKS = 300000  # the same where parts are searched
LEFT = 0.2  # of what an order could save, what the search may have left so that parts are not searched, too
TRIED = 24  # steps of the program's order, the fullest at the hints, that one of the other order is compared with


def reorder(plan: Plan, context: PlanContext = DEFAULTS) -> tuple[Plan, ...]:
    """`plan` (not allocated, as `assemble` makes it) in the best order of steps that was found for all sizes, and, if
    one was found, in an order that needs clearly less at the hints, and at other sizes perhaps more.
    `config.planning_seconds`: of an integer program (plan/schedule/ilp.py), for each way to take steps together that is
    tried."""
    forward = context.forward
    if any(_reads_gathered(plan, part) for _, part in context.recomputed):
        return (plan,)  # the graph gathers weights before what may be computed again by them
    best = plan = permuted(plan, hoist_mutations(plan, dependencies(plan)))
    needed = _needed(best, context)
    beside: tuple[Plan, int] | None = None
    joined = _units(plan)
    for units, worth in ((joined, WORTH), ([[k] for k in range(len(plan.steps))], WORTH_PARTING)):
        if worth == WORTH or len(joined) < len(units):
            for other in _searched(plan, forward, units, worth, context.config.planning_seconds):
                needs = _needed(other, context)
                if needs.most <= worth * needed.most and _is_no_more(needs, needed, plan.facts):
                    best, needed = other, needs
                elif needs.most <= worth * (needed.most if beside is None else beside[1]):
                    beside = other, needs.most
    if beside is None or beside[1] > WORTH * needed.most or not context.second_order:
        return (best,)
    return best, beside[0]


def _reads_gathered(plan: Plan, part: Plan) -> set[str]:
    """What a part of a forward that may be computed again reads, and `plan` waits for."""
    coming = {window.buffer for step in plan.steps if is_wait(step) for window in step_writes(step)}
    return {b.name for b in part.buffers if b.is_input} & coming


def _searched(plan: Plan, forward: Plan | None, units: Sequence[Sequence[int]], worth: float,
              seconds: float) -> list[Plan]:
    """`plan` with its units in orders that need at most `worth` of the bytes by the hints, if there are such and they
    were found: of the whole, then of parts where that has left much, then by an integer program."""
    problem = problem_of(plan, forward, units)
    program = list(range(len(units)))
    peak = problem.peak(program)
    most = min(int(peak * worth), peak - LEAST)
    least = problem.least(program) if len(units) > 2 else peak
    if most < least:
        return []
    looks = min(LOOKS + LOOKS_EACH * len(units), MOST_LOOKS)
    found = [search(problem, most, looks // 4 if least > SMALL * peak else looks)]
    if found[0] is None or problem.peak(found[0]) > least + LEFT * (peak - least):
        found.append(order_by_parts(problem, PART_LOOKS).order)
    if seconds:
        found.append(improved(problem, min(filter(None, [program, *found]), key=problem.peak), seconds))
    return [permuted(plan, [step for unit in order for step in units[unit]]) for order in found
            if order is not None and problem.peak(order) <= most]


@dataclass(frozen=True, slots=True)
class _Needed:
    """Formulas of the bytes alive at each step, in the arena and beside it; the most of both at the hints, added."""

    inside: list[Size]
    beside: list[Size]
    most: int


def _needed(plan: Plan, context: PlanContext) -> _Needed:
    inside, beside = _totals(group_launches(alias_buffers(plan, context)), context.forward)
    hint = plan.facts.hint
    return _Needed(inside, beside, sum(max(map(hint, curve), default=0) for curve in (inside, beside)))


def bytes_at_hints(plan: Plan, context: PlanContext) -> int:
    """The most bytes of a plan (not allocated) at the hints, inside the arena and beside."""
    return _needed(plan, context).most


def needs_no_more(new: Plan, old: Plan, context: PlanContext) -> bool:
    """Does a plan (not allocated) provably need no more bytes than another, at any size, inside the arena and beside?
    """
    return _is_no_more(_needed(new, context), _needed(old, context), old.facts)


def _is_no_more(new: _Needed, old: _Needed, facts: Facts) -> bool:
    """Does the order of `new` provably need no more than that of `old`, at any size?"""
    return no_more(new.inside, old.inside, facts) and no_more(new.beside, old.beside, facts)


def _units(plan: Plan) -> list[list[int]]:
    """Steps that stay together: products side by side."""
    units = [[k] for k in range(len(plan.steps))]
    for first, last in group_launches(plan).together:
        end = kernels_from(plan.steps, first, last)
        for k in range(first + 1, end):
            units[first].append(k)
            units[k] = []
    return [unit for unit in units if unit]


def dependencies(plan: Plan) -> list[set[int]]:
    """Per step, the earlier ones that have to stay before it."""
    inputs = {b.name for b in plan.buffers if b.is_input}
    before: list[set[int]] = [set() for _ in plan.steps]
    maker: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    watched = effects = refusing = -1
    for k, step in enumerate(plan.steps):
        writes = {window.buffer for window in step_writes(step)}
        if _is_watched(step):
            # a launch that comes before a check that fails is let go of with the call
            before[k] |= {effects if is_launch(step) else watched} - {-1}
            watched = k
            effects = k if isinstance(step, ExternStep) else effects
            if not is_launch(step):  # which copies what it sends, and refuses nothing
                writes |= {window.buffer for window in touched(step)} if isinstance(step, ExternStep) else set()
                refusing = k
        for name in {window.buffer for window in touched(step)}:
            before[k] |= {maker[name]} if name in maker else set()
            if name in writes:
                before[k].update(readers.pop(name, ()))
                maker[name] = k
            else:
                readers.setdefault(name, []).append(k)
        if writes & inputs:
            before[k] |= {refusing} - {-1}
        before[k].discard(k)
    return before


def _is_watched(step: Step) -> bool:
    """Does the step do what keeps its place among the others that do? Effects and errors. A wait for a collective has
    its place behind the launch."""
    if isinstance(step, KernelStep):
        return any(window.buffer == "status" for window in step.params)
    return isinstance(step, ExternStep) and step.effect > 0 and not is_wait(step)


def problem_of(plan: Plan, forward: Plan | None, units: Sequence[Sequence[int]]) -> Problem:
    """The problem of ordering `units` of steps, at the hints."""
    hint = plan.facts.hint
    unit_of = {step: number for number, unit in enumerate(units) for step in unit}
    before = [0] * len(units)
    after: list[list[int]] = [[] for _ in units]
    for later, others in enumerate(dependencies(plan)):
        for other in others:
            a, b = unit_of[other], unit_of[later]
            if a != b and not before[b] >> a & 1:
                before[b] |= 1 << a
                after[a].append(b)
    values = _values(plan, forward)
    number = {name: k for k, (names, *_) in enumerate(values) for name in names}
    users = [0] * len(values)
    touches: list[dict[int, None]] = [{} for _ in units]
    over: list[list[tuple[int, int]]] = [[] for _ in units]
    bytes_ = {b.name: b.bytes for b in plan.buffers}
    inside = {b.name for b in plan.buffers if b.in_arena}
    for k, step in enumerate(plan.steps):
        for window in touched(step):
            if window.buffer in number:
                users[number[window.buffer]] |= 1 << unit_of[k]
                touches[unit_of[k]][number[window.buffer]] = None
        over[unit_of[k]] += [(number[a.buffer], number[b.buffer]) for a, b in pairs(step)
                             if a.buffer in inside and b.buffer in inside and bytes_[a.buffer] == bytes_[b.buffer]]
    return Problem(
        before, after, [list(one) for one in touches], users, [hint(size) for _, size, *_ in values],
        [kind for _, _, kind, _, _ in values], {k for k, value in enumerate(values) if value[3]},
        {k for k, value in enumerate(values) if value[4]}, over, hint(forward.kept) if forward is not None else 0,
        [isinstance(plan.steps[unit[0]], KernelStep) for unit in units])


_Value = tuple[tuple[str, ...], Size, int, bool, bool]  # buffers, bytes, kind, alive from the start, to the end


def _values(plan: Plan, forward: Plan | None) -> list[_Value]:
    """What a call holds, as plan/schedule/beam_search.py wants it: buffers, and of a backward the forward's kept
    values."""
    elsewhere = caller_owned(plan, forward)
    ends = {o.buffer for o in (*plan.outputs, *plan.saved) if isinstance(o, Window)}
    found: list[_Value] = []
    lying: dict[str, list[str]] = {}
    for buffer in plan.buffers:
        entry = tape_entry(forward, buffer.index) if forward is not None and buffer.is_restored else None
        if entry is not None:
            lying.setdefault(entry[0].name, []).append(buffer.name)
        elif buffer.in_arena:
            found.append(((buffer.name,), buffer.bytes, 0, False, buffer.name in ends))
        elif buffer.is_output or buffer.name in elsewhere:
            early = buffer.is_parameter
            found.append(((buffer.name,), buffer.bytes, 1, early, buffer.name in ends))
    if forward is not None:
        sizes = {b.name: b.bytes for b in forward.buffers}
        found += [(tuple(names), sizes[home], 0, True, False) for home, names in lying.items()]
    return found


def _totals(plan: Plan, forward: Plan | None) -> tuple[list[Size], list[Size]]:
    """Formulas of the bytes alive at each step: in the arena, and beside it."""
    end = len(plan.steps)
    held = [] if forward is None else [forward.kept]
    return [*held, *live_bytes(arena_ranges(plan, forward), end)], live_bytes(outside_ranges(plan, forward), end)


def no_more(new: Sequence[Size], old: Sequence[Size], facts: Facts) -> bool:
    """Is the largest of `new` proved to be at most the largest of `old`, at every size: each at most one of those?"""
    fullest = sorted(dict.fromkeys(old), key=lambda size: -facts.hint(size))[:TRIED]
    here = set(fullest)
    return all(size in here or any(prove_at_most(facts, size, other) for other in fullest)
               for size in sorted(dict.fromkeys(new), key=lambda size: -facts.hint(size)))
