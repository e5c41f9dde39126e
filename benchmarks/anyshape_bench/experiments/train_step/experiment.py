"""The train-step experiment, `anyshape bench step`: whole train steps on each backend.

    anyshape bench step llama bert vit --shapes 14 --rounds 1 --out steps
    anyshape bench step llama --autocast bfloat16 --out steps

One process per backend and round takes the time, another one counts memory and notes the losses, which are compared
with eager's; one more counts a step of several batches. Runs add up in a folder.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.speed import charts
from anyshape_bench.experiments.train_step.report import chart, report
from anyshape_bench.experiments.train_step.results import BACKENDS, EXACT, WHOLE, Steps
from anyshape_bench.harness.experiment import Experiment, Job, Report, named_models
from anyshape_bench.harness.runner import in_turns
from anyshape_bench.models.suite import SUITE, named_backends

DEFAULT = ("llama", "bert-train", "vit-train")
QUICK = "demo-llama"
SHAPES, QUICK_SHAPES, ROUNDS, ACCUMULATE = 14, 5, 1, 8
MEMORY_SHAPES, QUICK_MEMORY_SHAPES = 4, 2
CHART = Path("step.png")


class TrainSteps(Experiment[Steps]):
    """Each model on each backend, as in the module's head."""

    name = "step"
    worker = "anyshape_bench.experiments.train_step.worker"
    results = Steps
    adds_up = True

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """accumulate: batches of one step whose memory is counted too; 1: none. memory: count it, and compare losses.
        shapes, repeats, threads: 0 for the usual number."""
        models = tuple(dict.fromkeys(map(training, named_models(arguments, self.name))))
        quick = arguments.quick
        return {
            "models": list(models or ((QUICK,) if quick else DEFAULT)),
            "backends": list(step_backends(arguments.backends)), "rounds": arguments.rounds or ROUNDS,
            "shapes": arguments.shapes or (QUICK_SHAPES if quick else SHAPES),
            "memory_shapes": QUICK_MEMORY_SHAPES if quick else MEMORY_SHAPES, "repeats": arguments.repeats,
            "threads": arguments.threads, "autocast": arguments.autocast,
            "accumulate": ACCUMULATE if arguments.accumulate is None else arguments.accumulate,
            "memory": not arguments.no_memory}

    def jobs(self, options: dict[str, Any], found: Steps, out: Path) -> Iterator[Job]:
        rounds, backends = options["rounds"], options["backends"]
        shared = {key: options[key] for key in ("shapes", "memory_shapes", "repeats", "threads", "autocast")}

        def job(model: str, backend: str, number: int, mode: str, accumulate: int = 1) -> Job:
            return {"model": model, "backend": backend, "number": number, "mode": mode, "accumulate": accumulate,
                    "way": f"{options['autocast'] or EXACT}-{accumulate}"} | shared

        for model in options["models"]:
            for number, backend in in_turns(backends, rounds):
                yield job(model, backend, number, "time")
            if options["memory"]:
                for backend in backends:
                    yield job(model, backend, rounds, "memory")
                if WHOLE in backends and options["accumulate"] > 1:
                    yield job(model, WHOLE, rounds, "memory", options["accumulate"])

    def total(self, options: dict[str, Any]) -> int:
        return sum(1 for _ in self.jobs(options, Steps(), Path()))

    def label(self, job: Job) -> str:
        what = f"round {job['number'] + 1}" if job["mode"] == "time" else "memory and losses" \
            if job["accumulate"] == 1 else f"memory of {job['accumulate']} batches a step"
        return f"{job['model']} on {job['backend']}, {what}"

    def take(self, found: Steps, job: Job, answer: dict[str, Any]) -> None:
        if answer.pop("finished", True):
            found.take(job, answer)

    def report(self, found: Steps, folder: Path) -> Report:
        return report(found)

    def check_chart(self) -> None:
        charts.check_chart()

    def draw(self, found: Steps, path: Path | None, out: Path, measured: bool) -> list[str]:
        if path is None and (not measured or not charts.can_draw()):
            return []
        path = path or CHART
        drawn = chart(found, out / path if path.parent == Path() else path)
        return [f"Drew {drawn}" if drawn else "Drew no chart: no model was measured on eager too"]


def step_backends(text: str | None) -> tuple[str, ...]:
    """The backends of a list with commas; all, where none is given.

    Raises:
        ConfigError: the list is empty, or names one on which no train step is measured.
    """
    found = named_backends(text, BACKENDS)
    for backend in found:
        if backend not in BACKENDS:
            raise ConfigError(f"no train step is measured on {backend!r}", why="its step would not be comparable",
                              do=f"choose from {', '.join(BACKENDS)}")
    return found


def training(name: str) -> str:
    """The entry of the suite that trains the model of this name; any other name as it is."""
    entry = SUITE.get(name)
    other = f"{name}-train"
    return other if entry is not None and not entry.trains and other in SUITE else name
