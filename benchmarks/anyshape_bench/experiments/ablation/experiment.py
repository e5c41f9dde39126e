"""The ablation, `anyshape bench --techniques`: what each technique of the compiler gives.

    anyshape bench --techniques llama bert

A model with all of them, and with one left out, measured in turn; a process for each model.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.ablation.report import report
from anyshape_bench.experiments.ablation.results import ALL, TECHNIQUES, Row, Techniques
from anyshape_bench.harness.experiment import Experiment, Job, Report, named_models
from anyshape_bench.harness.result_files import made

ROUNDS, SHAPES = 7, 3


class Ablation(Experiment[Techniques]):
    """All techniques of each model, in a process."""

    name = "techniques"
    worker = "anyshape_bench.experiments.ablation.worker"
    results = Techniques

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        names = named_models(arguments)
        if not names:
            raise ConfigError("no model to measure techniques on", why="each takes minutes", do="name some: llama bert")
        return {"models": list(names), "rounds": arguments.rounds or ROUNDS, "shapes": arguments.shapes or SHAPES,
                "threads": arguments.threads, "autocast": arguments.autocast}

    def jobs(self, options: dict[str, Any], found: Techniques, out: Path) -> Iterator[Job]:
        for model in options["models"]:
            yield options | {"model": model, "backend": "anyshape", "mode": "time", "techniques": list(TECHNIQUES)}

    def total(self, options: dict[str, Any]) -> int:
        return len(options["models"])

    def label(self, job: Job) -> str:
        return str(job["model"])

    def take(self, found: Techniques, job: Job, answer: dict[str, Any]) -> None:
        """The rows of a model that has finished; of one that failed, why."""
        if answer.get("error"):
            found.rows.append(Row(job["model"], ALL, [], error=answer["error"]))
        elif answer.get("finished", True):
            found.options["threads"] = answer["threads"]
            found.rows += made(list[Row], answer["rows"])

    def report(self, found: Techniques, folder: Path) -> Report:
        return report(found)
