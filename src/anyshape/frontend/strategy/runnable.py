"""Strategies that processes run: what a search found, as a mesh and a strategy along each of its axes.

    data=16 tensor=8 cut+sequence fsdp   -->   mesh(data=16, tensor=8), fsdp along the one and sp along the other
    data=2 context=4 fsdp                -->   mesh(data=2, context=4), fsdp and ring; weights are dealt out along both
    data=4 tensor=2 sequence zero2       -->   mesh(data=4, tensor=2), zero1 and ulysses; states dealt out along both
    pipe=4 data=2 ddp micro=8 1f1b       -->   mesh(pp=4, data=2), the schedule 1f1b of 8 micro-batches
"""
from __future__ import annotations

from anyshape.base.errors import ConfigError
from anyshape.dist.cost.collectives import seconds
from anyshape.dist.cost.machine import Machine
from anyshape.dist.cost.strategy import LayerStrategy
from anyshape.dist.mesh import Axis, Mesh
from anyshape.dist.placement import Shard
from anyshape.dist.strategies import CONTEXT, PipelineSchedule, Strategy

# what a step is run with, by the search's words for a layer's data parallelism; the later, the more is dealt out
RUN_AS = {"ddp": "ddp", "zero1": "zero1", "zero2": "zero1", "hsdp": "fsdp", "fsdp": "fsdp"}
STRENGTH = ("ddp", "zero1", "fsdp")
RUN_ALONG = ({"cut"}, {"sequence"})  # what all layers deal out along the tensor axis: weights, or positions


def runnable(found: LayerStrategy, machine: Machine, mixed: bool = False) -> Strategy:
    """The strategy of processes that a strategy of the search stands for.

    Args:
        machine: whose links the axes have.
        mixed: layers may differ in their data parallelism; then all have the one that deals out most.

    Raises:
        ConfigError: layers differ in their data parallelism, or in what is dealt out along the tensor axis; the message
            says what to fix so that it can be run.
    """
    degrees = found.degrees
    kinds = {RUN_AS[layer.choice.data] for layer in found.layers} or {"ddp"}
    tensor = {layer.choice.tensor for layer in found.layers} if degrees.tensor > 1 else {"cut"}
    data = max(kinds, key=STRENGTH.index)
    fix = {**({"data": data} if len(kinds) > 1 and not mixed else {}),
           **({"placement": "sequence" if "sequence" in tensor else "cut"} if tensor not in RUN_ALONG else {})}
    if fix:
        raise ConfigError("this strategy is planned, and cannot be run yet", where=found.summary,
                          why="a step is run with one kind of data parallelism (ddp, zero1, fsdp) for all layers, and "
                          "along the tensor axis weights are dealt out in all of them, or positions in all",
                          do="let the layers be alike: search.override(\"*\", "
                          f"{', '.join(f'{name}={word!r}' for name, word in fix.items())})")
    axes, names = [], []
    along_tensor = "ulysses" if tensor == {"sequence"} else "sp" if degrees.sequence else "tp"
    if degrees.pipe > 1 or found.micro > 1:  # micro-batches alone are a pipeline of one stage
        axes.append(Axis("pp", degrees.pipe, machine.chip.alpha))
        names.append("pp")
    for name, size, kind, group in (
            ("data", degrees.data, data, degrees.weights_group("cut")),
            ("context", degrees.context, "ring", degrees.context_group),
            ("tensor", degrees.tensor, along_tensor, degrees.tensor_group)):
        if size > 1 or (name == "data" and degrees.tensor == degrees.context == 1):
            beta = seconds("all_gather", 1e9, group, machine) / 1e9
            axes.append(Axis(name, size, machine.chip.alpha, beta))
            names.append(kind)
    schedule = PipelineSchedule(found.schedule, found.micro, found.chunks) if "pp" in names else PipelineSchedule()
    # ranks with other positions have the same weights, as ranks with other sequences do
    dealt = {"fsdp": "*", "zero1": "state:*"}.get(data)
    overrides = tuple((dealt, axis.name, Shard(0)) for axis, kind in zip(axes, names, strict=True)
                      if dealt and kind in CONTEXT)
    return Strategy(Mesh(tuple(axes)), tuple(names), overrides, schedule)
