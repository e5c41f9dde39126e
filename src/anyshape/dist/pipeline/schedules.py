"""Pipeline schedules as data: what each rank does in which order.

    gpipe, 2 ranks, 2 micro-batches         rank 0: F0 F1 B0 B1      rank 1: F0 F1 B0 B1
    1f1b                                    rank 0: F0 F1 B0 B1      rank 1: F0 B0 F1 B1

F is a forward, B a backward; of zero-bubble schedules B computes the gradients of what a stage was given, W those of
its weights. GPipe: Huang et al. (2019). 1F1B: PipeDream-flush, Narayanan et al. (2021a). Interleaved: Narayanan et al.,
"Efficient Large-Scale Language Model Training" (2021b), section 2.2. Zero-bubble: Qi et al. (2023), schedule ZB-H1.
"""
from __future__ import annotations

from typing import NamedTuple


class Action(NamedTuple):
    """kind: "F", "B" or "W". chunk: which of a rank's stages. micro: of which micro-batch."""

    kind: str
    chunk: int
    micro: int


Orders = tuple[tuple[Action, ...], ...]  # per rank


def schedule(name: str, stages: int, micro: int, chunks: int = 1) -> Orders | None:
    """The actions of each rank in order; None where the schedule needs other numbers (interleaved ones want as many
    micro-batches as ranks, or a multiple)."""
    if name == "interleaved":
        if chunks < 2 or micro % stages:
            return None
        return tuple(_interleaved(rank, stages, micro, chunks) for rank in range(stages))
    if chunks != 1:
        return None
    if name == "gpipe":
        order = tuple([Action("F", 0, one) for one in range(micro)] + [Action("B", 0, one) for one in range(micro)])
        return (order,) * stages
    make = {"1f1b": _one_forward_one_backward, "zero-bubble": _zero_bubble}[name]
    return tuple(make(rank, stages, micro) for rank in range(stages))


def _one_forward_one_backward(rank: int, stages: int, micro: int) -> tuple[Action, ...]:
    warm = min(stages - rank - 1, micro)
    found = [Action("F", 0, one) for one in range(warm)]
    for one in range(micro):
        if warm + one < micro:
            found.append(Action("F", 0, warm + one))
        found.append(Action("B", 0, one))
    return tuple(found)


def _zero_bubble(rank: int, stages: int, micro: int) -> tuple[Action, ...]:
    """As 1F1B; the gradients of weights wait for `rank` micro-batches, so that no rank holds more than the first."""
    found: list[Action] = []
    for one in _one_forward_one_backward(rank, stages, micro):
        found.append(one)
        if one.kind == "B" and one.micro >= rank:
            found.append(Action("W", 0, one.micro - rank))
    found += [Action("W", 0, one) for one in range(max(0, micro - rank), micro)]
    return tuple(found)


def _interleaved(rank: int, stages: int, micro: int, chunks: int) -> tuple[Action, ...]:
    total = micro * chunks
    warm = min((stages - rank - 1) * 2 + (chunks - 1) * stages, total)

    def at(number: int, kind: str) -> Action:
        turn, place = divmod(number, stages * chunks)
        chunk = place // stages
        return Action(kind, chunks - 1 - chunk if kind == "B" else chunk, turn * stages + number % stages)

    found = [at(one, "F") for one in range(warm)]
    for one in range(total):
        if warm + one < total:
            found.append(at(warm + one, "F"))
        found.append(at(one, "B"))
    return tuple(found)


def in_flight(orders: Orders, rank: int) -> int:
    """The most micro-batches (of one chunk each) that a rank keeps the activations of."""
    most = now = 0
    frees = "W" if any(one.kind == "W" for one in orders[rank]) else "B"
    for one in orders[rank]:
        now += (one.kind == "F") - (one.kind == frees)
        most = max(most, now)
    return most


def check(orders: Orders, stages: int, micro: int, chunks: int) -> list[str]:
    """What is wrong with a schedule; empty where every rank does each action once, in an order that can be run."""
    found = []
    kinds = {one.kind for order in orders for one in order}
    for rank, order in enumerate(orders):
        wanted = {Action(kind, chunk, one) for kind in kinds for chunk in range(chunks) for one in range(micro)}
        if len(order) != len(set(order)) or set(order) != wanted:
            found.append(f"rank {rank} does not do each action once")
    if found:
        return found
    done: set[tuple[Action, int]] = set()
    places = [0] * stages
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                if any(one not in done for one in before(order[places[rank]], rank, stages, chunks)):
                    break
                done.add((order[places[rank]], rank))
                places[rank] += 1
                moved = True
    return [f"rank {rank} waits forever with {order[places[rank]]}" for rank, order in enumerate(orders)
            if places[rank] < len(order)]


def before(action: Action, rank: int, stages: int, chunks: int) -> list[tuple[Action, int]]:
    """The actions, and the ranks that do them, whose results an action needs."""
    kind, chunk, micro = action
    if kind == "W":
        return [(Action("B", chunk, micro), rank)]
    if kind == "F":
        if rank:
            return [(Action("F", chunk, micro), rank - 1)]
        return [(Action("F", chunk - 1, micro), stages - 1)] if chunk else []
    found = [(Action("F", chunk, micro), rank)]
    if rank < stages - 1:
        found.append((Action("B", chunk, micro), rank + 1))
    elif chunk < chunks - 1:
        found.append((Action("B", chunk + 1, micro), 0))
    return found
