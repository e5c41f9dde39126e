"""Pipelined train step: the traced step is cut into stages, and each rank compiles and runs the programs of its own.

    step(w1, w2, x)  -->  rank 0: F0 B0 U0 of w1      rank 1: F1 B1 U1 of w2      in the order of a schedule

What is dealt out along other axes is in the graph of each micro-batch before it is cut (frontend/train_step/
distributed.py). A parameter and its states are on the ranks whose stages read them, and elsewhere let go.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from anyshape.base.errors import ConfigError
from anyshape.compiler.driver import compile_pair
from anyshape.dist.buckets import bucketed
from anyshape.dist.lower import lowered
from anyshape.dist.mesh import Axis
from anyshape.dist.partition import LocalGraph
from anyshape.dist.pipeline.schedules import Orders, schedule
from anyshape.dist.pipeline.segments import Key, Pipeline, pipeline
from anyshape.dist.pipeline.stages import assign
from anyshape.dist.placement import Shard, local_count
from anyshape.dist.ragged import needs_of
from anyshape.dist.strategies import MICRO, PipelineSchedule, partitioned
from anyshape.frontend.programs.compile_program import NativeProgram
from anyshape.frontend.programs.session import Boxed, Compilation
from anyshape.frontend.train_step.distributed import BATCH, DistributedProgram, Distribution, content, imported
from anyshape.ir.alpha_rename import nameless
from anyshape.ir.types import TensorType
from anyshape.ir.verify import verify
from anyshape.runtime.collectives.agreement import exchanged, refusal
from anyshape.runtime.collectives.pipeline import Batch, PipelineRank, Program
from anyshape.runtime.collectives.point_to_point import ProcessTransport
from anyshape.runtime.collectives.process_group import sending
from anyshape.sym.expr import Expr, evaluate, symbols_of
from anyshape.torch_compat.versions import api


def compile_pipelined(compilation: Compilation, number: int, gm: GraphModule, static: Sequence[int]) -> Boxed:
    """The programs of this rank for a traced step with its update.

    Raises:
        Unsupported: the graph has what our IR does not carry, or cannot be run by micro-batches.
        ConfigError: the schedule needs another number of micro-batches.
    """
    distribution: Distribution = compilation.step.distribution
    strategy, mesh = distribution.strategy, distribution.strategy.mesh
    axis = strategy.pipe
    assert axis is not None
    name = f"{number}.inference"
    graph, notes, roles = imported(compilation, name, gm, static)
    with api.outside_tracing():
        orders = orders_of(strategy.pipeline, axis)
        chain = partitioned(graph, strategy, roles)
        local = chain[-1].graph
        verify(local, "the partitioner")
        needs = needs_of(local, chain, graph)
        stages = assign(local, roles, axis.size * strategy.pipeline.chunks, varying_sizes(chain))
        plan = pipeline(local, stages, axis.size, strategy.pipeline.name == "zero-bubble",
                        (*roles.weights, *roles.states))
        programs: dict[Key, Program] = {}
        rank = distribution.mesh.coordinates[axis.name]
        for key, one in plan.segments.items():
            if (key.stage < 0 or key.stage % axis.size == rank) and one.graph.nodes:
                compiled = compile_pair(lowered(bucketed(one.graph), mesh), None, compilation.config, (), True,
                                        compilation.names_of(name), compilation.held).forward
                own = one.graph.name.removeprefix(f"{graph.name}_")
                compilation.register(NativeProgram(f"{number}.{own}", compiled, notes))
                programs[key] = compiled.executable
        text = "\n".join([*stages.firsts, *(nameless(one.graph) for one in plan.segments.values())])
    every = DistributedProgram(_not_called, distribution, chain, graph, roles, notes, needs, text)
    return PipelinedProgram(every, plan, orders, programs)


def _not_called(_inputs: list[Any]) -> list[Any]:
    raise AssertionError("a pipelined step has no program of the whole")


def orders_of(one: PipelineSchedule, axis: Axis) -> Orders:
    """What each rank along an axis does in which order.

    Raises:
        ConfigError: there is no such schedule, or it needs other numbers.
    """
    names = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    if one.name not in names or one.micro < 0 or one.chunks < 1:
        raise ConfigError(f"the schedule of a pipeline is {one}", why="that is none",
                          do=f"take one of {', '.join(names)}, and numbers of micro-batches and chunks from 1 on")
    micro = one.micro_of(axis.size)
    found = schedule(one.name, axis.size, micro, one.chunks)
    if found is None:
        raise ConfigError(f"the schedule {one.name} with {micro} micro-batches and {one.chunks} chunks on {axis.size} "
                          "ranks", why="interleaved schedules have several chunks, and micro-batches that the ranks "
                          "divide; all others have one chunk",
                          do=f"take chunks=2 and micro={2 * axis.size} with interleaved, chunks=1 with the others")
    return found


def varying_sizes(chain: Sequence[LocalGraph]) -> list[str]:
    """The symbols of sizes that differ from micro-batch to micro-batch."""
    found: dict[str, None] = {}
    for one in chain:
        if one.sharding.axis == MICRO:
            found |= dict.fromkeys([one.rank_symbol, *(name for name, _ in one.counts)])
        else:
            found |= {name: None for name, n in one.counts if isinstance(n, Expr) and symbols_of(n) & set(found)}
    return list(found)


class PipelinedProgram:
    """The programs of a rank of a pipeline. Called with one list of the whole step's inputs, of which the batch is this
    rank's: all ranks of one pipeline have the same.

    Attributes:
        plan: of all ranks. local: its text.
    """

    _boxed_call = True

    def __init__(self, every: DistributedProgram, plan: Pipeline, orders: Orders,
                 programs: Mapping[Key, Program]) -> None:
        self.every = every
        self.plan = plan
        self.local = every.local
        strategy, mesh = every.distribution.strategy, every.distribution.mesh
        assert strategy.pipe is not None
        self.axis = strategy.pipe.name
        self.micro = strategy.pipeline.micro_of(strategy.pipe.size)
        transport = ProcessTransport(mesh, self.axis)
        self.transport = transport
        self.rank = PipelineRank(plan, orders, mesh.coordinates[self.axis], programs, transport)
        (self.dealt,) = [one for one in every.chain if one.sharding.axis == MICRO]
        self.written = {target.name for target, _ in every.graph.writes}
        self.tensors = [(place, v.name) for place, v in enumerate(every.graph.inputs) if isinstance(v.type, TensorType)]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Raises RankError where ranks run other programs, or have sizes that this one cannot tell apart."""
        every = self.every
        own = {name: int(inputs[place]) for place, name in every.sizes}
        sizes = self._sizes(own, content(inputs[place] for place in every.rows))
        given = [*inputs, *every.constants]
        inputs.clear()
        batch = Batch(sizes, [self._rows(given, number) for number in range(self.micro)], self._shared(given))
        try:
            with sending(every.distribution.mesh):
                for _ in self.rank.run(batch):
                    pass
                self.transport.settle()
        finally:
            self.transport.sent.clear()  # of a step that has failed
        return [evaluate(one, sizes[0]) if isinstance(one, Expr) else one for one in self.rank.results()]

    def _shared(self, given: Sequence[Any]) -> dict[str, Tensor]:
        """The tensors that this rank has, but for the batch."""
        every, found = self.every, {}
        for place, name in self.tensors:
            if name in every.data:
                continue
            homes = frozenset(rank for rank, names in enumerate(self.plan.inputs) if name in names)
            cuts = every.cuts[place]
            if homes and name in every.dealt_out:
                every.distribution.at_home(given[place], cuts, homes, name in self.written)
            elif homes:
                every.distribution.everywhere(given[place])
            if self.rank.rank in homes:
                found[name] = every.distribution.own(given[place], cuts)
        return found

    def _rows(self, given: Sequence[Any], number: int) -> dict[str, Tensor]:
        """The batch of one micro-batch: of this rank's rows, its part."""
        layouts, found = dict(self.dealt.layouts), {}
        for place, name in self.tensors:
            if name in self.every.data:
                tensor = given[place]
                if isinstance(layouts.get(name), Shard):
                    low, high = local_count(tensor.shape[0], self.micro, number)
                    tensor = tensor[low:high]
                found[name] = tensor
        return found

    def _sizes(self, own: Mapping[str, int], batch: int) -> list[dict[str, int]]:
        """The sizes of each micro-batch, after all ranks have said theirs."""
        every, mesh = self.every, self.every.distribution.mesh
        numbers = exchanged(mesh, every.digest, [*own.values(), batch], every.local)
        said = [dict(zip([*own, BATCH], one, strict=True)) for one in numbers]
        data = [one.sharding.axis for one in every.chain if one.sharding.given and one.sharding.axis != MICRO]
        every.check(said, data)
        here = mesh.coordinates
        beside = [rank for rank in range(mesh.mesh.world)
                  if all(mesh.mesh.coordinates(rank)[a] == here[a] for a in here if a not in data)]
        if every.needs.even and len(beside) > 1:
            rows = {said[rank][name] for rank in beside for name in every.given}
            if len(rows) > 1 or any(count % self.micro for count in rows):
                raise refusal(mesh, f"ranks have {', '.join(map(str, sorted(rows)[:8]))} rows, in {self.micro} "
                              "micro-batches", why=f"{every.needs.even} takes parts of equal size",
                              do="give all ranks as many rows, a multiple of the micro-batches")
        return [self._of_micro(own, said, beside, number) for number in range(self.micro)]

    def _of_micro(self, own: Mapping[str, int], said: Sequence[Mapping[str, int]], beside: Sequence[int],
                  number: int) -> dict[str, int]:
        """The sizes of one micro-batch. beside: ranks that have rows of the same batch."""
        every, mesh = self.every, self.every.distribution.mesh
        here = mesh.coordinates
        found = {**own, **{name: sum(said[rank][name] for rank in beside) for name in every.given}}
        known: dict[str, str] = {}  # of a number of rows dealt out, whose

        def rows(name: str, fixed: Sequence[str]) -> int:
            """Of a micro-batch, the rows of the ranks that have this rank's coordinates along some axes."""
            total = 0
            for rank in beside:
                there = mesh.mesh.coordinates(rank)
                if all(there[axis] == here[axis] for axis in fixed):
                    low, high = local_count(said[rank][name], self.micro, number)
                    total += high - low
            return total

        fixed: list[str] = []
        for one in every.chain:
            axis = one.sharding.axis
            place = number if axis == MICRO else here[axis]
            found[one.rank_symbol] = place
            if one.sharding.given and axis != MICRO:
                fixed.append(axis)
            after: dict[str, str] = {}
            for name, n in one.counts:
                whose = str(n) if axis == MICRO and str(n) in every.given else known.get(str(n), "")
                if whose and one.sharding.given:
                    found[name] = rows(whose, fixed)
                    after[name] = whose
                else:
                    low, high = local_count(evaluate(n, found), one.sharding.ranks, place)
                    found[name] = high - low
            known = after or known
        return found
