"""The simulated step of a strategy: seconds, tokens a second, what is exposed, bytes of each rank.

Without pipeline all ranks do the same, and one is simulated, task by task. With a pipeline each stage is simulated
alone for a micro-batch, and then all of them by their schedule.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.dist.cost.collectives import Group, seconds
from anyshape.dist.cost.layer_cost import Costing
from anyshape.dist.cost.machine import Machine
from anyshape.dist.cost.parallel import Precision
from anyshape.dist.cost.strategy import LayerStrategy
from anyshape.dist.cost.workload import Workload
from anyshape.dist.pipeline.cut import cut
from anyshape.dist.pipeline.schedules import Action, Orders, before, in_flight, schedule
from anyshape.dist.simulate.chain import Link, Tasks, chain_of, norm_seconds
from anyshape.dist.simulate.events import Task, Timeline, simulate

RESERVED = 1.5e9  # bytes of a device that the context, libraries and collectives hold


@dataclass(frozen=True, slots=True)
class Report:
    """What a strategy does in a step. seconds: of the step. exposed, sending: seconds in which the first rank sends and
    computes nothing, and in which it sends. memory: bytes a rank, one for each stage of the pipeline. bubble: seconds
    in which the first rank does nothing. stages: first layers of the stages."""

    seconds: float
    exposed: float
    sending: float
    memory: tuple[float, ...]
    bubble: float
    tokens: int
    stages: tuple[int, ...]
    timeline: Timeline

    @property
    def rate(self) -> float:
        """Tokens a second, of all ranks."""
        return self.tokens / self.seconds


def simulate_step(workload: Workload, machine: Machine, strategy: LayerStrategy, batch: int, length: int,
                  precision: Precision | None = None) -> Report | None:
    """Simulates one step.

    Args:
        batch: sequences of all ranks together; each data rank has an even share of them, rounded up.

    Returns:
        None where the schedule cannot have these numbers of micro-batches, or there are fewer layers than stages.
    """
    costing = costing_of(workload, machine, strategy, batch, length, precision)
    if costing is None:
        return None
    chain = chain_of(costing, strategy)
    if strategy.degrees.pipe > 1:
        return _pipelined(costing, strategy, chain, batch * length)
    timeline = simulate(Tasks(strategy, strategy.micro).step(chain), machine.chip.efficiency.busy)
    held = sum(link.cost.held for link in chain) + RESERVED
    time = timeline.seconds + norm_seconds(costing)
    idle = timeline.seconds - timeline.busy(0, "compute") - timeline.exposed()
    return Report(time, timeline.exposed() + norm_seconds(costing), timeline.sending(),
                  (held + timeline.peaks.get(0, 0.0),), max(idle, 0.0), batch * length, (0,), timeline)


def costing_of(workload: Workload, machine: Machine, strategy: LayerStrategy, batch: int, length: int,
               precision: Precision | None) -> Costing | None:
    """The sizes of a micro-batch of one data rank; None where it has fewer sequences than micro-batches."""
    share = -(-batch // strategy.degrees.data)
    if share < strategy.micro:
        return None
    return Costing(workload, machine, strategy.degrees, precision or Precision.of(workload.dtype),
                   -(-share // strategy.micro), length)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage for one micro-batch. after: seconds of a gradient of weights that can wait (W of zero-bubble)."""

    forward: float
    backward: float
    exposed: float
    gather: float
    reduce: float
    update: float
    held: float
    kept: float
    transient: float
    border: float
    link: str


def _stage(links: Sequence[Link], strategy: LayerStrategy, busy: float) -> _Stage:
    """Simulates the forward and backward of a stage's layers, with the gathers that each micro-batch repeats."""
    repeated = [link for link in links if link.data in ("fsdp", "hsdp")]
    both = sum(link.cost.computing for link in links)
    forward = sum(link.cost.forward + link.cost.forward_wait for link in links)
    wait = sum(link.cost.forward_wait + link.cost.backward_wait for link in links)
    if repeated:
        timeline = simulate(Tasks(strategy, 1).step(links), busy)
        took = timeline.seconds - sum(link.cost.update for link in links)
        wait += max(took - both, 0.0)
        forward, both = forward * took / both, took
    once = [link for link in links if link.data not in ("fsdp", "hsdp")]
    whole = sum(link.cost.held for link in links) + sum(link.gradients for link in once)
    return _Stage(forward, both - forward, wait, sum(link.cost.gather for link in once),
                  sum(link.cost.reduce for link in once), sum(link.cost.update for link in links), whole,
                  sum(link.cost.kept for link in links),
                  max(link.cost.transient + 2 * link.cost.gathered + link.gradients * (link in repeated)
                      for link in links), links[-1].cost.border, links[0].cost.link)


