"""The step profiler: how long the steps of programs take, as a table and as a Chrome trace.

    with anyshape.profile() as profile:
        fast(x)
    print(profile)
    profile.export_chrome_trace("trace.json")      # for https://ui.perfetto.dev, or chrome://tracing

Each step is timed by the host (backend/cpu/step_timer.py), in processor time where a run has one thread; a launch
group, steps that threads do in one parallel region, is one. Operations and bytes are those of the cost model
(runtime/cost/step_cost.py): of products alone, and what is read and written at least.
"""
from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from anyshape.base.errors import OutputError
from anyshape.base.files import write_atomically
from anyshape.plan.ir.program import Plan
from anyshape.plan.ir.step_text import step_text
from anyshape.runtime.context.profiling import ProgramRun, recorded
from anyshape.runtime.cost.step_cost import work_of
from anyshape.sym.expr import Size, evaluate

MOST_ROWS = 40  # of a table
WIDEST = 60  # letters of what a step does, and of where it comes from


@dataclass(frozen=True, slots=True)
class StepTimes:
    """All runs of one step, or of one launch group. number: of its first step; seconds, operations (of products) and
    bytes (read and written) of all runs together; where: source lines, or the names of an ONNX model's nodes."""

    program: str
    number: int
    what: str
    where: str
    runs: int
    seconds: float
    operations: int
    bytes: int


class PlanRun(NamedTuple):
    """A run of a program, without the program: a profile keeps no weights alive. values: of the symbols; began: seconds
    of `time.perf_counter`; steps: (number, seconds) of those that ran."""

    plan: Plan
    values: Mapping[str, int]
    began: float
    thread: int
    steps: Sequence[tuple[int, float]]


