"""Results of the train-step experiment: records of processes, and how losses compare with eager's."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from anyshape_bench.experiments.speed.results import Record, Results
from anyshape_bench.harness.result_files import StoredRun

EAGER, INDUCTOR, OURS, WHOLE = "eager", "inductor", "anyshape", "anyshape-step"
BACKENDS = (EAGER, INDUCTOR, OURS, WHOLE)
TOLERANCE = 1e-3  # of a loss
NOISE = 1.5  # how many times eager's own rounding error the losses may have in lower precision
MOVED = 0.05  # of how far all weights moved together
EXACT = "float32"


@dataclass(slots=True)
class StepRecord(Record):
    """What a worker found of train steps.

    Attributes:
        gradients: bytes of one set. losses: of every step of the process that counts memory; exact: the same in
            float32, by eager under autocast. moved: how far the weights went: the root of the sum of squares.
    """

    autocast: str = ""
    accumulate: int = 1
    gradients: int = 0
    losses: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    moved: float = 0.0


def empty(job: dict[str, Any], threads: int) -> StepRecord:
    """A record of nothing measured."""
    return StepRecord(job["model"], job["backend"], job["number"], job["mode"], threads=threads,
                      autocast=job["autocast"], accumulate=job["accumulate"])


@dataclass(slots=True)
class Steps(StoredRun):
    """All runs of a folder, with the record of every process."""

    FILE = "step.json"
    WHAT = "measurements of train steps"
    COMMAND = "anyshape bench step"
    records: list[dict[str, Any]] = field(default_factory=list)

    def take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """Adds what a process found. What the folder had of the same is gone; the first round drops earlier runs."""
        first = job["mode"] == "memory" or job["number"] == 0
        self.records = [r for r in self.records if any(r[key] != job[key] for key in
                                                       ("model", "backend", "mode", "autocast", "accumulate"))
                        or not (first or r["number"] == job["number"])]
        self.records.append(asdict(empty(job, job["threads"])) | answer)

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
