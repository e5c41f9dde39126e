"""Calls under limits, for `anyshape bench memory`: many shapes with six limits each, and epochs of batches."""
from __future__ import annotations

import functools
import gc
import random
from typing import Any

from anyshape.base.errors import ConfigError, LimitError
from anyshape.runtime.budget.memory_budget import MemoryBudget
from anyshape.runtime.inspect.memory_timeline import scratch, timeline, used
from anyshape.runtime.inspect.watermark import watched
from anyshape_bench.experiments.memory_budget.results import CALL_SHARES, COUNTS, EPOCH_SHARE, EPOCHS, Call, Epoch, Ours
from anyshape_bench.experiments.memory_budget.switch import NEVER, Switch, Train, need, needed, random_shapes
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure.compiler import timed
from anyshape_bench.measure.memory_counter import Meter, settled
from anyshape_bench.models import padding
from anyshape_bench.models.bench_models import BenchModel, Inputs
from anyshape_bench.models.suite import WARM_UP_CALLS, Shape

MIDDLE, SPREAD = -1.6, 0.7  # of the logarithm of a length, of the longest


def started(model: BenchModel, job: dict[str, Any], counter: Meter | None = None) -> tuple[Switch, Train]:
    """The model, compiled and warm.

    Raises:
        ConfigError: there is no backward, and so nothing to decide on.
    """
    switch = Switch(job["backend"], job["autocast"], counter)
    step = switch.step(model)
    for shape in model.shapes[:WARM_UP_CALLS]:
        for _ in range(2):
            step(model.inputs(shape))
    if not switch.limits():
        raise ConfigError(f"{model.name} has nothing to keep or to compute again", why="no forward of it that was "
                          "compiled has a backward", do="name a model that trains")
    # what is there by now stays: looking through it again before every call would take longer than most calls
    gc.collect()
    gc.freeze()
    return switch, step


def calls(model: BenchModel, job: dict[str, Any], found: Ours, counter: Meter, tell: Tell) -> None:
    """Random shapes, each under all limits of CALL_SHARES."""
    tell("compiling", 0, 1)
    switch, step = started(model, job, counter)
    shapes = random_shapes(model, job["calls"], "calls")
    for number, shape in enumerate(shapes):
        _calls(model, step, switch, shape, found.calls, counter)
        tell("calls under limits", (number + 1) * len(CALL_SHARES), len(shapes) * len(CALL_SHARES))


def _calls(model: BenchModel, step: Train, switch: Switch, shape: Shape, found: list[Call],
           counter: Meter) -> None:
    inputs = model.inputs(shape)
    switch.set(NEVER)
    most, values = need(switch, step, inputs)
    if not values:
        return  # it ran as PyTorch would
    for share in CALL_SHARES:
        call = Call(list(shape), int(most * share))
        switch.set(call.limit)
        try:
            call.arena = _as_predicted(switch, step, inputs)
            # counted afterwards: what is remembered of a choice, and the records, are not the step's own memory
            call.peak = _counted(switch, step, inputs, counter)
            call.need, _ = needed(switch)
        except LimitError:
            call.refused = True
            call.bound = max(bound(limit, sizes, call.limit) for limit, sizes in values.items())
        found.append(call)


def _counted(switch: Switch, step: Train, inputs: Inputs, counter: Meter) -> int:
    """Bytes of the C library's blocks that a step takes beyond those that are there. No block of an earlier step lies
    idle, which this one could use or would have to give back."""
    switch.release_idle()
    before, _ = settled(counter)
    counter.reset()
    step(inputs)
    return counter.peak() - before


def bound(limit: MemoryBudget, values: dict[str, int], room: int = 0) -> int:
    """Bytes that no choice of what is dropped needs less than: what is alive at the fullest step if all that can be
    dropped is gone wherever it could be, and computing it again takes nothing. Values are not moved out.

    Where that is not above `room`, one value at a time is looked at: it is kept, or what computes it again is there as
    well. What it takes at least is the lesser of both."""
    assert limit.backward is not None
    names = frozenset(one.saved for one in limit.backward.plan.again)
    line, beside = timeline(limit), scratch(limit, values)
    found = int(line.curve(values, beside, names).max())
    for name in sorted(names):
        if found > room:
            break
        kept = line.curve(values, beside, names - {name})
        again = line.curve(values, beside, names, used(limit.problem, frozenset((name,))))
        found = max(found, min(int(kept.max()), int(again.max())))
    return found


