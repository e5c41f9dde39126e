"""Expert placement: traffic on calls that nobody planned with, against contiguous blocks and EPLB; no needless change.

Traces are Markov chains over layers (correlated), or none (uncorrelated); counts, not times, so any machine will do.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anyshape.route.optimize.place import plan
from anyshape.route.placement import RoutingTrace, contiguous, eplb
from anyshape.route.placement.problem import problem
from anyshape.route.placement.traces import markov
from anyshape_bench.routes.case import Study

WIDTH, HIDDEN = 768, 3072  # of Switch's experts, for bytes
CELL, BRANCH = 4.0 * WIDTH, 8.0 * WIDTH * HIDDEN
CALLS, CELLS, SEEDS = 80, 512, 20


def correlated(quick: bool) -> Iterator[tuple[int, RoutingTrace]]:
    """(devices, trace): how strongly a cell follows its chain, and how popular branches are, vary."""
    for branches, devices, layers in ((16, 4, 4),) if quick else ((16, 4, 6), (32, 8, 6), (64, 8, 6)):
        for follow, popular in ((0.8, 0.0),) if quick else ((0.65, 0.0), (0.8, 0.5), (0.9, 1.0)):
            yield devices, markov(branches, layers, CELLS, CALLS, follow, popular=popular)


def measure(quick: bool) -> dict[str, float]:
    """Numbers by name: the least share of traffic saved, over all traces, against each baseline, and the mean; the
    load of the busiest device of a mean one, by placement; changes proposed on uncorrelated traces."""
    saved: dict[str, list[float]] = {"contiguous": [], "eplb": []}
    busiest: dict[str, list[float]] = {"contiguous": [], "eplb": [], "ours": []}
    refused = 0
    for devices, trace in correlated(quick):
        found = plan(trace, devices, cell_bytes=CELL, branch_bytes=BRANCH, horizon=100_000.0)
        known, held_out = trace.split()
        task = problem(known.loads(), known.joint(), devices, cell_bytes=CELL)
        refused += not found.taken
        placements = {"contiguous": contiguous(task), "eplb": eplb(task), "ours": found.placement}
        traffic = {name: float(held_out.costs(task, one)[0].mean()) for name, one in placements.items()}
        for name, shares in saved.items():
            shares.append(1 - traffic["ours"] / traffic[name])
        for name, one in placements.items():
            loads = [load @ copies for load, copies in zip(held_out.loads(), one.copies, strict=True)]
            busiest[name].append(float(np.mean([load.max() / load.mean() for load in loads])))
    seeds = range(SEEDS // 5 if quick else SEEDS)
    needless = sum(plan(markov(16, 4, CELLS, CALLS, 0.0, seed=seed, chain=seed), 4, cell_bytes=CELL).taken
                   for seed in seeds)
    return {"less_traffic": min(saved["contiguous"]), "less_traffic_than_eplb": min(saved["eplb"]),
            "less_traffic_mean": float(np.mean(saved["contiguous"])),
            "less_traffic_than_eplb_mean": float(np.mean(saved["eplb"])), "needless_changes": needless,
            "changes_refused_on_correlated_traces": refused,
            **{f"busiest_of_mean_{name}": float(np.mean(values)) for name, values in busiest.items()}}


def cases() -> list[Study]:
    return [Study("placement", "placement", measure, quick=True)]
