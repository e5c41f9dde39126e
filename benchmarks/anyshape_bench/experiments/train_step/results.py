"""Whole train steps, each backend in fresh processes: what is measured, and what was found.

    anyshape bench step llama bert vit --shapes 14 --rounds 1 --out steps
    anyshape bench step llama --autocast bfloat16 --out steps

One process per backend and round takes the time, another one counts memory and notes the losses, which are compared
with eager's; one more counts a step of several batches. Runs add up in a folder.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.speed.results import Results
from anyshape_bench.harness import result_files
from anyshape_bench.harness.runner import empty_record, in_turns
from anyshape_bench.models.suite import SUITE, named_backends

FILE = "step.json"
MODULE = "anyshape_bench.experiments.train_step.worker"
EAGER, INDUCTOR, OURS, WHOLE = "eager", "inductor", "anyshape", "anyshape-step"
BACKENDS = (EAGER, INDUCTOR, OURS, WHOLE)
DEFAULT = ("llama", "bert-train", "vit-train")
QUICK = "demo-llama"
SHAPES, QUICK_SHAPES, ROUNDS, ACCUMULATE = 14, 5, 1, 8
MEMORY_SHAPES, QUICK_MEMORY_SHAPES = 4, 2
TOLERANCE = 1e-3  # of a loss
NOISE = 1.5  # how many times eager's own rounding error the losses may have in lower precision
MOVED = 0.05  # of how far all weights moved together
EXACT = "float32"


def named(text: str | None) -> tuple[str, ...]:
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


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for. accumulate: batches of one step whose memory is counted too; 1: none. memory: count it, and
    compare losses. shapes, repeats, threads: 0 for the usual number."""

    models: tuple[str, ...]
    backends: tuple[str, ...] = BACKENDS
    rounds: int = ROUNDS
    shapes: int = SHAPES
    memory_shapes: int = MEMORY_SHAPES
    repeats: int = 0
    threads: int = 0
    autocast: str = ""
    accumulate: int = ACCUMULATE
    memory: bool = True

    def jobs(self) -> Iterator[dict[str, Any]]:
        """The processes in order."""
        for model in self.models:
            for number, backend in in_turns(self.backends, self.rounds):
                yield self._job(model, backend, number, "time")
            if self.memory:
                for backend in self.backends:
                    yield self._job(model, backend, self.rounds, "memory")
                if WHOLE in self.backends and self.accumulate > 1:
                    yield self._job(model, WHOLE, self.rounds, "memory", self.accumulate)

    def _job(self, model: str, backend: str, number: int, mode: str, accumulate: int = 1) -> dict[str, Any]:
        return {"model": model, "backend": backend, "number": number, "mode": mode, "accumulate": accumulate,
                "way": f"{self.autocast or EXACT}-{accumulate}", "shapes": self.shapes,
                "memory_shapes": self.memory_shapes, "repeats": self.repeats, "threads": self.threads,
                "autocast": self.autocast}


@dataclass(slots=True)
class Steps:
    """All runs of a folder: where, how the last one ran, and the record of every process.

    A record has the fields of `worker.Record`, and `autocast`, `accumulate`, `gradients` (bytes of one set), `losses`
    (of every step of the process that counts memory), `exact` (the same in float32, by eager under autocast) and
    `moved` (how far the weights went: the root of the sum of squares).
    """

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `step.json`; another process never sees half a file."""
        return result_files.write(self, folder, FILE)

    def take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """Adds what a process found. What the folder had of the same is gone; the first round drops earlier runs."""
        first = job["mode"] == "memory" or job["number"] == 0
        self.records = [r for r in self.records if any(r[key] != job[key] for key in
                                                       ("model", "backend", "mode", "autocast", "accumulate"))
                        or not (first or r["number"] == job["number"])]
        self.records.append(empty_record(job) | {key: job[key] for key in ("autocast", "accumulate")}
                            | {"gradients": 0, "losses": [], "exact": [], "moved": 0.0} | answer)

    def dtypes(self) -> list[str]:
        """Of autocast, in the order they were measured; "" for none."""
        return list(dict.fromkeys(r["autocast"] for r in self.records))

    def part(self, autocast: str) -> Results:
        """What was measured under one autocast, one batch a step, as results of the benchmark; losses compared."""
        records = [r for r in self.records if r["autocast"] == autocast and r["accumulate"] == 1]
        return Results(self.machine, self.options, [_compared(r, records) for r in records])

    def accumulated(self, model: str, autocast: str) -> dict[str, Any] | None:
        """The record of a step of several batches."""
        return next((r for r in self.records if r["accumulate"] > 1 and (r["model"], r["autocast"]) == (model, autocast)
                     and r["memory"]), None)


def load(path: Path) -> Steps:
    """Reads what `save` wrote, from the folder or the file.

    Raises:
        InputError: there is no such file, or it is another one.
    """
    return result_files.read(path, FILE, lambda data: Steps(data["machine"], data["options"], data["records"]),
                       "measurements of train steps", "anyshape bench step")


def training(name: str) -> str:
    """The entry of the suite that trains the model of this name; any other name as it is."""
    entry = SUITE.get(name)
    other = f"{name}-train"
    return other if entry is not None and not entry.trains and other in SUITE else name


def options_of(options: Options) -> dict[str, Any]:
    """For the file: how it was measured."""
    return asdict(options)


def _compared(record: dict[str, Any], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The record, with what differs from eager's, where eager has run the same steps."""
    eager = next((r for r in records if r["backend"] == EAGER and r["mode"] == "memory" and r["losses"]
                  and r["model"] == record["model"] and r["memory_shapes"] == record["memory_shapes"]), None)
    if eager is None or record["mode"] != "memory" or not record["losses"] or record["backend"] == EAGER:
        return record
    return record | {"checked": record["memory_shapes"], "mismatches": differences(record, eager)}


def differences(record: dict[str, Any], eager: dict[str, Any]) -> list[str]:
    """What differs in losses and in how far the weights moved, in words.

    In float32 each loss is eager's within TOLERANCE. Under autocast eager's own in float32 are taken as exact, and the
    root mean square of the error may be NOISE times eager's.
    """
    losses, wanted, exact = record["losses"], eager["losses"], eager["exact"]
    if len(losses) != len(wanted):
        return [f"{len(losses)} losses, eager has {len(wanted)}"]
    said = []
    if exact:
        error, own, size = (_size(a - b for a, b in zip(one, other, strict=True)) for one, other in
                            ((losses, exact), (wanted, exact), (exact, [0.0] * len(exact))))
        if not error <= NOISE * own + TOLERANCE * size:
            said.append(f"losses have an error of {error:.3g}, eager's own is {own:.3g}")
    else:
        for place, (loss, right) in enumerate(zip(losses, wanted, strict=True)):
            if not abs(loss - right) <= TOLERANCE * max(abs(right), TOLERANCE):
                said.append(f"the loss of step {place + 1} is {loss:.6g}, eager's is {right:.6g}")
    if not abs(record["moved"] - eager["moved"]) <= MOVED * eager["moved"]:
        said.append(f"all weights moved by {record['moved']:.4g}, eager's by {eager['moved']:.4g}")
    return said


def _size(values: Iterator[float]) -> float:
    """The root mean square."""
    every = list(values)
    return math.sqrt(math.fsum(value * value for value in every) / len(every))
