"""Results of the speed experiment, and the numbers that are read off them: ratios of medians within one run."""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from anyshape_bench.harness.result_files import StoredRun
from anyshape_bench.measure.statistics import median
from anyshape_bench.models.suite import Shape

GapRow = list[Any]  # shape, seconds of the program for all sizes, seconds of the one for this shape
Row = list[Any]  # of the arena: shape, name of the program, bytes predicted, bytes counted


@dataclass(slots=True)
class Record:
    """What a worker found. Seconds and bytes; lists follow `shapes`.

    Attributes:
        first_step: from before compile to the first result.
        second_step: the other warm-up call.
        fresh: one time per shape after the warm-up calls, seen for the first time.
        repeated: per shape, the median of the passes.
        apart: shapes with a size of 1 that the others do not have, run once after them, each in `apart_times`.
        p50, p99: of all repeated steps.
        programs: compiled programs or graphs; None where the backend has no such number.
        memory: per shape of `memory_shapes`, the peak above parameters and optimiser state.
        idle: bytes kept between steps, at the end.
        launches: what one step at the first shape launches, by kind; None where nobody can say.
        gap: per shape, seconds of a program for all sizes and of the one for this shape, measured in turn.
        mismatches: differences from eager's results, each in words.
    """

    model: str
    backend: str
    number: int = 0
    mode: str = "time"
    trains: bool = False
    dims: list[str] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    first_step: float | None = None
    second_step: float | None = None
    fresh: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    apart: list[Shape] = field(default_factory=list)
    apart_times: list[float] = field(default_factory=list)
    p50: float | None = None
    p99: float | None = None
    programs: int | None = None
    memory_shapes: list[Shape] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    idle: int | None = None
    baseline: int | None = None
    memory_method: str = ""
    launches: dict[str, int] | None = None
    checked: list[Shape] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    arena: list[Row] = field(default_factory=list)
    gap: list[GapRow] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    threads: int = 0
    error: str = ""


@dataclass(slots=True)
class Results(StoredRun):
    """A run, with the record of every process, in the order they ended."""

    FILE = "results.json"
    WHAT = "benchmark results"
    COMMAND = "anyshape bench"
    records: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Cell:
    """One model on one backend, summed up over its processes. Seconds and bytes.

    Attributes:
        cold, warm: first step with empty caches, and with the caches of an earlier process.
        fresh: throughput at shapes seen for the first time (empty caches), relative to eager.
        fresh_warm: the same in a later process with the caches filled.
        repeated: throughput at shapes seen before, relative to eager.
        shapes: how many shapes were run.
        apart: seconds of the slowest first call with a size of 1 that the other shapes do not have.
        fallbacks: parts of the model the backend says it ran uncompiled.
        eager_calls: calls that ran as PyTorch: their shapes were not served by a program.
        peak: greatest peak above parameters and optimiser state.
        peak_ratio: peak relative to eager's.
        launches: kernels, products, calls of PyTorch and copies of one step; launch_ratio: relative to Inductor's.
        arena: greatest predicted peak of the arena over all shapes; arena_wrong: the first that is not the counted
            one, in words.
    """

    model: str
    backend: str
    cold: float | None = None
    warm: float | None = None
    fresh: float | None = None
    fresh_warm: float | None = None
    repeated: float | None = None
    p50: float | None = None
    p99: float | None = None
    programs: int | None = None
    shapes: int = 0
    apart: float | None = None
    fallbacks: int = 0
    eager_calls: int = 0
    peak: int | None = None
    peak_ratio: float | None = None
    memory_method: str = ""
    launches: int | None = None
    launch_ratio: float | None = None
    arena: int | None = None
    arena_wrong: str = ""
    checked: int = 0
    mismatches: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def records_of(results: Results, model: str, backend: str) -> list[dict[str, Any]]:
    return [r for r in results.records if r["model"] == model and r["backend"] == backend]


def models_of(results: Results) -> list[str]:
    return list(dict.fromkeys(r["model"] for r in results.records))


def backends_of(results: Results) -> list[str]:
    return list(dict.fromkeys(r["backend"] for r in results.records))


