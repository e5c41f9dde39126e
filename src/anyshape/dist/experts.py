"""Expert placement over ranks: which rank serves a cell of another, which slot of it an expert has, and moves.

    copies [[1, 0], [1, 1], [0, 1]]   three experts, two ranks: expert 1 is hot, and has a replica
    -->  slots of rank 0: experts 0, 1;  of rank 1: experts 1, 2
    -->  a cell of rank 1 for expert 1 stays there; one for expert 0 goes to rank 0

A placement is that of route/placement: which device has which branch. A cell goes to the copy on its own rank, if there
is one; else ranks take turns among the copies, so that these have equal shares.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anyshape.base.errors import InputError

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Move(NamedTuple):
    """The weights of an expert go from one rank to another."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMap:
    """Where experts are. copies: [experts, ranks], as a layer of route/placement's `Placement.copies`.

    Raises:
        InputError: an expert is nowhere.
    """

    copies: Bools

    def __post_init__(self) -> None:
        missing = np.flatnonzero(~self.copies.any(1)) if self.copies.ndim == 2 else np.zeros(1)
        if self.copies.ndim != 2 or not self.copies.size or len(missing):
            raise InputError(f"a placement of shape {self.copies.shape} leaves experts {missing.tolist()[:8]} nowhere",
                             why="each expert is on at least one rank", do="give bools [experts, ranks]")

    @staticmethod
    def contiguous(experts: int, ranks: int) -> ExpertMap:
        """Experts in order, as even as can be."""
        return ExpertMap(np.arange(experts)[:, None] * ranks // experts == np.arange(ranks))

    @property
    def experts(self) -> int:
        return len(self.copies)

    @property
    def ranks(self) -> int:
        return self.copies.shape[1]

    def slots(self, rank: int) -> tuple[int, ...]:
        """The experts that a rank has, in order."""
        return tuple(int(one) for one in np.flatnonzero(self.copies[:, rank]))

    def replicated(self) -> tuple[int, ...]:
        """The experts with several copies."""
        return tuple(int(one) for one in np.flatnonzero(self.copies.sum(1) > 1))

    def serving(self, source: int) -> Ints:
        """The rank that serves cells of the rank `source`, for each expert."""
        found = np.empty(self.experts, np.int64)
        for expert, copies in enumerate(self.copies):
            there = np.flatnonzero(copies)
            found[expert] = source if copies[source] else there[(source + expert) % len(there)]
        return found

    def places(self, source: int) -> tuple[Ints, Ints]:
        """For each expert the number of the slot that serves cells of `source`, counted over the slots of all ranks;
        and where the slots of each rank begin, [ranks + 1]."""
        begins = np.concatenate([[0], np.cumsum(self.copies.sum(0))])
        within = self.copies.cumsum(0) - 1
        serving = self.serving(source)
        return begins[serving] + within[np.arange(self.experts), serving], begins

    def moves(self, after: ExpertMap) -> tuple[Move, ...]:
        """What makes this placement that one: each new copy from an old one, which take turns.

        Raises:
            InputError: they are of other experts or ranks.
        """
        if after.copies.shape != self.copies.shape:
            raise InputError(f"a placement of shape {after.copies.shape} does not follow one of {self.copies.shape}",
                             why="experts and ranks stay the same", do="make a new layer")
        sent = np.zeros(self.ranks, np.int64)
        found = []
        for expert, target in np.argwhere(after.copies & ~self.copies):
            there = np.flatnonzero(self.copies[expert])
            source = there[np.argmin(sent[there])]
            sent[source] += 1
            found.append(Move(int(expert), int(source), int(target)))
        return tuple(found)


def cells_sent(loads: Sequence[Ints], experts: ExpertMap) -> Ints:
    """Cells from each rank to each, [ranks, ranks]. loads: of each rank, its cells for each expert."""
    found = np.zeros((experts.ranks, experts.ranks), np.int64)
    for source, own in enumerate(loads):
        np.add.at(found[source], experts.serving(source), own)
    return found
