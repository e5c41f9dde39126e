"""What each technique of the compiler gives: a model with all of them, and with one left out, measured in turn.

    anyshape bench --techniques llama bert

All programs of a model are compiled in one process, for one module with one set of parameters. In each round every
program runs every shape once, in an order of its own; a ratio is one of medians. Everything is there twice: how far the
two are apart says what is noise. On one thread processor time is taken, which other work on the machine lengthens less.
A technique that leaves the program as it is has no part in the model.
"""
from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anyshape
from anyshape.passes.pipeline import ATTENTION, DOOR, EPILOGUES, ORDER, REGIMES, ROOMS
from anyshape.plan.show import show
from anyshape_bench.experiments.speed.results import machine, median
from anyshape_bench.harness import result_files
from anyshape_bench.measure.launch_count import of_step
from anyshape_bench.models.bench_models import BenchModel, Inputs, Step
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import Shape

FILE = "techniques.json"
ROUNDS, SHAPES = 7, 3
LEAST = 0.005  # seconds of one timing: quicker steps are run several times
ALL, AGAIN, EAGER = "everything", "everything, again", "eager"
Progress = Callable[[str, int, int], None]

# name -> (settings without it, what it is). Passes that only tidy up (fold, dce) are none.
TECHNIQUES: dict[str, tuple[dict[str, Any], str]] = {
    "fuse": ({"fuse": False}, "pointwise work, reductions and views in common kernels"),
    **{name: ({"disable": name}, text) for name, text in (
        (ATTENTION, "attention that the model writes out becomes the fused operator"),
        ("causal", "what a mask of the future hides is not computed"),
        ("addends", "products add residuals and biases themselves"),
        ("strips", "a wide value between two products is made in two halves"),
        ("products", "weights are rounded, operands read through views, within products"),
        ("onto", "what is scattered and added is added where the rest lies"),
        ("pieces", "concatenations are written part by part"),
        ("channels_last", "convolutions with channels last"),
        ("views", "views of views are one, so that they vanish in kernels"),
        ("simplify", "arithmetic that does nothing is left out"),
        ("cse", "equal equations are one"),
        (REGIMES, "versions of a kernel for short, long, few rows"),
        (ORDER, "steps run in another order where that takes less memory"),
        (ROOMS, "values lie in results and over what dies"),
        (EPILOGUES, "kernels run with the product before them, updates in bands"),
        (DOOR, "calls go past Dynamo's and AOTAutograd's wrappers"),
    )},
}


@dataclass(slots=True)
class Row:
    """A model with a technique left out, with everything, or on eager. Seconds and bytes.

    Attributes:
        times: per shape, the median; empty where the technique has no part.
        part: whether leaving it out changes the programs, or the way to them.
        launches: of a step at the first shape.
        arena: bytes at the last shape, of the greatest program.
        error: why there are no numbers.
    """

    model: str
    name: str
    shapes: list[list[int]]
    times: list[float] = field(default_factory=list)
    part: bool = True
    launches: int | None = None
    arena: int | None = None
    error: str = ""


