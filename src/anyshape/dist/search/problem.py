"""The problem of strategy search: a workload, a machine, ranks, a limit in bytes, and the shapes that steps have.

A strategy for changing shapes has two stages. Placements of parameters (and the axes of the mesh that they lie along)
are common to all shapes, for weights cannot move at every step; what activations do (recomputation, micro-batches,
positions over ranks) is decided for each class of shapes.
"""
from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from anyshape.base.errors import InputError
from anyshape.dist.cost.layer_cost import Precision
from anyshape.dist.cost.machine import Machine
from anyshape.dist.cost.parallel import DATA, RECOMPUTE, TENSOR
from anyshape.dist.cost.strategy import LayerStrategy
from anyshape.dist.cost.workload import Workload

PLACEMENTS = {"column": "cut", "row": "cut", "cut": "cut", "tensor": "cut", "sequence": "sequence", "whole": "whole",
              "replicated": "whole"}
CLASSES = 4  # of shapes, at most


@dataclass(frozen=True, slots=True)
class Shape:
    """A class of shapes. length: the longest of it. weight: which part of the steps. batch: sequences of all ranks."""

    length: int
    weight: float
    batch: int


@dataclass(frozen=True, slots=True)
class Override:
    """What a person has fixed of the layers that a pattern matches. tensor, data, recompute: "" where it is open."""

    pattern: str
    tensor: str = ""
    data: str = ""
    recompute: str = ""

    def fits(self, layer: str) -> bool:
        """Does it speak of this layer?"""
        return any(fnmatch.fnmatchcase(layer, f"{before}{self.pattern}{behind}")
                   for before in ("", "*.") for behind in ("", ".*"))


@dataclass(frozen=True, slots=True)
class Search:
    """What a strategy is sought for: a workload on `world` devices. memory: bytes of a device. degrees: of the mesh,
    axes by name; 0 or left out: open."""

    workload: Workload
    machine: Machine
    world: int
    shapes: tuple[Shape, ...]
    memory: float
    overrides: tuple[Override, ...] = ()
    degrees: tuple[tuple[str, int], ...] = ()
    precision: Precision | None = None

    def fixed(self, axis: str) -> int:
        """The size that a person gave an axis; 0: none."""
        return dict(self.degrees).get(axis, 0)

    def fixed_of(self, layer: str) -> Override:
        """What a person has fixed of a layer: of several overrides that speak of one choice of it, the last counts."""
        found = Override(layer)
        for one in self.overrides:
            if one.fits(layer):
                found = Override(layer, one.tensor or found.tensor, one.data or found.data,
                                 one.recompute or found.recompute)
        return found

    def replace(self, **changes: object) -> Search:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Plan:
    """A solution: a strategy for each class of shapes; their degrees of tensor and pipe, and their layers' choices, are
    equal, and so are data * context."""

    strategies: tuple[LayerStrategy, ...]

    def at(self, shapes: Sequence[Shape], length: int) -> LayerStrategy:
        """The strategy of a step of this length: that of the first class that is long enough."""
        for shape, strategy in zip(shapes, self.strategies, strict=True):
            if length <= shape.length:
                return strategy
        return self.strategies[-1]

    def __str__(self) -> str:
        return "\n".join(map(str, self.strategies))


def override(pattern: str, *, placement: str = "", data: str = "", recompute: str = "",
             workload: Workload | None = None) -> Override:
    """An override from a user's words.

    Raises:
        InputError: a word is none of the known ones, there is none, or no layer has such a name.
    """
    where = f"override({pattern!r})"
    if not (placement or data or recompute):
        raise InputError("an override fixes nothing", where=where, why="it has neither placement, data nor recompute",
                         do='give one of them, such as data="fsdp"')
    for name, value, known in (("placement", placement, PLACEMENTS), ("data", data, DATA),
                               ("recompute", recompute, RECOMPUTE)):
        if value and value not in known:
            raise InputError(f"{name}={value!r} cannot be had for {pattern}", where=where,
                             why=f"it is one of {', '.join(known)}", do="give one of these")
    found = Override(pattern, PLACEMENTS.get(placement, ""), data, recompute)
    assert found.tensor in ("", *TENSOR)
    if workload is not None and not any(found.fits(layer.name) for layer in workload.layers):
        raise InputError(f"no layer of {workload.name} is called {pattern!r}", where=where,
                         why=f"there are {', '.join(layer.name for layer in workload.layers)}",
                         do="give one of these, or a pattern with * that one of them matches")
    return found


def shapes_of(lengths: Sequence[int] | Mapping[int, float], batch: int, most: int = CLASSES) -> tuple[Shape, ...]:
    """Classes of shapes from lengths that were seen (or lengths with weights): at most `most`, with borders where the
    positions that are paid for beyond the real ones are fewest, by dynamic programming.

    Raises:
        InputError: there are no lengths, or one is below 1.
    """
    weights: dict[int, float] = {}
    for one, weight in (lengths.items() if isinstance(lengths, Mapping) else ((one, 1.0) for one in lengths)):
        weights[int(one)] = weights.get(int(one), 0.0) + float(weight)
    if not weights or min(weights) < 1 or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise InputError("these are no lengths of steps", where=f"lengths={list(weights)[:6]}",
                         why="there is at least one, each from 1 on, with weights from 0 on", do="give such lengths")
    order = sorted(weights)
    total = sum(weights.values())
    ends = _borders(order, [weights[one] for one in order], most)
    found, begin = [], 0
    for end in ends:
        weight = sum(weights[one] for one in order[begin:end]) / total
        found.append(Shape(order[end - 1], weight, batch))
        begin = end
    return tuple(found)


def _borders(order: Sequence[int], weights: Sequence[float], most: int) -> list[int]:
    """Where classes end, so that sum of weight * (longest of its class) is least."""
    count = len(order)
    best: list[tuple[float, list[int]]] = [(0.0, []), *((float("inf"), []) for _ in range(count))]
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    for _ in range(min(most, count)):
        nearer = list(best)
        for end in range(1, count + 1):
            for begin in range(end):
                cost = best[begin][0] + (sums[end] - sums[begin]) * order[end - 1]
                if cost < nearer[end][0]:
                    nearer[end] = cost, [*best[begin][1], end]
        best = nearer
    return best[count][1]
