"""Speculative weight preload: branches' weights wait in a file, and those that will be wanted are read ahead.

    Router(f, branches)  -->  Router(f, PreloadedBranches(branches))      the same results, under a limit in bytes

Each call of a router says which branches it needs. Those that are missing are read, and no others; then a thread reads
what the next routers are likely to need (preload/branch_predictor.py) while this one's branches run. Weights keep their
addresses (store/host_memory.py), so the same kernels run on the same rows, and a compiled program is never traced
again: for it a router's branches are one operator, `anyshape_route::preloaded`. Where the branches of one call do not
fit under the limit together, they run in several rounds, in order. Rows of a grouped module then lie elsewhere in
their tensor, and functions such as gelu may round their last bit otherwise, as between any two batch sizes.

For inference: there are no gradients through a weight that is not there.

The idea is that of Brainstorm (OSDI'23, section 4.4), which loads one group ahead, keeps nothing, and has no limit.
"""
from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from anyshape.base.errors import InputError
from anyshape.route.core.router import Router
from anyshape.route.optimize.decision import Compile, Decision, DecisionContext
from anyshape.route.preload import Layout, PreloadedBranches, Preloader, lay_out, outermost, reason_against
from anyshape.route.profile.routers import routers_of
from anyshape.route.store.branch_cache import check_limit
from anyshape.route.store.host_memory import BranchMemory, supported

NAME = "preload"
GUARD = "each call reads the branches that it needs and that are not in memory; " \
        "prefetch switches itself off where it is wasted"
LOOK_AHEAD = 3  # routers


def propose(context: DecisionContext) -> list[Decision]:
    """Preload for all routers together, since they share the limit.

    Raises:
        LimitError: a branch alone does not fit under the limit.
    """
    candidates = outermost(context.routers)
    refused = {name: reason for name, router in candidates.items()
               if (reason := reason_against(router) or _fused_in_classes(context, name))}
    found = [Decision(name, NAME, False, reason) for name, reason in refused.items() if context.memory_limit]
    routers = {name: router for name, router in candidates.items() if name not in refused}
    if not context.memory_limit:
        return [Decision("", NAME, False, "there is no memory_limit, so all weights stay in memory")]
    if not supported():
        return [Decision("", NAME, False, "this system cannot take the pages of an address back")]
    if not routers:
        return found
    layout = lay_out(context.model, routers)
    limit = context.memory_limit
    if layout.bytes <= limit:
        return [*found, Decision("", NAME, False, f"the branches' {layout.bytes} bytes fit into {limit}")]
    check(layout, limit)
    popular = {name: taken(context.profile.loads(name), router.branch_count) for name, router in routers.items()}
    rate = resident_rate(layout, list(popular.values()), limit)
    why = f"the branches of {len(routers)} router{'s' * (len(routers) > 1)} have {layout.bytes} bytes, " \
          f"{limit} may be in memory ({limit / layout.bytes:.0%}); keeping the most popular alone would hit {rate:.0%}"
    joint = [[first, second, counts.astype(int).tolist()] for first, second, counts in _joint(context, routers)]
    options = {"routers": list(routers), "limit": limit, "joint": joint,
               "popular": {name: one.tolist() for name, one in popular.items()}}
    return [*found, Decision("", NAME, True, why, None, GUARD, options)]


def _fused_in_classes(context: DecisionContext, router: str) -> str:
    """Why what an earlier optimisation makes of the branches cannot be preloaded; "" where it can."""
    classes = max((len(one.options.get("classes", ())) for one in context.applied(router)), default=0)
    return "its branches are fused in classes, and stay in memory" if classes > 1 else ""


def _joint(context: DecisionContext, routers: Mapping[str, Router]) -> list[tuple[str, str, Any]]:
    """Joint counts of each router and those that may follow it within the look-ahead."""
    names = list(routers)
    found = []
    for at, first in enumerate(names):
        for second in names[at + 1:at + 1 + LOOK_AHEAD]:
            counts = context.profile.joint(first, second)
            if counts.any():
                found.append((first, second, counts))
    return found


