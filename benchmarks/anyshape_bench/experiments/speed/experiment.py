"""The speed experiment, `anyshape bench`: time and memory of models whose shapes change, on each backend."""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyshape_bench.experiments.roofline.results import beside
from anyshape_bench.experiments.speed import charts
from anyshape_bench.experiments.speed.report import report
from anyshape_bench.experiments.speed.results import Record, Results
from anyshape_bench.harness.experiment import Experiment, Job, Report, named_models
from anyshape_bench.harness.runner import in_turns
from anyshape_bench.models.suite import BACKENDS, QUICK_SHAPES, default_names, named_backends


class Speed(Experiment[Results]):
    """Each model on each backend: rounds that are timed, the first with empty caches, then a process that counts memory
    and compares results with eager's."""

    name = "bench"
    worker = "anyshape_bench.experiments.speed.worker"
    results = Results

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        quick = arguments.quick
        return {
            "models": list(named_models(arguments) or default_names(quick)),
            "backends": list(named_backends(arguments.backends, BACKENDS)),
            "rounds": arguments.rounds or (1 if quick else 2),
            "shapes": arguments.shapes or (QUICK_SHAPES if quick else 0),
            "repeats": arguments.repeats, "threads": arguments.threads, "autocast": arguments.autocast,
            "memory": not arguments.no_memory, "limit": arguments.limit,
        }

    def jobs(self, options: dict[str, Any], found: Results, out: Path) -> Iterator[Job]:
        shared = {key: options[key] for key in ("shapes", "repeats", "threads", "autocast")}
        for model in options["models"]:
            for number, backend in in_turns(options["backends"], options["rounds"]):
                yield {"model": model, "backend": backend, "number": number, "mode": "time"} | shared
            for backend in options["backends"] if options["memory"] else ():
                yield {"model": model, "backend": backend, "number": options["rounds"], "mode": "memory"} | shared

    def total(self, options: dict[str, Any]) -> int:
        return len(options["models"]) * len(options["backends"]) * (options["rounds"] + options["memory"])

    def label(self, job: Job) -> str:
        what = f"round {job['number'] + 1}" if job["mode"] == "time" else "memory and results"
        return f"{job['model']} on {job['backend']}, {what}"

    def take(self, found: Results, job: Job, answer: dict[str, Any]) -> None:
        if answer.pop("finished", True):
            empty = Record(job["model"], job["backend"], job["number"], job["mode"], threads=job["threads"])
            found.records.append(asdict(empty) | answer)

    def report(self, found: Results, folder: Path) -> Report:
        return report(found, beside(folder))

    def check_chart(self) -> None:
        charts.check_chart()

    def draw(self, found: Results, path: Path | None, out: Path, measured: bool) -> list[str]:
        said = [f"Drew {len(charts.charts(found, out))} charts in {out}"] if measured else []
        if path is not None:
            drawn = charts.chart(found, out / path if path.parent == Path() else path)
            said.append(f"Drew {drawn}" if drawn else "Drew no chart: no model was measured on eager too")
        return said
