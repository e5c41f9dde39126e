"""Distributed train step: the traced step is partitioned by a strategy, and every rank compiles and runs its part.

    step(w, x, m)  -->  partition, axis by axis  -->  local step(w part, x rows, m part, rank, ...)  -->  one program

All ranks trace the same program, whose batch is the ranks' batches one after another; each has its own rows. Parameters
and optimiser states of which a rank has a part live here; the model's tensors keep their shapes, and no memory
(runtime/collectives/released.py).
"""
from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from anyshape.backend.targets import target_of
from anyshape.base.errors import AnyShapeError, ConfigError, InputError, LimitError, Unsupported
from anyshape.base.version import __version__
from anyshape.compiler.compiled import BackwardGraph
from anyshape.compiler.driver import compile_pair
from anyshape.compiler.shape_preconditions import uncertain_sizes
from anyshape.dist.buckets import bucketed, messages_text
from anyshape.dist.halves import gathered_first, halves_of
from anyshape.dist.lower import lowered
from anyshape.dist.mesh import Axis, Mesh
from anyshape.dist.partition import LocalGraph
from anyshape.dist.placement import Shard, local_count
from anyshape.dist.ragged import Needs, needs_of
from anyshape.dist.strategies import Roles, Strategy, given_symbols, partitioned, strategy_of
from anyshape.frontend.importer.fx_to_graph import to_graph
from anyshape.frontend.importer.graph_inputs import Notes
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Boxed, Compilation
from anyshape.frontend.strategy import StrategySearch
from anyshape.frontend.train_step.batch_sizes import shared_sizes
from anyshape.frontend.train_step.partition import (
    HalvesOrder,
    HalvesProgram,
    StepHalves,
    joined,
    refusal_of,
    step_halves,
)
from anyshape.frontend.train_step.program import ROLE
from anyshape.frontend.train_step.tiled import BANDED, in_bands
from anyshape.frontend.train_step.update_op import expanded
from anyshape.ir.alpha_rename import nameless, with_symbols
from anyshape.ir.graph import Graph, Value
from anyshape.ir.types import SizeType, TensorType
from anyshape.ir.verify import verify
from anyshape.passes.dce import dce
from anyshape.runtime.collectives.agreement import agree, digest, exchanged, refusal, said, told_once
from anyshape.runtime.collectives.lost_rank import meet_peers
from anyshape.runtime.collectives.parts import Numbers, cut
from anyshape.runtime.collectives.process_group import ProcessMesh, gathered, process_mesh, sending, start, wait
from anyshape.runtime.collectives.released import is_released, release, restore
from anyshape.runtime.collectives.ring_attention import ring
from anyshape.sym.expr import evaluate, symbol
from anyshape.torch_compat.tree import tree_map_only
from anyshape.torch_compat.versions import api
from anyshape.torch_compat.versions.symbolic_functions import likely_values

OPERATORS = (start, wait, ring)  # what lowered graphs call; torch knows them once they are imported
LIKELY = 64  # of a size that is not known, as in sym/facts.py
BATCH = "%batch"  # among sizes, the digest of a batch
Cut = tuple[str, Numbers]  # the axis, and how a dim is dealt out along it


@dataclass(slots=True)
class Part:
    """What this rank has of a tensor. cuts: in the order in which it was dealt out."""

    tensor: Tensor
    own: Tensor
    cuts: tuple[Cut, ...]


@dataclass(slots=True)
class Home:
    """Where a tensor of a pipeline is. owners: the ranks of the pipeline that have its numbers."""

    tensor: Tensor
    owners: frozenset[int]