def _as_predicted(switch: Switch, step: Train, inputs: Inputs) -> bool:
    """Whether a step writes as many bytes of the arena as its records say."""
    found = []
    for limit in switch.limits():
        seen: list[Any] = []
        for program in (limit.program, limit.backward):  # one at a time: a backward reads what its forward wrote
            if program is not None:
                with watched(program) as runs:
                    step(inputs)
                seen += runs
        records = [run.record for run in seen]
        if records and len({record.arena for record in records}) == 1 and not any(one.temporary for one in records):
            # both in one block, which one of them fills
            found.append(max(run.counted for run in seen) == records[0].arena)
        else:
            found += [run.record.arena == run.counted for run in seen]
    return bool(found) and all(found)


def epochs(model: BenchModel, job: dict[str, Any], found: Ours, counter: Meter, tell: Tell) -> None:
    """Batches of three counts of sentences, with lengths from a log-normal distribution (such as that of the characters
    of CodeAlpaca-20K: from 100 to 3,000, here scaled to the model's longest); the limit is a share of the greatest need
    of a batch. Padded ones have lengths of buckets; what they run and how they keep to the limit is ours, too."""
    if model.pad is None or model.dims != ("batch", "length"):
        return  # no sentences
    tell("compiling", 0, 1)
    switch, step = started(model, job, counter)
    batches, lengths = zip(*model.shapes, strict=True)
    longest = max(lengths)
    draw = random.Random(model.name)
    counts = list(dict.fromkeys(max(min(2, max(batches)), int(max(batches) * share)) for share in COUNTS))
    every: dict[int, list[Shape]] = {batch: [(batch, max(_length(draw, longest) for _ in range(batch)))
                                             for _ in range(job["epochs"])] for batch in counts}
    free = {batch: max(_taken(model, step, switch, shape) for shape in dict.fromkeys(shapes))
            for batch, shapes in every.items()}
    limit = int(free[counts[-1]] * EPOCH_SHARE)
    for place, (batch, shapes) in enumerate(every.items()):
        for turn, way in enumerate(EPOCHS):
            tell(f"batches of {batch}, {way}", place * len(EPOCHS) + turn, len(counts) * len(EPOCHS))
            epoch = Epoch(way, batch, limit, sum(rows * length for rows, length in shapes))
            switch.set(NEVER if way == "no limit" else limit)
            switch.release_idle()
            _run(model, step, epoch, shapes, counter)
            if way == "no limit":
                epoch.fits = free[batch] <= limit
            found.epochs.append(epoch)
    tell("batches", 1, 1)


def _length(draw: random.Random, longest: int) -> int:
    """The words of one sentence."""
    return min(longest, max(longest // 30, int(draw.lognormvariate(MIDDLE, SPREAD) * longest), 2))


def _run(model: BenchModel, step: Train, epoch: Epoch, shapes: list[Shape], counter: Meter) -> None:
    """Once to see the shapes, then twice on the clock."""
    before, _ = settled(counter)
    makers = [functools.partial(_made, model, shape, epoch.way == "padded") for shape in shapes]
    try:
        for make in makers:
            step(make())
    except LimitError:
        epoch.fits = False
        return
    counter.reset()
    epoch.seconds = min(sum(timed(step, make()) for make in makers) for _ in range(2))
    epoch.peak = counter.peak() - before


def _made(model: BenchModel, shape: Shape, padded: bool) -> Inputs:
    inputs = model.inputs(shape)
    if not padded or model.pad is None:
        return inputs
    return model.pad(inputs, (shape[0], padding.bucket(shape, model.dims)[1]))


def _taken(model: BenchModel, step: Train, switch: Switch, shape: Shape) -> int:
    """What a step takes without a limit."""
    switch.set(NEVER)
    return need(switch, step, model.inputs(shape))[0]
