"""Linking: from plans and their kernels to executables, which are given all that their calls keep to.

    plans of a forward and its backward -> specializers -> joint layout, order selection -> executables with policies

Where two executables have to know of each other, each is given what was made of both specializers: so there is a
backward's executable before its forward's, and that of the second order of steps before that of the first.
"""
from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from anyshape.backend.interface import Kernel, Target
from anyshape.base import counters
from anyshape.base.config import Config
from anyshape.compiler.compiled import CompiledGraph, CompiledPair, PlannedGraph
from anyshape.ir.graph import UNUSED
from anyshape.plan.ir.program import Plan
from anyshape.runtime.budget.arbitration import BudgetTerms
from anyshape.runtime.budget.calibration import calibration_of
from anyshape.runtime.budget.order_selection import OrderSelection
from anyshape.runtime.call.executable import FREE, CallPolicy, Executable
from anyshape.runtime.context.process_context import shared_context
from anyshape.runtime.memory.pools import LiveTapes
from anyshape.runtime.specialize.joint_layout import joined
from anyshape.runtime.specialize.specialization import Specializer
from anyshape.sym.expr import Size

NO_NAMES: Mapping[str, str] = MappingProxyType({})
OWN_SIZES = "its memory is not counted: it has sizes of its own"


def link_pair(first: PlannedGraph, second: PlannedGraph | None, config: Config, names: Mapping[str, str] = NO_NAMES,
              held: LiveTapes | None = None, zeros: Sequence[tuple[Size, int]] = (),
              whole: bool = False) -> CompiledPair:
    """A forward and its backward, or a program alone (`second` is None).

    Args:
        names: symbol -> what errors call it.
        held: what tapes keep of the limits of `config`; None: those limits are not put on the programs.
        zeros: see `MemoryBudget`.
        whole: the two are a whole step.

    Raises:
        Unsupported: a size of a plan cannot be read from its inputs.
    """
    begun = time.perf_counter()
    forwards = [_specializer(first, plan, None, names, second, at) for at, plan in enumerate(first.plans)]
    backwards = []
    if second is not None:
        plans = second.plans if len(forwards) == 1 else second.plans[:1]
        backwards = [_specializer(second, plan, first.plan, names, None, at) for at, plan in enumerate(plans)]
        if has_own_sizes(forwards[0], backwards[0]):
            backward = _executable(second, backwards[0], config)
            forward = link_pair(first, None, config, names, held).forward
            return CompiledPair(forward, _linked(second, [backward], begun), OWN_SIZES)
        if len(backwards) > 1:  # where the forward's values lie depends on what its backward does
            forwards.append(_specializer(first, first.plan, None, names, second, 1))
        if whole:
            halves = [joined(*both) for both in zip(forwards, backwards, strict=False)]
            forwards[:len(halves)], backwards[:len(halves)] = zip(*halves, strict=True)
    selection = None
    if len(forwards) > 1:
        selection = OrderSelection(*(backwards if len(backwards) > 1 else forwards))
    later = _in_orders(second, backwards, config, [None] * len(backwards), selection) if second is not None else []
    budgets: list[BudgetTerms | None] = [None] * len(forwards)
    if config.limited and held is not None:
        budgets = [BudgetTerms(backward, config, held, calibration_of(config, first.target), zeros)
                   for _, backward in itertools.zip_longest(forwards, later)]
    programs = _in_orders(first, forwards, config, budgets, selection)
    own = len(first.plans)
    return CompiledPair(_linked(first, programs[:own], begun),
                        None if second is None else _linked(second, later, time.perf_counter()))


def link_backward(planned: PlannedGraph, forward: CompiledGraph, config: Config,
                  names: Mapping[str, str] = NO_NAMES) -> CompiledGraph:
    """A backward whose forward is there, and knows nothing of it. Errors as of `link_pair`."""
    begun = time.perf_counter()
    specializer = _specializer(planned, planned.plan, forward.plan, names, None, 0)
    return _linked(planned, [_executable(planned, specializer, config)], begun)


def link_plan(plan: Plan, kernels: Sequence[Kernel], forward: Plan | None, target: Target, config: Config,
              names: Mapping[str, str] = NO_NAMES) -> Executable:
    """The executable of a plan that keeps to nothing. forward: of a backward, the plan of its forward."""
    context = shared_context()
    specializer = Specializer(plan, target.runner(plan, kernels), context.host, forward, names=names)
    return Executable(plan, kernels, context, forward, config.threads, config.packed_bytes, target, specializer)


def has_own_sizes(forward: Specializer, backward: Specializer) -> bool:
    """Whether a backward has sizes that its forward does not know."""
    unknown = set(backward.layout.symbols) - set(forward.layout.symbols)
    return any(not symbol.startswith(UNUSED) for symbol in unknown)


def _specializer(planned: PlannedGraph, plan: Plan, before: Plan | None, names: Mapping[str, str],
                 later: PlannedGraph | None, order: int) -> Specializer:
    """That of a plan in one of its orders. before, later: the forward's plan, and the backward that reads its tape."""
    chunks = () if later is None else later.plans[min(order, len(later.plans) - 1)].chunks
    runner = planned.target.runner(plan, planned.kernels)
    return Specializer(plan, runner, shared_context().host, before, chunks, order > 0, names)


def _in_orders(planned: PlannedGraph, specializers: Sequence[Specializer], config: Config,
               budgets: Sequence[BudgetTerms | None], selection: OrderSelection | None) -> list[Executable]:
    """The executables of a graph, in each order of steps that calls choose from."""
    found: list[Executable] = []
    for specializer, budget in reversed([*zip(specializers, budgets, strict=False)]):
        other = found[0] if found else None
        policy = CallPolicy(budget, other, None if other is None else selection)
        found.insert(0, _executable(planned, specializer, config, policy))
    return found


def _executable(planned: PlannedGraph, specializer: Specializer, config: Config,
                policy: CallPolicy = FREE) -> Executable:
    return Executable(specializer.plan, planned.kernels, shared_context(), specializer.keeps.forward, config.threads,
                      config.packed_bytes, planned.target, specializer, policy)


def _linked(planned: PlannedGraph, executables: Sequence[Executable], begun: float) -> CompiledGraph:
    """The graph with its executables. begun: when linking began."""
    seconds = time.perf_counter() - begun
    counters.count("compile_seconds", seconds)
    fields = {one.name: getattr(planned, one.name) for one in dataclasses.fields(planned)}
    fields["seconds"] = (*planned.seconds, ("link", seconds))
    return CompiledGraph(**fields, executable=executables[0], other=executables[1] if len(executables) > 1 else None)
