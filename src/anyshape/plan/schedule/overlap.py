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
else is left, and launches at once. Steps that no launch needs, such as updates of weights, come behind all others that
are ready: they are there where a wait would be next. Two messages are under way at most: a third is launched when the
oldest of them was waited for. So a bucket of gradients travels behind the backward of the layers below, the last one
behind the weight updates of those before, and gathered weights come while the layer before them runs. Launches keep
their order: whatever plans ranks choose, their messages meet.

A message is memory from its launch to its wait, and what a step makes that comes before its time is memory until its
time has come. Where such steps have made at most the last number of `AHEAD` bytes that are alive, the plan needs least.
At no step may more be alive than at the fullest step of that order: at the hints, and at other sizes (`SCALES`), for
which step is the fullest depends on them. What does not fit comes later, and lets others that are ready go first. So
messages travel behind all steps but those around the fullest one. With a limit of bytes the plan has to need no more
than it did at every size: the first of `AHEAD` with which that is proved is taken.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.program import Plan, Step, is_launch, is_wait, step_writes, touched
from anyshape.plan.ir.renaming import merged
from anyshape.plan.memory.inplace_reuse import in_place
from anyshape.plan.memory.mutation_copy_elision import permuted
from anyshape.plan.schedule.beam_search import Problem
from anyshape.plan.schedule.reorder import needs_no_more, problem_of
from anyshape.sym.expr import Expr, symbol, symbols_of

UNDER_WAY = 2  # messages at a time
AHEAD = (1 << 62, 32 << 20, 8 << 20, 1 << 20)  # bytes that are made ahead of a wait, at most
LOOKED = 16  # ready steps of which the first one is taken that fits
SCALES = (1.0, 2.0, 0.8, 0.6)  # of each hint, for the sizes at which bytes are compared; smaller calls need less
WORTH = 1.02  # of the bytes that the plan needs where least is made ahead, what it may need


def overlap_collectives(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (not allocated) with launches and waits of collectives apart, as early and as late as dependences let."""
    if not any(map(is_launch, plan.steps)):
        return plan
    problems = _problems(plan, context)
    if context.config.limited:
        tried = (permuted(plan, _Scheduler(plan, problems, most, ahead).order())
                 for most in range(UNDER_WAY, 0, -1) for ahead in AHEAD)
        return next((one for one in tried if needs_no_more(one, plan, context)), plan)
    least = _Scheduler(plan, problems, UNDER_WAY, AHEAD[-1]).order()
    for ahead in AHEAD[:-1]:
        order = _Scheduler(plan, problems, UNDER_WAY, ahead, least).order()
        if all(problem.peak(order) <= WORTH * problem.peak(least) for problem in problems):
            return permuted(plan, order)
    return permuted(plan, least)


def _problems(plan: Plan, context: PlanContext) -> list[Problem]:
    """The steps, what has to stay before what, and what is alive at each of `SCALES`, where they write in place as they
    do in the given order."""
    units = [[number] for number in range(len(plan.steps))]
    order = problem_of(plan, context.forward, units)
    united = merged(plan, in_place(plan, forward=context.forward))
    hint = plan.facts.hint
    names = sorted({name for b in plan.buffers if isinstance(b.bytes, Expr) for name in symbols_of(b.bytes)})
    found = []
    for scale in SCALES:
        hints = tuple((name, int(hint(symbol(name)) * scale)) for name in names)
        one = problem_of(replace(united, facts=replace(plan.facts, hints=hints)), context.forward, units)
        found.append(replace(one, before=order.before, after=order.after))
    return found


class _Room:
    """What may come early at one size: no step of the order `base` gets to have more alive than its fullest one has.

    A step that comes early leaves bytes alive until its turn in `base`, beside what the steps before that have alive.
    """

    def __init__(self, problem: Problem, base: Sequence[int]) -> None:
        self.problem = problem
        self.alive = problem.start()
        curve = problem.curve(base)
        self.inside, beside = [inside for inside, _ in curve], [beside for _, beside in curve]
        self.most = max(problem.floor, self.alive[0], *self.inside), max(self.alive[1], *beside)
        self.early = [0] * len(base)  # by the turn of a step that came early, the bytes that it has left alive

    def has(self, number: int, turn: int, first: int, done: int) -> bool:
        """Is there room for a step? turn: its place in `base`; first: that of the first step that is not `done`."""
        during, left = self.problem.step(number, done, self.alive)
        if any(bytes_ > most for bytes_, most in zip(during, self.most, strict=True)):
            return False
        more = left[0] - self.alive[0]
        early = sum(self.early[turn:])
        for place in range(turn - 1, first - 1, -1):
            if self.inside[place] + early + more > self.most[0]:
                return False
            early += self.early[place]
        return True

    def take(self, number: int, turn: int, first: int, done: int) -> None:
        """The step comes now."""
        _, left = self.problem.step(number, done, self.alive)
        if turn > first:
            self.early[turn] = left[0] - self.alive[0]
        self.alive = left


class _Scheduler:
    """The list scheduler: what is ready, by kind of step, which messages are under way, what is alive, and what was
    made ahead. base: an order none of whose steps gets to have more alive than its fullest one has."""

    def __init__(self, plan: Plan, problems: Sequence[Problem], most: int, ahead: int,
                 base: Sequence[int] = ()) -> None:
        self.plan = plan
        self.problem = problems[0]
        self.rooms = [_Room(problem, base) for problem in problems] if base else []
        self.turns = {number: turn for turn, number in enumerate(base or range(len(plan.steps)))}
        self.put_off = self.needed_by_none() if base else set()
        self.left = list(base)  # steps that are not done, in that order
        self.most = most
        self.ahead = ahead
        self.made: dict[str, int] = {}  # buffers that steps ahead of a wait have made -> bytes
        self.readers: dict[str, int] = {}  # of each buffer, the steps that are left to touch it
        for step in plan.steps:
            for name in {window.buffer for window in touched(step)}:
                self.readers[name] = self.readers.get(name, 0) + 1
        self.bytes = {b.name: plan.facts.hint(b.bytes) for b in plan.buffers if b.is_allocated}
        self.finished = 0  # a bit for each step that is done
        self.missing = [one.bit_count() for one in self.problem.before]
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
        rest = [ready[0] for ready in (self.launches, self.others, self.waits) if ready]
        first = sorted(self.others, key=lambda number: (number in self.put_off, number))
        return next((number for number in first[:LOOKED]
                     if self.is_next(number, rest) or (self.has_room(number) and self.is_little(number))), None)

    def needed_by_none(self) -> set[int]:
        """The steps that no launch waits for."""
        launches = [number for number, step in enumerate(self.plan.steps) if is_launch(step)]
        needed = 0
        for number in launches:
            needed |= self.problem.behind(number)
        return {number for number in range(len(self.plan.steps)) if not needed >> number & 1}

    def is_next(self, number: int, others: list[int]) -> bool:
        """Does the given order have the step before all others that are ready?"""
        return all(number <= one for one in others)

    def ready(self, number: int) -> None:
        """All that the step needs is done."""
        step = self.plan.steps[number]
        insort(self.launches if is_launch(step) else self.waits if is_wait(step) else self.others, number)

    def has_room(self, number: int) -> bool:
        """Does no step get to have more alive than may be if this one comes now?"""
        return all(room.has(number, self.turns[number], self.turns[self.left[0]], self.finished) for room in self.rooms)

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
        for room in self.rooms:
            room.take(number, self.turns[number], self.turns[self.left[0]], self.finished)
        if self.left:
            self.left.remove(number)
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
