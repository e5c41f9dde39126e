"""Train steps under a limit in bytes, beside PyTorch's ways to save memory: what is measured, and what was found.

    anyshape bench memory llama t5-train unet
    anyshape bench memory llama-32 --planning

The *ways* are timed, and their peaks counted by the C library's blocks (memory.py), above parameters and optimiser
state, at the same shapes: PyTorch's, then ours without a limit, at shares of what it takes then, at what each other
way took, and at the least that works. The other parts are of ours alone: calls at many shapes with six limits each,
epochs of batches of sentences, planning, layouts and orders. Ours are two: forward and backward compiled, with the
optimiser of PyTorch, and the whole step as one program. Each way and each part of each is a process.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyshape_bench.experiments.train_step.results import OURS, WHOLE
from anyshape_bench.harness import result_files
from anyshape_bench.models.suite import SUITE

FILE = "memory.json"
MODULE = "anyshape_bench.experiments.memory_budget.worker"
PROGRAMS = (OURS, WHOLE)
OWN = -1  # as many as the suite has for the model
# part -> how much of it there is where nothing is said: random shapes, batches of each count of sentences, shapes never
# seen, shapes that are laid out, seconds for each search of an order
PARTS = {"calls": OWN, "epochs": 8, "planning": 50, "layouts": 50, "orders": 60}
APART = ("orders",)  # measured only where it is asked for
SHAPES, ROUNDS, CALLS = 2, 5, 20
SHARES = (0.6, 0.4)  # of what a step takes without a limit, timed
COUNTS, EPOCH_SHARE = (0.5, 0.75, 1.0), 0.6  # of the greatest batch, its sentences; and of its greatest need, the limit
EPOCHS = ("no limit", "padded", "limit")
CALL_SHARES = (1.0, 0.9, 0.75, 0.6, 0.5, 0.4)  # at many shapes
PLANNED_SHARES = (1.0, 0.6, 0.4)  # of what each shape takes, for shapes never seen
SEARCHES = 4  # that look for an order
LIMITED = "limits"  # the job of all ways of one of our programs


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
        way: a name of WAYS; or of ours: "no limit", "60% of that", "as NAME", the peak of that way, or "least limit".
        peaks: counted; seconds: medians.
        limits, predicted: of ours, the limits, and what its record says that forward and backward take together.
        again: of ours, values that are computed again.
        error: why there are no numbers.
        program: of ours, which one: of PROGRAMS.
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
    program: str = OURS


@dataclass(slots=True)
class Call:
    """One step at one shape under one limit. need: what the record says; peak: what it takes, counted; arena: whether
    the bytes of the arena that forward and backward wrote are the predicted ones; refused: a LimitError came first,
    where no way to drop values needs less than `bound`."""

    shape: list[int]
    limit: int
    need: int = 0
    peak: int = 0
    arena: bool = True
    refused: bool = False
    bound: int = 0


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
class Choice:
    """What a forward and its backward keep at a shape never seen, under a share of what they take there without a
    limit. seconds: of the processor, until it is chosen and laid out, or refused."""

    shape: list[int]
    share: float
    seconds: float
    refused: bool = False


@dataclass(slots=True)
class Laid:
    """The arena of a program at one shape, and the most bytes of it alive at one step. No limit is set."""

    program: str
    shape: list[int]
    arena: int
    alive: int


@dataclass(slots=True)
class Order:
    """The order of a program's steps at one shape: the most bytes alive at one step, in the arena and beside it.

    Attributes:
        ours: in the order that serves every shape; best: in the best that was found for this one.
        by: the search that found it, or that none could, since `ours` is at the bound.
        seconds: of the processor, of all searches.
    """

    program: str
    shape: list[int]
    ours: int
    best: int
    by: str
    seconds: float


@dataclass(slots=True)
class Ours:
    """What is known of one of our programs of a model beside its rows.

    Attributes:
        least: the smallest limit that works, by shape. unlimited: seconds of a step where a limit is set that is never
            reached, and where none is, by shape. The others: see their classes.
    """

    model: str
    least: list[int] = field(default_factory=list)
    unlimited: list[list[float]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)
    planning: list[Choice] = field(default_factory=list)
    layouts: list[Laid] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    program: str = OURS

    def add(self, more: Ours) -> None:
        """Adds what another process found of the same model."""
        for name in LISTS:
            getattr(self, name).extend(getattr(more, name))


KINDS: dict[str, Any] = {"calls": Call, "epochs": Epoch, "planning": Choice, "layouts": Laid, "orders": Order}
LISTS = ("least", "unlimited", *KINDS)


@dataclass(slots=True)
class Limits:
    """A run: where and how, its rows in order, and what else is known of ours."""

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    ours: list[Ours] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `memory.json`; another process never sees half a file."""
        return result_files.write(self, folder, FILE)

    def of(self, model: str, way: str, program: str = OURS) -> Row | None:
        """The row of a model that was measured in that way, by that program if it is one of ours."""
        return next((row for row in self.rows
                     if (row.model, row.way) == (model, way) and (way in WAYS or row.program == program)), None)

    def known(self, model: str, program: str) -> Ours | None:
        """What is known of a program beside its rows."""
        return next((one for one in self.ours if (one.model, one.program) == (model, program)), None)

    def take(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """Puts what a process found in the place of what was known of its job; of one that died, or was ended, what it
        had by then."""
        self._forget(job)
        rows = [Row(**row) for row in answer.get("rows", ())]
        if "error" in answer:
            row = next((row for row in rows if row.way == job["way"]), None) or Row(
                job["model"], job["way"], program=OURS if job["way"] in WAYS else job["backend"])
            row.error = answer["error"]
            rows = [row, *(one for one in rows if one is not row)]
        elif not answer.get("finished", True):
            self.options["unfinished"].append(name_of(job))
        self.rows += rows
        if answer.get("ours") is not None:
            more = _ours(answer["ours"])
            known = self.known(more.model, more.program)
            if known is None:
                self.ours.append(more)
            else:
                known.add(more)

    def _forget(self, job: dict[str, Any]) -> None:
        model, way, program = job["model"], job["way"], job["backend"]
        self.rows = [row for row in self.rows if row.model != model or (
            row.way != way if way in WAYS else row.way in WAYS or row.program != program or (
                row.way in PARTS if way == LIMITED else row.way != way))]
        known = self.known(model, program)
        if known is not None:
            for name in ("least", "unlimited") if way == LIMITED else (way,) if way in PARTS else ():
                getattr(known, name).clear()
        unfinished = self.options.get("unfinished", [])
        self.options["unfinished"] = [name for name in unfinished if name != name_of(job)]


def _ours(data: dict[str, Any]) -> Ours:
    return Ours(**data | {name: [kind(**one) for one in data[name]] for name, kind in KINDS.items()})


def load(path: Path) -> Limits:
    """Reads what `save` wrote, from the folder or the file.

    Raises:
        InputError: there is no such file, or it is another one.
    """
    return result_files.read(path, FILE, lambda data: Limits(data["machine"], data["options"],
                                                       [Row(**row) for row in data["rows"]],
                                                       [_ours(one) for one in data["ours"]]),
                       "measurements under limits", "anyshape bench memory")


def name_of(job: dict[str, Any]) -> str:
    """What a job is called where it is shown."""
    program = f"{job['backend']}, " if job["backend"] in PROGRAMS else ""
    return f"{job['model']}: {program}{job['way']}"


def jobs(models: list[str], options: dict[str, Any], found: Limits) -> Iterator[dict[str, Any]]:
    """The processes in order; those of our ways are told what the others, by then in `found`, took."""
    for model in models:
        for way in ways_of(options):
            yield {"model": model, "backend": WAYS[way].backend, "way": way, "settings": asdict(WAYS[way])} | options
        for program in programs_of(model, options):
            if options["ways"]:
                peaks = {row.way: row.peaks for row in found.rows
                         if row.model == model and row.way in WAYS and row.peaks}
                yield {"model": model, "backend": program, "way": LIMITED, "peaks": peaks} | options
            for part in parts_of(options):
                number = options[part]
                if number == OWN:
                    number = SUITE[model].calls if model in SUITE else CALLS
                yield {"model": model, "backend": program, "way": part} | options | {part: number}


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


def seconds_of(options: dict[str, Any], job: dict[str, Any], limit: float) -> float:
    """After which time a process is ended: `limit`, beside the time that searches are given, of two programs."""
    return limit + (2 * SEARCHES * options["shapes"] * job["orders"] if job["way"] == "orders" else 0)
