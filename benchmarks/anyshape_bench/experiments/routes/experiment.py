"""The routing experiment, `anyshape bench routes`: dynamic networks against plain loops, Inductor, padding, grouped_mm.

    anyshape bench routes --quick
    anyshape bench routes --only switch,mixtral --threads 2 --out docs/results/benchmarks-routes
    anyshape bench routes --show docs/results/benchmarks-routes --write-document docs/benchmarks-routes.md

One process per case and round measures all ways in turn and compares their results, others count the memory of one
way each. Runs add up in a folder.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyshape_bench.experiments.routes.report import report
from anyshape_bench.experiments.routes.results import Routes
from anyshape_bench.harness.experiment import Experiment, Job, Report, named
from anyshape_bench.harness.tables import Table
from anyshape_bench.routes.case import Case
from anyshape_bench.routes.catalog import catalog, chosen

ROUNDS, PASSES, QUICK_PASSES = 1, 9, 2


class RoutingNetworks(Experiment[Routes]):
    """Each case, as in the module's head."""

    name = "routes"
    worker = "anyshape_bench.experiments.routes.worker"
    results = Routes
    adds_up = True

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """passes: over seen batches, at most. memory: count it."""
        words = (*named(arguments, self.name), *filter(None, map(str.strip, arguments.only.split(","))))
        quick = arguments.quick
        return {"models": chosen(words, quick), "rounds": arguments.rounds or ROUNDS, "threads": arguments.threads,
                "passes": arguments.repeats or (QUICK_PASSES if quick else PASSES), "quick": quick,
                "memory": not arguments.no_memory}

    def jobs(self, options: dict[str, Any], found: Routes, out: Path) -> Iterator[Job]:
        shared = {key: options[key] for key in ("threads", "passes", "quick")} | {"backend": "all"}
        for model in options["models"]:
            for number in range(options["rounds"]):
                yield shared | {"model": model, "number": number, "mode": "time"}
            case = catalog()[model]
            ways = case.memory if options["memory"] and isinstance(case, Case) else ()
            for number, way in enumerate(ways):
                yield shared | {"model": model, "number": number, "mode": "memory", "way": way}

    def total(self, options: dict[str, Any]) -> int:
        return sum(1 for _ in self.jobs(options, Routes(), Path()))

    def label(self, job: Job) -> str:
        return f"{job['model']}, {job.get('way', '')} {job['mode']}"

    def take(self, found: Routes, job: Job, answer: dict[str, Any]) -> None:
        if answer.pop("finished", True):
            row = catalog()[job["model"]].row
            found.take({"case": job["model"], "row": row, "mode": job["mode"], "number": job["number"],
                        "threads": job["threads"]} | answer)

    def report(self, found: Routes, folder: Path) -> Report:
        return report(found)

    def listing(self) -> Table:
        """The cases."""
        return Table("cases of anyshape bench routes", ("name", "row", "trains", "with --quick"),
                     [(one.name, one.row, "yes" if isinstance(one, Case) and one.trains else "no",
                       "yes" if one.quick else "no") for one in catalog().values()], words=range(4))
