"""One process of `anyshape bench memory`: a model run in one way; writes rows as JSON."""
from __future__ import annotations

import functools
import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

import anyshape
from anyshape.base.errors import AnyShapeError, LimitError
from anyshape.run.limit import Limit
from anyshape.run.watch import watched

from . import models, own, padding
from .limits import CALL_SHARES, EPOCH, EPOCH_SHARE, EPOCHS, OURS, SHARES, Call, Epoch, Ours, Row, Way
from .memory import Meter, meter, settled
from .results import median
from .suite import SUITE, Shape
from .worker import Compiler, peak_of, report, step_peak, timed

NEVER = 1 << 50  # a limit that is never reached
MIDDLE, SPREAD = -1.6, 0.7  # of the logarithm of a length, of the longest
FREE, FIXED = "without", "with"  # programs that know no limit, and those that do
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


def shapes_of(model: models.BenchModel, number: int) -> list[Shape]:
    """The greatest shape, then ordinary ones."""
    return list(dict.fromkeys([model.shapes[-1], *model.shapes]))[:number]


def checkpointed(module: nn.Module, keep: str) -> nn.Module:
    """Every layer (a member of a list of modules) keeps its input alone, or the results of its products too."""
    context: dict[str, Any] = {}
    if keep == "products":
        operators = [getattr(torch.ops.aten, name).default for name in PRODUCTS]
        context["context_fn"] = functools.partial(checkpointing.create_selective_checkpoint_contexts, operators)
    for parent in [one for one in module.modules() if isinstance(one, nn.ModuleList)]:
        for layer in parent:
            layer.forward = functools.partial(checkpointing.checkpoint, layer.forward, use_reentrant=False, **context)
    return module


def other_way(model: models.BenchModel, job: dict[str, Any], counter: Meter) -> list[Row]:
    """The row of one of PyTorch's ways."""
    way = Way(**job["settings"])
    torch._functorch.config.activation_memory_budget = way.budget
    compiler = Compiler(way.backend, job["autocast"], counter)
    step = model.make(lambda module: compiler(checkpointed(module, way.checkpoint) if way.checkpoint else module))
    row = Row(model.name, job["way"])
    for shape in shapes_of(model, job["shapes"]):
        inputs = model.inputs(shape)
        for _ in range(2):
            step(inputs)
        row.shapes.append(list(shape))
        row.peaks.append(step_peak(step, model, shape, counter, compiler.held))
        report(f"{shape}", 0, 1)
        row.seconds.append(middle([timed(step, inputs) for _ in range(job["rounds"])]))
    return [row]


def middle(times: list[float]) -> float:
    found = median(times)
    assert found is not None
    return found


class Switch:
    """One module, compiled without a limit and with one; `current` names the one that is called."""

    def __init__(self, autocast: str, counter: Meter) -> None:
        self.compiler = Compiler("eager", autocast, counter)
        self.current = FIXED
        self.compiled: dict[str, Any] = {}

    def __call__(self, module: nn.Module) -> Callable[..., Any]:
        self.compiler(module)  # notes what is held
        self.compiled = {FREE: anyshape.compile(module), FIXED: anyshape.compile(module, memory_limit=NEVER)}
        return lambda *arguments, **keywords: self.compiled[self.current](*arguments, **keywords)

    def limits(self) -> list[Limit]:
        """Those of the forwards."""
        found = [getattr(one, "executable", one) for one in self.compiled[FIXED].programs]
        limits = [getattr(one, "limit", None) for one in found]
        return [limit for limit in limits if limit is not None and limit.backward is not None]

    def set(self, bytes_: int) -> None:
        """Puts the limit elsewhere."""
        for limit in self.limits():
            limit.move(bytes_)


