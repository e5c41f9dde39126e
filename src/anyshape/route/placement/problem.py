"""The placement problem: branches of several layers (routers), devices, and what it costs that a cell changes device.

A cell that took branch i of one layer and takes branch j of the next travels from i's device to j's (one all-to-all
between two layers, ExFlow, arXiv 2401.08383). Brainstorm (OSDI'23, section 4.2) states the same problem; its code does
not solve it.
"""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshape.base.errors import InputError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Which device has which branch. copies: per layer [branches, devices]; a branch with several has replicas."""

    copies: tuple[Bools, ...]

    @staticmethod
    def of(devices: Sequence[Ints], count: int) -> Placement:
        """Without replicas: the device of each branch, per layer [branches], of `count` devices."""
        return Placement(tuple(np.asarray(one)[:, None] == np.arange(count) for one in devices))

    @property
    def devices(self) -> tuple[Ints, ...]:
        """Per layer the (first) device of each branch."""
        return tuple(one.argmax(1) for one in self.copies)

    @property
    def replicas(self) -> int:
        """Copies beyond one of each branch."""
        return sum(int(one.sum()) - len(one) for one in self.copies)

    def orders(self) -> tuple[Ints, ...]:
        """Per layer the permutation that makes each device's branches contiguous: position -> branch. It says nothing
        of replicas."""
        return tuple(np.argsort(one, kind="stable") for one in self.devices)


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """What a placement costs and must keep to. Numbers are of one call.

    loads: per layer, cells of each branch, [branches]. joint: per pair of layers, cells from branch i to branch j,
    [Ea, Eb]. distance: what a byte costs from one device to another, [devices, devices], 0 on the diagonal. cell_bytes:
    of one cell. branch_bytes: per layer, of each branch, [branches]. memory: bytes that a device has; 0: enough. slots:
    branches of one layer that a device takes, replicas included. replicas: copies per layer beyond one of each branch.
    current: where branches are. balance: what a cell on the busiest device beyond the mean costs, in cells that travel.
    horizon: calls over which moving the branches has to pay.
    """

    loads: tuple[Floats, ...]
    joint: tuple[Floats, ...]
    distance: Floats
    cell_bytes: float
    branch_bytes: tuple[Floats, ...]
    slots: int
    memory: float = 0.0
    replicas: int = 0
    current: Placement | None = None
    balance: float = 1.0
    horizon: float = 10_000.0

    @property
    def devices(self) -> int:
        return len(self.distance)

    @property
    def layers(self) -> int:
        return len(self.loads)


def problem(loads: Sequence[Floats], joint: Sequence[Floats], devices: int, *, cell_bytes: float = 1.0,
            branch_bytes: float | Sequence[Floats] = 0.0, distance: Floats | None = None, memory: float = 0.0,
            replicas: int = 0, current: Placement | None = None, balance: float = 1.0,
            horizon: float = 10_000.0) -> PlacementProblem:
    """A problem with as many slots on each device as an even share needs.

    Args:
        distance: left out, 1 between any two devices. The others: as in PlacementProblem.

    Raises:
        InputError: sizes that do not fit together, no device, or not enough memory on all devices together.
    """
    counts = [len(one) for one in loads]
    if devices < 1 or not counts:
        raise InputError(f"{len(counts)} layers cannot be placed on {devices} devices", why="at least one of each is "
                         "needed", do="give loads of each router, and the number of devices")
    wanted = list(itertools.pairwise(counts))
    if [np.shape(one) for one in joint] != wanted:
        raise InputError(f"joint counts of shapes {[np.shape(one) for one in joint]} do not fit the loads",
                         why=f"layers of {counts} branches have pairs of {wanted}",
                         do="give one matrix for each two layers that follow each other")
    far = 1.0 - np.eye(devices) if distance is None else np.asarray(distance, np.float64)
    if far.shape != (devices, devices) or (far < 0).any() or np.diag(far).any():
        raise InputError(f"distances of shape {far.shape} do not fit {devices} devices",
                         why="they are [devices, devices], not negative, 0 on the diagonal", do="give such a matrix")
    sizes = tuple(np.full(count, float(branch_bytes)) for count in counts) if isinstance(branch_bytes, (int, float)) \
        else tuple(np.asarray(one, np.float64) for one in branch_bytes)
    total = sum(float(one.sum()) for one in sizes)
    if memory and total > memory * devices:
        raise InputError(f"branches of {total:.0f} bytes do not fit on {devices} devices",
                         why=f"a device has {memory:.0f} bytes", do="give more devices, or more memory")
    slots = -(-(max(counts) + replicas) // devices)
    return PlacementProblem(tuple(np.asarray(one, np.float64) for one in loads),
                            tuple(np.asarray(one, np.float64) for one in joint), far, float(cell_bytes), sizes, slots,
                            float(memory), replicas, current, balance, horizon)
