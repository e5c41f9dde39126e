"""Cost tables of a family of strategies: seconds and bytes of each layer, choice and recomputation, as arrays.

A family is what all shapes share: the axes tensor and pipe, the schedule. A mode is what a shape may choose: how the
other ranks are dealt out to data and context, and micro-batches.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshape.dist.cost.layer_cost import Costing, Precision, layer_cost
from anyshape.dist.cost.parallel import DATA, RECOMPUTE, Degrees, LayerChoice
from anyshape.dist.cost.workload import Layer
from anyshape.dist.pipeline.schedules import in_flight, schedule
from anyshape.dist.search.problem import Search, Shape

Floats = NDArray[np.float64]
Row = tuple[list[float], list[float], list[float], int]  # seconds, bytes, transient by recomputation; layers
LONG = 8192  # positions from which on they may be dealt out over ranks, if there are sequences enough


@dataclass(frozen=True, slots=True)
class Family:
    """What all shapes share."""

    tensor: int
    sequence: bool
    pipe: int
    schedule: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Mode:
    """What a shape may choose."""

    degrees: Degrees
    micro: int
    flight: int  # micro-batches that the fullest rank keeps the activations of


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Of one mode and shape, arrays [layers, choices, recomputations], infinite where a person has decided otherwise.

    seconds: what one layer adds to a step, with what of its collectives does not hide behind itself. computing,
    sending: parts of a lower bound of the step: no step is shorter than the sum of either. held: bytes of a layer on
    a rank; kept: of its activations, of all micro-batches in flight. transient: while it runs. reserved: bytes.
    counts: [layers].
    """

    seconds: Floats
    computing: Floats
    sending: Floats
    held: Floats
    kept: Floats
    transient: Floats
    counts: Floats

    def rows(self, picked: tuple[int, ...]) -> list[Row]:
        """Of each layer with its choice."""
        found = []
        for layer, option in enumerate(picked):
            seconds, sizes, transient = (array[layer, option].tolist() for array in
                                         (self.seconds, self.bytes, self.transient))
            found.append((seconds, sizes, transient, int(self.counts[layer])))
        return found

    @property
    def bytes(self) -> Floats:
        """What one layer takes."""
        return np.asarray(self.held + self.kept)


