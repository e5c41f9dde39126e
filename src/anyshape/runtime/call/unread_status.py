"""Asynchronous errors: runs that were issued to a stream and whose status nobody has read yet.

Such a call returns before it is known whether a check failed (an index out of range, a whole number divided by 0).
The error is raised by the next call of a program of the device, before that reads its arguments, or by `settle` with
`wait`. It names the step that failed. A run leaves the list only when its end is known, and each failed run raises
once.
"""
from __future__ import annotations

import atexit
import warnings
from dataclasses import dataclass
from typing import Any

from anyshape.backend.interface import CHECK_FAILED, DONE, ISSUED, PlanRunner
from anyshape.base.errors import AnyShapeError, VerifyError
from anyshape.plan.ir.program import Plan
from anyshape.runtime.specialize.shape_binding import failed_check

MOST = 1024  # runs that are remembered; beyond that a call waits for them
_lists: list[list[UnreadRun]] = []  # of all devices


@dataclass(frozen=True, slots=True, eq=False)
class UnreadRun:
    """A run whose end is not known. frame: what the device reads and writes until then."""

    name: str
    plan: Plan
    runner: PlanRunner
    frame: Any


def note(unread: list[UnreadRun], run: UnreadRun) -> None:
    """One more run was issued."""
    if not any(one is unread for one in _lists):
        _lists.append(unread)
    unread.append(run)


def settle(unread: list[UnreadRun], wait: bool = False) -> None:
    """Forgets the runs that have ended. wait: a synchronisation point: for all of them.

    Raises:
        IndexRangeError, DivisionError: a run failed, the oldest one of those that are known to; the others stay.
    """
    for run in tuple(unread):
        code = run.runner.ended(run.frame, wait or len(unread) > MOST)
        if code == ISSUED:
            continue
        try:
            unread.remove(run)
        except ValueError:  # another thread has read it
            continue
        if code != DONE:
            error = failure(run.name, run.plan, run.runner, run.frame, code)
            error.add_note(f"an earlier call of {run.name} found it after it had returned: its results are not valid")
            raise error


def failure(name: str, plan: Plan, runner: PlanRunner, frame: Any, code: int) -> AnyShapeError:
    """The error for a run that did not end well."""
    number, status = runner.failure(frame)
    step = plan.steps[number]
    if code == CHECK_FAILED:
        return failed_check(name, step, status)
    return VerifyError(f"step {number} of {name} failed with code {code}", where=step.where)


@atexit.register
def _at_exit() -> None:
    """Nobody calls a program any more: what failed is told."""
    for unread in _lists:
        while unread:
            try:
                settle(unread, wait=True)
            except AnyShapeError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=1)
