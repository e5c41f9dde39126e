"""What is decided before a call, for `anyshape bench memory`: what to keep, places in the arena, the order of steps.
Here programs are asked about shapes, and hardly ever run.

A call at a new shape is begun, so that its sizes are read as they always are, and ended where its record is there.
"""
from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anyshape.backend.targets import target_of
from anyshape.base.config import Config
from anyshape.base.errors import LimitError
from anyshape.compiler.build_plan import assemble
from anyshape.compiler.driver import CompiledGraph, fused, named
from anyshape.plan.ir.context import PlanContext
from anyshape.plan.ir.program import Plan
from anyshape.plan.memory.mutation_copy_elision import elide_mutation_copies, sink_mutations
from anyshape.plan.schedule.reorder import reorder
from anyshape.plan.verify import judge
from anyshape.runtime.budget.memory_budget import MemoryBudget
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.runtime.specialize.specialization import Specialization
from anyshape_bench.experiments.memory_budget.calls import started
from anyshape_bench.experiments.memory_budget.results import PLANNED_SHARES, Choice, Laid, Order, Ours
from anyshape_bench.experiments.memory_budget.switch import FREE, Switch, Train, random_shapes
from anyshape_bench.experiments.planning import order_search
from anyshape_bench.harness.worker import Tell
from anyshape_bench.models.bench_models import BenchModel
from anyshape_bench.models.suite import WARM_UP_CALLS, Shape

WARM_UP = 3  # shapes planned before those that count: what does not depend on sizes is remembered


class _Known(LimitError):
    """The sizes of a forward are known; nothing of it has to run."""


class _Asking:
    """Stands in the place of a program's limit: notes the records of its calls, and ends a forward that has a
    backward."""

    def __init__(self, program: Executable, seen: list[tuple[Executable, Specialization]]) -> None:
        self.program = program
        self.seen = seen

    def choose(self, values: dict[str, int]) -> SavePolicy:
        """All is kept."""
        return SAVE_ALL

    def fit(self, record: Specialization) -> tuple[Specialization, None]:
        self.seen.append((self.program, record))
        if self.program.plan.saved:
            raise _Known("its sizes are known")
        return record, None


@contextmanager
def _asked(programs: list[Executable]) -> Iterator[list[tuple[Executable, Specialization]]]:
    """Receives the programs that calls begin meanwhile, up to the first that saves something, and their records."""
    seen: list[tuple[Executable, Specialization]] = []
    before = [(program, program.limit) for program in programs if not program.takes_tape]
    for program, _ in before:
        program.limit = _Asking(program, seen)  # type: ignore[assignment]
    try:
        yield seen
    except _Known:
        pass
    finally:
        for program, limit in before:
            program.limit = limit


def planning(model: BenchModel, job: dict[str, Any], found: Ours, tell: Tell) -> None:
    """What a call keeps at shapes never seen, under shares of what each takes without a limit: processor time of the
    choice with all layouts that it looks at. Of several programs in a step, the first one's."""
    tell("compiling", 0, 1)
    switch, step = started(model, job)
    known: list[tuple[Shape, MemoryBudget, dict[str, int], int]] = []
    for shape in random_shapes(model, job["planning"] + WARM_UP, "planning"):
        with _asked(switch.programs()) as seen:
            step(model.inputs(shape))
        for program, record in seen:
            if isinstance(program.limit, MemoryBudget) and program.limit.backward is not None:
                known.append((shape, program.limit, record.values, program.limit.needed(record.values, SAVE_ALL)))
    for number, (shape, limit, values, most) in enumerate(known):
        for share in PLANNED_SHARES:
            choice = Choice(list(shape), share, 0.0)
            _forget(limit)
            begun = time.process_time()
            try:
                limit.choose(values, int(most * share))
            except LimitError:
                choice.refused = True
            choice.seconds = time.process_time() - begun
            if number >= WARM_UP:
                found.planning.append(choice)
        tell("planning", number + 1, len(known))


def _forget(limit: MemoryBudget) -> None:
    """As if no sizes had been met."""
    limit.forget()
    for program in (limit.program, limit.backward):
        if program is not None:
            program.specializations.clear()
            program.specializer.specializations.clear()
            program.specializer.latest = None