def families(search: Search) -> list[Family]:
    """Those that the world, the layers and a person allow."""
    found = []
    depth = sum(layer.count for layer in search.workload.layers)
    for tensor, pipe in itertools.product(_divisors(search, "tensor"), _divisors(search, "pipe")):
        if search.world % (tensor * pipe) or pipe > depth or (
                tensor > 1 and not any(layer.most % tensor == 0 for layer in search.workload.layers)):
            continue
        kinds = [("1f1b", 1)] if pipe == 1 else [("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)]
        for (kind, chunks), sequence in itertools.product(kinds, (True, False) if tensor > 1 else (True,)):
            if pipe * chunks <= depth:
                found.append(Family(tensor, sequence, pipe, kind, chunks))
    return found


def _divisors(search: Search, axis: str) -> list[int]:
    """Sizes an axis may have: powers of two, within a node for `tensor`; all that divide, where a person gave one."""
    if search.fixed(axis):
        return [search.fixed(axis)]
    most = min(search.machine.per_node, search.world) if axis == "tensor" else min(16, search.world)
    return [2 ** one for one in range(most.bit_length()) if 2 ** one <= most]


def modes(search: Search, family: Family, shape: Shape) -> list[Mode]:
    """What a shape may choose in a family."""
    others = search.world // (family.tensor * family.pipe)
    found: list[Mode] = []
    for context in (2 ** one for one in range(6)):
        if others % context or context > others or (search.fixed("context") or context) != context:
            continue
        data = others // context
        if (search.fixed("data") or data) != data or data > shape.batch:
            continue
        crowded = any(mode.degrees.context < context for mode in found)
        if context > 1 and crowded and shape.length < LONG and not search.fixed("context"):
            continue
        share = -(-shape.batch // data)
        for micro in ([1, 2, 4, 8, 16] if family.pipe == 1 else [family.pipe, 2 * family.pipe, 4 * family.pipe]):
            orders = schedule(family.schedule, family.pipe, micro, family.chunks)
            if micro > share or share % micro or orders is None:
                continue
            degrees = Degrees(data, family.tensor, context, family.pipe, family.sequence)
            found.append(Mode(degrees, micro, max(in_flight(orders, rank) for rank in range(family.pipe))
                              if family.pipe > 1 else 1))
    return found


def choices(search: Search, family: Family) -> list[LayerChoice]:
    """All choices of a layer, in the order of the tables."""
    kinds = ["whole"] if family.tensor == 1 else ["cut", "sequence"] if family.sequence else ["cut", "whole"]
    nodes = search.world > search.machine.per_node
    return [LayerChoice(tensor, data) for tensor, data in itertools.product(kinds, DATA) if data != "hsdp" or nodes]


def table(search: Search, family: Family, mode: Mode, shape: Shape) -> Table | None:
    """The table of a mode; None where it leaves ranks without a sequence."""
    batch = -(-shape.batch // mode.degrees.data) // mode.micro
    costing = Costing(search.workload, search.machine, mode.degrees,
                      search.precision or Precision.of(search.workload.dtype), batch, shape.length)
    options = choices(search, family)
    layers = search.workload.layers
    arrays = [np.full((len(layers), len(options), len(RECOMPUTE)), np.inf) for _ in range(6)]
    for i, layer in enumerate(layers):
        for j, choice in enumerate(options):
            for r, kind in enumerate(RECOMPUTE):
                if allowed(search, layer, choice, kind, family.tensor):
                    for array, value in zip(arrays, _entries(costing, family, mode, layer, choice, kind), strict=True):
                        array[i, j, r] = value
    seconds, computing, sending, held, kept, transient = arrays
    return Table(seconds, computing, sending, held, kept, transient, np.array([float(layer.count) for layer in layers]))


def allowed(search: Search, layer: Layer, choice: LayerChoice, recompute: str, tensor: int) -> bool:
    """May the layer have this choice?"""
    if choice.tensor == "cut" and (layer.most % tensor or not layer.cut_parameters):
        return False
    fixed = search.fixed_of(layer.name)
    return not ((fixed.tensor and tensor > 1 and fixed.tensor != choice.tensor)
                or (fixed.data and fixed.data != choice.data) or (fixed.recompute and fixed.recompute != recompute))


def _entries(costing: Costing, family: Family, mode: Mode, layer: Layer, choice: LayerChoice,
             recompute: str) -> tuple[float, ...]:
    found = layer_cost(costing, layer, choice, recompute)
    micro, pipe = mode.micro, mode.degrees.pipe
    again = micro if choice.data in ("fsdp", "hsdp") else 1
    sending = found.sending * again
    computing = micro * found.computing + found.update
    bubble = 1.0 if pipe == 1 else 1 + (pipe - 1) / (family.chunks * micro) * (0.4 if "zero" in family.schedule else 1)
    whole = layer.parameters * costing.precision.gradient if pipe > 1 and choice.data == "zero2" else 0.0
    if choice.tensor == "cut":
        whole *= 1 - (layer.cut_parameters / max(layer.parameters, 1)) * (1 - 1 / mode.degrees.tensor)
    exposed = max(0.0, sending - 0.9 * (micro * (found.forward + found.backward)))
    once = found.gather + found.reduce if pipe > 1 and again == 1 else 0.0
    return ((micro * found.computing * bubble + found.update + exposed + once) / pipe, computing / pipe, sending / pipe,
            (found.held + whole) / pipe, found.kept * mode.flight / pipe * 1.0,
            found.transient + 2 * found.gathered + layer.parameters * costing.precision.gradient * (again > 1))

