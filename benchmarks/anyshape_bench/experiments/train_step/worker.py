"""A worker of the train-step experiment: train steps of one model on one backend, timed, or with their memory counted
and their losses noted."""
from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyshape
from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.speed.worker import time_shapes
from anyshape_bench.experiments.train_step.results import EAGER, OURS, WHOLE, StepRecord, empty
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure.compiler import Compiler, peak_of, programs
from anyshape_bench.measure.memory_counter import Meter, meter, settled
from anyshape_bench.models.bench_models import BenchModel, Inputs, Step, TrainStep
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import WARM_UP_CALLS, pick


class WholeStep:
    """A step that is one program: `anyshape.train_step` in the place of backward and optimiser."""

    def __init__(self, apart: TrainStep, compiler: Compiler, accumulate: int) -> None:
        self.module = apart.module
        if compiler.counter is not None:
            compiler.held = settled(compiler.counter)[1]
        compiler.started = time.perf_counter()
        self.compiled = compiler.compiled = anyshape.train_step(
            apart.module, loss_of(apart, compiler.autocast), apart.optimizer, accumulate=accumulate)

    def __call__(self, inputs: Inputs) -> Tensor:
        return self.compiled(*inputs)


def loss_of(apart: TrainStep, autocast: str) -> Callable[..., Tensor]:
    """What `train_step` is given: a function of the module and a batch."""
    loss = type(apart).loss
    if not autocast:
        return loss
    dtype: torch.dtype = getattr(torch, autocast)

    def lower(module: Any, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return loss(module, *inputs)

    return lower


def made(model: BenchModel, compiler: Compiler, accumulate: int) -> TrainStep | WholeStep:
    """The step on its backend; AdamW is torch's fused one, or a part of the program."""
    if compiler.backend != WHOLE:
        return trained(model.make(compiler), model)
    return WholeStep(trained(model.make(lambda module: module), model), compiler, accumulate)


def trained(step: Step, model: BenchModel) -> TrainStep:
    """The step, if it is one that trains.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(step, TrainStep):
        raise ConfigError(f"{model.name} does not train", why="its step is a forward call",
                          do='name a model that trains, such as llama, or return "train" as a fourth thing')
    return step


def started(model: BenchModel, job: dict[str, Any], record: StepRecord, compiler: Compiler,
            tell: Tell) -> TrainStep | WholeStep:
    """The step, after two warm-up calls."""
    tell("compiling", 0, 1)
    inputs = [model.inputs(shape) for shape in record.shapes[:WARM_UP_CALLS]]
    step = made(model, compiler, job["accumulate"])
    record.losses.append(_number(step(inputs[0])))
    record.first_step = time.perf_counter() - compiler.started
    for more in inputs[1:]:
        start = time.perf_counter()
        record.losses.append(_number(step(more)))
        record.second_step = time.perf_counter() - start
    return step


def _number(loss: object) -> float:
    assert isinstance(loss, Tensor)
    return float(loss)


def measure_time(model: BenchModel, job: dict[str, Any], record: StepRecord, compiler: Compiler,
                 tell: Tell) -> None:
    """First step, shapes seen for the first time, and seen again."""
    step = started(model, job, record, compiler, tell)
    time_shapes(step, model, record, job["repeats"] or model.repeats, tell)


def measure_memory(model: BenchModel, job: dict[str, Any], record: StepRecord, compiler: Compiler,
                   counter: Meter, tell: Tell) -> None:
    """The peak of a step above parameters and optimiser state: at the greatest shape, when only the warm-up calls came
    before, then at others, and at the greatest again. With several batches a step, that of the whole step, at the
    greatest shape alone. Every loss on the way, and how far the weights went."""
    record.memory_method = counter.method
    greatest = record.shapes[-1]
    others = [shape for shape in pick(tuple(record.shapes), WARM_UP_CALLS + job["memory_shapes"])[WARM_UP_CALLS:]
              if shape != greatest]
    step = started(model, job, record, compiler, tell)
    for _ in range(-len(record.losses) % job["accumulate"]):
        step(model.inputs(record.shapes[0]))  # until the step ends that the warm-up calls began

    def batches(inputs: Inputs) -> None:
        for _ in range(job["accumulate"]):
            record.losses.append(_number(step(inputs)))

    record.memory_shapes = [greatest, *others, greatest] if job["accumulate"] == 1 else [greatest]
    for place, shape in enumerate(record.memory_shapes):
        batches(model.inputs(shape))  # so that what is made once for this shape is not counted
        record.memory.append(peak_of(batches, functools.partial(model.inputs, shape), counter, compiler.held))
        tell("memory", place + 1, len(record.memory_shapes))
    record.idle = max(0, settled(counter)[1] - compiler.held)
    record.baseline = compiler.held
    record.gradients = sum(one.numel() * one.element_size() for one in step.module.parameters() if one.requires_grad)
    if counter.note():
        record.stats["memory_note"] = counter.note()
    tell("results", 0, 1)
    start = trained(model.make(lambda module: module), model)
    record.moved = math.sqrt(math.fsum(float((one.detach().double() - other.detach().double()).square().sum())
                                       for one, other in zip(step.module.parameters(), start.module.parameters(),
                                                             strict=True)))
    if job["backend"] == EAGER and job["autocast"]:
        twice = [shape for shape in record.memory_shapes for _ in range(2)]
        record.exact = [_number(start(model.inputs(shape))) for shape in (*record.shapes[:WARM_UP_CALLS], *twice)]


def answer(job: dict[str, Any]) -> StepRecord:
    """An empty record."""
    return empty(job, torch.get_num_threads())


def measure(job: dict[str, Any], record: StepRecord, tell: Tell) -> None:
    """Fills the record: times, or in mode "memory" what is counted, and the losses."""
    model = load_by_name(job["model"])
    record.shapes = list(pick(tuple(model.shapes), job["shapes"]))
    record.dims, record.trains = list(model.dims), True
    counter = meter() if job["mode"] == "memory" else None
    compiler = Compiler(job["backend"], job["autocast"], counter)
    if counter is None:
        measure_time(model, job, record, compiler, tell)
    else:
        measure_memory(model, job, record, compiler, counter, tell)
    ours = job["backend"] in (OURS, WHOLE)
    record.programs = programs(OURS if ours else job["backend"])
    if ours:
        record.stats |= compiler.stats()
