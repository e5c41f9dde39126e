"""Shows train steps: per model and dtype a table of backends, what is aimed at, a chart, and the document."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyshape_bench.experiments.speed import charts
from anyshape_bench.experiments.speed.report import describe, programs, verdict
from anyshape_bench.experiments.speed.results import Cell, Results, backends_of, cell, models_of, records_of
from anyshape_bench.experiments.train_step.results import (
    EXACT,
    INDUCTOR,
    WHOLE,
    Steps,
)
from anyshape_bench.harness import targets
from anyshape_bench.harness.experiment import Report
from anyshape_bench.harness.machine import facts
from anyshape_bench.harness.tables import MISSING, Table, bullets, ratio, seconds, size
from anyshape_bench.harness.targets import Measure
from anyshape_bench.measure.statistics import median

HEAD = ("backend", "first step", "new shapes", "of Inductor's", "median shape, of Inductor's", "seen shapes",
        "of Inductor's", "p50", "p99")
MEMORY_HEAD = ("backend", "programs / shapes", "peak, greatest shape", "of Inductor's", "peak, any shape",
               "of Inductor's", "idle", "same as eager")
FASTER = {"": 1.5, "bfloat16": 2.5}  # throughput at new shapes, against Inductor, by autocast
PEAK = 0.6  # of Inductor's
REST = 1.01  # of what a step of several batches takes beside one set of gradients, against a step of one



def tables(found: Steps) -> Iterator[tuple[Table, Table]]:
    """Times and memory of each model under each autocast."""
    for autocast in found.dtypes():
        part = found.part(autocast)
        for model in models_of(part):
            cells = [cell(part, model, backend) for backend in backends_of(part) if records_of(part, model, backend)]
            memory = [_memory(part, one) for one in cells]
            several = found.accumulated(model, autocast)
            if several is not None:
                memory.append(_several(part, several))
            title = f"{model}, {autocast or EXACT}"
            styles = ["bold red" if line[-1] in ("failed", "WRONG") else None for line in memory]
            yield (Table(title, HEAD, [_times(part, one) for one in cells], narrow=True),
                   Table(title, MEMORY_HEAD, memory, narrow=True, styles=styles))


def _times(part: Results, mean: Cell) -> tuple[str, ...]:
    """The cells of a line, as HEAD names them."""
    against = cell(part, mean.model, mean.backend, INDUCTOR)
    return (mean.backend, seconds(mean.cold), ratio(mean.fresh), ratio(against.fresh),
            ratio(median_shape(part, mean.model, mean.backend)), ratio(mean.repeated), ratio(against.repeated),
            seconds(mean.p50), seconds(mean.p99))


def _memory(part: Results, mean: Cell) -> tuple[str, ...]:
    """The cells of a line, as MEMORY_HEAD names them."""
    greatest, theirs = (_greatest(part, mean.model, name) for name in (mean.backend, INDUCTOR))
    against = cell(part, mean.model, mean.backend, INDUCTOR)
    idle = max((r["idle"] for r in _counted(part, mean.model, mean.backend) if r["idle"] is not None), default=None)
    return (mean.backend, programs(mean), size(greatest),
            ratio(greatest / theirs if greatest and theirs else None), size(mean.peak), ratio(against.peak_ratio),
            size(idle), verdict(mean))


def _several(part: Results, several: dict[str, Any]) -> tuple[str, ...]:
    """The same, of a step of several batches."""
    theirs, peak = _greatest(part, several["model"], INDUCTOR), several["memory"][0]
    return (f"{several['backend']}, {several['accumulate']} batches", MISSING, size(peak),
            ratio(peak / theirs if theirs else None), MISSING, MISSING, size(several["idle"]), MISSING)


def median_shape(part: Results, model: str, backend: str) -> float | None:
    """How many times faster than Inductor a step at a shape never seen is, the median over shapes and rounds: a shape
    for which one of both compiles again hardly counts."""
    def times(name: str) -> dict[tuple[int, tuple[int, ...]], float]:
        return {(r["number"], tuple(shape)): seconds for r in records_of(part, model, name) if r["mode"] == "time"
                and not r["error"] and r["fresh"]
                for shape, seconds in zip(r["shapes"][-len(r["fresh"]):], r["fresh"], strict=True)}

    ours, theirs = times(backend), times(INDUCTOR)
    return median(theirs[key] / ours[key] for key in ours if key in theirs)


def _counted(part: Results, model: str, backend: str) -> list[dict[str, Any]]:
    return [r for r in records_of(part, model, backend) if r["mode"] == "memory" and not r["error"]]


def _greatest(part: Results, model: str, backend: str) -> int | None:
    """The peak at the greatest shape, before others have come."""
    return max((r["memory"][0] for r in _counted(part, model, backend) if r["memory"]), default=None)


def measures(found: Steps) -> list[Measure]:
    """What is aimed at, of every model that was measured."""
    parts = {autocast: found.part(autocast) for autocast in found.dtypes()}
    return [one for autocast, part in parts.items() for model in models_of(part) if records_of(part, model, WHOLE)
            for one in _of_model(found, part, model, autocast)]


def _of_model(found: Steps, part: Results, model: str, autocast: str) -> Iterator[Measure]:
    dtype = autocast or EXACT
    note = f"`{model}`, {dtype}"
    ours = cell(part, model, WHOLE, INDUCTOR)
    if autocast in FASTER:
        yield Measure("throughput at new shapes, against Inductor", FASTER[autocast], False, ours.fresh, note)
        yield Measure("the same, at the median shape", FASTER[autocast], False, median_shape(part, model, WHOLE), note)
    greatest, theirs = _greatest(part, model, WHOLE), _greatest(part, model, INDUCTOR)
    yield Measure("peak at the greatest shape, of Inductor's", PEAK, True,
                  greatest / theirs if greatest is not None and theirs else None, note)
    yield Measure("greatest peak at any shape, of Inductor's", PEAK, True, ours.peak_ratio, note)
    several = found.accumulated(model, autocast)
    name = "peak of several batches a step without one set of gradients, of one batch's"
    if several is not None:
        rest = several["memory"][0] - several["gradients"]
        batches = f"{note}, {several['accumulate']} batches"
        yield Measure(name, REST, True, rest / greatest if greatest else None, batches)
    else:
        yield Measure(name, REST, True, None, note)


def problems(found: Steps) -> list[str]:
    """Processes that failed, results that are not eager's, and parts of ours that ran uncompiled."""
    said = [f"FAILED: {r['model']} on {r['backend']}, {r['autocast'] or EXACT}: {r['error']}" for r in found.records
            if r["error"]]
    for autocast in found.dtypes():
        for r in found.part(autocast).records:
            said += [f"WRONG: {r['model']} on {r['backend']}, {autocast or EXACT}: {text}" for text in r["mismatches"]]
    return said


