"""Offload scheduling: moving values out of memory between their last use in a forward and their first in its backward
(runtime/memory/offload_store.py).

    forward:  4 kernel -> h    5 kernel(h)    begin to copy h out    6 7 8    wait    9 h's memory is free
    backward: 2 h has memory again, begin to copy it back    3 4    wait    5 kernel(h)

When to begin and when to wait is decided with what to recompute, from estimates of what steps and copies take
(`Clock`). It is no part of the plan but of a record: the calls that do it (`CallAction`) stand between the host's words
of the steps. Of steps that the host does as one, nothing comes between.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyshape.base.errors import VerifyError
from anyshape.plan.ir.program import Plan
from anyshape.runtime.specialize.saved_policy import OffloadMove, SavedLayout, SavePolicy

SLACK = 2.0  # what a copy is given: others may be before it, and steps may take less than estimated
ORDER = ("out", "back", "wait")  # of actions before the same step


@dataclass(frozen=True, slots=True)
class CallAction:
    """What a call does before step `step`: begins to copy value `number` of its record's moves "out" or "back", or
    "wait"s for that. The value has `bytes` bytes at `offset` of the upper block, and at `at` of the space in the store.
    """

    step: int
    kind: str
    number: int
    offset: int
    at: int
    bytes: int


def actions(keeps: SavedLayout, policy: SavePolicy, runs: frozenset[int],
            places: Sequence[tuple[int, int]]) -> tuple[CallAction, ...]:
    """What moves the values of `policy` in a forward or a backward. runs: its optional steps that run; places: offset
    in the upper block and bytes of each value."""
    found = []
    at = 0
    for number, (move, (offset, bytes_)) in enumerate(zip(policy.moved, places, strict=True)):
        if keeps.forward is None:
            begin = run_of(keeps.plan, keeps.ends[move.saved])[1] + 1
            until = move.gone + 1
            kind = "out"
        else:
            begin = move.back
            until = first_read(keeps, move.saved, runs)
            kind = "back"
        if begin > until:
            raise VerifyError(f"{move.saved} of {keeps.plan.name} is moved too late", why="a step needs it before",
                              do="report this plan: a bug of AnyShape")
        found += [CallAction(begin, kind, number, offset, at, bytes_),
                  CallAction(until, "wait", number, offset, at, bytes_)]
        at += bytes_
    return tuple(sorted(found, key=lambda one: (one.step, ORDER.index(one.kind), one.number)))


def first_read(keeps: SavedLayout, saved: str, runs: frozenset[int]) -> int:
    """The first step of a backward that reads a saved buffer of its forward, or the first one that is done with it."""
    left_out = keeps.optional - runs
    return run_of(keeps.plan, next(number for number in keeps.reads[saved] if number not in left_out))[0]


def run_of(plan: Plan, number: int) -> tuple[int, int]:
    """The first and the last of the steps that the host may do as one with step `number`."""
    return next(((a, b) for a, b in plan.together if a <= number <= b), (number, number))


class Clock:
    """When steps and copies begin, by estimate. forward, backward: seconds of each step; out, back: seconds that
    copying a byte takes; each, share: what a move costs beside that (`Store`). at_once: nobody computes while values
    are copied, so that they are in memory for the shortest time."""

    def __init__(self, program: SavedLayout, later: SavedLayout, forward: np.ndarray, backward: np.ndarray, out: float,
                 back: float, each: float, share: float, at_once: bool = False) -> None:
        self.at_once = at_once
        self.each, self.share = each, share
        self.program, self.later = program, later
        self.forward = np.concatenate(([0.0], np.cumsum(forward)))
        self.backward = np.concatenate(([0.0], np.cumsum(backward)))
        self.out, self.back = out, back
        self.hidden = 0.0 if at_once else float(self.forward[-1] + self.backward[-1])

    def gone(self, saved: str, bytes_: int) -> int:
        """See `OffloadMove`."""
        plan = self.program.plan
        count = len(plan.steps)
        end = run_of(plan, self.program.ends[saved])[1]
        if self.at_once:
            return end
        done = int(np.searchsorted(self.forward, self.forward[end + 1] + SLACK * bytes_ * self.out))
        return run_of(plan, min(max(done - 1, end + 1), count))[1]

    def there(self, step: int, bytes_: int) -> int:
        """The backward's first step during which a value is there that step `step` needs: see `OffloadMove`."""
        plan = self.later.plan
        first = run_of(plan, step)[0]
        if self.at_once:
            return first
        begin = int(np.searchsorted(self.backward, self.backward[first] - SLACK * bytes_ * self.back, "right")) - 1
        return run_of(plan, max(min(begin, first - 1), 0))[0]

    def move(self, saved: str, bytes_: int, step: int) -> OffloadMove:
        """The move of a value of `bytes_` bytes that step `step` of the backward is the first to need."""
        return OffloadMove(saved, self.gone(saved, bytes_), self.there(step, bytes_))

    def seconds(self, bytes_: float) -> float:
        """What copying so many bytes out and back takes."""
        return bytes_ * (self.out + self.back)
