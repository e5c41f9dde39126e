"""The tasks of a chain of layers on one rank: forwards and backwards, gathers of weights, reductions of gradients.

    compute   f0 f1 f2 ........ b2 b1 b0 u0 u1 u2
    gather    g0 g1 g2 ........ g2 g1 g0              launched one layer ahead (early), one collective a layer (merged)
    reduce                         r2 r1 r0

Without `early` a collective runs where its result is needed, on the stream that computes; without `merged` there is one
for each tensor.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.dist.cost.collectives import Group, seconds
from anyshape.dist.cost.layer_cost import Costing, LayerCost, layer_cost
from anyshape.dist.cost.strategy import LayerStrategy
from anyshape.dist.simulate.events import Task

AHEAD = 2  # layers whose weights may be whole at one time, the one that runs included


@dataclass(frozen=True, slots=True)
class Link:
    """One layer of the chain: what it costs, and how its weights are placed."""

    name: str
    data: str
    cost: LayerCost
    latency: float  # of a collective of its weights
    gradients: float  # bytes before they are reduced


def chain_of(costing: Costing, strategy: LayerStrategy) -> list[Link]:
    """All layers in order, each on its own."""
    found = []
    layers = {layer.name: layer for layer in costing.workload.layers}
    for plan, mode in strategy.order():
        layer = layers[plan.name]
        latency = seconds("all_gather", 1.0, costing.degrees.weights_group(plan.choice.tensor), costing.machine)
        cost = layer_cost(costing, layer, plan.choice, mode)
        gradients = layer.parameters * costing.precision.gradient
        if plan.choice.tensor == "cut":
            gradients -= layer.cut_parameters * (1 - 1 / costing.degrees.tensor) * costing.precision.gradient
        found.append(Link(layer.name, plan.choice.data, cost, latency,
                          gradients if plan.choice.data in ("zero2", "fsdp", "hsdp") else 0.0))
    return found


class Tasks:
    """A list of tasks of one rank, in the making."""

    def __init__(self, strategy: LayerStrategy, micro: int, rank: int = 0) -> None:
        self.strategy, self.micro, self.rank = strategy, micro, rank
        self.tasks: list[Task] = []

    def add(self, name: str, stream: str, time: float, after: Sequence[int] = (), link: str = "", takes: float = 0.0,
            gives: float = 0.0, layer: str = "") -> int:
        """Appends a task; its number."""
        self.tasks.append(Task(name, (self.rank, stream), time, tuple(after), link, takes, gives, layer))
        return len(self.tasks) - 1

    def step(self, chain: Sequence[Link]) -> list[Task]:
        """A whole step, without pipeline: micro-batches one after another, then the update."""
        reduced: list[list[int]] = [[] for _ in chain]
        ran: list[int] = []  # what ended computing, in order
        for micro in range(self.micro):
            last = micro == self.micro - 1
            ends = [self._forward(chain, place, micro, ran) for place in range(len(chain))]
            ran += [ends[-1]] if ends else []
            self._backward(chain, micro, last, ran, reduced)
        for place, link in enumerate(chain):
            self.add(f"update {link.name}", "compute", link.cost.update, reduced[place], layer=link.name)
        return self.tasks

    def collective(self, name: str, stream: str, link: Link, time: float, after: Sequence[int], takes: float = 0.0,
                   gives: float = 0.0) -> int:
        """One of a layer's weights or gradients: for each tensor of it, where they are not merged."""
        if not self.strategy.merged:
            time += (link.cost.tensors - 1) * link.latency
        where = stream if self.strategy.early else "compute"
        return self.add(name, where, time, after, link.cost.link, takes, gives, link.name)

    def _gathers(self, link: Link, micro: int, backward: bool) -> bool:
        """Are weights gathered before this forward or backward?"""
        time = link.cost.regather if backward else link.cost.gather
        return time > 0 and (link.data in ("fsdp", "hsdp") or micro == 0)

    def _gather(self, chain: Sequence[Link], place: int, micro: int, backward: bool, ran: Sequence[int]) -> list[int]:
        link = chain[place]
        if not self._gathers(link, micro, backward):
            return []
        after = ran[-AHEAD:-AHEAD + 1] if AHEAD > 1 else ran[-1:]
        time = link.cost.regather if backward else link.cost.gather
        return [self.collective(f"gather {link.name}", "gather", link, time, after, link.cost.gathered)]

    def _forward(self, chain: Sequence[Link], place: int, micro: int, ran: list[int]) -> int:
        link = chain[place]
        given = self._gather(chain, place, micro, False, ran)
        gone = link.cost.gathered if given else 0.0
        end = self.add(f"forward {link.name}", "compute", link.cost.forward, [*given, *ran[-1:]], "",
                       link.cost.kept, gone, link.name)
        if link.cost.forward_wait > 0:
            end = self.add(f"exchange {link.name}", "tensor", link.cost.forward_wait, [end], "fabric", layer=link.name)
        ran.append(end)
        return end

    def _backward(self, chain: Sequence[Link], micro: int, last: bool, ran: list[int],
                  reduced: list[list[int]]) -> None:
        for place in reversed(range(len(chain))):
            link = chain[place]
            given = self._gather(chain, place, micro, True, ran)
            gone = link.cost.gathered if given else 0.0
            sends = link.cost.reduce > 0 and (last or link.data in ("fsdp", "hsdp"))
            if link.cost.backward_wait > 0:
                ran.append(self.add(f"exchange {link.name}", "tensor", link.cost.backward_wait, [*given, *ran[-1:]],
                                    "fabric", layer=link.name))
            end = self.add(f"backward {link.name}", "compute", link.cost.backward, [*given, *ran[-1:]], "",
                           link.cost.transient + (link.gradients if sends else 0.0),
                           link.cost.transient + link.cost.kept + gone, link.name)
            ran.append(end)
            if sends:
                reduced[place].append(self.collective(f"reduce {link.name}", "reduce", link, link.cost.reduce, [end],
                                                      0.0, link.gradients))
            else:
                reduced[place].append(end)


def norm_seconds(costing: Costing) -> float:
    """Of the collective that adds up the norm of all gradients."""
    return seconds("all_reduce", 4.0, Group(costing.degrees.world), costing.machine)