def ours(model: models.BenchModel, job: dict[str, Any], counter: Meter) -> tuple[list[Row], Ours]:
    """Our rows, and the rest. A model of several programs is held to each limit by each of them."""
    switch = Switch(job["autocast"], counter)
    step = model.make(switch)
    shapes = shapes_of(model, job["shapes"])
    found = Ours(model.name)
    rows: dict[str, Row] = {}
    for place, shape in enumerate(shapes):
        inputs = model.inputs(shape)
        switch.set(NEVER)
        for switch.current in (FREE, FIXED):
            for _ in range(2):
                step(inputs)
        need, values = _need(switch, step, inputs)
        found.least.append(sum(limit.least(values[limit]) for limit in switch.limits() if limit in values))
        limits = {"no limit": NEVER, **{f"{share:.0%} of that": int(need * share) for share in SHARES}}
        limits |= {f"as {way}": peaks[place] for way, peaks in job["peaks"].items()}
        fits = {}
        for name, bytes_ in limits.items():
            row = rows.setdefault(name, Row(model.name, name))
            switch.set(bytes_)
            try:
                step(inputs)
            except LimitError as error:
                row.error = row.error or f"{error.do}"
                continue
            if row.error:
                continue
            fits[name] = bytes_
            row.shapes.append(list(shape))
            row.limits.append(bytes_ if bytes_ < NEVER else 0)
            row.peaks.append(step_peak(step, model, shape, counter, switch.compiler.held))
            row.predicted.append(_need(switch, step, inputs)[0])
            row.again.append(sum(len(_record(limit).keeping.dropped) for limit in switch.limits()))
        times: dict[str, list[float]] = {name: [] for name in (*fits, FREE, FIXED)}
        for turn in range(job["rounds"]):
            report(f"{shape}: in turn", turn, job["rounds"])
            for name in random.Random(turn).sample(list(times), len(times)):
                switch.current = FREE if name == FREE else FIXED
                switch.set(fits.get(name, NEVER))
                step(inputs)
                times[name].append(timed(step, inputs))
        switch.current = FIXED
        for name in fits:
            rows[name].seconds.append(middle(times[name]))
        found.unlimited.append([middle(times[FIXED]), middle(times[FREE])])
    for number in range(job["calls"]):
        report("many shapes", number, job["calls"])
        _calls(model, step, switch, number, found, counter)
    if job["calls"] and model.pad is not None and model.dims == ("batch", "length"):
        found.epochs = _epochs(model, step, switch, counter)
    return list(rows.values()), found


def _record(limit: Limit) -> Any:
    """That of the call that ran last."""
    return list(limit.program.records.values())[-1]


def _need(switch: Switch, step: models.Step, inputs: models.Inputs) -> tuple[int, dict[Limit, dict[str, int]]]:
    """What the programs of a step take by their records, at most, and the sizes of each."""
    for limit in switch.limits():
        limit.program.records.clear()
    step(inputs)
    ran = [limit for limit in switch.limits() if limit.program.records]
    values = {limit: _record(limit).values for limit in ran}
    return sum(limit.needed(values[limit], _record(limit).keeping) for limit in ran), values


def _calls(model: models.BenchModel, step: models.Step, switch: Switch, number: int, found: Ours,
           counter: Meter) -> None:
    """One random shape under all limits of CALL_SHARES."""
    draw = random.Random(f"{model.name} {number}")
    columns = list(zip(*model.shapes, strict=True))
    shape = tuple(draw.randint(min(column), max(column)) for column in columns)
    inputs = model.inputs(shape)
    switch.set(NEVER)
    need, _ = _need(switch, step, inputs)
    for turn in range(len(CALL_SHARES)):
        share = CALL_SHARES[(turn + number) % len(CALL_SHARES)]
        call = Call(list(shape), int(need * share))
        found.calls.append(call)
        switch.set(call.limit)
        try:
            with _planning(switch) as spent:
                step(inputs)
            if not turn:
                found.planning.append(sum(spent))
            call.need, _ = _need(switch, step, inputs)
            call.peak = step_peak(step, model, shape, counter, switch.compiler.held)
            call.arena = _as_predicted(switch, step, inputs)
        except LimitError:
            call.refused = True


