"""Loads of branches: how many cells each gets, and routes drawn for them, so that every form takes the same ones."""
from __future__ import annotations

import torch
from torch import Tensor

LOADS = ("uniform", "zipf", "one-hot")


def counts(load: str, cells: int, branches: int) -> list[int]:
    """Cells of each branch: as even as can be, in proportion to 1/rank (Zipf, exponent 1), or all to one branch."""
    shares = {"uniform": [1.0] * branches, "zipf": [1 / (rank + 1) for rank in range(branches)],
              "one-hot": [1.0] + [0.0] * (branches - 1)}[load]
    whole = sum(shares)
    found = [int(cells * share / whole) for share in shares]
    wanting = sorted(range(branches), key=lambda one: found[one] - cells * shares[one] / whole)
    for one in wanting[:cells - sum(found)]:
        found[one] += 1
    return found


def routes(load: str, cells: int, branches: int, draw: torch.Generator) -> Tensor:
    """Routes i64 [cells] with these loads; which branch is the busy one, and which cells go there, is drawn."""
    which = torch.randperm(branches, generator=draw)
    ids = torch.repeat_interleave(which, torch.tensor(counts(load, cells, branches)))
    return ids[torch.randperm(cells, generator=draw)]


def steer(ids: Tensor, branches: int) -> Tensor:
    """What is added to probabilities [*, branches] so that the highest is at `ids`: f32 of that shape."""
    return 2.0 * torch.nn.functional.one_hot(ids, branches).float()
