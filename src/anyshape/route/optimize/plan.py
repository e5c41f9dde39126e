"""The plan of profile-guided optimisation: optimisations propose decisions, the plan applies those that are taken.

    profile --optimize--> Plan(decisions with reasons) --apply(model)--> a module with the same results
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from anyshape.base.errors import InputError
from anyshape.base.units import bytes_of
from anyshape.route.optimize import constant_routes, dead_branches, fuse, place, preload, sink, speculate
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext, FlowSource, Optimisation, shared_copy
from anyshape.route.optimize.drift import DriftPolicy, adapted, cost
from anyshape.route.optimize.watched import Watched
from anyshape.route.profile.profile import Profile, ProfileView
from anyshape.route.report import collect, write_report

# in the order in which they propose and are applied; the last two leave alone what another has taken
PASSES: tuple[Optimisation, ...] = (constant_routes, fuse, place, preload, speculate, dead_branches, sink)
DEFAULT = DriftPolicy()


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for a model.

    memory_limit: bytes for weights, 0 for no limit. compile: what `apply` compiles with. example: inputs of the model.
    """

    profile: Profile
    decisions: tuple[Decision, ...]
    memory_limit: int = 0
    compile: Compile | None = None
    passes: tuple[Optimisation, ...] = PASSES
    example: tuple[Any, ...] | None = None

    @property
    def applied(self) -> tuple[Decision, ...]:
        return tuple(one for one in self.decisions if one.applied)

    def of(self, router: str) -> tuple[Decision, ...]:
        """The decisions for one router."""
        return tuple(one for one in self.decisions if one.router == router)

    def apply(self, model: nn.Module, drift: DriftPolicy | None = DEFAULT) -> nn.Module:
        """A module with the results of the model, by the decisions that are taken; the model stays as it is, and shares
        its parameters and buffers.

        Args:
            drift: how loads are watched, and the plan replaced where others come (optimize/watched.py); None: they are
                not, and the module is the specialised one alone. A plan of which no cost is known cannot be judged,
                and is not watched; nor is one that preloads weights, beside which a general path would keep
                all of them in memory.

        Raises:
            InputError: the plan is of another model.
        """
        self.profile.check(model)
        judged = cost(self, self.profile) > 0 or cost(self.refused(), self.profile) > 0
        if drift is None or not judged or any(one.optimisation == preload.NAME for one in self.applied):
            return self.specialized(model)
        return Watched(model, self, drift)

    def general(self, model: nn.Module) -> nn.Module:
        """The general path: a copy of the model's modules, compiled where the plan compiles."""
        found = shared_copy(model)
        return found if self.compile is None else self.compile(found)  # type: ignore[no-any-return]

    def refused(self) -> Plan:
        """The plan that takes none of its decisions: the general path."""
        return replace(self, decisions=tuple(replace(one, applied=False) for one in self.decisions))

    def for_loads(self, profile: Profile) -> Plan:
        """The plan for other loads of the same model, without running it (drift.adapted)."""
        return replace(self, profile=profile, decisions=adapted(self, profile))

    def specialized(self, model: nn.Module) -> nn.Module:
        """`apply` without the watch for drift. A part that an optimisation has compiled says so by an attribute
        `is_compiled` and is not compiled again."""
        by_name = {one.NAME: one for one in self.passes}
        found = shared_copy(model)
        for decision in self.applied:
            found = by_name[decision.optimisation].apply(found, decision, self.compile)
        if self.compile is not None and not getattr(found, "is_compiled", False):
            found = self.compile(found)
        return found

    def report(self, path: str | Path, running: nn.Module | None = None) -> None:
        """Writes loads, joint distributions and decisions with their reasons as a page (.html), a picture (.png) or
        data (.json).

        Args:
            running: what `apply` returned: hit rates, bytes and what has happened to the plan are shown, too.

        Raises:
            ConfigError, OutputError: the name or the disk does not fit.
        """
        write_report(path, collect(self.profile, self.decisions, running))

    def __str__(self) -> str:
        if not self.decisions:
            return "plan: nothing to optimise"
        wide = max(len(one.router or "model") for one in self.decisions)
        lines = [f"plan: {len(self.applied)} of {len(self.decisions)} optimisations are taken"]
        for one in self.decisions:
            gain = f", {one.gain:.2f}x expected" if one.gain is not None and one.applied else ""
            lines.append(f"  {one.router or 'model':{wide}}  {'+' if one.applied else '-'} {one.optimisation}{gain}: "
                         f"{one.why}")
            if one.applied and one.guard:
                lines.append(f"  {'':{wide}}    guard: {one.guard}")
        return "\n".join(lines)


def optimize(model: nn.Module, profile: ProfileView, *, memory_limit: int | str | None = None,
             passes: Sequence[str] | None = None, compile: Callable[..., Any] | None = None,
             example: tuple[Any, ...] | None = None) -> Plan:
    """The plan for a model and the loads that it was profiled with.

    Args:
        profile: of this model (route.profile). memory_limit: bytes that branches' weights may take in fast memory, as a
            number or a text ("2GiB"). passes: names of optimisations to consider; all where left out. compile: a
            compiler (anyshape.compile) for what the plan builds; runs as it is where left out. example: inputs of the
            model, which the static flow analysis needs; what depends on it is refused where left out.

    Raises:
        InputError: a profile of another model, an unknown pass. ConfigError: a limit that is no number of bytes.
    """
    taken = profile.taken()
    taken.check(model)
    known = {one.NAME: one for one in PASSES}
    for name in passes or ():
        if name not in known:
            raise InputError(f"optimisation {name!r} is unknown", why=f"there are {', '.join(known) or 'none'}",
                             do="give names of these")
    limit = bytes_of("memory_limit", memory_limit or 0)
    chosen = tuple(one for one in PASSES if passes is None or one.NAME in passes)
    return propose(DecisionContext(model, taken, FlowSource(model, example), limit, compile), chosen)


def propose(context: DecisionContext, passes: tuple[Optimisation, ...]) -> Plan:
    """Each optimisation proposes, in order, knowing what those before it decided."""
    for one in passes:
        context = replace(context, decisions=(*context.decisions, *one.propose(context)))
    return Plan(context.profile, context.decisions, context.memory_limit, context.compile, passes,
                context.example)