def _epochs(model: models.BenchModel, step: models.Step, switch: Switch, counter: Meter) -> list[Epoch]:
    """Three counts of sentences, each in batches of lengths from a log-normal distribution (such as that of the
    characters of CodeAlpaca-20K: from 100 to 3,000, here scaled to the model's longest); the limit is a share of what
    the greatest batch takes."""
    batches, lengths = zip(*model.shapes, strict=True)
    longest = max(lengths)
    draw = random.Random(model.name)
    counts = (max(max(batches) // 4, 1), max(max(batches) // 2, 1), max(batches))
    limit = int(_taken(model, step, switch, (counts[-1], longest)) * EPOCH_SHARE)
    found = []
    for batch in dict.fromkeys(counts):
        shapes = [(batch, max(min(longest, max(longest // 30, int(draw.lognormvariate(MIDDLE, SPREAD) * longest)))
                              for _ in range(batch))) for _ in range(EPOCH)]
        free = max(_taken(model, step, switch, shape) for shape in shapes)
        for way in EPOCHS:
            report(f"batches of {batch}, {way}", 0, 1)
            epoch = Epoch(way, batch, limit, sum(rows * length for rows, length in shapes))
            found.append(epoch)
            switch.set(NEVER if way == "no limit" else limit)
            makers = [functools.partial(_made, model, shape, way == "padded") for shape in shapes]
            try:
                for make in makers:
                    step(make())
            except LimitError:
                epoch.fits = False
                continue
            if way == "no limit":
                epoch.fits = free <= limit
            gc.collect()
            epoch.seconds = min(sum(timed(step, make()) for make in makers) for _ in range(2))
            epoch.peak = max(peak_of(step, make, counter, switch.compiler.held) for make in makers)
    return found


def _made(model: models.BenchModel, shape: Shape, padded: bool) -> models.Inputs:
    inputs = model.inputs(shape)
    return inputs if not padded or model.pad is None else model.pad(inputs, padding.bucket(shape, model.dims))


def _taken(model: models.BenchModel, step: models.Step, switch: Switch, shape: Shape) -> int:
    """What a step takes without a limit."""
    switch.set(NEVER)
    return _need(switch, step, model.inputs(shape))[0]


def _as_predicted(switch: Switch, step: models.Step, inputs: models.Inputs) -> bool:
    """Whether a step writes as many bytes of the arena as its records say."""
    programs = [one for limit in switch.limits() for one in (limit.program, limit.backward) if one is not None]
    seen: list[Any] = []
    for program in programs:  # one at a time: a backward reads what its forward wrote
        with watched(program) as runs:
            step(inputs)
        seen += runs
    return bool(seen) and all(run.record.arena == run.counted for run in seen)


@contextmanager
def _planning(switch: Switch) -> Iterator[list[float]]:
    """Receives the seconds that programs take to make records of sizes they have not seen."""
    spent: list[float] = []

    def clocked(slow: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return slow(*arguments)
            finally:
                spent.append(time.perf_counter() - begun)

        return run

    programs = [one for limit in switch.limits() for one in (limit.program, limit.backward) if one is not None]
    for program in programs:
        program.records.clear()
        program.maker.records.clear()
        program._slow = clocked(program._slow)  # type: ignore[method-assign]
    for limit in switch.limits():
        limit.forget()
    try:
        yield spent
    finally:
        for program in programs:
            del program._slow


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Does the job. An error of the model or the backend is recorded: one broken process must not end the run."""
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    try:
        model = models.load(job["model"]) if job["model"] in SUITE else own.load(job["model"])
        counter = meter()
        settled(counter)
        if job["way"] != OURS:
            rows, known = other_way(model, job, counter), None
        else:
            rows, known = ours(model, job, counter)
        return {"rows": [asdict(row) for row in rows], "ours": known and asdict(known)}
    except AnyShapeError as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        gc.collect()


def main(arguments: list[str]) -> int:
    """Reads the job from the first file and writes what was found to the second."""
    found = run(json.loads(Path(arguments[0]).read_text()))
    Path(arguments[1]).write_text(json.dumps(found))
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