def stages_of(chain: Sequence[Link], strategy: LayerStrategy) -> tuple[int, ...] | None:
    """First layers of the stages, of all ranks and chunks in the order of the model."""
    return strategy.stages or cut([link.cost.computing for link in chain], strategy.degrees.pipe * strategy.chunks)


def _pipelined(costing: Costing, strategy: LayerStrategy, chain: Sequence[Link], tokens: int) -> Report | None:
    pipe, chunks = strategy.degrees.pipe, strategy.chunks
    orders = schedule(strategy.schedule, pipe, strategy.micro, chunks)
    firsts = stages_of(chain, strategy)
    if orders is None or firsts is None:
        return None
    ends = [*firsts[1:], len(chain)]
    busy = costing.machine.chip.efficiency.busy
    stages = [_stage(chain[first:end], strategy, busy) for first, end in zip(firsts, ends, strict=True)]
    timeline = simulate(_tasks(costing, strategy, stages, orders), 0.0)
    memory = []
    for rank in range(pipe):
        own = stages[rank::pipe]
        flight = in_flight(orders, rank)
        kept = max(stage.kept for stage in own) * flight
        memory.append(RESERVED + sum(stage.held for stage in own) + kept + max(stage.transient for stage in own))
    inner = sum(stage.exposed for stage in stages[::pipe]) * strategy.micro
    exposed = timeline.exposed() + inner
    bubble = timeline.seconds - timeline.busy(0, "compute") - timeline.exposed()
    return Report(timeline.seconds + norm_seconds(costing), exposed, timeline.sending() + inner, tuple(memory),
                  max(bubble, 0.0), tokens, firsts, timeline)


def _tasks(costing: Costing, strategy: LayerStrategy, stages: Sequence[_Stage], orders: Orders) -> list[Task]:
    """The tasks of all ranks of a pipeline, in an order in which each comes behind what it waits for."""
    pipe, chunks = strategy.degrees.pipe, strategy.chunks
    degrees = costing.degrees
    group = Group(2, degrees.data * degrees.context * degrees.tensor)
    split = any(one.kind == "W" for order in orders for one in order)
    tasks: list[Task] = []
    done: dict[tuple[Action, int], int] = {}
    sent: dict[tuple[Action, int], int] = {}
    gathers: dict[int, int] = {}
    for place, stage in enumerate(stages):
        tasks.append(Task(f"gather stage {place}", (place % pipe, "gather"), stage.gather, (), stage.link))
        gathers[place] = len(tasks) - 1
    places = [0] * pipe
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needed = before(action, rank, pipe, chunks)
                if any(one not in done for one in needed):
                    break
                places[rank] += 1
                at = action.chunk * pipe + rank
                stage = stages[at]
                after = [sent.get(one, done[one]) if one[1] != rank or one[0].chunk != action.chunk else done[one]
                         for one in needed]
                time = {"F": stage.forward, "B": stage.backward * (0.5 if split else 1.0),
                        "W": stage.backward * 0.5}[action.kind]
                if action.kind == "F" and action.micro == 0:
                    after.append(gathers[at])
                tasks.append(Task(f"{action.kind}{action.micro} stage {at}", (rank, "compute"), time, tuple(after),
                                  layer=f"stage {at}"))
                done[action, rank] = len(tasks) - 1
                moves = (action.kind == "F" and at < len(stages) - 1) or (action.kind == "B" and at > 0)
                if moves and pipe > 1:
                    tasks.append(Task(f"send {action.kind}{action.micro} from stage {at}", (rank, "send"),
                                      seconds("send", stage.border, group, costing.machine), (len(tasks) - 1,),
                                      group.link(costing.machine)))
                    sent[action, rank] = len(tasks) - 1
    for place, stage in enumerate(stages):
        rank = place % pipe
        last = [number for number, task in enumerate(tasks) if task.layer == f"stage {place}"][-1]
        tasks.append(Task(f"reduce stage {place}", (rank, "reduce"), stage.reduce, (last,), stage.link))
        tasks.append(Task(f"update stage {place}", (rank, "compute"), stage.update, (len(tasks) - 1,)))
    return tasks
