"""A worker of the ablation: all programs of a model, compiled for one module with one set of parameters.

In each round every program runs every shape once, in an order of its own; a ratio is one of medians. Everything is
there twice: how far the two are apart says what is noise. On one thread processor time is taken, which other work on
the machine lengthens less. A technique that leaves the program as it is has no part in the model.
"""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import anyshape
from anyshape.passes.driver.pipeline import FAST_DISPATCH
from anyshape.plan.ir.show import show
from anyshape.runtime.context.profiling import recorded
from anyshape_bench.experiments.ablation.results import AGAIN, ALL, EAGER, TECHNIQUES, Answer, Row
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure.compiler import under
from anyshape_bench.measure.launch_count import of_step
from anyshape_bench.measure.statistics import median_of
from anyshape_bench.models.bench_models import BenchModel, Inputs, Step
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import Shape

LEAST = 0.005  # seconds of one timing: quicker steps are run several times


class Variants:
    """One module, compiled in several ways; `current` names the one that is called."""

    def __init__(self, module: nn.Module, techniques: Sequence[str], around: Callable[[Any], Any]) -> None:
        settings: dict[str, dict[str, Any]] = {ALL: {}, AGAIN: {}} | {name: TECHNIQUES[name][0] for name in techniques}
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


def answer(job: dict[str, Any]) -> Answer:
    """No rows yet."""
    return Answer(torch.get_num_threads())


def measure(job: dict[str, Any], found: Answer, tell: Tell) -> None:
    """The rows of one model. An error of a variant is recorded: one that fails must not end the run."""
    model = load_by_name(job["model"])
    shapes = shapes_of(model, job["shapes"])
    made: list[Variants] = []

    def make(module: nn.Module) -> Variants:
        made.append(Variants(module, job["techniques"], lambda call: under(job["autocast"], call)))
        return made[0]

    step = model.make(make)
    variants = made[0]
    names = list(variants.calls)
    inputs = [model.inputs(shape) for shape in shapes]
    rows = {one: Row(job["model"], one, [list(shape) for shape in shapes]) for one in names}
    found.rows = list(rows.values())
    for done, one in enumerate(names):
        tell(f"compiling without {one}" if one in TECHNIQUES else one, done, len(names))
        _prepare(step, variants, rows[one], inputs)
    names = [one for one in names if rows[one].part and not rows[one].error]
    times: dict[str, list[list[float]]] = {one: [[] for _ in shapes] for one in names}
    for turn in range(job["rounds"]):
        tell("in turn", turn, job["rounds"])
        order = random.Random(turn).sample(names, len(names))
        for place, given in enumerate(inputs):
            for one in order:
                variants.current = one
                times[one][place].append(timed(step, given))
    for one, kept in times.items():
        rows[one].times = [median_of(several) for several in kept]


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
        row.part = name in (ALL, AGAIN, FAST_DISPATCH) or variants.text(name) != variants.text(ALL)
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
    with recorded() as runs:
        step()
    return max((run.record.arena for run in runs for executable in executables
                if run.program is executable.ran(run.record)), default=None)
