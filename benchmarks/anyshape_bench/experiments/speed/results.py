"""Results on disk, and the numbers that are read off them: ratios of medians within one run."""
from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyshape_bench.harness import result_files

FILE = "results.json"
Row = list[Any]  # of the arena: shape, name of the program, bytes predicted, bytes counted


@dataclass(slots=True)
class Results:
    """A run: where it ran, how, and the record of every process, in the order they ended."""

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `results.json`; another process never sees half a file."""
        return result_files.write(self, folder, FILE)


def load(path: Path) -> Results:
    """Reads the results of a folder or file.

    Raises:
        InputError: there is no such file, or it is no result of this benchmark.
    """
    return result_files.read(path, FILE, lambda data: Results(data["machine"], data["options"], data["records"]),
                       "benchmark results", "anyshape bench")


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, versions, the tree, date, and what ran beside."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "anyshape": _version("anyshape"),
        "commit": commit(),
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def commit() -> str:
    """The commit of the tree that is measured, with "+" where files differ from it; empty outside of a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    if not git("ls-files", __file__):  # the package is installed inside of somebody else's checkout
        return ""
    changed = git("status", "--porcelain", "--", ":(top)src", ":(top)benchmarks")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def median(values: Iterable[float]) -> float | None:
    """The middle value; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


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


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The mean of ratios; None of nothing."""
    logs = [math.log(v) for v in values if v]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def failed(results: Results) -> bool:
    """Did a process fail, a result differ from eager's, or a predicted peak from the counted one?"""
    return any(r["error"] or r["mismatches"] or disagreement(r.get("arena", ())) for r in results.records)
