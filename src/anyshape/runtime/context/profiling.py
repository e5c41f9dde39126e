"""The profiler's record: runs of programs and what their steps took, while somebody wants to know."""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple


class ProgramRun(NamedTuple):
    """A run of a program (runtime/call/program.py) that had `record`. began: seconds, of `time.perf_counter`; thread:
    its identity; steps: (number, seconds) of those that ran; a launch group is one, by the number of its first."""

    program: Any
    record: Any
    began: float
    thread: int
    steps: list[tuple[int, float]]

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(seconds for _, seconds in self.steps)


class Profiler:
    """Receives the runs of all programs whose context has it: `runs` is None while nobody wants to know."""

    def __init__(self) -> None:
        self.runs: list[ProgramRun] | None = None

    def run(self, program: Any, record: Any, frame: Any, steps: Any = None) -> int:
        """A run of the program's plan, noted; returns its code, as `PlanRunner.run` does."""
        began = time.perf_counter()
        code, times = program.runner.timed(record.payload, frame, steps)
        runs = self.runs
        if runs is not None:  # not since
            runs.append(ProgramRun(program, record, began, threading.get_ident(), times))
        return code  # type: ignore[no-any-return]


PROCESS = Profiler()  # of all contexts, but those that somebody makes to watch one program


@contextlib.contextmanager
def recorded(profiler: Profiler = PROCESS) -> Iterator[list[ProgramRun]]:
    """Records the runs of all programs meanwhile, of all threads. Records may be nested; each has all of its runs."""
    before, runs = profiler.runs, []  # type: ignore[var-annotated]
    profiler.runs = runs
    try:
        yield runs
    finally:
        profiler.runs = before
        if before is not None:
            before.extend(runs)