def report(found: Steps) -> Report:
    """Two tables for each model and autocast, what is aimed at, and what failed."""
    aims = measures(found)
    shown = [table for pair in tables(found) for table in pair] + ([targets.table(aims)] if aims else [])
    notes = [f"Resident memory, not counted blocks: {found.options['memory_note']}"] \
        if found.options.get("memory_note") else []
    if found.options.get("interrupted"):
        notes.append("Interrupted: what had finished is shown.")
    return Report(shown, markdown(found), document(found), problems(found), notes=notes)


def markdown(found: Steps) -> str:
    """A section with two tables for each model and autocast, and one of what is aimed at."""
    parts = [f"## {times.title}\n\n{times.markdown()}\n{memory.markdown()}\n" for times, memory in tables(found)]
    aims = measures(found)
    return "".join(parts) + ("## What is aimed at\n\n" + targets.table(aims).markdown() if aims else "")


def chart(found: Steps, path: Path) -> Path | None:
    """Draws throughput at new and at seen shapes, and peaks, of every model, dtype and backend into one picture;
    None where there is no number relative to eager's.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    return charts.groups(_joined(found), (("fresh", "throughput at new shapes (eager = 1, more is better)"),
                                          ("repeated", "throughput at seen shapes (eager = 1, more is better)"),
                                          ("peak_ratio", "peak memory (eager = 1, less is better)")), path)


def _joined(found: Steps) -> Results:
    """All dtypes as results of one run, where a model under autocast is one of its own."""
    records = [r | {"model": f"{r['model']}\n{autocast or EXACT}"} for autocast in found.dtypes()
               for r in found.part(autocast).records]
    return Results(found.machine, found.options, records)


INTRODUCTION = """\
# Train steps

This file is written by `anyshape bench step ... --write-document` from stored results; it is not edited by hand.
[how-to-benchmark.md](how-to-benchmark.md) says how it is measured and what the columns mean.

"""


def document(found: Steps) -> str:
    """The text of the page."""
    threads = sorted({r["threads"] for r in found.records if not r["error"]})
    parts = [INTRODUCTION, "## Machine\n\n", facts(found.machine, ", ".join(map(str, threads)) or MISSING), "\n",
             markdown(found)]
    wrong = problems(found)
    if wrong:
        parts.append("\n## What went wrong\n\n" + bullets(wrong))
    if found.options.get("interrupted"):
        parts.append("\nThe last run was interrupted; only what had finished is shown.\n")
    part = [(model, autocast) for autocast in found.dtypes() for model in models_of(found.part(autocast))]
    models = {model: describe(found.part(autocast), model) for model, autocast in reversed(part)}
    parts.append("\n## Models\n\n" + "".join(f"- `{model}`: {text}\n" for model, text in sorted(models.items())))
    return "".join(parts)
