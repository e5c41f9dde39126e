"""A worker of the speed experiment: one model on one backend, timed, or with memory counted and results compared."""
from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyshape.base.errors import ConfigError
from anyshape_bench.experiments.speed.results import Record
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure import launch_count, static_shape_baseline
from anyshape_bench.measure.compiler import Compiler, programs, step_peak, timed, under
from anyshape_bench.measure.memory_counter import Meter, meter, settled
from anyshape_bench.measure.predicted_peak_check import predicted_and_counted
from anyshape_bench.measure.statistics import median_of, quantile
from anyshape_bench.models import padding
from anyshape_bench.models.bench_models import BenchModel, Inputs, Step
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import WARM_UP_CALLS, Shape, pick

TOLERANCE = 1e-3
FLOOR = 1e-6
NOISE = 1.5  # how many times eager's own rounding error a result may have in lower precision
MEMORY_SHAPES = 8


class Padded:
    """A step whose inputs are padded into buckets."""

    def __init__(self, step: Step, model: BenchModel) -> None:
        self.step = step
        self.model = model

    def pad(self, inputs: Inputs) -> Inputs:
        assert self.model.pad is not None
        return self.model.pad(inputs, padding.bucket(tuple(inputs[0].shape), self.model.dims))

    def __call__(self, inputs: Inputs) -> object:
        return self.step(self.pad(inputs))

    def check(self, inputs: Inputs) -> dict[str, Tensor]:
        return self.step.check(self.pad(inputs))

    def state(self) -> dict[str, Tensor]:
        return self.step.state()

    def load(self, state: dict[str, Tensor]) -> None:
        self.step.load(state)


def start(model: BenchModel, record: Record, compiler: Compiler, tell: Tell) -> Step:
    """Makes the step and takes the two warm-up calls."""
    first = model.inputs(record.shapes[0])
    second = model.inputs(record.shapes[min(1, len(record.shapes) - 1)])
    tell("compiling", 0, 1)
    step = model.make(compiler)
    if compiler.backend == padding.BACKEND:
        step = Padded(step, model)
    step(first)
    record.first_step = time.perf_counter() - compiler.started
    record.second_step = timed(step, second)
    return step


def measure_time(model: BenchModel, job: dict[str, Any], record: Record, compiler: Compiler, tell: Tell) -> None:
    """First step, fresh shapes, repeated shapes."""
    step = start(model, record, compiler, tell)
    if compiler.backend == padding.BACKEND:
        buckets = {padding.bucket(shape, model.dims): shape for shape in (*record.shapes, *record.apart)}
        for i, shape in enumerate(buckets.values()):
            step(model.inputs(shape))
            tell("buckets", i + 1, len(buckets))
    time_shapes(step, model, record, job["repeats"] or model.repeats, tell)
    record.apart_times = [timed(step, model.inputs(shape)) for shape in record.apart]
    if job["backend"] == static_shape_baseline.BACKEND:
        record.programs = programs(job["backend"])
        record.gap = static_shape_baseline.gap(
            model, step, lambda call: under(job["autocast"], call), record.shapes, job["repeats"] or model.repeats,
            lambda done, total: tell("program for all sizes", done, total))
    if job["number"] == 0 and job["backend"] == "anyshape":
        tell("arena", 0, 1)
        found = getattr(compiler.compiled, "programs", ())
        record.arena = predicted_and_counted(step, model.inputs, [*record.shapes, *record.apart], found)


def time_shapes(step: Callable[[Inputs], object], model: BenchModel, record: Record, repeats: int, tell: Tell) -> None:
    """Times the shapes after the warm-up calls, seen for the first time, then all of them again."""
    fresh = record.shapes[WARM_UP_CALLS:]
    for i, shape in enumerate(fresh):
        inputs = model.inputs(shape)
        record.fresh.append(timed(step, inputs))
        tell("new shapes", i + 1, len(fresh))
    gc.collect()
    times: dict[Shape, list[float]] = {shape: [] for shape in record.shapes}
    if len(record.shapes) == 1:
        inputs = model.inputs(record.shapes[0])
        times[record.shapes[0]] = [timed(step, inputs) for _ in range(repeats)]
    else:
        for i in range(repeats):
            for shape in record.shapes:
                inputs = model.inputs(shape)
                times[shape].append(timed(step, inputs))
            tell("seen shapes", i + 1, repeats)
    record.repeated = [median_of(times[shape]) for shape in record.shapes]
    every = [seconds for of_shape in times.values() for seconds in of_shape]
    record.p50, record.p99 = quantile(every, 0.5), quantile(every, 0.99)


def measure_memory(model: BenchModel, record: Record, counter: Meter, compiler: Compiler, tell: Tell) -> None:
    """Peak per shape above parameters and optimiser state, then results against eager's at two shapes.

    The peak of a step is what was kept before it (idle arena, packed weights; tensor memory only, so that what a
    compiler leaves in Python objects does not count) and what the step took on top (every kind of block).
    """
    record.memory_method = counter.method
    record.memory_shapes = list(pick(tuple(record.shapes), MEMORY_SHAPES))
    step = start(model, record, compiler, tell)
    for shape in record.memory_shapes:
        step(model.inputs(shape))  # so that a compilation for this shape is not counted as the step's own memory
    for i, shape in enumerate(record.memory_shapes):
        record.memory.append(step_peak(step, model, shape, counter, compiler.held))
        tell("memory", i + 1, len(record.memory_shapes))
    record.idle = max(0, settled(counter)[1] - compiler.held)
    record.baseline = compiler.held
    inputs = model.inputs(record.shapes[0])
    record.launches = launch_count.of_step(compiler.backend, compiler.compiled, lambda: step(inputs))
    compare(model, step, record, compiler.autocast, tell)
    if counter.note():
        record.stats["memory_note"] = counter.note()