def apply(model: nn.Module, decision: Decision, compile: Compile | None = None) -> nn.Module:
    """The model with its branches' weights in a file; `model` is changed in place.

    Memory goes once nobody else has the tensors: the model that the plan was applied to shares them.

    Raises:
        StoreError: there is no room on the disk. LimitError: a branch alone does not fit under the limit. Nothing is
            changed then.
    """
    options = decision.options
    return preload(model, int(options["limit"]), routers=options["routers"], popular=options["popular"],
                   joint={(first, second): np.array(counts, np.float64) for first, second, counts in options["joint"]},
                   compile=compile)


def preload(model: nn.Module, limit: int, *, routers: list[str] | None = None,
            popular: Mapping[str, Any] | None = None, joint: Mapping[tuple[str, str], Any] | None = None,
            compile: Compile | None = None, folder: str | None = None, ahead: bool = True) -> nn.Module:
    """`apply` without a plan: the model, changed in place, with branches' weights in a file.

    Args:
        limit: bytes of branches' weights that may be in memory. routers: names; all that can be where left out.
        popular: per router, P(a branch is taken in a call). joint: per pair of routers, counts of cells, [Ea, Eb].
        compile: what compiles grouped branches. folder: for the file; that of temporary files where left out.
        ahead: whether branches are read before they are needed.

    Raises:
        InputError: no such router, or one whose branches cannot be preloaded. The others: as apply.
    """
    every = routers_of(model)
    for name in routers or ():
        if name not in every:
            raise InputError(f"there is no router {name!r}", why=f"there are {', '.join(every) or 'none'}",
                             do="give names of these, or a plan of this model")
    chosen = {name: every[name] for name in routers} if routers is not None else {
        name: one for name, one in outermost(every).items() if not reason_against(one)}
    for name, router in chosen.items():
        reason = reason_against(router)
        if reason:
            raise InputError("branches cannot be preloaded", where=name, why=reason,
                             do="leave this router out, or plan without memory_limit")
    layout = lay_out(model, chosen)
    check(layout, limit)
    names = list(chosen)
    known = popular or {}
    start = [np.asarray(known.get(name, np.full(one.branch_count, 0.5)), np.float64) for name, one in chosen.items()]
    pairs = {(names.index(first), names.index(second)): np.asarray(counts) for (first, second), counts
             in (joint or {}).items()}
    preloader = Preloader(layout, limit, start, pairs, folder=folder, ahead=ahead, depth=LOOK_AHEAD)
    preloader.store({id(tensor): tensor for router in chosen.values()
                     for tensor in itertools.chain(router.branches.parameters(), router.branches.buffers())})
    for number, router in enumerate(chosen.values()):
        router.branches = PreloadedBranches(router, preloader, number, compile)
        router.grouped = True
    return model


def check(layout: Layout, limit: int) -> None:
    """Raises LimitError where a branch alone does not fit under the limit, beside what always stays in memory."""
    check_limit(layout.branches, BranchMemory(layout.size, layout.branches), limit - layout.kept, layout.kept)


def taken(loads: Any, branches: int) -> Any:
    """P(a branch is taken in a call), [branches], of loads [calls, branches]."""
    return (np.asarray(loads) > 0).mean(0) if len(loads) else np.full(branches, 0.5)


def resident_rate(layout: Layout, popular: list[Any], limit: int) -> float:
    """The share of uses that find their branch in memory if the most popular are always there, without prefetch."""
    sizes = np.array([one.size for one in layout.branches], np.float64)
    odds = np.concatenate(popular)
    order = np.argsort(-odds / np.maximum(sizes, 1), kind="stable")
    inside = np.cumsum(sizes[order]) <= limit - layout.kept
    return float(odds[order][inside].sum() / max(odds.sum(), 1e-12))
