"""A worker of the routing experiment: one case, all its ways in turn in this process, timed, or memory of one."""
from __future__ import annotations

import datetime
import functools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyshape.base.errors import AnyShapeError
from anyshape_bench.experiments.routes.results import CaseRecord, WayRecord
from anyshape_bench.harness.machine import commit
from anyshape_bench.harness.worker import Tell
from anyshape_bench.measure.compiler import Compiler, peak_of, programs
from anyshape_bench.measure.memory_counter import Meter, meter, settled
from anyshape_bench.models.bench_models import flatten
from anyshape_bench.routes.case import WARM_UP, Case, Forms, Inputs, Study, Way
from anyshape_bench.routes.catalog import catalog
from anyshape_bench.routes.names import EAGER, ROUTED

TOLERANCE = 1e-3  # of the root mean square of what is compared
LEAST_PASSES = 3
BUSY = 40.0  # seconds after which there is no further pass over seen batches, if there were LEAST_PASSES


@dataclass(slots=True)
class Running:
    """A way that is compiled and warm.

    counts: the backend whose programs are counted. form: what was compiled. call: it, compiled.
    """

    record: WayRecord
    counts: str
    trains: bool
    same_bits: bool
    form: Any = None
    call: Callable[..., Any] | None = None

    def step(self, batch: Inputs) -> list[Tensor]:
        """What is timed: forward; in training also backward of the mean square of what it returns. The gradients of the
        inputs are further results."""
        assert self.call is not None
        if not self.trains:
            with torch.no_grad():
                return flatten(self.call(*batch))
        given = [one.detach().requires_grad_() if one.is_floating_point() else one for one in batch]
        results = flatten(self.call(*given))
        torch.stack([one.float().square().mean() for one in results if one.requires_grad]).sum().backward()
        return [*(one.detach() for one in results), *(one.grad for one in given if one.grad is not None)]

    def results(self, batch: Inputs) -> dict[str, Tensor]:
        """What is compared: the same, and in training the gradients of parameters by name."""
        found = {f"result {number}": one.clone() for number, one in enumerate(self.step(batch))}
        named = self.form.named_parameters() if isinstance(self.form, torch.nn.Module) else ()
        found |= {f"gradient of {name}": one.grad for name, one in named if one.grad is not None}
        self.clear()
        return found

    def clear(self) -> None:
        """Drops the gradients of parameters."""
        if self.trains and isinstance(self.form, torch.nn.Module):
            self.form.zero_grad(set_to_none=True)


def start(name: str, way: Way, batches: list[Inputs], trains: bool, held: Callable[[], None] = lambda: None) -> Running:
    """Makes and compiles a way, and runs the batches of the warm-up. An error is recorded: other ways go on. held: is
    called before it is compiled."""
    record, counts = WayRecord(name, way.backend), way.counts or way.backend
    running = Running(record, counts, trains, way.same_bits)
    compiler = Compiler(way.backend)
    try:
        before = programs(counts)
        running.form = way.make()
        if isinstance(running.form, torch.nn.Module):
            running.form.train(trains)
        held()
        begun = time.perf_counter()
        running.call = compiler(running.form)
        for batch in batches[:WARM_UP]:
            running.step(batch)
            running.clear()
            record.first = record.first or time.perf_counter() - begun
        after = programs(counts)
        record.programs = None if after is None else after - (before or 0)
        record.uncompiled = compiler.uncompiled()
    except AnyShapeError as error:
        record.error = str(error)
    except Exception as error:
        traceback.print_exc()
        record.error = f"{type(error).__name__}: {error}"[:500]
    return running


def timed(one: Running, batch: Inputs) -> float:
    before = programs(one.counts)
    begun = time.perf_counter()
    one.step(batch)
    taken = time.perf_counter() - begun
    one.clear()
    if before is not None:
        one.record.recompiled = (one.record.recompiled or 0) + (programs(one.counts) or 0) - before
    return taken


def turns(running: list[Running], number: int) -> list[Running]:
    """All of them, each time another first."""
    place = number % max(1, len(running))
    return [*running[place:], *running[:place]]


def time_ways(forms: Forms, running: list[Running], passes: int, tell: Tell) -> None:
    """Times new loads, then seen ones in passes: per batch all ways in turn."""
    fresh = forms.batches[WARM_UP:]
    for number, batch in enumerate(fresh):
        tell("new loads", number, len(fresh))
        for one in turns(running, number):
            one.record.fresh.append(timed(one, batch))
    begun = time.perf_counter()
    for number in range(passes):
        if number >= LEAST_PASSES and time.perf_counter() - begun > BUSY:
            break
        tell("seen loads", number, passes)
        found: dict[str, list[float]] = {one.record.name: [] for one in running}
        for place, batch in enumerate(fresh):
            for one in turns(running, number + place):
                found[one.record.name].append(timed(one, batch))
        for one in running:
            one.record.seen.append(found[one.record.name])


