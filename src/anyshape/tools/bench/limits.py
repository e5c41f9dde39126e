"""Train steps under a limit in bytes, beside PyTorch's ways to save memory: peaks and times, each in a fresh process.

    anyshape bench memory llama t5-train unet

Peaks are counted by the C library's blocks (memory.py), above parameters and optimiser state. Of every way the same
shapes are run. Ours then runs without a limit, at shares of what it takes then, at what each other way took, and, to be
sure, at many shapes with six limits each.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import stored

FILE = "memory.json"
MODULE = "anyshape.tools.bench.limits_worker"
OURS = "anyshape"
SHAPES, ROUNDS, CALLS = 2, 5, 20
SHARES = (0.6, 0.4)  # of what a step takes without a limit, timed
EPOCH, EPOCH_SHARE = 12, 0.6  # steps, and what share of the greatest batch's need the limit is
EPOCHS = ("no limit", "padded", "limit")
CALL_SHARES = (1.0, 0.9, 0.75, 0.6, 0.5, 0.4)  # at many shapes


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a model. backend: eager or inductor. checkpoint: what eager keeps of a layer: "" for everything,
    "nothing" (torch.utils.checkpoint), "products" (its selective form). budget: Inductor's activation_memory_budget."""

    backend: str
    checkpoint: str = ""
    budget: float = 1.0


WAYS = {
    "eager": Way("eager"),
    "eager, layers checkpointed": Way("eager", "nothing"),
    "eager, products kept": Way("eager", "products"),
    "inductor": Way("inductor"),
    "inductor, budget 0.5": Way("inductor", budget=0.5),
    "inductor, budget 0.25": Way("inductor", budget=0.25),
}


@dataclass(slots=True)
class Row:
    """A way at the shapes of its model. Bytes and seconds.

    Attributes:
        way: a name of WAYS; or of ours: "no limit", "60 %" of what that takes, or "as NAME", the peak of that way.
        peaks: counted; seconds: medians.
        limits, predicted: of ours, the limits, and what its record says that forward and backward take together.
        again: of ours, values that are computed again.
        error: why there are no numbers.
    """

    model: str
    way: str
    shapes: list[list[int]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class Call:
    """One step at one shape under one limit. need: what the record says; peak: counted; arena: whether the bytes of
    the arena that forward and backward wrote are the predicted ones; refused: a LimitError came first."""

    shape: list[int]
    limit: int
    need: int = 0
    peak: int = 0
    arena: bool = True
    refused: bool = False


@dataclass(slots=True)
class Epoch:
    """Batches of one count of sentences under one limit, once through: lengths as in a set of instructions.

    Attributes:
        way: "no limit" (as long as it takes what it needs), "padded" (into buckets) or "limit".
        fits: whether every step keeps to the limit; of "no limit", whether it would.
        seconds: of all steps; peak: the greatest, counted; words: real ones.
    """

    way: str
    batch: int
    limit: int
    words: int
    fits: bool = True
    seconds: float = 0.0
    peak: int = 0


@dataclass(slots=True)
class Ours:
    """What is known of our programs of a model beside their rows.

    Attributes:
        least: the smallest limit that works, by shape. unlimited: seconds of a step where a limit is set that is never
            reached, and where none is, by shape. calls: at many shapes. planning: seconds until a step at a shape
            never seen begins to run, forward and backward together, by shape of `calls`, under the limit that is a
            share of CALL_SHARES in turn. epochs: of a model of words, those of three counts of sentences.
    """

    model: str
    least: list[int] = field(default_factory=list)
    unlimited: list[list[float]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    planning: list[float] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)


@dataclass(slots=True)
class Limits:
    """A run: where and how, its rows in order, and what else is known of ours."""

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    ours: list[Ours] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `memory.json`; another process never sees half a file."""
        return stored.write(self, folder, FILE)

    def of(self, model: str, way: str) -> Row | None:
        """The row of a model that was measured in that way."""
        return next((row for row in self.rows if (row.model, row.way) == (model, way)), None)

    def take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """Adds what a process found; one that died has only an `error`."""
        if "rows" not in answer:
            self.rows.append(Row(job["model"], job["way"], error=answer["error"]))
            return
        self.rows += [Row(**row) for row in answer["rows"]]
        if answer["ours"] is not None:
            self.ours.append(_ours(answer["ours"]))


def _ours(data: dict[str, Any]) -> Ours:
    return Ours(**{**data, "calls": [Call(**call) for call in data["calls"]],
                   "epochs": [Epoch(**epoch) for epoch in data["epochs"]]})


def load(path: Path) -> Limits:
    """Reads what `save` wrote, from the folder or the file.

    Raises:
        InputError: there is no such file, or it is another one.
    """
    return stored.read(path, FILE, lambda data: Limits(data["machine"], data["options"],
                                                       [Row(**row) for row in data["rows"]],
                                                       [_ours(one) for one in data["ours"]]),
                       "measurements under limits", "anyshape bench memory")


def jobs(models: list[str], options: dict[str, Any], found: Limits) -> Iterator[dict[str, Any]]:
    """The processes in order; those of ours are told what the others, by then in `found`, took."""
    for model in models:
        for way in WAYS:
            yield {"model": model, "backend": WAYS[way].backend, "way": way, "settings": asdict(WAYS[way])} | options
        peaks = {row.way: row.peaks for row in found.rows if row.model == model and row.peaks}
        yield {"model": model, "backend": OURS, "way": OURS, "peaks": peaks} | options