def speedup(results: Results, model: str, backend: str, base: str, what: str,
            numbers: Iterable[int] | None = None) -> float | None:
    """How many times faster `backend` is than `base`: the median over rounds of total time by total time.

    `what` is "fresh" or "repeated". Both totals of a ratio come from the same round, whose processes ran one after
    the other, so that a slow minute of the machine does not favour either; and from the same shapes, for a backend may
    run only a few.
    """
    wanted = None if numbers is None else set(numbers)

    def times(name: str) -> dict[int, dict[tuple[int, ...], float]]:
        return {r["number"]: dict(zip([tuple(s) for s in r["shapes"]][len(r["shapes"]) - len(r[what]):], r[what],
                                      strict=True))
                for r in records_of(results, model, name) if r["mode"] == "time" and not r["error"] and r[what]}

    ours, theirs = times(backend), times(base)
    ratios = []
    for n in ours:
        shapes = [shape for shape in ours[n] if shape in theirs.get(n, {})]
        if shapes and (wanted is None or n in wanted):
            ratios.append(math.fsum(theirs[n][s] for s in shapes) / math.fsum(ours[n][s] for s in shapes))
    return median(ratios)


def cell(results: Results, model: str, backend: str, base: str = "eager") -> Cell:
    """The summary of one model on one backend."""
    records = records_of(results, model, backend)
    good = [r for r in records if not r["error"]]
    timed = [r for r in good if r["mode"] == "time"]
    counted = [r for r in good if r["mode"] == "memory"]
    later = [r["first_step"] for r in timed if r["number"] > 0] or [r["first_step"] for r in counted]
    peak = max((b for r in counted for b in r["memory"]), default=None)
    base_peak = max((b for r in records_of(results, model, base) if r["mode"] == "memory" and not r["error"]
                     for b in r["memory"]), default=None)
    same = {r["memory_method"] for r in counted} == {r["memory_method"] for r in records_of(results, model, base)
                                                     if r["mode"] == "memory"}
    numbers = {r["number"] for r in timed}
    rows = [row for r in good for row in r.get("arena", ())]
    return Cell(
        model, backend,
        cold=median(r["first_step"] for r in timed if r["number"] == 0),
        warm=median(later),
        fresh=speedup(results, model, backend, base, "fresh", [0]),
        fresh_warm=speedup(results, model, backend, base, "fresh", numbers - {0}),
        repeated=speedup(results, model, backend, base, "repeated"),
        p50=median(r["p50"] for r in timed), p99=median(r["p99"] for r in timed),
        programs=max((r["programs"] for r in timed if r["programs"] is not None), default=None),
        shapes=max((len(r["shapes"]) + len(r["apart"]) for r in timed), default=0),
        apart=max((seconds for r in timed for seconds in r["apart_times"]), default=None),
        fallbacks=max((r["stats"].get("uncompiled", 0) for r in good), default=0),
        eager_calls=max((r["stats"].get("eager_calls", 0) for r in timed), default=0),
        peak=peak, peak_ratio=peak / base_peak if peak is not None and base_peak and same else None,
        memory_method=counted[0]["memory_method"] if counted else "",
        launches=launched(results, model, backend), launch_ratio=per_inductor(results, model, backend),
        arena=greatest(rows), arena_wrong=disagreement(rows), checked=sum(len(r["checked"]) for r in records),
        mismatches=tuple(m for r in records for m in r["mismatches"]),
        errors=tuple(dict.fromkeys(r["error"] for r in records if r["error"])),
    )


def launched(results: Results, model: str, backend: str) -> int | None:
    """What one step launches; None where it was not counted."""
    counts = [r["launches"] for r in records_of(results, model, backend) if r.get("launches") and not r["error"]]
    return max((sum(count.values()) for count in counts), default=None)


def per_inductor(results: Results, model: str, backend: str) -> float | None:
    """Launches of one step relative to Inductor's with dynamic shapes."""
    own, base = launched(results, model, backend), launched(results, model, "inductor")
    return own / base if own is not None and base else None


def single_gap(results: Results, model: str) -> float | None:
    """How many times as long as programs of our own for one shape the one for all sizes takes, over their shapes; the
    median over rounds."""
    rounds = [r["gap"] for r in records_of(results, model, "anyshape-single") if r.get("gap")]
    return median(math.fsum(row[1] for row in rows) / math.fsum(row[2] for row in rows) for rows in rounds)


def greatest(rows: Iterable[Row]) -> int | None:
    """The greatest predicted peak; None of nothing."""
    return max((predicted for _, _, predicted, _ in rows if predicted is not None), default=None)


def disagreement(rows: Iterable[Row]) -> str:
    """The first row whose numbers differ, in words; empty when there is none."""
    for shape, program, predicted, counted in rows:
        if predicted != counted:
            sizes = "x".join(map(str, shape))
            return f"{program} at {sizes}: {predicted} B predicted, {counted} B counted"
    return ""


def cells(results: Results) -> list[Cell]:
    """Every summary, models in the order they ran, backends likewise."""
    return [cell(results, model, backend) for model in models_of(results) for backend in backends_of(results)
            if records_of(results, model, backend)]