class _StepGroup:
    """What is run as one step of a plan, and what it costs as formulas."""

    def __init__(self, plan: Plan, number: int) -> None:
        last = max((last for first, last in plan.together if first == number), default=number)
        steps = plan.steps[number:last + 1]
        self.what = "; ".join(map(step_text, steps))
        self.where = "; ".join(dict.fromkeys(filter(None, (one.where for one in steps))))
        self.operations: Size = 0
        self.bytes: Size = 0
        for one in steps:
            operations, bytes_ = work_of(one)
            self.operations, self.bytes = self.operations + operations, self.bytes + bytes_

    def work(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Operations and bytes at the symbols' `values`."""
        return evaluate(self.operations, values), evaluate(self.bytes, values)


class Profile:
    """What `anyshape.profile()` has recorded: `str()` is a table of the slowest steps."""

    def __init__(self, recorded: Sequence[ProgramRun]) -> None:
        self.seconds = 0.0  # between the begin and the end
        self._recorded = recorded  # until the end
        self._kept: list[PlanRun] = []
        self._groups: dict[tuple[int, int], _StepGroup] = {}

    @property
    def runs(self) -> Sequence[PlanRun]:
        """All runs so far, in the order in which they ended."""
        return [*self._kept, *(PlanRun(one.program.plan, one.record.values, one.began, one.thread, one.steps)
                               for one in [*self._recorded])]

    def end(self, seconds: float) -> None:
        """Lets go of the programs."""
        self.seconds, self._kept, self._recorded = seconds, [*self.runs], ()

    def steps(self) -> tuple[StepTimes, ...]:
        """The steps that ran, slowest first."""
        found: dict[tuple[int, int], StepTimes] = {}
        for run in self.runs:
            for number, seconds in run.steps:
                group = self._group(run, number)
                operations, bytes_ = group.work(run.values)
                key = id(run.plan), number
                before = found.get(key) or StepTimes(run.plan.name, number, group.what, group.where, 0, 0.0, 0, 0)
                found[key] = StepTimes(before.program, number, before.what, before.where, before.runs + 1,
                                       before.seconds + seconds, before.operations + operations, before.bytes + bytes_)
        return tuple(sorted(found.values(), key=lambda one: -one.seconds))

    def _group(self, run: PlanRun, number: int) -> _StepGroup:
        key = id(run.plan), number
        if key not in self._groups:
            self._groups[key] = _StepGroup(run.plan, number)
        return self._groups[key]

    def __str__(self) -> str:
        steps = self.steps()
        whole = sum(one.seconds for one in steps)
        runs = self.runs
        programs = len({id(run.plan) for run in runs})
        lines = [f"{_count(len(runs), 'run')} of {_count(programs, 'program')}: {whole * 1e3:.3f} ms in their "
                 f"steps, of {self.seconds * 1e3:.3f} ms"]
        if steps:
            shares: dict[str, float] = {}
            for one in steps:
                kind = one.what.split()[0]
                shares[kind] = shares.get(kind, 0.0) + one.seconds / (whole or 1)
            lines.append(", ".join(f"{kind} {share:.0%}" for kind, share in
                                   sorted(shares.items(), key=lambda item: -item[1])))
            width = max(len("program"), *(len(one.program) for one in steps))
            lines += ["", f"{'ms':>10} {'share':>6} {'runs':>6} {'us each':>9} {'GFLOP/s':>8} {'GB/s':>7}  "
                          f"{'program':<{width}} {'step':>4}  what"]
        for one in steps[:MOST_ROWS]:
            rate = f"{one.operations / one.seconds * 1e-9:.1f}" if one.operations and one.seconds else ""
            speed = f"{one.bytes / one.seconds * 1e-9:.1f}" if one.seconds else ""
            lines.append(f"{one.seconds * 1e3:>10.3f} {one.seconds / (whole or 1):>6.1%} {one.runs:>6} "
                         f"{one.seconds / one.runs * 1e6:>9.1f} {rate:>8} {speed:>7}  {one.program:<{width}} "
                         f"{one.number:>4}  {_short(one.what)}" + (f"  {_short(one.where)}" if one.where else ""))
        if len(steps) > MOST_ROWS:
            lines.append(f"and {len(steps) - MOST_ROWS} more steps, "
                         f"{sum(one.seconds for one in steps[MOST_ROWS:]) * 1e3:.3f} ms")
        return "\n".join(lines)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the runs and their steps as events of the Chrome trace format, JSON that Perfetto and
        chrome://tracing show; times are in microseconds since the first run.

        Raises:
            OutputError: the file cannot be written.
        """
        runs = self.runs
        first = min((run.began for run in runs), default=0.0)
        events: list[dict[str, Any]] = []
        for run in runs:
            at = (run.began - first) * 1e6
            whole = sum(seconds for _, seconds in run.steps)
            events.append(_event(run, run.plan.name, "program", at, whole, dict(run.values)))
            for number, seconds in run.steps:
                group = self._group(run, number)
                operations, bytes_ = group.work(run.values)
                events.append(_event(run, group.what, "step", at, seconds, {
                    "step": number, "source": group.where, "operations": operations, "bytes": bytes_}))
                at += seconds * 1e6
        try:
            write_atomically(Path(path), json.dumps({"traceEvents": events}).encode())
        except OSError as error:
            raise OutputError(f"{os.fspath(path)} cannot be written", why=error.strerror or str(error),
                              do="name another file") from error


def _event(run: PlanRun, name: str, kind: str, at: float, seconds: float, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": kind, "ph": "X", "ts": at, "dur": seconds * 1e6, "pid": os.getpid(), "tid": run.thread,
            "args": more}


def _count(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[:WIDEST - 3] + "..."


@contextlib.contextmanager
def profile() -> Iterator[Profile]:
    """Records the steps of all programs meanwhile: see `anyshape.profile`."""
    with recorded() as runs:
        found = Profile(runs)
        began = time.perf_counter()
        try:
            yield found
        finally:
            found.end(time.perf_counter() - began)
