"""Overlap of collectives with compute: launches as early and waits as late as dependences let, so that steps hide them.

before:
    plan step  arena 0
      where 1 <= n
      in      x: f32[n]  4*n bytes  steps 0-3
      buffer  g: f32[n]  4*n bytes  steps 0-1  arena
      buffer  m: f32[n]  4*n bytes  steps 1-2  arena
      buffer  s: f32[n]  4*n bytes  steps 2-4  arena
      buffer  h: f32[n]  4*n bytes  steps 3-4  arena
      buffer  y: f32[n]  4*n bytes  steps 4-5  output 0
      0  kernel k0(x, &g; n)
      1  call anyshape_collective.start.default(g) -> m
           {template=[], effect=1}
      2  call anyshape_collective.wait.default(m) -> s
           {template=[], effect=2}
      3  kernel k1(x, &h; n)
      4  kernel k2(s, h, &y; n)
      out     y
after overlap_collectives:
    plan step  arena 0
      where 1 <= n
      in      x: f32[n]  4*n bytes  steps 0-2
      buffer  g: f32[n]  4*n bytes  steps 0-1  arena
      buffer  m: f32[n]  4*n bytes  steps 1-3  arena
      buffer  s: f32[n]  4*n bytes  steps 3-4  arena
      buffer  h: f32[n]  4*n bytes  steps 2-4  arena
      buffer  y: f32[n]  4*n bytes  steps 4-5  output 0
      0  kernel k0(x, &g; n)
      1  call anyshape_collective.start.default(g) -> m
           {template=[], effect=1}
      2  kernel k1(x, &h; n)
      3  call anyshape_collective.wait.default(m) -> s
           {template=[], effect=2}
      4  kernel k2(s, h, &y; n)
      out     y

A list scheduler (Adam, Chandy and Dickson, "A Comparison of List Schedules for Parallel Processing Systems", CACM
1974): of the steps whose operands are there the first one of the given order is next, but that waits come when nothing
else is left, and launches at once. Two messages are under way at most: a third is launched when the oldest of them was
waited for. So a bucket of gradients travels behind the backward of the layers below, the last one behind the weight
updates of those before, and gathered weights come while the layer before them runs. Launches keep their order: whatever
plans ranks choose, their messages meet.

A message is memory from its launch to its wait, and what a step makes that comes before its time is memory until its
time has come. Where such steps have made at most the last number of `AHEAD` bytes that are alive, the plan needs least.
At the fullest step of that order no more may be alive than there, by the hints, and anywhere else as much: what does
not fit comes later, and lets others that are ready go first. So messages travel behind all steps but those around the
fullest one. With a limit of bytes the plan has to need no more than it did at every size: the first of `AHEAD` with
which that is proved is taken.
"""
from __future__ import annotations

from bisect import insort
from dataclasses import replace

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.program import Plan, Step, is_launch, is_wait, step_writes, touched
from anyshape.plan.ir.renaming import merged
from anyshape.plan.memory.inplace_reuse import in_place
from anyshape.plan.memory.mutation_copy_elision import permuted
from anyshape.plan.schedule.beam_search import Bytes, Problem
from anyshape.plan.schedule.reorder import bytes_at_hints, needs_no_more, problem_of

UNDER_WAY = 2  # messages at a time
AHEAD = (1 << 62, 32 << 20, 8 << 20, 1 << 20)  # bytes that are made ahead of a wait, at most
LOOKED = 16  # ready steps of which the first one is taken that fits
WORTH = 1.02  # of the bytes that the plan needs where least is made ahead, by the hints, what it may need


