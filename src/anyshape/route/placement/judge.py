"""The judge of placements: what one costs, and what is wrong with it, apart from whoever made it.

With replicas each copy of a branch takes an equal share of its cells, and a cell goes to the nearest copy of its next
branch.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anyshape.route.placement.problem import Floats, Placement, PlacementProblem


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one call. traffic: that travel. balance: what the busiest devices cost. migration: of moving, spread
    over the horizon. moved: bytes that move once."""

    traffic: float
    balance: float
    migration: float
    moved: float

    @property
    def total(self) -> float:
        return self.traffic + self.balance + self.migration


def cost(problem: PlacementProblem, placement: Placement) -> Cost:
    """What a placement costs: traffic and load of the calls of a problem, as `Cost` says."""
    traffic = sum(float((counts * per_cell(problem, placement, layer)).sum())
                  for layer, counts in enumerate(problem.joint))
    over = sum(busiest(share(placement, layer), loads) for layer, loads in enumerate(problem.loads))
    moved = 0.0
    if problem.current is not None:
        for new, old, sizes in zip(placement.copies, problem.current.copies, problem.branch_bytes, strict=True):
            moved += float(((new & ~old).sum(1) * sizes).sum())
    return Cost(traffic * problem.cell_bytes, problem.balance * over * problem.cell_bytes, moved / problem.horizon,
                moved)


def share(placement: Placement, layer: int) -> Floats:
    """The share of a branch's cells that each device takes, [branches, devices]."""
    copies = placement.copies[layer].astype(np.float64)
    return copies / copies.sum(1, keepdims=True)


def per_cell(problem: PlacementProblem, placement: Placement, layer: int) -> Floats:
    """What a cell costs from each branch of a layer to each of the next, [Ea, Eb], in distance."""
    there = placement.copies[layer + 1]
    nearest = np.where(there[None], problem.distance[:, None, :], np.inf).min(2)  # [devices, Eb]
    return share(placement, layer) @ nearest


def busiest(shares: Floats, loads: Floats) -> float:
    """Cells on the busiest device beyond an even share."""
    return float((loads @ shares).max() - loads.sum() / shares.shape[1])


def check(problem: PlacementProblem, placement: Placement) -> list[str]:
    """What is wrong with a placement; empty where it is right."""
    found = []
    if len(placement.copies) != problem.layers:
        return [f"it has {len(placement.copies)} layers of {problem.layers}"]
    held = np.zeros(problem.devices)
    for layer, (copies, sizes) in enumerate(zip(placement.copies, problem.branch_bytes, strict=True)):
        if copies.shape != (len(sizes), problem.devices):
            return [f"layer {layer} has shape {copies.shape}"]
        if (copies.sum(1) < 1).any():
            found.append(f"branches {np.flatnonzero(copies.sum(1) < 1).tolist()} of layer {layer} are nowhere")
        if copies.sum(0).max() > problem.slots:
            found.append(f"a device has {copies.sum(0).max()} branches of layer {layer}, {problem.slots} at most")
        if copies.sum() - len(copies) > problem.replicas:
            found.append(f"layer {layer} has more than {problem.replicas} replicas")
        held += sizes @ copies
    if problem.memory and held.max() > problem.memory:
        found.append(f"a device has {held.max():.0f} bytes of {problem.memory:.0f}")
    return found
