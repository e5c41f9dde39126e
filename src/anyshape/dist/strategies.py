"""Strategies by name: data parallel, ZeRO 1, FSDP, tensor parallel, as placements of what a step reads and writes.

    ddp      the batch is dealt out; weights and optimiser state are replicated
    zero1    optimiser state is dealt out as well (Rajbhandari et al., "ZeRO", 2020, stage 1)
    fsdp     weights too (stage 3): they are gathered where they are used, and gradients are scattered
    tp       weights alone: products by columns, then by rows (Shoeybi et al., "Megatron-LM", 2019), found by walking
             over the graph: a product whose input is whole is dealt out by its outputs, one whose input is dealt out by
             its inputs; so tables and the vocabulary are dealt out too
    sp       tp, and what lies between products is dealt out along the sequence, dim 1 (Korthikanti et al., "Reducing
             Activation Recomputation in Large Transformer Models", 2022): partial sums are scattered, not added up
    ulysses  the sequence of a batch that all ranks have; attention deals out heads instead, by all_to_all (Jacobs et
             al., "DeepSpeed Ulysses", 2023)
    ring     the same, and in attention keys and values go around (Liu et al., "Ring Attention", 2023)
    pp       pipeline parallel: the batch is dealt out to micro-batches, which run one after another through stages of
             the graph (dist/pipeline/segments.py); a micro-batch is a rank of an axis that is time

A mesh of several axes has a strategy for each, by the names of its axes.
"""
from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from anyshape.base.errors import ConfigError
from anyshape.dist.mesh import Axis, Mesh
from anyshape.dist.partition import LocalGraph, partition, reached
from anyshape.dist.pins import gradient_pins
from anyshape.dist.placement import REPLICATE, Placement, Shard, placement_of
from anyshape.dist.reshape import reshaped
from anyshape.dist.sharding import Sharding
from anyshape.dist.walk import WeightWalk
from anyshape.ir.graph import Graph
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, symbols_of

CONTEXT = ("ring", "ulysses")  # strategies that deal out sequences
PRODUCTS = ("tp", "sp")  # strategies that deal out products
SHARED = (*PRODUCTS, *CONTEXT)  # all ranks have the same batch
AXES = {"data": "ddp", "ddp": "ddp", "zero1": "zero1", "fsdp": "fsdp", "tensor": "tp", "tp": "tp", "sequence": "sp",
        "sp": "sp", "ulysses": "ulysses", "ring": "ring", "context": "ring", "pp": "pp", "pipe": "pp"}
# the one axis of a word
ALONE = {"ddp": "data", "zero1": "data", "fsdp": "fsdp", "tp": "tensor", "sp": "tensor", "pp": "pp",
         "ring": "context", "ulysses": "context"}
MICRO = "micro"  # the axis of micro-batches
FLOATS = ("f64", "f32", "bf16", "f16")
WIDE = 1.0  # multiply-adds a byte: as if products were wide, so that they are always done in parts