@dataclass(slots=True)
class Techniques:
    """A run: where and how, and its rows in order."""

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `techniques.json`; another process never sees half a file."""
        return result_files.write(self, folder, FILE)

    def of(self, model: str, name: str) -> Row | None:
        """The row of a model with that technique left out."""
        return next((row for row in self.rows if (row.model, row.name) == (model, name)), None)


def load(path: Path) -> Techniques:
    """Reads what `save` wrote, from the folder or the file.

    Raises:
        InputError: there is no such file, or it is another one.
    """
    return result_files.read(path, FILE, lambda data: Techniques(data["machine"], data["options"],
                                                           [Row(**row) for row in data["rows"]]),
                       "a table of techniques", "anyshape bench --techniques")


def slower(row: Row, base: Row) -> float | None:
    """How many times as long a step takes as with everything, over all shapes."""
    return math.fsum(row.times) / math.fsum(base.times) if row.times and base.times else None


class Variants:
    """One module, compiled in several ways; `current` names the one that is called."""

    def __init__(self, module: nn.Module, around: Callable[[Any], Any]) -> None:
        settings: dict[str, dict[str, Any]] = {ALL: {}, AGAIN: {}}
        settings |= {name: left_out for name, (left_out, _) in TECHNIQUES.items()}
        self.compiled = {EAGER: module} | {name: anyshape.compile(module, **one) for name, one in settings.items()}
        self.calls = {name: around(compiled) for name, compiled in self.compiled.items()}
        self.current = EAGER

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.calls[self.current](*arguments, **keywords)

    def drop(self, name: str) -> None:
        del self.compiled[name], self.calls[name]

    def text(self, name: str) -> str:
        """All that the programs of a variant are made of, names apart."""
        return "\n\n".join(show(program.executable.plan) for program in self.compiled[name].programs)


def shapes_of(model: BenchModel, number: int) -> list[Shape]:
    """An ordinary shape, the greatest, the least; then others."""
    every = list(model.shapes)
    return list(dict.fromkeys([every[0], every[-1], *every[2:3], *every[1:2], *every[3:]]))[:number]


def measure(name: str, rounds: int, number: int, around: Callable[[Any], Any], progress: Progress) -> list[Row]:
    """The rows of one model. An error of a variant is recorded: one that fails must not end the run."""
    model = load_by_name(name)
    shapes = shapes_of(model, number)
    found: list[Variants] = []

    def make(module: nn.Module) -> Variants:
        found.append(Variants(module, around))
        return found[0]

    step = model.make(make)
    variants = found[0]
    names = list(variants.calls)
    inputs = [model.inputs(shape) for shape in shapes]
    rows = {one: Row(name, one, [list(shape) for shape in shapes]) for one in names}
    for done, one in enumerate(names):
        progress(f"{name}: compiling without {one}" if one in TECHNIQUES else f"{name}: {one}", done, len(names))
        _prepare(step, variants, rows[one], inputs)
    names = [one for one in names if rows[one].part and not rows[one].error]
    times: dict[str, list[list[float]]] = {one: [[] for _ in shapes] for one in names}
    for turn in range(rounds):
        progress(f"{name}: in turn", turn, rounds)
        order = random.Random(turn).sample(names, len(names))
        for place, given in enumerate(inputs):
            for one in order:
                variants.current = one
                times[one][place].append(timed(step, given))
    for one, kept in times.items():
        rows[one].times = [value for several in kept if (value := median(several)) is not None]
    progress(f"{name}: in turn", rounds, rounds)
    return list(rows.values())


def timed(step: Step, inputs: Inputs) -> float:
    """Seconds of one step: the mean of as many as it takes to measure it."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    number, end = 0, begun
    while not number or end - begun < LEAST:
        step(inputs)
        number, end = number + 1, clock()
    return (end - begun) / number


def _prepare(step: Step, variants: Variants, row: Row, inputs: Sequence[Inputs]) -> None:
    """Runs every shape twice, so that nothing is compiled later, and looks whether the technique has a part."""
    name = variants.current = row.name
    try:
        for _ in range(2):
            for given in inputs:
                step(given)
        if name == EAGER:
            return
        row.part = name in (ALL, AGAIN, DOOR) or variants.text(name) != variants.text(ALL)
        if not row.part:
            variants.drop(name)
            return
        counts = of_step("anyshape", variants.compiled[name], lambda: step(inputs[0]), apart=True)
        row.launches = sum(counts.values()) if counts else None
        row.arena = _arena(variants.compiled[name], lambda: step(inputs[1 % len(inputs)]))
    except Exception as error:
        row.error = f"{type(error).__name__}: {error}"[:1000]


def _arena(compiled: Any, step: Callable[[], object]) -> int | None:
    """Bytes of the arena in a step, of the program that has the most."""
    executables = [program.executable for program in compiled.programs]
    for executable in executables:
        executable.profiles = []
    try:
        step()
        return max((record.arena for executable in executables for record, _ in executable.profiles or ()),
                   default=None)
    finally:
        for executable in executables:
            executable.profiles = None


def run(names: Sequence[str], rounds: int, number: int, threads: int, around: Callable[[Any], Any],
        options: dict[str, Any], out: Path, progress: Progress) -> tuple[Techniques, bool]:
    """Measures the models, and saves after each. False if Ctrl-C came first: then what had finished is kept."""
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    found = Techniques(machine(), options | {"rounds": rounds, "threads": torch.get_num_threads()})
    try:
        for name in names:
            found.rows += measure(name, rounds, number, around, progress)
            found.save(out)
    except KeyboardInterrupt:
        found.options["interrupted"] = True
        found.save(out)
        return found, False
    finally:
        torch.set_num_threads(before)
    return found, True
