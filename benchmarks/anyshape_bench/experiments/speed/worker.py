"""One process of the benchmark: one model, one backend, timed or with its memory counted; writes one JSON record."""
from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyshape
from anyshape.base.errors import AnyShapeError, ConfigError
from anyshape_bench.experiments.speed.results import Row
from anyshape_bench.measure import launch_count, static_shape_baseline
from anyshape_bench.measure.memory_counter import Meter, meter, settled
from anyshape_bench.measure.predicted_peak_check import predicted_and_counted
from anyshape_bench.models import padding
from anyshape_bench.models.bench_models import BenchModel, Compiled, Inputs, Step
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import WARM_UP_CALLS, Shape, pick

TOLERANCE = 1e-3
FLOOR = 1e-6
NOISE = 1.5  # how many times eager's own rounding error a result may have in lower precision
MEMORY_SHAPES = 8


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker does.

    Attributes:
        model: a name of the suite, module:function or path.py:function.
        backend: eager, inductor, inductor-padded, anyshape, anyshape-single, or another backend of torch.compile.
        number: rounds count from 0; round 0 has empty cache folders.
        mode: "time" or "memory" (memory counted and results compared with eager).
        shapes: how many shapes; 0 for all.
        repeats: passes over repeated shapes; 0 for the model's own.
        threads: of torch; 0 for its default.
        autocast: dtype of a torch.autocast around the model; empty for none.
    """

    model: str
    backend: str
    number: int = 0
    mode: str = "time"
    shapes: int = 0
    repeats: int = 0
    threads: int = 0
    autocast: str = ""


@dataclass(slots=True)
class Record:
    """What a worker found. Seconds and bytes; lists follow `shapes`.

    Attributes:
        first_step: from before compile to the first result.
        second_step: the other warm-up call.
        fresh: one time per shape after the warm-up calls, seen for the first time.
        repeated: per shape, the median of the passes.
        apart: shapes with a size of 1 that the others do not have, run once after them, each in `apart_times`.
        p50, p99: of all repeated steps.
        programs: compiled programs or graphs; None where the backend has no such number.
        memory: per shape of `memory_shapes`, the peak above parameters and optimiser state.
        idle: bytes kept between steps, at the end.
        launches: what one step at the first shape launches, by kind; None where nobody can say.
        gap: per shape, seconds of a program for all sizes and of the one for this shape, measured in turn.
        mismatches: differences from eager's results, each in words.
    """

    model: str
    backend: str
    number: int
    mode: str
    trains: bool = False
    dims: list[str] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    first_step: float | None = None
    second_step: float | None = None
    fresh: list[float] = field(default_factory=list)
    repeated: list[float] = field(default_factory=list)
    apart: list[Shape] = field(default_factory=list)
    apart_times: list[float] = field(default_factory=list)
    p50: float | None = None
    p99: float | None = None
    programs: int | None = None
    memory_shapes: list[Shape] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    idle: int | None = None
    baseline: int | None = None
    memory_method: str = ""
    launches: dict[str, int] | None = None
    checked: list[Shape] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    arena: list[Row] = field(default_factory=list)
    gap: list[static_shape_baseline.GapRow] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    threads: int = 0
    error: str = ""


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


class Compiler:
    """Compiles a module with a backend, and remembers when it was asked to and what was held right before: the
    parameters and, in training, the optimiser's state."""

    def __init__(self, backend: str, autocast: str = "", counter: Meter | None = None) -> None:
        self.backend = backend
        self.autocast = autocast
        self.counter = counter
        self.started = 0.0
        self.held = 0
        self.compiled: Compiled | None = None

    def __call__(self, module: nn.Module) -> Compiled:
        if self.counter is not None:
            self.held = settled(self.counter)[1]
        self.started = time.perf_counter()
        if self.backend == "eager":
            self.compiled = module
        elif self.backend == "anyshape":
            self.compiled = anyshape.compile(module)
        elif self.backend == static_shape_baseline.BACKEND:
            self.compiled = static_shape_baseline.Single(module)
        elif self.backend == padding.BACKEND:
            torch._dynamo.config.recompile_limit = 256  # of one function; a bucket is a program
            self.compiled = torch.compile(module, dynamic=False)
        else:
            self.compiled = torch.compile(module, dynamic=True, backend=self.backend)
        return under(self.autocast, self.compiled)

    def uncompiled(self) -> int:
        """Parts that AnyShape says it ran as PyTorch would; a second way of tracing, which it also notes, is none."""
        tell = getattr(self.compiled, "explain", None)
        noted = tell().fallbacks if callable(tell) else ()
        return sum(one.name != "trace" for one in noted)

    def explain(self) -> str:
        """What the backend says about its own work; empty when it says nothing."""
        tell = getattr(self.compiled, "explain", None)
        return str(tell()) if callable(tell) else ""