def layouts(model: BenchModel, job: dict[str, Any], found: Ours, tell: Tell) -> None:
    """The arena of every program that a step begins with at random shapes, and of the backward that would follow."""
    tell("compiling", 0, 1)
    switch, step = _compiled(model, job)
    judged: set[str] = set()
    shapes = random_shapes(model, job["layouts"], "layouts")
    for number, shape in enumerate(shapes):
        programs = switch.programs()
        with _asked(programs) as seen:
            step(model.inputs(shape))
        for program, record in seen:
            backward = _backward(programs, program)
            pairs = [(program, record)]
            if backward is not None:
                pairs.append((backward, backward.specializer.make(_later(backward, record.values))))
            for one, its in pairs:
                if one.name not in judged and its.reused_output < 0 and its.given < 0:
                    judged.add(one.name)
                    judge(one.plan, its.values, its.offsets, its.arena, its.kept)
                found.layouts.append(Laid(one.name, list(shape), its.arena, its.bound))
        tell("layouts", number + 1, len(shapes))


def _compiled(model: BenchModel, job: dict[str, Any]) -> tuple[Switch, Train]:
    """The model without a limit; no size of the shapes that it meets is 1, if it can be."""
    switch = Switch(job["backend"], job["autocast"])
    step = switch.step(model)
    switch.current = FREE
    for shape in model.shapes[:WARM_UP_CALLS]:
        step(model.inputs(shape))
    gc.collect()
    return switch, step


def _backward(programs: list[Executable], program: Executable) -> Executable | None:
    return next((one for one in programs if one.specializer.keeps.forward is program.plan
                 and one.specializer.is_other is program.specializer.is_other), None)


def _later(backward: Executable, values: dict[str, int]) -> dict[str, int]:
    """The backward's sizes: its forward's, and numbers that nothing depends on."""
    return {**dict.fromkeys(backward.layout.symbols, 0), **values}


def orders(model: BenchModel, job: dict[str, Any], found: Ours, tell: Tell) -> None:
    """The order of steps that serves every shape, and the best that searches find for one shape."""
    tell("compiling", 0, 1)
    switch, step = _compiled(model, job)
    compiled = [one.compiled for one in switch.compiled[FREE].programs
                if isinstance(getattr(one, "compiled", None), CompiledGraph)]
    programs = [one for it in compiled for one in (it.executable, it.executable.other) if one is not None]
    made: dict[Executable, tuple[Plan, Plan, Plan | None]] = {}
    shapes = [model.shapes[-1], *random_shapes(model, job["shapes"] - 1, "orders")]
    for number, shape in enumerate(shapes):
        with _asked(programs) as seen:
            step(model.inputs(shape))
        for program, record in seen:
            backward = _backward(programs, program)
            for one in (program, backward) if backward is not None else (program,):
                tell(f"{shape}: {one.name}", number, len(shapes))
                if one not in made:
                    made[one] = _plans(next(it for it in compiled if one in (it.executable, it.executable.other)), one)
                sizes = record.values if one is program else _later(one, record.values)
                found.orders.append(_order(one.name, shape, made[one], sizes, float(job["orders"])))
    tell("orders", 1, 1)


def _plans(compiled: CompiledGraph, program: Executable) -> tuple[Plan, Plan, Plan | None]:
    """The plan in the order of the model, the one in our order, and the forward's."""
    config = Config()
    store, fusion = fused(compiled.graph, target_of(config), config)
    versions, _ = named(fusion, compiled.graph.facts, target_of(config))
    plan = elide_mutation_copies(sink_mutations(assemble(compiled.graph, fusion, store, versions)))
    forward = program.specializer.keeps.forward
    return plan, reorder(plan, PlanContext(forward=forward))[-1 if program.specializer.is_other else 0], forward


def _order(name: str, shape: Shape, plans: tuple[Plan, Plan, Plan | None], values: dict[str, int],
           seconds: float) -> Order:
    plan, ours, forward = plans
    best, by, spent = order_search.best(plan, ours, forward, values, seconds)
    alive = order_search.alive(ours, forward, values)
    return Order(name, list(shape), alive, min(best, alive), by if best <= alive else "ours", spent)