def compare(forms: Forms, running: list[Running]) -> None:
    """Compares each way's results on every new batch with the plain form in eager, and those that promise the same
    bits with the routed form."""
    by_name = {one.record.name: one for one in running}
    for batch in forms.batches[WARM_UP:]:
        wanted = by_name[EAGER].results(batch)
        for one in running:
            if one.record.wrong or one.record.name == EAGER:
                continue
            found = one.results(batch)
            one.record.wrong = differs(found, wanted)
            if one.same_bits and not one.record.wrong and ROUTED in by_name:
                same = by_name[ROUTED].results(batch)
                other = [name for name in same if name in found and not torch.equal(found[name], same[name])]
                one.record.wrong = f"{other[0]} has other bits than the routed form's" if other else ""


def differs(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """How results differ, in words; empty when they do not. Gradients are compared where both forms have a parameter of
    that name."""
    for name in dict.fromkeys((*wanted, *found)):
        few, many = found.get(name), wanted.get(name)
        if few is None or many is None:
            if name.startswith("result"):
                return f"{name} is {'missing' if few is None else 'too many'}"
            continue
        if few.shape != many.shape or few.dtype != many.dtype:
            return f"{name} is {few.dtype}{list(few.shape)}, not {many.dtype}{list(many.shape)}"
        if not many.numel():
            continue
        scale = float(many.double().square().mean().sqrt())
        tolerance = max(TOLERANCE, 4 * torch.finfo(many.dtype).eps) if many.is_floating_point() else 0.0
        if not torch.allclose(few.double(), many.double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return f"{name} is off by {float((few - many).abs().max()):.3g}, values of size {scale:.3g}"
    return ""


def measure_time(case: Case, job: dict[str, Any], found: CaseRecord, tell: Tell) -> None:
    """Compiles all ways, compares, and times them in turn."""
    forms = made(case.make)
    found.left_out = dict(forms.left_out)
    running = []
    ways = forms.ways()
    for number, (name, way) in enumerate(ways.items()):
        tell(f"compiling {name}", number, len(ways))
        one = start(name, way, forms.batches, case.trains)
        found.ways.append(one.record)
        if not one.record.error:
            running.append(one)
    assert any(one.record.name == EAGER for one in running), "the plain form fails in eager"
    time_ways(forms, running, job["passes"], tell)
    tell("comparing", 0, 1)
    compare(forms, running)


def measure_memory(case: Case, name: str, found: CaseRecord, tell: Tell) -> None:
    """The peak of one way at each new batch above what was held before it was compiled. A process of its own: what
    another way leaves, an arena that is used again, would count for nothing."""
    counter = meter()
    forms = made(case.large or case.make)
    if forms.active is not None:
        found.active = [forms.active(batch) for batch in forms.batches[WARM_UP:]]
    way = forms.ways().get(name)
    if way is None:
        return
    tell(name, 0, 1)
    held: list[int] = []
    one = start(name, way, forms.batches, case.trains, functools.partial(_note, counter, held))
    found.ways.append(one.record)
    if one.record.error:
        return
    for batch in forms.batches[WARM_UP:]:
        _step(one, batch)
        one.record.peaks.append(peak_of(functools.partial(_step, one), lambda batch=batch: batch,  # type: ignore[misc]
                                        counter, held[0]))


def _note(counter: Meter, held: list[int]) -> None:
    held.append(settled(counter)[1])


def _step(one: Running, batch: Inputs) -> None:
    one.step(batch)
    one.clear()


def made(make: Callable[[], Forms]) -> Forms:
    torch.manual_seed(0)
    return make()


def answer(job: dict[str, Any]) -> CaseRecord:
    """An empty record."""
    one = catalog()[job["model"]]
    return CaseRecord(one.name, one.row, job["mode"], job["number"], torch.get_num_threads(), commit(),
                      datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                      isinstance(one, Case) and one.trains)


def measure(job: dict[str, Any], found: CaseRecord, tell: Tell) -> None:
    """Fills the record."""
    one = catalog()[job["model"]]
    if isinstance(one, Study):
        tell("measuring", 0, 1)
        found.values = one.measure(job["quick"])
    elif job["mode"] == "time":
        measure_time(one, job, found, tell)
    else:
        measure_memory(one, job["way"], found, tell)