@dataclass(frozen=True, slots=True)
class Roles:
    """What the inputs of a step's graph are, by name.

    weights: input -> the name of its parameter. states: input -> that of its weight (the input).
    data: what the batch consists of. same: of sizes of the batch, symbol -> the symbol of the size that it is equal to.
    """

    weights: Mapping[str, str]
    states: Mapping[str, str]
    data: tuple[str, ...]
    same: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """How micro-batches go through the stages of a pipeline.

    name: gpipe, 1f1b, interleaved or zero-bubble (dist/pipeline/schedules.py). micro: micro-batches of a step; 0: two
    for each rank of the pipeline. chunks: stages of a rank, more than one of an interleaved schedule.
    """

    name: str = "1f1b"
    micro: int = 0
    chunks: int = 1

    def micro_of(self, ranks: int) -> int:
        """Micro-batches of a step on so many ranks."""
        return self.micro or 2 * ranks

    def __str__(self) -> str:
        return f"{self.name} micro={self.micro} chunks={self.chunks}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a train step is dealt out.

    mesh: of the ranks. kinds: for each axis a strategy by name.
    overrides: (pattern of parameter names, axis, placement) each: what is fixed; the last one that fits counts. A
        pattern `state:*` is of what the optimiser keeps for them alone.
    pipeline: the schedule along an axis whose kind is "pp".

    Raises:
        ConfigError: axes have no kind, or one that there is not, or placements are fixed along other axes.
    """

    mesh: Mesh
    kinds: tuple[str, ...]
    overrides: tuple[tuple[str, str, Placement], ...] = ()
    pipeline: PipelineSchedule = PipelineSchedule()

    def __post_init__(self) -> None:
        axes, known = [axis.name for axis in self.mesh.axes], sorted(set(AXES.values()))
        if len(self.kinds) != len(axes) or not set(self.kinds) <= set(known) or self.kinds.count("pp") > 1:
            raise ConfigError(f"a strategy of {self.mesh} has the kinds {', '.join(map(str, self.kinds)) or 'none'}",
                              where="Strategy", why="each axis has one kind, and at most one is a pipeline",
                              do=f"give each of the axes {', '.join(axes)} one of {', '.join(known)}")
        for pattern, along, _ in self.overrides:
            if along not in axes:
                raise ConfigError(f"the placement of {pattern} is fixed along {along}", where="Strategy.overrides",
                                  why=f"{self.mesh} has no such axis", do=f"name one of {', '.join(axes)}")

    def check(self, parameters: Sequence[str]) -> None:
        """Raises ConfigError where a placement is fixed of parameters that are none of these."""
        for pattern, along, place in self.overrides:
            if not fnmatch.filter(parameters, pattern.removeprefix("state:")):
                raise ConfigError(f"the strategy fixes the placement of {pattern}, and there is no such parameter",
                                  where=f"Strategy.overrides: {pattern} {along}: {place}",
                                  why=f"the model has {', '.join(parameters[:4])}{', ...' * (len(parameters) > 4)}",
                                  do="give a pattern of their names, or a strategy that was made for this model")

    def __str__(self) -> str:
        kinds = [f"{axis.name}: {kind}" for axis, kind in zip(self.mesh.axes, self.kinds, strict=True)]
        fixed = [f"{pattern} {axis}: {one}" for pattern, axis, one in self.overrides]
        return "\n".join([str(self.mesh), *kinds, *fixed, *([str(self.pipeline)] if self.pipe else [])])

    @property
    def pipe(self) -> Axis | None:
        """The axis of a pipeline; None where there is none."""
        return next((axis for axis, kind in zip(self.mesh.axes, self.kinds, strict=True) if kind == "pp"), None)

    def part_of_batch(self, rank: int) -> tuple[int, int]:
        """(which part of a batch a rank gives to its step, of how many parts): ranks along axes that deal out something
        else give the same."""
        here, place, count = self.mesh.coordinates(rank), 0, 1
        for axis, kind in zip(self.mesh.axes, self.kinds, strict=True):
            if kind not in SHARED and kind != "pp":
                place, count = place * axis.size + here[axis.name], count * axis.size
        return place, count


def strategy_of(given: object, world: int) -> Strategy:
    """The strategy that a user names: a word, a mesh, or a strategy.

    Raises:
        ConfigError: it is none, or its mesh has another number of ranks than there are.
    """
    if isinstance(given, Strategy):
        found = given
    elif isinstance(given, Mesh):
        unknown = [axis.name for axis in given.axes if axis.name not in AXES]
        if unknown:
            raise ConfigError(f"axes of the mesh are called {', '.join(unknown)}", where=f"strategy={given}",
                              why="the name of an axis says what is dealt out along it",
                              do=f"call axes {', '.join(AXES)}, or pass a Strategy")
        found = Strategy(given, tuple(AXES[axis.name] for axis in given.axes))
    elif isinstance(given, str) and given in AXES.values():
        found = Strategy(Mesh((Axis(ALONE[given], world),)), (given,))
    else:
        raise ConfigError(f"strategy is {given!r}", where="strategy", why="it is a word, a mesh or a Strategy",
                          do=f"pass auto, one of {', '.join(sorted(set(AXES.values())))}, or a mesh with named axes")
    if found.mesh.world != world:
        raise ConfigError(f"{found.mesh} has {found.mesh.world} ranks", where="strategy", why=f"{world} processes run",
                          do=f"start {found.mesh.world} processes, or make a mesh of {world}")
    return found


def partitioned(graph: Graph, strategy: Strategy, roles: Roles) -> list[LocalGraph]:
    """The local graphs of a step, axis after axis; ranks run the last one."""
    chain: list[LocalGraph] = []
    given = given_symbols(graph, roles)
    # products first: rows are dealt out of what each group of ranks shares; then micro-batches, whose sums come first
    order = sorted(range(len(strategy.kinds)), key=lambda place: (
        strategy.kinds[place] not in PRODUCTS, strategy.kinds[place] not in SHARED, strategy.kinds[place] != "pp"))
    for place in order:
        axis, kind = strategy.mesh.axes[place], strategy.kinds[place]
        if kind == "pp":
            axis, kind = Axis(MICRO, strategy.pipeline.micro_of(axis.size)), "ddp"
        sharding = sharding_for(graph, axis, kind, roles, given, strategy.overrides)
        local = partition(graph, sharding, WIDE if kind in PRODUCTS else 500.0)
        if kind == "sp":
            local = partition(graph, along_sequence(graph, local), WIDE)
        if kind not in SHARED:
            given = tuple(name for name, n in local.counts if isinstance(n, Expr) and symbols_of(n) <= set(given))
        chain.append(local)
        graph = local.graph
    return chain


def given_symbols(graph: Graph, roles: Roles) -> tuple[str, ...]:
    """The symbols of the first dims of a batch, which say how many rows callers have."""
    found: dict[str, None] = {}
    for value in graph.inputs:
        if value.name in roles.data and isinstance(value.type, TensorType) and value.type.rank:
            size = value.type.shape[0]
            if isinstance(size, Expr) and len(symbols_of(size)) == 1 and str(size) in symbols_of(size):
                found[str(size)] = None
    return tuple(found)


def sharding_for(graph: Graph, axis: Axis, kind: str, roles: Roles, given: Sequence[str],
                 overrides: Sequence[tuple[str, str, Placement]] = ()) -> Sharding:
    """The sharding of a step's graph along one axis, by a strategy's name."""
    types = {value.name: value.type for value in graph.inputs if isinstance(value.type, TensorType)}
    placed: dict[str, Placement] = {}
    if kind in PRODUCTS:
        placed |= WeightWalk(graph, axis.size, roles.weights, roles.data).run()
    elif kind not in CONTEXT:
        placed |= {name: Shard(0) for name in roles.data
                   if name in types and types[name].rank and str(types[name].shape[0]) in given}
    if kind == "fsdp":
        placed |= {name: Shard(0) for name in roles.weights if types[name].rank}
    fixed = functools.partial(_fixed, overrides, axis.name)
    placed |= {name: place for name, parameter in roles.weights.items()
               if (place := fixed(parameter, types[name].rank)) is not None}
    for name, weight in roles.states.items():
        if types[name].shape == types[weight].shape:
            place = fixed(f"state:{roles.weights[weight]}", types[name].rank)
            if place is not None:
                placed[name] = place
            elif kind == "zero1" and types[name].rank and weight not in placed:
                placed[name] = Shard(0)
            elif weight in placed:
                placed[name] = placed[weight]
    placed = {name: one for name, one in placed.items() if one != REPLICATE}
    data = tuple(roles.data)
    whole = {name: one.of(types[name].shape) if isinstance(one, Shard) else one for name, one in placed.items()}
    pins = gradient_pins(graph, whole, reached(graph, data))
    if kind in CONTEXT:
        pins = {**sequence_pins(graph, data), **pins}
    return Sharding(axis.name, axis.size, tuple(placed.items()), tuple(pins.items()),
                    "weights" if kind in PRODUCTS else "data", data, () if kind in SHARED else tuple(given),
                    kind if kind in CONTEXT else "")


def _fixed(overrides: Sequence[tuple[str, str, Placement]], axis: str, name: str, rank: int) -> Placement | None:
    """The placement that is fixed of a weight or a state; one of few dims is not dealt out along one that it lacks."""
    return next((place for pattern, along, place in reversed(overrides)
                 if along == axis and fnmatch.fnmatchcase(name, pattern)
                 and not (isinstance(place, Shard) and place.dim >= rank)), None)


def sequence_pins(graph: Graph, data: Sequence[str]) -> dict[str, Placement]:
    """Activations [batch, sequence, ...], forward and backward, are dealt out along the sequence: dims that are made of
    the second dim of a batch."""
    lengths = {str(name) for v in graph.inputs if v.name in data and v.tensor.rank > 1
               for name in _symbols(v.tensor.shape[1]) - _symbols(v.tensor.shape[0])}
    heavy = reached(graph, data)
    found: dict[str, Placement] = {}
    for value in (v for node in graph.nodes for v in node.outputs):
        shape = value.tensor.shape if isinstance(value.type, TensorType) else ()
        if value.name in heavy and len(shape) in (3, 4) and value.tensor.dtype in FLOATS:
            along = [d for d, size in enumerate(shape) if _symbols(size) & lengths]
            if along == [1]:
                found[value.name] = Shard(1)
    return found


def _symbols(size: object) -> set[str]:
    return set(symbols_of(size)) if isinstance(size, Expr) else set()


def along_sequence(graph: Graph, local: LocalGraph) -> Sharding:
    """The sharding of `local` with more pins: what is added up there, of the shape [batch, sequence, ...], or reshaped
    to it, is dealt out along the sequence."""
    summed = {v.name for node in local.graph.nodes if node.op == "all_reduce" for v in node.values()}
    pins = dict(local.sharding.pins)
    users = graph.users()
    for node in graph.nodes:
        for value in node.outputs:
            if value.name not in summed or value.name in pins:
                continue
            shape = value.tensor.shape
            shaped = [shape, *(user.output.tensor.shape for user in users.get(value.name, ()) if user.op == "reshape")]
            for one in shaped:
                if len(one) == 3 and isinstance(one[1], Expr):
                    place = Shard(1, 1, one[1]) if one == shape else reshaped(one, shape, Shard(1, 1, one[1]))
                    if place is not None:
                        pins[value.name] = place
    return replace(local.sharding, pins=tuple(pins.items()))
