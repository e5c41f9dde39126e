"""A worker of the memory-budget experiment: a model run in one way, or one part of what is measured of ours."""
from __future__ import annotations

import functools
import gc
import random
import time
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from anyshape.base.errors import LimitError
from anyshape_bench.experiments.memory_budget import calls, decisions
from anyshape_bench.experiments.memory_budget.results import LIMITED, SHARES, WAYS, Answer, Ours, Way
from anyshape_bench.experiments.memory_budget.switch import FIXED, FREE, NEVER, Switch, Train, need, record_of
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure.compiler import Compiler, step_peak, timed
from anyshape_bench.measure.memory_counter import Meter, meter, settled
from anyshape_bench.measure.statistics import median_of
from anyshape_bench.models.bench_models import BenchModel, Inputs
from anyshape_bench.models.custom_model import load_by_name
from anyshape_bench.models.suite import Shape

COST_SECONDS, MOST_TURNS = 10.0, 300
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


def shapes_of(model: BenchModel, number: int) -> list[Shape]:
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


def other_way(model: BenchModel, job: dict[str, Any], answer: Answer, counter: Meter, tell: Tell) -> None:
    """Fills the row of one of PyTorch's ways."""
    way = Way(**job["settings"])
    torch._functorch.config.activation_memory_budget = way.budget
    compiler = Compiler(way.backend, job["autocast"], counter)
    step = model.make(lambda module: compiler(checkpointed(module, way.checkpoint) if way.checkpoint else module))
    row = answer.row(model.name, job["way"])
    shapes = shapes_of(model, job["shapes"])
    for number, shape in enumerate(shapes):
        inputs = model.inputs(shape)
        for _ in range(2):
            step(inputs)
        row.shapes.append(list(shape))
        row.peaks.append(step_peak(step, model, shape, counter, compiler.held))
        times = []
        for turn in range(job["rounds"]):
            tell(f"{shape}", number * job["rounds"] + turn, len(shapes) * job["rounds"])
            times.append(timed(step, inputs))
        row.seconds.append(median_of(times))


def ours(model: BenchModel, job: dict[str, Any], answer: Answer, counter: Meter, tell: Tell) -> None:
    """Fills the rows of one of ours. A model of several programs is held to each limit by each of them."""
    assert answer.ours is not None
    found = answer.ours
    switch = Switch(job["backend"], job["autocast"], counter)
    step = switch.step(model)
    shapes = shapes_of(model, job["shapes"])
    for place, shape in enumerate(shapes):
        inputs = model.inputs(shape)
        switch.set(NEVER)
        for switch.current in (FREE, FIXED):
            for _ in range(2):
                step(inputs)
        most, values = need(switch, step, inputs)
        found.least.append(sum(limit.least(its) for limit, its in values.items()))
        limits = {"no limit": NEVER, **{f"{share:.0%} of that": int(most * share) for share in SHARES}}
        limits |= {f"as {way}": peaks[place] for way, peaks in job["peaks"].items() if place < len(peaks)}
        limits["least limit"] = found.least[-1]
        fits = {}
        for name, bytes_ in limits.items():
            tell(f"{shape}: {name}", place, len(shapes))
            row = answer.row(model.name, name, job["backend"])
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
            row.predicted.append(need(switch, step, inputs)[0])
            row.again.append(sum(len(record_of(limit).policy.dropped) for limit in switch.limits()))
        times: dict[str, list[float]] = {name: [] for name in fits}
        for turn in range(job["rounds"]):
            tell(f"{shape}: in turn", place * job["rounds"] + turn, len(shapes) * job["rounds"])
            for name in random.Random(turn).sample(list(times), len(times)):
                switch.set(fits[name])
                step(inputs)
                times[name].append(timed(step, inputs))
        for name in fits:
            answer.row(model.name, name).seconds.append(median_of(times[name]))
        tell(f"{shape}: with a limit, and without", place, len(shapes))
        found.unlimited.append(_cost(switch, step, inputs, job["rounds"]))


def _cost(switch: Switch, step: Train, inputs: Inputs, rounds: int) -> list[float]:
    """Seconds of a step where a limit is set that is never reached, and where none is: medians of as many as fit into
    some seconds, in turn."""
    switch.set(NEVER)
    times: dict[str, list[float]] = {FIXED: [], FREE: []}
    for switch.current in (FREE, FIXED):
        step(inputs)
    begun = time.perf_counter()
    turn = 0
    while turn < rounds or (turn < MOST_TURNS and time.perf_counter() - begun < COST_SECONDS):
        for switch.current in (FIXED, FREE) if turn % 2 else (FREE, FIXED):
            times[switch.current].append(timed(step, inputs))
        turn += 1
    switch.current = FIXED
    return [median_of(times[FIXED]), median_of(times[FREE])]


def answer(job: dict[str, Any]) -> Answer:
    """Nothing found yet."""
    return Answer(ours=None if job["way"] in WAYS else Ours(job["model"], program=job["backend"]))


def measure(job: dict[str, Any], found: Answer, tell: Tell) -> None:
    """Does a way of PyTorch's, all limits of one of our programs, or a part of what is measured of it."""
    model = load_by_name(job["model"])
    counter = meter()
    settled(counter)
    if job["way"] in WAYS:
        other_way(model, job, found, counter, tell)
        return
    assert found.ours is not None
    found.ours.model = model.name
    if job["way"] == LIMITED:
        ours(model, job, found, counter, tell)
    elif job["way"] in ("calls", "epochs"):
        getattr(calls, job["way"])(model, job, found.ours, counter, tell)
    else:
        getattr(decisions, job["way"])(model, job, found.ours, tell)
    gc.collect()
