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
time has come. So steps that the given order has behind a wait which is still to come may have made only so many bytes
that are alive (`AHEAD`): the first of these numbers is taken with which the plan needs hardly more, by the hints, than
with the last. With a limit of bytes, steps move only where, at every size, the plan needs no more than it did.
"""
from __future__ import annotations

from heapq import heappop, heappush

from anyshape.plan.ir.context import DEFAULTS, PlanContext
from anyshape.plan.ir.program import Plan, Step, is_launch, is_wait, step_writes, touched
from anyshape.plan.memory.mutation_copy_elision import permuted
from anyshape.plan.schedule.reorder import bytes_at_hints, dependencies, needs_no_more

UNDER_WAY = 2  # messages at a time
AHEAD = (1 << 62, 32 << 20, 8 << 20, 1 << 20)  # bytes that are made ahead of a wait, at most
WORTH = 1.02  # of the bytes of the plan that needs least, what another may need


def overlap_collectives(plan: Plan, context: PlanContext = DEFAULTS) -> Plan:
    """`plan` (not allocated) with launches and waits of collectives apart; see the head of this file."""
    if not any(map(is_launch, plan.steps)):
        return plan
    for most in range(UNDER_WAY, 0, -1):
        tried = [permuted(plan, _Scheduler(plan, most, ahead).order()) for ahead in AHEAD]
        if context.config.limited:
            found = next((one for one in tried if needs_no_more(one, plan, context)), None)
            if found is not None:
                return found
        else:
            peaks = [bytes_at_hints(one, context) for one in tried]
            return next(one for one, peak in zip(tried, peaks, strict=True) if peak <= WORTH * min(peaks))
    return plan


class _Scheduler:
    """The list scheduler: what is ready, by kind of step, which messages are under way, and what was made ahead."""

    def __init__(self, plan: Plan, most: int, ahead: int) -> None:
        self.plan = plan
        self.most = most
        self.ahead = ahead
        self.made: dict[str, int] = {}  # buffers that steps ahead of a wait have made -> bytes
        self.readers: dict[str, int] = {}  # of each buffer, the steps that are left to touch it
        for step in plan.steps:
            for name in {window.buffer for window in touched(step)}:
                self.readers[name] = self.readers.get(name, 0) + 1
        self.bytes = {b.name: plan.facts.hint(b.bytes) for b in plan.buffers if b.is_allocated}
        before = dependencies(plan)
        self.missing = list(map(len, before))
        self.after: list[list[int]] = [[] for _ in before]
        for later, others in enumerate(before):
            for other in others:
                self.after[other].append(later)
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
            is_next = bool(self.launches) and not (self.others and self.others[0] < self.launches[0])
            if self.launches and self.under_way < self.most:
                self.under_way += 1
                self.do(heappop(self.launches))
            elif self.others and not is_next and self.fits(self.others[0]):
                self.do(heappop(self.others))
            else:
                self.under_way -= 1
                self.do(heappop(self.waits))
        assert len(self.done) == len(self.plan.steps)
        return self.done

    def ready(self, number: int) -> None:
        """All that the step needs is done."""
        step = self.plan.steps[number]
        heappush(self.launches if is_launch(step) else self.waits if is_wait(step) else self.others, number)

    def fits(self, number: int) -> bool:
        """May the step come now? Always where no wait that is ready would come before it."""
        if not self.waits or number < self.waits[0]:
            return True
        more = sum(self.bytes.get(name, 0) for name in _makes(self.plan.steps[number]) - self.made.keys())
        return more == 0 or sum(self.made.values()) + more <= self.ahead

    def do(self, number: int) -> None:
        """The step is the next one."""
        self.done.append(number)
        step = self.plan.steps[number]
        if self.waits and number > self.waits[0]:
            self.made |= {name: self.bytes[name] for name in _makes(step) if name in self.bytes}
        for name in {window.buffer for window in touched(step)}:
            self.readers[name] -= 1
            if not self.readers[name]:
                self.made.pop(name, None)
        for other in self.after[number]:
            self.missing[other] -= 1
            if not self.missing[other]:
                self.ready(other)


def _makes(step: Step) -> set[str]:
    return {window.buffer for window in step_writes(step)}
