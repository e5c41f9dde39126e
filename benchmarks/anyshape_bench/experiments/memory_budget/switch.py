"""One model compiled with and without a limit, for the processes of `anyshape bench memory`: which is called, what the
limit is, and what calls take by their records."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from torch import nn

import anyshape
from anyshape.runtime.budget.memory_budget import MemoryBudget
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.specialize.specialization import Specialization
from anyshape_bench.experiments.train_step.results import WHOLE
from anyshape_bench.experiments.train_step.worker import loss_of, trained
from anyshape_bench.measure.compiler import Compiler, under
from anyshape_bench.measure.memory_counter import Meter
from anyshape_bench.models.bench_models import BenchModel, Inputs
from anyshape_bench.models.suite import Shape

NEVER = 1 << 50  # a limit that is never reached
FREE, FIXED = "without", "with"  # programs that know no limit, and those that do
Train = Callable[[Inputs], object]  # a step


class Switch:
    """One module, or its whole train step, compiled without a limit and with one; `current` names the one that is
    called. backend: which of our programs it is."""

    def __init__(self, backend: str, autocast: str, counter: Meter | None = None) -> None:
        self.backend = backend
        self.compiler = Compiler("eager", autocast, counter)
        self.current = FIXED
        self.compiled: dict[str, Any] = {}

    def step(self, model: BenchModel) -> Train:
        """A step of the model. Nothing is compiled yet.

        Raises:
            ConfigError: it is to be a whole train step of a model that does not train.
        """
        if self.backend != WHOLE:
            return model.make(self._module)
        apart = trained(model.make(lambda module: module), model)
        self.compiler(apart.module)  # notes what is held
        loss = loss_of(apart, self.compiler.autocast)
        self.compiled = {FREE: anyshape.train_step(apart.module, loss, apart.optimizer),
                         FIXED: anyshape.train_step(apart.module, loss, apart.optimizer, memory_limit=NEVER)}
        return lambda inputs: self.compiled[self.current](*inputs)

    def _module(self, module: nn.Module) -> Callable[..., Any]:
        self.compiler(module)  # notes what is held
        self.compiled = {FREE: anyshape.compile(module), FIXED: anyshape.compile(module, memory_limit=NEVER)}
        return under(self.compiler.autocast,
                     lambda *arguments, **keywords: self.compiled[self.current](*arguments, **keywords))

    def programs(self) -> list[Executable]:
        """Those that were compiled, of the one that is called, in each order of steps that there is."""
        found = [getattr(one, "executable", one) for one in self.compiled[self.current].programs]
        found += [getattr(one, "other", None) for one in found]
        return [one for one in found if isinstance(one, Executable)]

    def limits(self) -> list[MemoryBudget]:
        """Those of the forwards."""
        found = [getattr(one, "executable", one) for one in self.compiled[FIXED].programs]
        limits = [getattr(one, "limit", None) for one in found]
        return [limit for limit in limits if limit is not None and limit.backward is not None]

    def release_idle(self) -> None:
        """Gives blocks back that wait for the next call."""
        for limit in self.limits():
            context = limit.program.context
            context.kept.release_idle()
            context.temporary.release_idle()

    def set(self, bytes_: int) -> None:
        """Puts the limit elsewhere."""
        for limit in self.limits():
            for program in (limit.program, limit.program.other):
                if program is not None and isinstance(program.limit, MemoryBudget):
                    program.limit.move(bytes_)


def record_of(limit: MemoryBudget) -> Specialization:
    """That of the call that ran last."""
    return list(limit.program.specializations.values())[-1]


def need(switch: Switch, step: Train, inputs: Inputs) -> tuple[int, dict[MemoryBudget, dict[str, int]]]:
    """What the programs of a step take by their records, at most, and the sizes of each."""
    for limit in switch.limits():
        limit.program.specializations.clear()
    step(inputs)
    return needed(switch)


def needed(switch: Switch) -> tuple[int, dict[MemoryBudget, dict[str, int]]]:
    """The same of the step that ran last, where no record was there before."""
    ran = {}
    for limit in switch.limits():
        if limit.program.specializations:
            record = record_of(limit)
            other = limit.program.ran(record).limit
            ran[other if isinstance(other, MemoryBudget) else limit] = record
    return sum(limit.needed(record.values, record.policy) for limit, record in ran.items()), {
        limit: record.values for limit, record in ran.items()}


def random_shapes(model: BenchModel, number: int, salt: str) -> list[Shape]:
    """Different shapes within the ranges of the model's, the same ones each time. No size is 1 unless it has to be:
    those have programs of their own, and run as PyTorch until that pays."""
    draw = random.Random(f"{model.name} {salt}")
    ranges = [(min(max(min(column), 2), max(column)), max(column)) for column in zip(*model.shapes, strict=True)]
    found: dict[Shape, None] = {}
    for _ in range(20 * number):
        if len(found) < number:
            found[tuple(draw.randint(*bounds) for bounds in ranges)] = None
    return list(found)
