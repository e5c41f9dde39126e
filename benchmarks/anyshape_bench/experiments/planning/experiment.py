"""The planning experiment, `anyshape bench plan`: memory plans of whole train steps, against other planners."""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.planning.report import report
from anyshape_bench.experiments.planning.results import DEEP, Plans
from anyshape_bench.experiments.planning.train_step_problems import NETWORKS, file_of
from anyshape_bench.harness.experiment import Experiment, Job, Report, named
from anyshape_bench.harness.tables import Table

PROBLEMS = "problems"  # a folder of their texts
DEFAULT = ("alexnet", "vgg16", "mobilenet-v2", "efficientnet-b0", "vit", "bert", "gpt2")
BATCHES, QUICK_BATCHES = (1, 32), (1,)


class Planning(Experiment[Plans]):
    """A process for each network; it is not traced where the folder has its problems."""

    name = "plan"
    worker = "anyshape_bench.experiments.planning.worker"
    results = Plans
    adds_up = True

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        names = named(arguments, self.name)
        for name in names:
            if name not in NETWORKS:
                raise ConfigError(f"no train step of {name!r} is planned", why="there is no network of that name",
                                  do=f"choose from {', '.join(NETWORKS)}")
        quick = arguments.quick
        return {"models": list(names or (DEFAULT[:1] if quick else (*DEFAULT, DEEP))), "threads": arguments.threads,
                "seconds": arguments.program_seconds, "batches": list(QUICK_BATCHES if quick else BATCHES)}

    def jobs(self, options: dict[str, Any], found: Plans, out: Path) -> Iterator[Job]:
        folder = (out / PROBLEMS).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for name in options["models"]:
            graph = found.graphs.get(name, {})
            there = all(str(batch) in graph.get("problems", {}) and file_of(folder, name, batch).exists()
                        for batch in options["batches"])
            yield {"model": name, "backend": "anyshape", "mode": "time", "batches": options["batches"],
                   "folder": str(folder), "graph": graph if there else {}, "threads": options["threads"],
                   "seconds": 0.0 if name == DEEP else options["seconds"]}

    def total(self, options: dict[str, Any]) -> int:
        return len(options["models"])

    def label(self, job: Job) -> str:
        return str(job["model"])

    def take(self, found: Plans, job: Job, answer: dict[str, Any]) -> None:
        for one in answer.get("planned", ()):
            found.take(one)
        if answer.get("graph") or answer.get("error"):
            found.graphs[job["model"]] = answer.get("graph", {}) | (
                {"error": answer["error"]} if answer.get("error") else {})

    def report(self, found: Plans, folder: Path) -> Report:
        return report(found)

    def listing(self) -> Table:
        """The networks."""
        return Table("networks of anyshape bench plan", ("name", "what"),
                     [(one.name, one.summary) for one in NETWORKS.values()], words=range(2))
