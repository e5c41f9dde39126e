"""The memory timeline that reports show: what is alive at every step of a forward and then of its backward, with bytes
as formulas.

    forward  0 1 2 .. F | backward  0 1 2 .. B     one line of positions for both

The lives are those that the problem of `runtime/budget/tradeoff_curve.py` are made of; there they stand in numbers, at
one set of sizes. A report evaluates them at any sizes.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from anyshape.base.align import align
from anyshape.plan.ir.home import External, Home, Output, Recomputed, Restored, Saved, Temp
from anyshape.plan.ir.liveness import live_bytes
from anyshape.plan.ir.program import step_writes
from anyshape.runtime.budget.memory_budget import MemoryBudget
from anyshape.runtime.budget.peak_breakdown import source_of
from anyshape.runtime.budget.tradeoff_problem import TradeoffProblem
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.specialize.saved_policy import OffloadMove, SavePolicy
from anyshape.sym.expr import Size, evaluate

KINDS: dict[type[Home], str] = {
    Temp: "temporary", Recomputed: "temporary", Saved: "saved", Output: "result", External: "made by PyTorch",
    Restored: "made by PyTorch"}
Span = tuple[int, int]  # first and last position


@dataclass(frozen=True, slots=True)
class TimelineRange:
    """A value in memory between two positions of the line, both inclusive.

    kind: saved (for the backward), temporary, result, or made by PyTorch. bytes: as they count, a formula. gap: of a
    value that can be dropped, the positions between which it then is not there. only: alive in calls that compute
    something again with it. where: the line of the model that makes it.
    """

    name: str
    kind: str
    bytes: Size
    first: int
    last: int
    where: str
    gap: Span | None = None
    only: bool = False

    def spans(self, dropped: frozenset[str], used: frozenset[str], moved: Mapping[str, Span]) -> list[Span]:
        """From where to where it is in memory, under the choice that `MemoryTimeline.curve` describes."""
        if self.only and self.name not in used:
            return []
        gap = moved.get(self.name) if self.kind == "saved" else None
        if gap is None and self.name in dropped:
            gap = self.gap
        if gap is None:
            return [(self.first, self.last)]
        return [(first, last) for first, last in ((self.first, gap[0] - 1), (gap[1] + 1, self.last)) if first <= last]


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """The lives of a program, or of a forward with its backward. border: the position where the backward begins, or the
    length where there is none."""

    lives: tuple[TimelineRange, ...]
    border: int
    length: int

    def curve(self, values: Mapping[str, int], scratch: tuple[int, int], dropped: frozenset[str] = frozenset(),
              used: frozenset[str] = frozenset(), moved: Mapping[str, Span] = MappingProxyType({})) -> np.ndarray:
        """Bytes alive at every position at the symbols' `values`.

        Args:
            scratch: bytes that all threads take in the forward, and in the backward.
            used: names of lives that are `only` there to compute again, and are.
            moved: values that are moved out, with the first and last position where they are away.
        """
        spans = [(life, life.spans(dropped, used, moved)) for life in self.lives]
        ranges = [(size, *span) for life, some in spans if some for size in (evaluate(life.bytes, values),)
                  for span in some]
        curve = np.array(live_bytes(ranges, self.length - 1), np.int64)
        curve[:self.border] += scratch[0]
        curve[self.border:] += scratch[1]
        return curve

    def alive(self, position: int, values: Mapping[str, int], dropped: frozenset[str], used: frozenset[str],
              moved: Mapping[str, Span]) -> list[tuple[TimelineRange, int]]:
        """What is in memory at a position, with its bytes, the largest first; see `curve`."""
        found = [(life, evaluate(life.bytes, values)) for life in self.lives
                 if any(first <= position <= last for first, last in life.spans(dropped, used, moved))]
        return sorted([one for one in found if one[1]], key=lambda one: -one[1])


def timeline(limit: MemoryBudget) -> MemoryTimeline:
    """The lives of the programs of a limit."""
    problem = limit.problem
    if problem is None:
        return _alone(limit.program)
    lives = [TimelineRange(life.name, KINDS[type(life.home)], problem.bytes[life.number], life.first, life.last,
                           life.where)
             for life in problem.fixed]
    gaps = {name: (first, last - 1) for name, (first, last) in zip(problem.names, problem.gaps, strict=True)
            if first < last}
    for name, life in problem.held.items():
        size = align(problem.bytes[life.number])
        lives.append(TimelineRange(name, "saved", size, life.first, life.last, life.where, gaps.get(name)))
    lives += [TimelineRange(life.name, KINDS[type(life.home)], problem.bytes[life.number], life.first, life.last,
                   life.where, only=True) for life in problem.temporaries]
    return MemoryTimeline(tuple(life for life in lives if life.first <= life.last), problem.border, problem.length)


def _alone(program: Executable) -> MemoryTimeline:
    plan = program.plan
    end = len(plan.steps)
    # results count from when they are written: before that, other values may lie in their memory
    lives = tuple(TimelineRange(b.name, KINDS[type(b.home)], b.bytes, b.first,
                       end if b.survives_call else b.last, source_of(b, plan))
                  for b in plan.buffers if b.is_allocated)
    return MemoryTimeline(lives, end + 1, end + 1)


def scratch(limit: MemoryBudget, values: dict[str, int]) -> tuple[int, int]:
    """Bytes of all threads' scratch in the forward, and in the backward."""
    threads = limit.threads()
    later = 0
    if limit.backward is not None:
        later = limit.backward.specializer.made(limit.later(values)).scratch
    return limit.program.specializer.made(values).scratch * threads, later * threads


def used(problem: TradeoffProblem | None, dropped: frozenset[str]) -> frozenset[str]:
    """The lives that are only there to compute again what is dropped."""
    if problem is None or not dropped:
        return frozenset()
    return frozenset(problem.keeps.used(SavePolicy(dropped)) & problem.keeps.made)


def away(problem: TradeoffProblem | None, moved: Sequence[OffloadMove]) -> dict[str, Span]:
    """The values of `moved`, with the positions between which their memory is free."""
    return {} if problem is None else {
        move.saved: (move.gone + 1, problem.border + move.back - 1) for move in moved}


def state(problem: TradeoffProblem | None, policy: SavePolicy
          ) -> tuple[frozenset[str], frozenset[str], dict[str, Span]]:
    """What `MemoryTimeline.curve` and `MemoryTimeline.alive` ask of a choice: what is dropped, used and moved."""
    return policy.dropped, used(problem, policy.dropped), away(problem, policy.moved)


def work_again(limit: MemoryBudget, values: dict[str, int], dropped: frozenset[str]) -> dict[str, tuple[int, float]]:
    """Per value that is dropped, how many steps of the backward write it again, and the seconds that this takes, by
    estimate: its own steps, and what is made on the way to it alone, that is since the value before it."""
    problem = limit.problem
    if problem is None or not dropped:
        return {}
    threads = limit.threads()
    seconds = problem.costs.seconds(limit.later(values), limit.speeds(threads)) / threads
    runs = problem.keeps.runs(SavePolicy(dropped))
    buffers = {one.buffer: one.saved for one in problem.plan.again if one.saved in dropped}
    found = dict.fromkeys(dropped, (0, 0.0))
    before = 0.0
    for number, cost in zip(problem.optional, seconds.tolist(), strict=True):
        if number in runs:
            names = [buffers[one.buffer] for one in step_writes(problem.plan.steps[number]) if one.buffer in buffers]
            before += cost
            for name in names:
                found[name] = found[name][0] + 1, found[name][1] + before / len(names)
            before = 0.0 if names else before
    return found
