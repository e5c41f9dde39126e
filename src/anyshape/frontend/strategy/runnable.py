"""Strategies that processes run: what a search found, as a mesh and a strategy along each of its axes.

    data=16 tensor=8 cut+sequence fsdp   -->   mesh(data=16, tensor=8), fsdp along the one and sp along the other
    pipe=4 data=2 ddp micro=8 1f1b       -->   mesh(pp=4, data=2), the schedule 1f1b of 8 micro-batches
"""
from __future__ import annotations

from anyshape.base.errors import ConfigError
from anyshape.dist.cost.collectives import seconds
from anyshape.dist.cost.machine import Machine
from anyshape.dist.cost.strategy import Strategy as Found
from anyshape.dist.mesh import Axis, Mesh
from anyshape.dist.strategies import PipelineSchedule, Strategy

# what a step is run with, by the search's words for a layer's data parallelism; the later, the more is dealt out
RUN_AS = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero1", "hsdp": "fsdp", "fsdp": "fsdp"}
STRENGTH = ("ddp", "zero1", "fsdp")


def runnable(found: Found, machine: Machine, mixed: bool = False) -> Strategy:
    """The strategy of processes that a strategy of the search stands for.

    Args:
        machine: whose links the axes have.
        mixed: layers may differ in their data parallelism; then all have the one that deals out most.

    Raises:
        ConfigError: it has a context axis, positions dealt out by all_to_all, or layers whose data parallelism differs;
            the message says what to fix so that it can be run.
    """
    degrees = found.degrees
    kinds = {RUN_AS[layer.choice.data] for layer in found.layers} or {"ddp"}
    tensor = {layer.choice.tensor for layer in found.layers} if degrees.tensor > 1 else {"cut"}
    if degrees.context > 1 or (len(kinds) > 1 and not mixed) or tensor != {"cut"}:
        raise ConfigError("this strategy is planned, and cannot be run yet", where=found.summary,
                          why="a step is run with one kind of data parallelism (ddp, zero1, fsdp) for all layers, "
                          "tensor parallelism that cuts weights, and no context axis",
                          do='fix it: mesh={"context": 1, "tensor": 1}, and '
                          'search.override("*", data="fsdp")')
    axes, names = [], []
    if degrees.pipe > 1 or found.micro > 1:  # micro-batches alone are a pipeline of one stage
        axes.append(Axis("pp", degrees.pipe, machine.chip.alpha))
        names.append("pp")
    for name, size, kind, group in (
            ("data", degrees.data, max(kinds, key=STRENGTH.index), degrees.weights_group("cut")),
            ("tensor", degrees.tensor, "sp" if degrees.sequence else "tp", degrees.tensor_group)):
        if size > 1 or (name == "data" and degrees.tensor == 1):
            beta = seconds("all_gather", 1e9, group, machine) / 1e9
            axes.append(Axis(name, size, machine.chip.alpha, beta))
            names.append(kind)
    schedule = PipelineSchedule(found.schedule, found.micro, found.chunks) if "pp" in names else PipelineSchedule()
    return Strategy(Mesh(tuple(axes)), tuple(names), pipeline=schedule)
