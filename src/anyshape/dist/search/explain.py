"""A strategy explained: per layer its placements, collectives, bytes and seconds; in lines of text, and as data."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.base.units import bytes_text
from anyshape.dist.cost.layer_cost import LayerCost, layer_cost
from anyshape.dist.cost.parallel import RECOMPUTE
from anyshape.dist.cost.strategy import LayerPlan, LayerStrategy
from anyshape.dist.cost.workload import Layer
from anyshape.dist.search.problem import Search, Shape
from anyshape.dist.search.solver import Found
from anyshape.dist.simulate.step import costing_of


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What a layer does in a step on one rank. collectives: in words; sent: bytes of the whole values of one layer.
    seconds: of all `count`, computing; sending, exposed: seconds of collectives, and those that do not hide behind
    the layer itself. held, kept: bytes of all of them, for good and for the backward of a micro-batch."""

    name: str
    count: int
    placement: str
    recompute: str
    collectives: str
    sent: float
    seconds: float
    sending: float
    exposed: float
    held: float
    kept: float


def rows(search: Search, shape: Shape, strategy: LayerStrategy) -> list[LayerRow]:
    """Of each layer, at one class of shapes."""
    costing = costing_of(search.workload, search.machine, strategy, shape.batch, shape.length, search.precision)
    assert costing is not None
    found = []
    for plan, layer in zip(strategy.layers, search.workload.layers, strict=True):
        costs = [(count, layer_cost(costing, layer, plan.choice, kind))
                 for kind, count in zip(RECOMPUTE, plan.recompute, strict=True) if count]
        found.append(_row(strategy, plan, layer, costs, costing.precision.gather))
    return found


def _row(strategy: LayerStrategy, plan: LayerPlan, layer: Layer, costs: Sequence[tuple[int, LayerCost]],
         width: float) -> LayerRow:
    micro, pipe = strategy.micro, strategy.degrees.pipe
    again = micro if plan.choice.data in ("fsdp", "hsdp") else 1
    computing = sum(count * micro * (one.forward + one.backward) for count, one in costs) / pipe
    waits = sum(count * micro * (one.forward_wait + one.backward_wait) for count, one in costs) / pipe
    weights = sum(count * again * one.sending for count, one in costs) / pipe
    exposed = waits + max(0.0, weights - computing)
    kinds = ", ".join(f"{count} {kind}" for kind, count in zip(RECOMPUTE, plan.recompute, strict=True) if count)
    share = layer.parameters - (layer.cut_parameters * (1 - 1 / strategy.degrees.tensor)
                                if plan.choice.tensor == "cut" else 0)
    return LayerRow(layer.name, layer.count, str(plan.choice), kinds if plan.recompute[0] < layer.count else "none",
                    _collectives(strategy, plan, layer), share * width, computing, waits + weights, exposed,
                    sum(count * one.held for count, one in costs) / pipe,
                    sum(count * one.kept for count, one in costs) / pipe)


def _collectives(strategy: LayerStrategy, plan: LayerPlan, layer: Layer) -> str:
    degrees, found = strategy.degrees, []
    if degrees.weights_group(plan.choice.tensor).size > 1:
        found += {"ddp": ["all_reduce"], "zero1": ["all_gather", "reduce_scatter"],
                  "zero2": ["all_gather", "reduce_scatter"], "fsdp": ["2 all_gather", "reduce_scatter"],
                  "hsdp": ["2 all_gather", "reduce_scatter", "all_reduce"]}[plan.choice.data]
    if degrees.tensor > 1 and plan.choice.tensor == "cut" and layer.regions:
        found.append("tensor " + ("gather+scatter" if degrees.sequence else "all_reduce"))
    if degrees.tensor > 1 and plan.choice.tensor == "sequence" and layer.attentions:
        found.append("all_to_all")
    if degrees.context > 1 and layer.attentions:
        found.append("ring")
    return " + ".join(found) or "none"


def text(search: Search, found: Found, tried: int = 8) -> str:
    """The result of a search in lines."""
    best, verdict = found.best, found.best.verdict
    assert verdict is not None
    shape = search.shapes[-1]
    lines = [f"{search.workload.name}: {search.workload.parameters / 1e9:.3g} billion parameters, {search.world} ranks "
             f"of {search.machine}",
             f"step {verdict.seconds * 1e3:.4g} ms simulated, no strategy is below {found.bound * 1e3:.4g} ms "
             f"(gap {found.gap:.1%}); {bytes_text(verdict.memory)} a rank of {bytes_text(search.memory)}"]
    for one, strategy, report in zip(search.shapes, best.plan.strategies, verdict.reports, strict=True):
        title = f"  length <= {one.length}" if len(search.shapes) > 1 else f"  length {one.length}"
        lines.append(f"{title} ({one.weight:.0%} of steps, {one.batch} sequences): {strategy.summary}; "
                     f"{report.seconds * 1e3:.4g} ms, exposed {report.exposed * 1e3:.3g} of "
                     f"{report.sending * 1e3:.4g} ms, {bytes_text(max(report.memory))}")
    lines += ["", f"layers at length {shape.length}, one rank"]
    table = [("layer", "count", "placement", "recompute", "collectives", "weights", "compute ms", "sent ms",
              "exposed ms", "held", "kept")]
    for row in rows(search, shape, best.plan.strategies[-1]):
        table.append((row.name, str(row.count), row.placement, row.recompute, row.collectives, bytes_text(row.sent),
                      f"{row.seconds * 1e3:.4g}", f"{row.sending * 1e3:.3g}", f"{row.exposed * 1e3:.3g}",
                      bytes_text(row.held), bytes_text(row.kept)))
    lines += _aligned(table)
    lines += ["", "what else was tried"]
    lines += _aligned([("", "step ms", "a rank", ""), *(
        (one.name, f"{one.verdict.seconds * 1e3:.4g}" if one.verdict else "-",
         bytes_text(one.verdict.memory) if one.verdict else "-",
         one.plan.strategies[-1].summary + (f": {one.why}" if one.why else ""))
        for one in found.tried if one is not best)][:tried + 1])
    return "\n".join(lines)


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table]