@dataclass(slots=True)
class Distribution:
    """How one train step is dealt out, and this rank's parts of parameters and states, by the id of the whole."""

    strategy: Strategy
    mesh: ProcessMesh
    names: Callable[[], list[str]]
    parts: dict[int, Part] = field(default_factory=dict)
    homes: dict[int, Home] = field(default_factory=dict)
    is_whole: bool = False

    def own(self, tensor: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
        """This rank's part of a tensor, or the tensor where it is not cut; made, and the whole let go, when it is first
        asked for. Where another program has dealt it out in another way, such as one before a weight was frozen, all
        ranks that have parts of it call this, and it is dealt out anew."""
        known = self.parts.get(id(tensor))
        if known is not None and known.cuts == cuts:
            return known.own
        if known is not None:
            with sending(self.mesh):
                restore(tensor, gathered(self.mesh, known.own, known.cuts))
            del self.parts[id(tensor)]
        if not cuts:
            return tensor
        known = self.parts[id(tensor)] = Part(tensor, self._cut(tensor, cuts), cuts)
        release(tensor)
        return known.own

    def everywhere(self, tensor: Tensor) -> Tensor:
        """A tensor that is dealt out no more, as one that is trained no more: all ranks call this."""
        home = self.homes.get(id(tensor))
        if home is not None:
            self.at_home(tensor, (), frozenset(range(self._stages.size)), False)
            del self.homes[id(tensor)]
        return self.own(tensor, ())

    def at_home(self, tensor: Tensor, cuts: tuple[Cut, ...], ranks: frozenset[int], is_written: bool) -> None:
        """Brings a tensor to the ranks of a pipeline that a program reads or writes it on, and notes who has its
        numbers; elsewhere it is let go. All ranks of the pipeline call this. Programs of one step may read a tensor on
        other stages: one that gathers gradients does not read a bias where its update is made."""
        home = self.homes.get(id(tensor))
        if home is None:
            home = self.homes[id(tensor)] = Home(tensor, ranks)
        elif not ranks <= home.owners:
            value = self.own(tensor, cuts) if self._stage in home.owners else self._empty(tensor, cuts)
            self._broadcast(home, value)
            if self._stage in ranks - home.owners and cuts:
                self.parts[id(tensor)] = Part(tensor, value, cuts)
            elif self._stage in ranks - home.owners:
                restore(tensor, value)
        home.owners = ranks if is_written else home.owners | ranks
        if self.is_elsewhere(tensor):
            self.parts.pop(id(tensor), None)
            if not is_released(tensor):
                release(tensor)

    @property
    def _stages(self) -> Axis:
        """The axis of the pipeline."""
        pipe = self.strategy.pipe
        assert pipe is not None
        return pipe

    @property
    def _stage(self) -> int:
        """Where this rank is along it."""
        return self.mesh.coordinates[self._stages.name]

    def _broadcast(self, home: Home, value: Tensor) -> None:
        """Sends what the first owner of a tensor has to all ranks of the pipeline."""
        axis = self._stages.name
        source = self.mesh.mesh.rank({**self.mesh.coordinates, axis: min(home.owners)})
        with sending(self.mesh):
            dist.broadcast(value.detach(), source, group=self.mesh.groups[axis])

    def _empty(self, tensor: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
        """What takes this rank's part of a tensor."""
        return self._cut(tensor, cuts) if cuts else torch.empty(tensor.shape, dtype=tensor.dtype)

    def _cut(self, tensor: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
        found = tensor.detach()
        for axis, numbers in cuts:
            found = cut(found, numbers, self.mesh.mesh.axis(axis).size, self.mesh.coordinates[axis])
        return found.clone(memory_format=torch.contiguous_format)

    def is_elsewhere(self, tensor: Any) -> bool:
        """Whether other ranks of a pipeline have a tensor, and this one does not."""
        home = self.homes.get(id(tensor))
        return home is not None and self._stage not in home.owners

    def gather(self) -> None:
        """Makes parameters and states whole, on every rank."""
        for part in self.parts.values():
            restore(part.tensor, gathered(self.mesh, part.own, part.cuts))
        for home in self.homes.values():
            if self.is_elsewhere(home.tensor):
                restore(home.tensor, self._empty(home.tensor, ()))
            self._broadcast(home, home.tensor)
        self.is_whole = True

    def scatter(self) -> None:
        """Takes over what was changed while they were whole, and lets the wholes go."""
        self.is_whole = False
        for part in self.parts.values():
            part.own.copy_(self._cut(part.tensor, part.cuts))
            release(part.tensor)
        for home in self.homes.values():
            if self.is_elsewhere(home.tensor):
                release(home.tensor)


def meet(given: object, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks make a step: what they make it of is compared, and they take over the numbers of rank 0.

    Raises:
        ConfigError: torch.distributed has no processes.
        RankError: ranks differ in model, optimiser or versions.
        InputError: another step has dealt out the model's weights.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(f"strategy is {given!r}, and there are no other processes", where="strategy",
                          why="torch.distributed is not initialised",
                          do='start with torchrun, and call torch.distributed.init_process_group("gloo") first')
    every = mesh_of_all()
    weights = [(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
    groups = [{key: repr(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    agree(every, {"versions": f"anyshape {__version__}, python {platform.python_version()}, torch {torch.__version__}",
                  "the model": f"{type(model).__qualname__} {weights}",
                  "the optimiser": f"{type(optimizer).__qualname__} {groups}"})
    in_parts = [name for name, one in model.named_parameters() if is_released(one)]
    if any(said(every, ", ".join(in_parts[:4]))):
        raise told_once(every.rank, InputError(
            "the model's weights are dealt out by another step", where=", ".join(in_parts[:4]) or "other ranks",
            why="of tensors that are dealt out nobody has the whole, and they read as NaN",
            do="make this step of a copy of the model, taken inside of `with step.whole():` of the other one, or make "
               "the model anew and load a checkpoint"))
    with torch.no_grad():
        for one in [*model.parameters(), *model.buffers()]:
            dist.broadcast(one.data, 0, group=every.control)
    meet_peers(every)


def mesh_of_all() -> ProcessMesh:
    """All processes in one line, for what they agree on before they have a strategy."""
    return process_mesh(Mesh((Axis("ranks", dist.get_world_size()),)))


def distribution_of(given: object, model: torch.nn.Module, names: Callable[[], list[str]],
                    limited: bool) -> Distribution:
    """The distribution of a step by what the user passed as its strategy; all ranks call this. limited: the step has a
    limit in bytes.

    Raises:
        ConfigError: the strategy does not fit the processes or the model, or keeps to no limit.
        RankError: ranks were given other strategies.
    """
    fault: AnyShapeError | None = None
    try:
        strategy = strategy_of(given.runnable() if isinstance(given, StrategySearch) else given, dist.get_world_size())
        strategy.check([name for name, _ in model.named_parameters()])
        if limited and strategy.pipe is not None:
            raise ConfigError("a pipeline, or micro-batches, keep to no limit in bytes", where=str(strategy.mesh),
                              why="how many micro-batches wait for their backward is up to the schedule, and their "
                                  "values are counted by no program",
                              do="leave memory_limit out and take more micro-batches, or take a strategy without pp")
    except AnyShapeError as error:
        fault = error
    # groups of processes are made by all ranks in one order: first they agree on which
    every = mesh_of_all()
    agree(every, {"the strategy": str(strategy) if fault is None else f"none: {fault.what}",
                  "having a limit in bytes": str(limited)})
    if fault is not None:
        raise told_once(every.rank, fault)
    mesh = process_mesh(strategy.mesh)
    return Distribution(strategy, mesh, names)


def as_batch(given: Any) -> Any:
    """The arguments of a step with tensors that are dense, begin their storage and are no views, so that all ranks
    trace alike, and none once more where another batch is a view."""

    def alike(one: Tensor) -> Tensor:
        dense = one.is_contiguous() and one.storage_offset() == 0
        one = one if dense else one.clone(memory_format=torch.contiguous_format)
        return one if one.requires_grad else one.detach()

    return tree_map_only(Tensor, alike, given)


def roles_of(gm: GraphModule, graph: Graph, static: Sequence[int], names: Sequence[str]) -> Roles:
    """What the inputs of a step's graph are.

    Args:
        gm: the traced step with its update; `graph` was made of it.
        static: places of inputs that stay at one address: all but the batch.
        names: of the parameters, in the order of the update.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    marks = [str(node.meta.get(ROLE, "")).split() for node in nodes]
    inputs = graph.inputs[:len(nodes)]
    owners = {mark[1]: value.name for mark, value in zip(marks, inputs, strict=True) if mark[:1] == ["weight"]}
    weights = {value: names[int(number)] for number, value in owners.items()}
    states = {value.name: owners[mark[1]] for mark, value in zip(marks, inputs, strict=True) if mark[:1] == ["state"]}
    data = tuple(value.name for place, value in enumerate(inputs)
                 if place not in static and isinstance(value.type, TensorType))
    return Roles(weights, states, data)


def halves_for_all(gm: GraphModule, static: Sequence[int]) -> StepHalves | None:
    """The halves of a step's graph (`step_halves`), the same on ranks whose batches have other sizes."""
    with likely_values([node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"], LIKELY):
        return step_halves(gm, static)


def imported(compilation: Compilation, name: str, gm: GraphModule, static: Sequence[int],
             in_halves: bool = False) -> tuple[Graph, Notes, Roles]:
    """The graph of a traced step with its update, as one rank alone would run it, and what its inputs are. in_halves:
    a forward comes first, and then a backward with what it computes again (`notes.first`).

    Raises:
        Unsupported: the graph has what our IR does not carry: there is no way around it on many ranks.
    """
    distribution: Distribution = compilation.step.distribution
    halves = halves_for_all(gm, static) if in_halves else None
    if halves is not None:
        gm = joined(gm, halves)
    expanded(gm)
    graph, notes = to_graph(gm, name.replace(".", "_"), target=target_of(compilation.config))
    # likely sizes are those of this rank's batch, and decisions are those of all ranks
    graph = graph.replace(facts=type(graph.facts)(graph.facts.ranges, (), graph.facts.divisible, graph.facts.known))
    graph = dce(graph, compilation.config)  # what nobody reads is not sent either
    roles = roles_of(gm, graph, static, distribution.names())
    same = shared_sizes(graph, roles.data)
    graph = with_symbols(graph, {name: symbol(one) for name, one in same.items()})
    return graph, notes, replace(roles, same=same)


def forward_of(graph: Graph, first: Collection[str]) -> frozenset[str]:
    """Names of all values of the forward of a rank's graph. first: of those that one rank alone would compute there;
    the others are moved or gathered for these."""
    made = [place for place, node in enumerate(graph.nodes) if any(v.name in first for v in node.outputs)]
    return frozenset(v.name for node in graph.nodes[:max(made, default=-1) + 1] for v in node.outputs)


def compile_distributed(compilation: Compilation, number: int, gm: GraphModule, static: Sequence[int]) -> Boxed:
    """The program of this rank for a traced step with its update.

    Raises:
        Unsupported: the graph has what our IR does not carry: there is no way around it on many ranks.
    """
    distribution: Distribution = compilation.step.distribution
    strategy = distribution.strategy
    graph, notes, roles = imported(compilation, f"{number}.inference", gm, static, True)
    with api.outside_tracing():
        chain = partitioned(graph, strategy, roles)
        local = gathered_first(chain[-1].graph, roles.data)
        verify(local, "the partitioner")
        needs = needs_of(local, chain, graph)
        ahead = forward_of(local, notes.first)
        banded = in_bands(local, ahead, notes.equalities, compilation.config) if ahead else None
        local, ahead = banded or (local, ahead)
        parts = [bucketed(local)]
        halves = halves_of(local, ahead, roles.data, compilation.config.limited) if ahead else None
        if halves is not None:
            parts = [bucketed(halves.forward), bucketed(halves.backward, ahead=not compilation.config.limited)]
        text = "\n".join(map(nameless, parts))
        compilation.strategy.append("\n".join([str(strategy), messages_text(parts), *([BANDED] if banded else [])]))
        first, *later = (lowered(one, strategy.mesh) for one in parts)
        names = ("forward", "backward") if later else ("inference",)
        needed = tuple(dict.fromkeys(size for one in later for size in uncertain_sizes(one)))
        backward = BackwardGraph(later[0], {}, needed) if later else None
        pair = compile_pair(first, backward, compilation.config, needed, True,
                            compilation.names_of(f"{number}.{names[0]}"), compilation.held)
    programs = [NativeProgram(f"{number}.{name}", one, notes)
                for name, one in zip(names, (pair.forward, pair.backward), strict=False) if one is not None]
    for one in programs:
        compilation.register(one)
    executables = [one.executable for one in programs]
    run = executables[0] if halves is None else HalvesProgram(HalvesOrder(
        bool(halves.forward.saved), halves.forward_inputs, halves.backward_inputs, halves.outputs), *executables)
    return DistributedProgram(run, distribution, chain, graph, roles, notes, needs, text, compilation.config.limited)


class DistributedProgram:
    """A rank's program. Called with one list of the whole program's inputs, of which the batch is this rank's.

    Attributes:
        local: the text of the rank's graph, which must be that of all ranks. It is without names: torch names the
            symbols of sizes by what else it met, such as the offset of a view. limited: each rank has a limit in bytes,
            and all keep to all of them.
    """

    _boxed_call = True

    def __init__(self, executable: Boxed, distribution: Distribution, chain: Sequence[LocalGraph], graph: Graph,
                 roles: Roles, notes: Notes, needs: Needs, local: str, limited: bool = False) -> None:
        self.executable = executable
        self.limited = limited
        self.distribution = distribution
        self.chain = tuple(chain)
        self.graph = graph
        self.data = frozenset(roles.data)
        self.dealt_out = frozenset((*roles.weights, *roles.states))
        self.constants = notes.constants
        self.same = roles.same
        self.needs = needs
        self.local = local
        self.digest = digest(local, str(limited))
        self.given = given_symbols(graph, roles)
        self.rows = [place for place, v in enumerate(graph.inputs) if v.name in self.data]
        self.shares = distribution.strategy.pipe is not None or any(not one.sharding.given for one in chain)
        self.sizes = [(place, v.name) for place, v in enumerate(graph.inputs) if isinstance(v.type, SizeType)]
        self.cuts = {place: _cuts(chain, v) for place, v in enumerate(graph.inputs)
                     if isinstance(v.type, TensorType) and v.name not in self.data}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Raises RankError where ranks run other programs, or have sizes that this one cannot tell apart; LimitError
        where the limit of one of them refuses the step. Nothing has run then, on any rank."""
        given = self._given(inputs)
        if self.limited:
            refused = self._refusal(given)
            if refused is not None:
                raise refused
        inputs.clear()
        with sending(self.distribution.mesh):
            return self.executable(given)

    def refusal(self, inputs: Sequence[Any]) -> LimitError | None:
        """Why the limit of a rank refuses a call; all ranks ask together."""
        return self._refusal(self._given(inputs)) if self.limited else None

    def _refusal(self, given: Sequence[Any]) -> LimitError | None:
        """The same, of all that the program takes. Ranks that have less to do are refused with the others."""
        mesh = self.distribution.mesh
        own = refusal_of(self.executable, given)
        least = [one[0] for one in exchanged(mesh, self.digest, [0 if own is None else max(own.least, 1)], self.local)]
        if not any(least):
            return None
        most = max(range(len(least)), key=least.__getitem__)
        do, _, why = said(mesh, "" if own is None else f"{own.do}\n{own.what}: {own.why}")[most].partition("\n")
        return told_once(mesh.rank, LimitError(
            f"the step does not run within the limit of rank {most}", why=why, do=f"on all ranks, {do}",
            where=f"{mesh.mesh}, before the step: no rank has run any of it", least=least[most]))

    def _given(self, inputs: Sequence[Any]) -> list[Any]:
        """What this rank's program takes: its parts of tensors, and sizes, which ranks tell each other."""
        own = {name: int(inputs[place]) for place, name in self.sizes}
        symbols = self._agreed(own, content(inputs[place] for place in self.rows) if self.shares else 0)
        given = [*inputs, *self.constants]
        for place, cuts in self.cuts.items():
            given[place] = self.distribution.own(given[place], cuts)
        for place, name in self.sizes:
            given[place] = symbols[name]
        coordinates = self.distribution.mesh.coordinates
        for one in self.chain:
            axis = one.sharding.axis
            symbols[one.rank_symbol] = coordinates[axis]
            for name, n in one.counts:
                if name not in symbols:
                    low, high = local_count(evaluate(n, symbols), one.sharding.ranks, coordinates[axis])
                    symbols[name] = high - low
            given += [symbols[one.rank_symbol], *(symbols[name] for name, _ in one.counts)]
        return given

    def _agreed(self, own: Mapping[str, int], batch: int) -> dict[str, int]:
        """The sizes of the whole batch, and how much of it this rank has, after all ranks have said theirs. batch: the
        digest of this rank's rows, where several ranks are to have the same."""
        mesh = self.distribution.mesh
        every = exchanged(mesh, self.digest, [*own.values(), batch], self.local)
        sizes = [dict(zip([*own, BATCH], one, strict=True)) for one in every]
        data = [one.sharding for one in self.chain if one.sharding.given]
        axes = [one.axis for one in data]
        self.check(sizes, axes)
        found = dict(own)
        here = mesh.coordinates
        for name in self.given:
            found[name] = _total(mesh.mesh, sizes, name, {a: here[a] for a in here if a not in axes})
        known = dict(zip(self.given, self.given, strict=True))  # of each level, the symbol that callers give
        for one in (one for one in self.chain if one.sharding.given):
            axis, after = one.sharding.axis, {}
            for name, n in one.counts:
                if str(n) in known:
                    fixed = {a: here[a] for a in here if a not in axes[axes.index(axis) + 1:]}
                    found[name] = _total(mesh.mesh, sizes, known[str(n)], fixed)
                    after[name] = known[str(n)]
            known = after
        return found

    def check(self, sizes: Sequence[Mapping[str, int]], axes: Sequence[str]) -> None:
        """Raises RankError where the ranks' sizes are not such as the program takes."""
        mesh = self.distribution.mesh
        for rank, one in enumerate(sizes):
            for name, first in self.same.items():
                if one.get(name) != one.get(first):
                    raise refusal(mesh, f"tensors of rank {rank}'s batch have {one[first]} and {one[name]} rows, or "
                                  "positions", why="they go with each other, element by element",
                                  do="give tensors of one batch the same sizes")
        for name in sizes[0]:
            if name == BATCH and not self.shares:
                continue
            is_given = name in self.given
            for rank, one in enumerate(sizes):
                here = mesh.mesh.coordinates(rank)
                partner = mesh.mesh.rank({a: 0 if a not in axes else here[a] for a in here})
                if one[name] != sizes[partner][name]:
                    what = "numbers" if name == BATCH else f"sizes, {sizes[partner][name]} and {one[name]}"
                    raise refusal(mesh, f"ranks {partner} and {rank} have batches of other {what}",
                                  why="they differ along axes of the mesh that share one batch",
                                  do="give them the same batch")
            if not is_given and name in self.needs.equal and len({one[name] for one in sizes}) > 1:
                raise refusal(mesh, "ranks have batches of other lengths",
                              why=f"{self.needs.equal[name]} is combined over ranks, and has that length",
                              do="pad the batches of a step to one length")
            if is_given and self.needs.even and self.distribution.strategy.pipe is None:
                ranks = [rank for rank in range(mesh.mesh.world)
                         if all(mesh.mesh.coordinates(rank)[a] == 0 for a in mesh.coordinates if a not in axes)]
                counts = [sizes[rank][name] for rank in ranks]
                if counts != [high - low for low, high in (
                        local_count(sum(counts), len(counts), place) for place in range(len(counts)))]:
                    raise refusal(mesh, f"ranks have {', '.join(map(str, counts[:8]))} rows",
                                  why=f"{self.needs.even} takes parts of equal size", do="give all ranks as many rows")


def content(tensors: Iterable[Tensor]) -> int:
    """A digest of the bytes of tensors."""
    found = hashlib.blake2b(digest_size=8)
    for one in tensors:
        found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return int.from_bytes(found.digest(), "little", signed=True)


def _total(mesh: Mesh, sizes: Sequence[Mapping[str, int]], name: str, fixed: Mapping[str, int]) -> int:
    """A size over all ranks that have the coordinates `fixed`."""
    return sum(one[name] for rank, one in enumerate(sizes)
               if all(mesh.coordinates(rank)[axis] == place for axis, place in fixed.items()))


def _cuts(chain: Iterable[LocalGraph], value: Value) -> tuple[Cut, ...]:
    """How a tensor that is no batch is dealt out, in numbers: its sizes are numbers."""
    found: list[Cut] = []
    shape = list(value.tensor.shape)
    for one in chain:
        place = dict(one.layouts).get(value.name)
        if not isinstance(place, Shard):
            continue
        if not all(isinstance(size, int) for size in (shape[place.dim], place.outer, place.count)):
            # parts of parts that are not even: their sizes are known at run time only
            raise Unsupported(f"{value.name} is dealt out along {one.sharding.axis} in parts that are not even",
                              why="an axis before has dealt it out unevenly", do="choose sizes that the ranks divide")
        outer, n = int(str(place.outer)), int(str(place.count))
        inner = int(str(shape[place.dim])) // (outer * n)
        found.append((one.sharding.axis, (place.dim, outer, n, inner, 0)))
        local = next(v for v in one.graph.inputs if v.name == value.name)
        shape = list(local.tensor.shape)
    return tuple(found)
