"""The solver of placements: seeds, greedy chains from layer to layer, then swaps and moves until none helps; restarts.

    cost of branch e of a layer on device d, its neighbours fixed:  A[e, d] = sum_i joint[i, e] distance[dev i, d] + ...
    swap of i and k                                                 A[i, dk] - A[i, di] + A[k, di] - A[k, dk]

so that a branch looks at all its partners in O(branches). Layers take turns; those beside a layer that has changed are
looked at again. Replicas are added last, each where it saves most.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anyshape.route.placement.baselines import contiguous, eplb
from anyshape.route.placement.judge import check, cost
from anyshape.route.placement.problem import Floats, Ints, Placement, PlacementProblem

NOTHING = 1e-9  # bytes: a gain below it is rounding


def solve(problem: PlacementProblem, *, restarts: int = 6, seed: int = 0) -> Placement:
    """The best placement that was found: at most the cost of the current one, of EPLB's and of contiguous blocks, as
    far as these are legal. The same for the same seed."""
    draw = np.random.default_rng(seed)
    best: Placement | None = None
    for start in _seeds(problem, restarts, draw):
        search = _Search(problem, start)
        search.run()
        found = Placement.of(search.devices, problem.devices)
        if not check(problem, found) and (best is None or cost(problem, found).total < cost(problem, best).total):
            best = found
    for other in (problem.current, contiguous(problem), eplb(problem)):
        if other is not None and not check(problem, other) and (
                best is None or cost(problem, other).total < cost(problem, best).total - NOTHING):
            best = other
    assert best is not None, "no seed is legal"
    return _replicated(problem, best)


def _seeds(problem: PlacementProblem, restarts: int, draw: np.random.Generator) -> Iterator[list[Ints]]:
    """The current placement, the baselines, and chains that begin with a random first layer."""
    single = [contiguous(problem), eplb(problem, 0)]
    if problem.current is not None:
        single.append(problem.current)
    for one in single:
        yield [devices.copy() for devices in one.devices]
    for _ in range(restarts):
        first = np.arange(len(problem.loads[0])) % problem.devices
        yield _chain(problem, draw.permutation(first))


def _chain(problem: PlacementProblem, first: Ints) -> list[Ints]:
    """Each layer's branches go where most of their cells come from; then back and forth, so that the first layer fits
    the others, too."""
    found = [first] + [np.zeros(0, np.int64)] * (problem.layers - 1)
    for layer in range(1, problem.layers):
        found[layer] = _assigned(_affinity(problem, found, layer, True, False), problem.slots)
    for layer in (*range(problem.layers - 2, -1, -1), *range(1, problem.layers)):
        found[layer] = _assigned(_affinity(problem, found, layer, layer > 0, layer < problem.layers - 1), problem.slots)
    return found


def _affinity(problem: PlacementProblem, devices: list[Ints], layer: int, before: bool, after: bool) -> Floats:
    """What each branch of a layer would cost on each device, [branches, devices], in cells times distance."""
    found = np.zeros((len(problem.loads[layer]), problem.devices))
    if before:
        found += problem.joint[layer - 1].T @ problem.distance[devices[layer - 1]]
    if after:
        found += problem.joint[layer] @ problem.distance[:, devices[layer + 1]].T
    return found


def _assigned(costs: Floats, slots: int) -> Ints:
    """A device for each branch, at most `slots` branches each: those that lose most by their second choice go first."""
    count, devices = costs.shape
    room, found = np.full(devices, slots), np.zeros(count, np.int64)
    left = np.ones(count, bool)
    spread = -(-count // devices)  # as even as can be: what balance asks for
    room[:] = min(slots, spread)
    while left.any():
        open_ = np.flatnonzero(room > 0)
        options = costs[np.ix_(left, open_)]
        order = np.sort(options, axis=1)
        regret = order[:, 1] - order[:, 0] if len(open_) > 1 else np.zeros(len(options))
        row = int(np.argmax(regret))
        one = int(np.flatnonzero(left)[row])
        found[one] = open_[int(np.argmin(options[row]))]
        room[found[one]] -= 1
        left[one] = False
    return found


class _Search:
    """Local search from one placement. devices: per layer, of each branch."""

    def __init__(self, problem: PlacementProblem, devices: list[Ints]) -> None:
        self.problem, self.devices = problem, devices
        self.held = np.zeros(problem.devices)
        for own, sizes in zip(devices, problem.branch_bytes, strict=True):
            np.add.at(self.held, own, sizes)

    def run(self) -> None:
        waiting = set(range(self.problem.layers))
        while waiting:
            layer = min(waiting)
            waiting.discard(layer)
            if self._layer(layer):
                waiting |= {one for one in (layer - 1, layer + 1) if 0 <= one < self.problem.layers}

    def _layer(self, layer: int) -> bool:
        """Improves one layer while its neighbours stay; whether it has changed."""
        problem, own = self.problem, self.devices[layer]
        costs = _affinity(problem, self.devices, layer, layer > 0, layer < problem.layers - 1) * problem.cell_bytes
        if problem.current is not None:
            away = ~problem.current.copies[layer]
            costs = costs + away * (problem.branch_bytes[layer] / problem.horizon)[:, None]
        loads, sizes = problem.loads[layer], problem.branch_bytes[layer]
        taken = np.zeros(problem.devices)
        np.add.at(taken, own, loads)
        changed = again = True
        ever = False
        while again:
            again = False
            for one in range(len(own)):
                changed = self._improved(one, own, costs, loads, sizes, taken)
                again, ever = again or changed, ever or changed
        return ever

    def _improved(self, one: int, own: Ints, costs: Floats, loads: Floats, sizes: Floats, taken: Floats) -> bool:
        """Does the best swap or move of one branch, if it helps."""
        here = own[one]
        swap = costs[one, own] - costs[one, here] + costs[:, here] - costs[np.arange(len(own)), own]
        swap = swap + self._balance(taken, here, own, loads - loads[one])
        swap[own == here] = np.inf
        room = np.bincount(own, minlength=len(taken)) < self.problem.slots
        there = np.arange(len(taken))
        move = costs[one] - costs[one, here] + self._balance(taken, here, there, np.full(len(taken), -loads[one]))
        move[~room | (there == here)] = np.inf
        if self.problem.memory:
            grown = self.held[own] + sizes[one] - sizes
            shrunk = self.held[here] - sizes[one] + sizes
            swap[(grown > self.problem.memory) & (sizes < sizes[one])] = np.inf
            swap[(shrunk > self.problem.memory) & (sizes > sizes[one])] = np.inf
            move[self.held + sizes[one] > self.problem.memory] = np.inf
        partner, device = int(np.argmin(swap)), int(np.argmin(move))
        if min(swap[partner], move[device]) >= -NOTHING:
            return False
        if swap[partner] <= move[device]:
            device = int(own[partner])
            self._put(partner, here, own, loads, sizes, taken)
        self._put(one, device, own, loads, sizes, taken)
        return True

    def _put(self, one: int, device: int, own: Ints, loads: Floats, sizes: Floats, taken: Floats) -> None:
        for where, way in ((own[one], -1), (device, 1)):
            taken[where] += way * loads[one]
            self.held[where] += way * sizes[one]
        own[one] = device

    def _balance(self, taken: Floats, here: int, there: Ints, gains: Floats) -> Floats:
        """By how much the cost of the busiest device grows if `here` gains so many cells and `there` loses them."""
        order = np.argsort(-taken)[:3]
        others = np.zeros(len(there))
        for device in order[::-1]:  # the busiest that is neither of the two
            others = np.where((device != here) & (device != there), taken[device], others)
        after = np.maximum(np.maximum(taken[here] + gains, taken[there] - gains), others)
        return (after - taken.max()) * self.problem.balance * self.problem.cell_bytes


def _replicated(problem: PlacementProblem, placement: Placement) -> Placement:
    """Adds replicas one by one, each where it saves most, while they save anything and have room."""
    if not problem.replicas:
        return placement
    now = cost(problem, placement).total
    for layer in range(problem.layers):
        for _ in range(problem.replicas - int(placement.copies[layer].sum()) + len(placement.copies[layer])):
            best = None
            for one, device in np.argwhere(~placement.copies[layer]):
                copies = placement.copies[layer].copy()
                copies[one, device] = True
                found = Placement((*placement.copies[:layer], copies, *placement.copies[layer + 1:]))
                total = cost(problem, found).total
                if total < now - NOTHING and not check(problem, found):
                    best, now = found, total
            if best is None:
                break
            placement = best
    return placement
