"""Targets of dynamic networks: per row the number of the paper (Brainstorm, OSDI'23), the aim, what was measured."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anyshape_bench.experiments.routes.results import Routes
from anyshape_bench.harness.targets import Measure, worst
from anyshape_bench.measure.statistics import geometric_mean, median
from anyshape_bench.routes.names import BASELINES, EAGER, GROUPED, INDUCTOR, LOOP, PADDED

INDUCTOR_GROUPED = "inductor-grouped_mm"  # transformers' own choice


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: its key, the paper's number in words, and what is aimed at."""

    key: str
    paper: str
    measures: Callable[[Routes, str], Iterator[Measure]]


def mean(found: Routes, row: str, name: str, way: str, aim: float, fresh: bool = False,
         keep: Callable[[str], bool] = lambda case: True) -> Measure:
    """The geometric mean over a row's cases of how many times faster than a way we are."""
    ratios = {case: ratio for case in found.rows(row) if keep(case) and (ratio := found.ratio(case, way, fresh))}
    note = f"geometric mean of {len(ratios)}" if len(ratios) > 1 else f"`{next(iter(ratios), row)}`"
    return Measure(name, aim, False, geometric_mean(ratios.values()), note)


def value(found: Routes, row: str, name: str, key: str, aim: float, most: bool, unit: str = "x") -> Measure:
    """A number of a study."""
    values = [one.values[key] for case in found.rows(row) for one in found.of(case) if key in one.values]
    return Measure(name, aim, most, median(values), f"`{row}`", unit)


def switch(found: Routes, row: str) -> Iterator[Measure]:
    yield mean(found, row, "Switch encoder, against eager", EAGER, 3.3)
    yield mean(found, row, "Switch encoder, against padded products", PADDED, 2.0)
    yield mean(found, row, "Switch encoder, against grouped_mm", GROUPED, 1.2)
    yield worst("Switch encoder, least of all cells and baselines", 1.0, False,
                {f"{case} against {way}": ratio for case in found.rows(row) for way in BASELINES
                 if (ratio := found.ratio(case, way))})
    yield worst("Switch encoder, peak memory of what is active", 1.05, True, active_ratios(found, row))


def active_ratios(found: Routes, row: str) -> dict[str, float]:
    """Per case our greatest peak over its batches, to the most bytes that the loads of a batch alone need: memory is
    kept for the next batch, a smaller one does not give it back."""
    ratios: dict[str, float] = {}
    for case in found.rows(row):
        for record in found.of(case, "memory"):
            ours = record.ours()
            if ours is not None and ours.peaks and record.active:
                ratios[f"{case}, {ours.name}"] = max(ours.peaks) / max(record.active)
    return ratios


def livesr(found: Routes, row: str) -> Iterator[Measure]:
    yield mean(found, row, "LiveSR, published loads, against eager", EAGER, 3.0)
    yield mean(found, row, "LiveSR, against our compiler on the plain loop", LOOP, 1.3)


def branches(found: Routes, row: str) -> Iterator[Measure]:
    yield mean(found, row, "64 small branches and more, against eager", EAGER, 8.0,
               keep=lambda case: int(case.split("-")[1]) >= 64)


def against_eager(name: str, aim: float) -> Callable[[Routes, str], Iterator[Measure]]:
    def measures(found: Routes, row: str) -> Iterator[Measure]:
        yield mean(found, row, f"{name}, against eager", EAGER, aim)

    return measures


def adopted(name: str) -> Callable[[Routes, str], Iterator[Measure]]:
    def measures(found: Routes, row: str) -> Iterator[Measure]:
        for kind in ("inference", "train"):
            case, what = f"{row}-{kind}", f"{name}, {kind}"
            yield worst(f"{what}, new loads, against Inductor", 1.3, False,
                        {f"{case} against {way}": ratio for way in (INDUCTOR, INDUCTOR_GROUPED)
                         if (ratio := found.ratio(case, way, True))})
            counts = [ours.recompiled for one in found.of(case) if (ours := one.ours()) and ours.recompiled is not None]
            yield Measure(f"{what}, recompilations", 0, True, max(counts, default=None), f"`{case}`", "")

    return measures


def preload(found: Routes, row: str) -> Iterator[Measure]:
    yield value(found, row, "preload, memory less than all in memory", "memory_saved", 0.42, False, "%")
    yield value(found, row, "preload, latency of all in memory", "latency", 1.1, True)
    yield value(found, row, "preload, steps above the cap, of 10,000", "steps_above_cap", 0, True, "")


def profiling(found: Routes, row: str) -> Iterator[Measure]:
    yield value(found, row, "profiling overhead", "overhead", 0.01, True, "0.01 %")
    yield value(found, row, "profiling overhead, upper end of its confidence interval", "overhead_high", 0.01, True,
                "0.01 %")


def misprediction(found: Routes, row: str) -> Iterator[Measure]:
    yield value(found, row, "mispredictions forced from 0 to 100 %, results with other bits", "unequal", 0, True, "")
    yield value(found, row, "mispredictions, speed of the unspeculated run, least", "least_ratio", 0.95, False)


def drift(found: Routes, row: str) -> Iterator[Measure]:
    yield value(found, row, "drift, speed of the general path, least", "least_ratio", 1.0, False)
    yield value(found, row, "drift, speed of the newly tuned optimum after 1 s", "after_one_second", 0.95, False)


def placement(found: Routes, row: str) -> Iterator[Measure]:
    yield value(found, row, "placement, traffic less than contiguous, correlated traces held out", "less_traffic", 0.42,
                False, "%")
    yield value(found, row, "placement, traffic less than EPLB's", "less_traffic_than_eplb", 0.42, False, "%")
    yield value(found, row, "placement, changes proposed on uncorrelated traces", "needless_changes", 0, True, "")


ROWS: dict[str, Row] = {row.key: row for row in (
    Row("switch", "3.63x eager, 3.33x padded", switch),
    Row("livesr", "8.62x", livesr),
    Row("branches", "41.8x", branches),
    Row("msdnet", "11.7x", against_eager("MSDNet with early exit, eight settings", 2.0)),
    Row("dynamic_routing", "1.7x", against_eager("DynamicRouting", 1.5)),
    Row("taskmoe", "1.17x", against_eager("TaskMoE, single machine", 1.5)),
    Row("swinv2moe", "1.52x", against_eager("SwinV2-MoE, single machine", 1.5)),
    Row("mixtral", "-", adopted("Mixtral, adopted")),
    Row("qwen3moe", "-", adopted("Qwen3-MoE, adopted")),
    Row("deepseekv3", "-", adopted("DeepSeek-V3, adopted")),
    Row("preload", "-43.5 %; 1.97x of on-demand", preload),
    Row("profiling", "< 1 %", profiling),
    Row("misprediction", "trusted", misprediction),
    Row("drift", "4.65x falls to 2.11x", drift),
    Row("placement", "-42 to -87 % traffic", placement),
)}


def measures(found: Routes) -> list[tuple[str, Measure]]:
    """(the paper's number, measure) of every row, measured or not."""
    return [(row.paper, one) for row in ROWS.values() for one in row.measures(found, row.key)]
