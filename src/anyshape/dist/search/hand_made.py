"""Baselines of strategy search: the plans that people write by hand, one for all shapes.

DDP, FSDP, tensor parallel (with and without sequence parallel), FSDP with tensor parallel, pipeline parallel: each with
every kind of recomputation for all layers, and usual numbers of micro-batches. A person fixes them once: they hold for
every shape, so they have to fit at the longest.
"""
from __future__ import annotations

from collections.abc import Iterator

from anyshape.dist.cost.parallel import RECOMPUTE, Degrees
from anyshape.dist.cost.strategy import LayerPlan, LayerStrategy, uniform
from anyshape.dist.search.judge import Verdict, check, cost
from anyshape.dist.search.problem import Plan, Search


def hand_made(search: Search) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of each."""
    world = search.world
    for recompute in RECOMPUTE:
        yield from _plans(search, "DDP", Degrees(world), "whole", "ddp", recompute)
        yield from _plans(search, "FSDP", Degrees(world), "whole", "fsdp", recompute)
        for tensor in (2, 4, 8):
            if world % tensor or tensor > search.machine.per_node:
                continue
            yield from _plans(search, "TP", Degrees(world // tensor, tensor, sequence=False), "cut", "ddp", recompute)
            yield from _plans(search, "TP+SP", Degrees(world // tensor, tensor), "cut", "ddp", recompute)
            yield from _plans(search, "FSDP+TP", Degrees(world // tensor, tensor), "cut", "fsdp", recompute)
        for pipe in (2, 4, 8):
            if world % pipe == 0:
                for micro in (pipe, 2 * pipe, 4 * pipe):
                    yield from _plans(search, "PP", Degrees(world // pipe, pipe=pipe), "whole", "ddp", recompute, micro)


def _plans(search: Search, name: str, degrees: Degrees, tensor: str, data: str, recompute: str,
           micro: int = 1) -> Iterator[tuple[str, Plan]]:
    layers = [(layer.name, layer.count) for layer in search.workload.layers]
    if any(shape.batch % (degrees.data * micro) for shape in search.shapes):
        return
    strategy = uniform(degrees, layers, tensor, data, recompute, micro=micro)
    if degrees.tensor > 1:  # what cannot be cut is whole, or has its positions dealt out
        other = "sequence" if degrees.sequence else "whole"
        strategy = strategy.replace(layers=tuple(
            plan if layer.most % degrees.tensor == 0 and layer.cut_parameters else
            LayerPlan(plan.name, type(plan.choice)(other, plan.choice.data), plan.recompute)
            for plan, layer in zip(strategy.layers, search.workload.layers, strict=True)))
    yield name, Plan((_staged(strategy),) * len(search.shapes))


def _staged(strategy: LayerStrategy) -> LayerStrategy:
    """Stages by the number of layers, as people cut them."""
    pipe = strategy.degrees.pipe
    if pipe == 1:
        return strategy
    depth = len(strategy.order())
    return strategy.replace(stages=tuple(depth * stage // pipe for stage in range(pipe))) if depth >= pipe else strategy


def best_by_name(search: Search) -> dict[str, tuple[Plan, Verdict]]:
    """Of each name the fastest plan that fits."""
    found: dict[str, tuple[Plan, Verdict]] = {}
    for name, plan in hand_made(search):
        verdict = cost(search, plan)
        if verdict is None or check(search, plan, verdict):
            continue
        if name not in found or verdict.seconds < found[name][1].seconds:
            found[name] = plan, verdict
    return found
