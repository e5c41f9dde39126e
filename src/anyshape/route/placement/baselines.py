"""Baselines of placement: contiguous blocks of experts, and EPLB's balanced packing with replicas.

EPLB (deepseek-ai/EPLB, README and the description of `replicate_experts` and `balanced_packing`), written anew from its
description: the global policy. It knows loads alone: no traffic between layers, no cost of moving.
"""
from __future__ import annotations

import numpy as np

from anyshape.route.placement.problem import Bools, Floats, Ints, Placement, PlacementProblem


def contiguous(problem: PlacementProblem) -> Placement:
    """Branches in order, as even as can be: how frameworks place experts by default."""
    return Placement.of([np.arange(len(one)) * problem.devices // len(one) for one in problem.loads], problem.devices)


def eplb(problem: PlacementProblem, replicas: int | None = None) -> Placement:
    """Per layer: the branch of the most load a copy gets a further copy, until there are `replicas` more; then the
    copies, heaviest first, go to the least loaded device that has room."""
    extra = problem.replicas if replicas is None else replicas
    return Placement(tuple(_packed(loads, replicate(loads, extra), problem.devices) for loads in problem.loads))


def replicate(loads: Floats, extra: int) -> Ints:
    """How many copies each branch has, [branches]: `extra` more than one of each."""
    copies = np.ones(len(loads), np.int64)
    for _ in range(extra):
        copies[np.argmax(loads / copies)] += 1
    return copies


def _packed(loads: Floats, copies: Ints, devices: int) -> Bools:
    found = np.zeros((len(loads), devices), bool)
    which = np.repeat(np.arange(len(loads)), copies)
    weight = (loads / copies)[which]
    room = np.full(devices, -(-len(which) // devices))
    taken = np.zeros(devices)
    for one in np.argsort(-weight, kind="stable"):
        open_ = np.flatnonzero(room > 0)
        device = open_[np.argmin(taken[open_])]
        found[which[one], device] = True
        room[device] -= 1
        taken[device] += weight[one]
    return found