def overlap_collectives(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (not allocated) with launches and waits of collectives apart; see the head of this file."""
    if not any(map(is_launch, plan.steps)):
        return plan
    problem = _problem(plan, context)
    if context.config.limited:
        tried = (permuted(plan, _Scheduler(plan, problem, most, ahead).order())
                 for most in range(UNDER_WAY, 0, -1) for ahead in AHEAD)
        return next((one for one in tried if needs_no_more(one, plan, context)), plan)
    order = _Scheduler(plan, problem, UNDER_WAY, AHEAD[-1]).order()
    least = permuted(plan, order)
    curve = [problem.start(), *problem.curve(order)]
    room = max(problem.floor, *(inside for inside, _ in curve)), max(beside for _, beside in curve)
    found = permuted(plan, _Scheduler(plan, problem, UNDER_WAY, AHEAD[0], room).order())
    return found if bytes_at_hints(found, context) <= WORTH * bytes_at_hints(least, context) else least


def _problem(plan: Plan, context: PlanContext) -> Problem:
    """The steps, what has to stay before what, and what is alive, where they write in place as they do in the given
    order."""
    units = [[number] for number in range(len(plan.steps))]
    order = problem_of(plan, context.forward, units)
    united = merged(plan, in_place(plan, forward=context.forward))
    return replace(problem_of(united, context.forward, units), before=order.before, after=order.after)


class _Scheduler:
    """The list scheduler: what is ready, by kind of step, which messages are under way, what is alive, and what was
    made ahead. room: the bytes that may be alive."""

    def __init__(self, plan: Plan, problem: Problem, most: int, ahead: int, room: Bytes | None = None) -> None:
        self.plan = plan
        self.problem = problem
        self.most = most
        self.ahead = ahead
        self.room = room
        self.made: dict[str, int] = {}  # buffers that steps ahead of a wait have made -> bytes
        self.readers: dict[str, int] = {}  # of each buffer, the steps that are left to touch it
        for step in plan.steps:
            for name in {window.buffer for window in touched(step)}:
                self.readers[name] = self.readers.get(name, 0) + 1
        self.bytes = {b.name: plan.facts.hint(b.bytes) for b in plan.buffers if b.is_allocated}
        self.alive, self.finished = problem.start(), 0
        self.missing = [one.bit_count() for one in problem.before]
        self.done: list[int] = []
        self.launches: list[int] = []
        self.waits: list[int] = []  # the oldest message comes first: its wait is that of the first launch
        self.others: list[int] = []
        self.under_way = 0
        for number, count in enumerate(self.missing):
            if not count:
                self.ready(number)

    def order(self) -> list[int]:
        """All steps."""
        while self.launches or self.others or self.waits:
            launch, other = self.launch(), self.other()
            if launch is not None:
                self.under_way += 1
                self.do(self.launches, launch)
            elif other is not None:
                self.do(self.others, other)
            elif self.waits:
                self.under_way -= 1
                self.do(self.waits, self.waits[0])
            else:  # nothing fits
                self.do(self.others or self.launches, (self.others or self.launches)[0])
        assert len(self.done) == len(self.plan.steps)
        return self.done

    def launch(self) -> int | None:
        """The launch that comes now, if one does."""
        if not self.launches or self.under_way >= self.most:
            return None
        first = self.launches[0]
        rest = [ready[0] for ready in (self.others, self.waits) if ready]
        return first if self.is_next(first, rest) or self.has_room(first) else None

    def other(self) -> int | None:
        """The step that is neither launch nor wait that comes now, if one does. A launch that is next waits for room
        among the messages, not behind steps."""
        if not self.others or (self.launches and self.launches[0] < self.others[0] and self.under_way >= self.most):
            return None
        rest = [ready[0] for ready in (self.launches, self.waits) if ready]
        return next((number for number in sorted(self.others)[:LOOKED]
                     if self.is_next(number, rest) or (self.has_room(number) and self.is_little(number))), None)

    def is_next(self, number: int, others: list[int]) -> bool:
        """Does the given order have the step before all others that are ready?"""
        return all(number < one for one in others)

    def ready(self, number: int) -> None:
        """All that the step needs is done."""
        step = self.plan.steps[number]
        insort(self.launches if is_launch(step) else self.waits if is_wait(step) else self.others, number)

    def has_room(self, number: int) -> bool:
        """Is no more alive if the step comes now than may be?"""
        if self.room is None:
            return True
        during, _ = self.problem.step(number, self.finished, self.alive)
        return all(bytes_ <= most for bytes_, most in zip(during, self.room, strict=True))

    def is_little(self, number: int) -> bool:
        """Has what was made ahead room for what the step makes? Always where no wait that is ready comes before it."""
        if not self.waits or number < self.waits[0]:
            return True
        more = sum(self.bytes.get(name, 0) for name in _makes(self.plan.steps[number]) - self.made.keys())
        return more == 0 or sum(self.made.values()) + more <= self.ahead

    def do(self, ready: list[int], number: int) -> None:
        """The step, which is among those that are `ready`, is the next one."""
        ready.remove(number)
        self.done.append(number)
        _, self.alive = self.problem.step(number, self.finished, self.alive)
        self.finished |= 1 << number
        step = self.plan.steps[number]
        if self.waits and number > self.waits[0]:
            self.made |= {name: self.bytes[name] for name in _makes(step) if name in self.bytes}
        for name in {window.buffer for window in touched(step)}:
            self.readers[name] -= 1
            if not self.readers[name]:
                self.made.pop(name, None)
        for other in self.problem.after[number]:
            self.missing[other] -= 1
            if not self.missing[other]:
                self.ready(other)


def _makes(step: Step) -> set[str]:
    return {window.buffer for window in step_writes(step)}