def compare(model: BenchModel, step: Step, record: Record, autocast: str, tell: Tell) -> None:
    """Runs two shapes, the least one and the greatest one, on this backend and on eager from the same parameters; under
    autocast also on eager without it, which is taken as exact."""
    if not hasattr(step, "check"):
        record.mismatches.append(f"{record.model}: its step has no check(inputs), results were not compared")
        return
    reference = model.make(lambda module: under(autocast, module))
    exact = model.make(lambda module: module)
    reference.load(step.state())
    exact.load(step.state())
    least = record.shapes[min(WARM_UP_CALLS, len(record.shapes) - 1)]
    shapes = list(dict.fromkeys((least, record.shapes[-1], record.shapes[0])))[:2]
    for i, shape in enumerate(shapes):
        inputs = model.inputs(shape)
        found, wanted = step.check(inputs), reference.check(inputs)
        if isinstance(step, Padded):
            found = {name: value[tuple(map(slice, wanted[name].shape))] for name, value in found.items()}
        record.mismatches += noisier(found, wanted, exact.check(inputs), shape) if autocast \
            else differences(found, wanted, shape)
        record.checked.append(shape)
        tell("checking", i + 1, len(shapes))


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor], shape: Shape) -> list[str]:
    """Where results differ by more than `TOLERANCE`, relative to the element or to the tensor's root mean square."""
    said = [f"{name} is missing at {shape}" for name in wanted if name not in found]
    for name, value in found.items():
        expected = wanted.get(name)
        if expected is None:
            said.append(f"{name} exists only in the compiled model at {shape}")
        elif value.shape != expected.shape or value.dtype != expected.dtype:
            said.append(f"{name} at {shape} is {value.dtype}{list(value.shape)}, eager gives "
                        f"{expected.dtype}{list(expected.shape)}")
        elif value.numel():
            value, expected = value.double(), expected.double()
            scale = size_of(expected.nan_to_num())
            close = torch.isclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE * scale + FLOOR,
                                  equal_nan=True)
            if not bool(close.all()):
                worst = (value - expected).abs()[~close].max()
                said.append(f"{name} at {shape} differs in {int((~close).sum())} of {close.numel()} elements, by up "
                            f"to {float(worst):.3g} (values of size {scale:.3g})")
    return said


def noisier(found: dict[str, Tensor], wanted: dict[str, Tensor], exact: dict[str, Tensor], shape: Shape) -> list[str]:
    """Where the error of `found` against `exact` exceeds `NOISE` times that of `wanted`, each as a root mean square."""
    said = [f"{name} is missing at {shape}" for name in wanted if name not in found]
    for name, right in exact.items():
        if name not in found:
            continue
        value, eagers = found[name], wanted[name]
        if value.shape != eagers.shape or value.dtype != eagers.dtype:
            said.append(f"{name} at {shape} is {value.dtype}{list(value.shape)}, eager gives "
                        f"{eagers.dtype}{list(eagers.shape)}")
        elif right.numel():
            error, own = (size_of(one.double() - right.double()) for one in (value, eagers))
            if not error <= NOISE * own + TOLERANCE * size_of(right) + FLOOR:
                said.append(f"{name} at {shape} has an error of {error:.3g}, eager's own is {own:.3g}")
    return said


def size_of(tensor: Tensor) -> float:
    """The root mean square of a tensor's elements."""
    return float(tensor.double().square().mean().sqrt())


def answer(job: dict[str, Any]) -> Record:
    """An empty record."""
    return Record(job["model"], job["backend"], job["number"], job["mode"], threads=torch.get_num_threads())


def measure(job: dict[str, Any], record: Record, tell: Tell) -> None:
    """Fills the record: times, or in mode "memory" what is counted, with results compared with eager's. `number`
    counts rounds from 0, which has empty cache folders; 0 `shapes`, `repeats`: as many as the model has.

    Raises:
        ConfigError: the model is not measured on this backend.
    """
    model = load_by_name(job["model"])
    record.shapes = list(pick(tuple(model.shapes), job["shapes"] or len(model.shapes)))
    record.apart = list(model.apart)
    if job["backend"] == static_shape_baseline.BACKEND:
        record.shapes, record.apart = record.shapes[:static_shape_baseline.SHAPES], []
    record.dims = list(model.dims)
    record.trains = model.trains
    if job["backend"] == padding.BACKEND and model.pad is None:
        raise ConfigError(f"{job['model']} is not measured with padding", why="padding would change its results",
                          do=f"leave out the backend {padding.BACKEND} for it")
    counter = meter() if job["mode"] == "memory" else None
    compiler = Compiler(job["backend"], job["autocast"], counter)
    if counter is None:
        measure_time(model, job, record, compiler, tell)
    else:
        measure_memory(model, record, counter, compiler, tell)
    record.programs = programs(job["backend"]) if record.programs is None else record.programs
    if job["backend"] in launch_count.OURS:
        record.stats |= compiler.stats()
