"""Results of the memory-budget experiment: ways to save memory, and what is known of our programs under limits."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyshape_bench.experiments.train_step.results import OURS, WHOLE
from anyshape_bench.harness.result_files import StoredRun, made

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


LISTS = ("least", "unlimited", "calls", "epochs", "planning", "layouts", "orders")


@dataclass(slots=True)
class Answer:
    """What a worker found: rows, and what else is known of ours; None of PyTorch's ways."""

    rows: list[Row] = field(default_factory=list)
    ours: Ours | None = None
    error: str = ""

    def row(self, model: str, way: str, program: str = OURS) -> Row:
        """The row of a way, which is there from the first time that it is asked for."""
        found = next((row for row in self.rows if row.way == way), None)
        if found is None:
            found = Row(model, way, program=program)
            self.rows.append(found)
        return found


@dataclass(slots=True)
class Limits(StoredRun):
    """A run, with its rows in order, and what else is known of ours."""

    FILE = "memory.json"
    WHAT = "measurements under limits"
    COMMAND = "anyshape bench memory"
    rows: list[Row] = field(default_factory=list)
    ours: list[Ours] = field(default_factory=list)

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
        rows = made(list[Row], answer.get("rows", ()))
        if answer.get("error"):
            row = next((row for row in rows if row.way == job["way"]), None) or Row(
                job["model"], job["way"], program=OURS if job["way"] in WAYS else job["backend"])
            row.error = answer["error"]
            rows = [row, *(one for one in rows if one is not row)]
        elif not answer.get("finished", True):
            self.options["unfinished"].append(name_of(job))
        self.rows += rows
        if answer.get("ours") is not None:
            more = made(Ours, answer["ours"])
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


def name_of(job: dict[str, Any]) -> str:
    """What a job is called where it is shown."""
    program = f"{job['backend']}, " if job["backend"] in PROGRAMS else ""
    return f"{job['model']}: {program}{job['way']}"
