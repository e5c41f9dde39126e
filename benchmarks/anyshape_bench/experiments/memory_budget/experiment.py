"""The memory-budget experiment, `anyshape bench memory`: train steps under a limit in bytes, beside PyTorch's ways.

    anyshape bench memory llama t5-train unet
    anyshape bench memory llama-32 --planning

The *ways* are timed, and their peaks counted by the C library's blocks (measure/memory_counter.py), above parameters
and optimiser state, at the same shapes: PyTorch's, then ours without a limit, at shares of what it takes then, at what
each other way took, and at the least that works. The other parts are of ours alone: calls at many shapes with six
limits each, epochs of batches of sentences, planning, layouts and orders. Ours are two: forward and backward compiled,
with the optimiser of PyTorch, and the whole step as one program. Each way and each part of each is a process.
"""
from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.memory_budget.report import report
from anyshape_bench.experiments.memory_budget.results import (
    APART,
    CALLS,
    LIMITED,
    OWN,
    PARTS,
    PROGRAMS,
    ROUNDS,
    SEARCHES,
    SHAPES,
    WAYS,
    Limits,
    name_of,
)
from anyshape_bench.experiments.train_step.experiment import step_backends
from anyshape_bench.experiments.train_step.results import WHOLE
from anyshape_bench.harness.experiment import Experiment, Job, Report, named_models
from anyshape_bench.models.suite import SUITE


class MemoryBudget(Experiment[Limits]):
    """PyTorch's ways, then each part of each of ours, as in the module's head; what a folder has of other models and
    parts stays."""

    name = "memory"
    worker = "anyshape_bench.experiments.memory_budget.worker"
    results = Limits
    adds_up = True

    def options(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """What is measured of every model: whether the ways are, by part its number, or None for none of it, and the
        rest."""
        said = {part: getattr(arguments, part) for part in PARTS}
        some = arguments.ways or any(said.values())
        parts = said if some else {part: usual if said[part] is None and part not in APART else None
                                   for part, usual in PARTS.items()}
        ways = arguments.ways or not some
        names = named_models(arguments, self.name)
        if not names:
            # what hardly runs a model is there for inference too
            if ways or any(parts[part] for part in ("calls", "epochs", "planning")):
                raise ConfigError("no model to measure under limits", why="each takes minutes",
                                  do="name some that train: demo-llama llama-small llama llama-12 llama-32 "
                                     "llama-1b-like t5-train unet, or your own")
            names = tuple(SUITE)
        return {"models": list(names), "ways": ways, **{part: number or None for part, number in parts.items()},
                "backends": list(step_backends(arguments.backends)), "shapes": arguments.shapes or SHAPES,
                "rounds": arguments.rounds or ROUNDS, "threads": arguments.threads, "autocast": arguments.autocast}

    def jobs(self, options: dict[str, Any], found: Limits, out: Path) -> Iterator[Job]:
        """The processes in order; those of our ways are told what the others, by then in `found`, took."""
        shared = {key: value for key, value in options.items() if key != "models"}
        for model in options["models"]:
            for way in ways_of(options):
                yield {"model": model, "backend": WAYS[way].backend, "way": way, "settings": asdict(WAYS[way])} | shared
            for program in programs_of(model, options):
                if options["ways"]:
                    peaks = {row.way: row.peaks for row in found.rows
                             if row.model == model and row.way in WAYS and row.peaks}
                    yield {"model": model, "backend": program, "way": LIMITED, "peaks": peaks} | shared
                for part in parts_of(options):
                    number = options[part]
                    if number == OWN:
                        number = SUITE[model].calls if model in SUITE else CALLS
                    yield {"model": model, "backend": program, "way": part} | shared | {part: number}

    def total(self, options: dict[str, Any]) -> int:
        return sum(1 for _ in self.jobs(options, Limits(), Path()))

    def label(self, job: Job) -> str:
        return name_of(job)

    def seconds(self, job: Job, limit: float) -> float:
        """`limit`, beside the time that searches are given, of two programs."""
        return limit + (2 * SEARCHES * job["shapes"] * job["orders"] if job["way"] == "orders" else 0)

    def take(self, found: Limits, job: Job, answer: dict[str, Any]) -> None:
        found.take(job, answer)

    def report(self, found: Limits, folder: Path) -> Report:
        return report(found)


def ways_of(options: dict[str, Any]) -> list[str]:
    """PyTorch's, on the backends that are named."""
    return [way for way in WAYS if options["ways"] and WAYS[way].backend in options["backends"]]


def programs_of(model: str, options: dict[str, Any]) -> list[str]:
    """Ours that are named; a model that does not train has no whole step."""
    trains = model not in SUITE or SUITE[model].trains
    return [program for program in PROGRAMS if program in options["backends"] and (trains or program != WHOLE)]


def parts_of(options: dict[str, Any]) -> list[str]:
    """Those that are measured beside the ways: the ones that have a number."""
    return [part for part in PARTS if options[part] is not None]


def processes(model: str, options: dict[str, Any]) -> int:
    """How many there are for a model."""
    each = len(parts_of(options)) + (1 if options["ways"] else 0)
    return len(ways_of(options)) + len(programs_of(model, options)) * each
