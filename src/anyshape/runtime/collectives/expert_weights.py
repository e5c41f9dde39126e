"""Weights of experts on many ranks: moved from one placement to another, and gradients of replicas added up.

    experts 0 1 | 2 3  -->  0 2 | 1 2 3     rank 0 sends expert 1, and rank 1 expert 2, of which both have a copy then

A tensor of weights has one row for each slot of its rank, in the order of dist/experts.py. Only what a rank has not
travels, point to point. Replicas stay alike when each is updated by the same gradient: the sum of all copies'.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base.errors import InputError
from anyshape.dist.experts import ExpertMap
from anyshape.runtime.collectives.messages import Line


def moved(line: Line, weights: Sequence[Tensor], before: ExpertMap, after: ExpertMap) -> list[Tensor]:
    """The weights of this rank's slots under `after`, new tensors; all ranks call it together.

    Args:
        weights: each [slots under `before`, ...]: parameters, and states of an optimiser.

    Raises:
        InputError: a tensor has another number of rows than this rank has slots.
    """
    own, wanted = before.slots(line.rank), after.slots(line.rank)
    _check(weights, len(own))
    found = [one.new_empty(len(wanted), *one.shape[1:]) for one in weights]
    place = {expert: slot for slot, expert in enumerate(own)}
    for slot, expert in enumerate(wanted):
        if expert in place:
            for old, new in zip(weights, found, strict=True):
                new[slot] = old[place[expert]].detach()
    work: list[Any] = []
    kept: list[Tensor] = []  # what is on its way
    for number, (expert, source, target) in enumerate(before.moves(after)):
        for at, (old, new) in enumerate(zip(weights, found, strict=True)):
            tag = number * len(weights) + at
            if not old.shape[1:].numel():
                continue
            if source == line.rank:
                kept.append(old[place[expert]].detach().contiguous())
                work.append(dist.isend(kept[-1], line.peer(target - source), group=line.group, tag=tag))
            elif target == line.rank:
                into = new[wanted.index(expert)]
                work.append(dist.irecv(into, line.peer(source - target), group=line.group, tag=tag))
    for one in work:
        one.wait()
    return found


def add_replicas(line: Line, gradients: Sequence[Tensor], experts: ExpertMap) -> None:
    """Adds up the gradients of experts that several ranks have, in place; one message, and none where there is none.

    Raises:
        InputError: a tensor has another number of rows than this rank has slots.
    """
    own = experts.slots(line.rank)
    _check(gradients, len(own))
    shared = experts.replicated()
    if not shared or not gradients:
        return
    here = [(place, own.index(expert)) for place, expert in enumerate(shared) if expert in own]
    parts = [one.new_zeros(len(shared), *one.shape[1:]) for one in gradients]
    for part, gradient in zip(parts, gradients, strict=True):
        for place, slot in here:
            part[place] = gradient[slot]
    flat = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(flat, group=line.group)
    at = 0
    for part, gradient in zip(parts, gradients, strict=True):
        total = flat[at:at + part.numel()].view_as(part)
        at += part.numel()
        for place, slot in here:
            gradient[slot] = total[place]


def _check(tensors: Sequence[Tensor], slots: int) -> None:
    for one in tensors:
        if one.dim() == 0 or len(one) != slots:
            raise InputError(f"a tensor of weights has the shape {list(one.shape)}, and this rank {slots} experts",
                             why="it has a row for each expert of the rank", do="give [experts of the rank, ...]")