def under(autocast: str, call: Compiled) -> Compiled:
    """`call` with torch.autocast around it, if a dtype is named; backward and optimiser stay outside, as torch
    advises."""
    if not autocast:
        return call
    dtype: torch.dtype = getattr(torch, autocast)

    def run(*arguments: Any, **keywords: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return call(*arguments, **keywords)

    return run


def programs(backend: str) -> int | None:
    """How many programs were compiled so far in this process; forward and backward of one graph are two."""
    if backend == "eager":
        return None
    if backend in launch_count.OURS:
        return int(anyshape.stats()["programs"])
    counters = torch._dynamo.utils.counters
    if backend in ("inductor", padding.BACKEND):
        return sum(counters["inductor"][f"fxgraph_cache_{how}"] for how in ("hit", "miss", "bypass"))
    return counters["stats"]["unique_graphs"]


def quantile(times: list[float], share: float) -> float:
    """The smallest time that at least `share` of all times do not exceed."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def median(times: list[float]) -> float:
    ordered = sorted(times)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def timed(step: Callable[[Inputs], object], inputs: Inputs) -> float:
    start = time.perf_counter()
    step(inputs)
    return time.perf_counter() - start


def report(event: str, done: int, total: int) -> None:
    """One line for the process that started this one."""
    print(json.dumps({"event": event, "done": done, "total": total}), flush=True)


def start(model: BenchModel, record: Record, compiler: Compiler) -> Step:
    """Makes the step and takes the two warm-up calls."""
    first = model.inputs(record.shapes[0])
    second = model.inputs(record.shapes[min(1, len(record.shapes) - 1)])
    report("compiling", 0, 1)
    step = model.make(compiler)
    if compiler.backend == padding.BACKEND:
        step = Padded(step, model)
    step(first)
    record.first_step = time.perf_counter() - compiler.started
    record.second_step = timed(step, second)
    return step


def measure_time(model: BenchModel, job: Job, record: Record, compiler: Compiler) -> None:
    """First step, fresh shapes, repeated shapes."""
    step = start(model, record, compiler)
    if compiler.backend == padding.BACKEND:
        buckets = {padding.bucket(shape, model.dims): shape for shape in (*record.shapes, *record.apart)}
        for i, shape in enumerate(buckets.values()):
            step(model.inputs(shape))
            report("buckets", i + 1, len(buckets))
    fresh = record.shapes[WARM_UP_CALLS:]
    for i, shape in enumerate(fresh):
        inputs = model.inputs(shape)
        record.fresh.append(timed(step, inputs))
        report("fresh shapes", i + 1, len(fresh))
    gc.collect()
    repeats = job.repeats or model.repeats
    times: dict[Shape, list[float]] = {shape: [] for shape in record.shapes}
    if len(record.shapes) == 1:
        inputs = model.inputs(record.shapes[0])
        times[record.shapes[0]] = [timed(step, inputs) for _ in range(repeats)]
    else:
        for i in range(repeats):
            for shape in record.shapes:
                inputs = model.inputs(shape)
                times[shape].append(timed(step, inputs))
            report("repeated shapes", i + 1, repeats)
    record.repeated = [median(times[shape]) for shape in record.shapes]
    every = [seconds for of_shape in times.values() for seconds in of_shape]
    record.p50, record.p99 = quantile(every, 0.5), quantile(every, 0.99)
    record.apart_times = [timed(step, model.inputs(shape)) for shape in record.apart]
    if job.backend == static_shape_baseline.BACKEND:
        record.programs = programs(job.backend)
        record.gap = static_shape_baseline.gap(
            model, step, lambda call: under(job.autocast, call), record.shapes, repeats,
            lambda done, total: report("program for all sizes", done, total))
    if job.number == 0 and job.backend == "anyshape":
        report("arena", 0, 1)
        found = getattr(compiler.compiled, "programs", ())
        record.arena = predicted_and_counted(step, model.inputs, [*record.shapes, *record.apart], found)


def measure_memory(model: BenchModel, record: Record, counter: Meter, compiler: Compiler) -> None:
    """Peak per shape above parameters and optimiser state, then results against eager's at two shapes.

    The peak of a step is what was kept before it (idle arena, packed weights; tensor memory only, so that what a
    compiler leaves in Python objects does not count) and what the step took on top (every kind of block).
    """
    record.memory_method = counter.method
    record.memory_shapes = list(pick(tuple(record.shapes), MEMORY_SHAPES))
    step = start(model, record, compiler)
    for shape in record.memory_shapes:
        step(model.inputs(shape))  # so that a compilation for this shape is not counted as the step's own memory
    for i, shape in enumerate(record.memory_shapes):
        record.memory.append(step_peak(step, model, shape, counter, compiler.held))
        report("memory", i + 1, len(record.memory_shapes))
    record.idle = max(0, settled(counter)[1] - compiler.held)
    record.baseline = compiler.held
    inputs = model.inputs(record.shapes[0])
    record.launches = launch_count.of_step(compiler.backend, compiler.compiled, lambda: step(inputs))
    compare(model, step, record, compiler.autocast)
    if counter.note():
        record.stats["memory_note"] = counter.note()


def step_peak(step: Callable[[Inputs], object], model: BenchModel, shape: Shape, counter: Meter,
              baseline: int) -> int:
    """Peak bytes of one step, its inputs not counted."""
    return peak_of(step, lambda: model.inputs(shape), counter, baseline)


def peak_of(step: Callable[[Inputs], object], make: Callable[[], Inputs], counter: Meter,
            baseline: int) -> int:
    """The same, with inputs that `make` makes."""
    idle = settled(counter)[1] - baseline
    inputs = make()
    before = settled(counter)[0]
    counter.reset()
    result = step(inputs)
    peak = counter.peak()
    del result
    return max(0, idle) + peak - before


def compare(model: BenchModel, step: Step, record: Record, autocast: str) -> None:
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
        report("checking", i + 1, len(shapes))


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


def run(job: Job) -> Record:
    """Does the job. An error of the model or the backend is recorded: one broken cell must not end the run."""
    if job.threads:
        torch.set_num_threads(job.threads)
    record = Record(job.model, job.backend, job.number, job.mode, threads=torch.get_num_threads())
    try:
        model = load_by_name(job.model)
        record.shapes = list(pick(tuple(model.shapes), job.shapes or len(model.shapes)))
        record.apart = list(model.apart)
        if job.backend == static_shape_baseline.BACKEND:
            record.shapes, record.apart = record.shapes[:static_shape_baseline.SHAPES], []
        record.dims = list(model.dims)
        record.trains = model.trains
        if job.backend == padding.BACKEND and model.pad is None:
            raise ConfigError(f"{job.model} is not measured with padding", why="padding would change its results",
                              do=f"leave out the backend {padding.BACKEND} for it")
        if job.mode == "memory":
            counter = meter()
            compiler = Compiler(job.backend, job.autocast, counter)
            measure_memory(model, record, counter, compiler)
        else:
            compiler = Compiler(job.backend, job.autocast)
            measure_time(model, job, record, compiler)
        record.programs = programs(job.backend) if record.programs is None else record.programs
        if job.backend in launch_count.OURS:
            record.stats |= plain(anyshape.stats())
            record.stats["uncompiled"] = compiler.uncompiled()
            print(compiler.explain(), file=sys.stderr)
    except AnyShapeError as error:
        record.error = str(error)
    except Exception as error:
        traceback.print_exc()
        record.error = f"{type(error).__name__}: {error}"[:2000]
    return record


def plain(value: Any) -> Any:
    """The part of a value that JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def main(arguments: list[str]) -> int:
    """Reads the job from the first file and writes the record to the second."""
    job = Job(**json.loads(Path(arguments[0]).read_text()))
    record = run(job)
    Path(arguments[1]).write_text(json.dumps(asdict(record)))
    return 1 if record.error else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
