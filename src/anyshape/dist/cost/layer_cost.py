"""Roofline of a layer under a choice: seconds of its forward and backward, of its collectives, and bytes.

    product     2 M N K / (peak * reached * M / (M + half) * N / (N + half)), at least a launch
    pointwise   bytes / bandwidth

Williams, Waterman, Patterson, "Roofline" (2009). What a rank computes follows from how rows, columns and inner dims are
dealt out; what it sends, from where values are partial sums or are needed whole.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from anyshape.dist.cost.collectives import Group, seconds
from anyshape.dist.cost.machine import Machine
from anyshape.dist.cost.parallel import Degrees, LayerChoice, Precision
from anyshape.dist.cost.workload import Attention, Layer, Product, Workload
from anyshape.sym.expr import Size, evaluate

BACKWARD_ATTENTION = 2.5  # of the forward's operations: five products in place of two
UPDATE_BYTES = 28.0  # an element of AdamW: weight and two moments read and written, gradient read


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on one rank, of one micro-batch. Seconds: forward, backward (with what is computed again), and of these
    those in which it waits for collectives of tensor and context parallelism (forward_wait, backward_wait). gather,
    regather: of weights before the forward and the backward; reduce: of gradients. update: of the optimiser. Bytes:
    held for good; kept for the backward of a micro-batch; transient: while its backward runs, gathered: of weights."""

    forward: float
    backward: float
    forward_wait: float
    backward_wait: float
    gather: float
    regather: float
    reduce: float
    update: float
    held: float
    kept: float
    transient: float
    gathered: float
    link: str
    tensors: int
    border: float

    @property
    def computing(self) -> float:
        """Seconds of forward and backward, waits included."""
        return self.forward + self.backward + self.forward_wait + self.backward_wait

    @property
    def sending(self) -> float:
        """Seconds of the collectives of weights and gradients."""
        return self.gather + self.regather + self.reduce


@dataclass(frozen=True, slots=True)
class Costing:
    """What all layers' costs depend on: a workload on a machine, at some sizes of a micro-batch of one data rank."""

    workload: Workload
    machine: Machine
    degrees: Degrees
    precision: Precision
    batch: int
    length: int

    @property
    def values(self) -> Mapping[str, int]:
        """The symbols' values."""
        return {self.workload.batch: self.batch, self.workload.length: self.length}


class _Pieces:
    """Seconds of the operations of a layer."""

    def __init__(self, costing: Costing, layer: Layer, tensor: str) -> None:
        self.costing, self.layer, self.tensor = costing, layer, tensor
        self.values = costing.values
        self.chip = costing.machine.chip
        degrees = costing.degrees
        self.cut = degrees.tensor if tensor == "cut" else 1
        self.dealt = degrees.tensor if tensor == "sequence" or (tensor == "cut" and degrees.sequence) else 1
        self.context = degrees.context

    def number(self, size: Size) -> float:
        """A formula's value for the positions of a context rank."""
        return evaluate(size, self.values) / self.context

    def product(self, one: Product) -> tuple[float, float]:
        """Forward and backward."""
        rows, inner, columns = self.number(one.rows), float(one.inner), float(one.columns)
        if one.cut and self.cut > 1:
            inner, columns = (inner / self.cut, columns) if one.cut == "row" else (inner, columns / self.cut)
        else:
            rows /= self.dealt
        forward = self.seconds(rows, inner, columns)
        return forward, self.seconds(rows, columns, inner) + self.seconds(inner, rows, columns)

    def seconds(self, rows: float, inner: float, columns: float) -> float:
        reached, kind = self.chip.efficiency, self.costing.precision.products
        peak = self.chip.peak(kind) * (reached.low if kind == "fp8" else reached.products)
        filled = rows / (rows + reached.half) * columns / (columns + reached.half)
        found = 2 * rows * inner * columns / (peak * filled)
        if kind == "fp8":
            found += reached.cast * (rows * inner + inner * columns) / (self.chip.bandwidth * reached.memory)
        return max(found, self.chip.launch)

    def attention(self, one: Attention) -> float:
        """The forward."""
        heads = one.heads / max(self.cut, self.dealt if self.tensor == "sequence" else 1)
        batch = evaluate(one.batch, self.values)
        operations = 4.0 * batch * heads * one.width * self.number(one.queries) * evaluate(one.keys, self.values)
        operations *= 0.5 if one.causal else 1.0
        peak, reached, k = self.chip.peak(self.costing.workload.dtype), self.chip.efficiency, self.context
        return operations / k / (peak * reached.attention) + operations * (k - 1) / k / (peak * reached.ring)

    def pointwise(self) -> float:
        """The forward of what is no product: bytes over bandwidth."""
        layer, precision = self.layer, self.costing.precision
        elements = self.number(layer.traffic) / self.dealt + \
            self.number(layer.cut_traffic) / max(self.cut, self.dealt if self.tensor == "sequence" else 1)
        again = self.chip.efficiency.eager if precision.eager else 1.0
        return elements * precision.compute * again / (self.chip.bandwidth * self.chip.efficiency.memory)

    def waits(self, attention: float) -> float:
        """Collectives of activations of one forward."""
        costing, degrees, layer = self.costing, self.costing.degrees, self.layer
        compute, found = costing.precision.compute, 0.0
        border = self.number(layer.border) * compute
        if self.tensor == "cut" and self.cut > 1:
            kinds = ("all_gather", "reduce_scatter") if degrees.sequence else ("all_reduce",)
            found += layer.regions * (1 - costing.precision.overlap_tensor) * sum(
                seconds(kind, border, degrees.tensor_group, costing.machine) for kind in kinds)
        for one in layer.attentions:
            both = (2 * one.heads + 2 * one.key_heads) * one.width * compute
            if self.tensor == "sequence" and degrees.tensor > 1:
                total = evaluate(one.batch, self.values) * self.number(one.queries) * both
                found += seconds("all_to_all", total, degrees.tensor_group, costing.machine)
            if self.context > 1:
                keys = 2 * one.key_heads * one.width * compute / max(self.cut, 1)
                total = evaluate(one.batch, self.values) * evaluate(one.keys, self.values) * keys
                ring = seconds("all_gather", total, degrees.context_group, costing.machine)
                found += max(0.0, ring - attention / len(layer.attentions))
        return found

    def kept(self, recompute: str) -> float:
        """Bytes that a forward keeps."""
        layer, compute = self.layer, self.costing.precision.compute
        inside = max(self.cut, self.dealt if self.tensor == "sequence" else 1)
        border = self.number(layer.border) / self.dealt
        if recompute == "full":
            return border * compute
        whole = self.number(layer.saved) / self.dealt + self.number(layer.cut_saved) / inside
        if recompute == "none":
            return whole * compute
        results = sum(self.number(one.rows) * one.columns / (inside if one.cut else self.dealt)
                      for one in layer.products)
        scores = sum(evaluate(one.batch, self.values) * self.number(one.queries) * one.heads * one.width / inside
                     for one in layer.attentions)
        return min(whole, border + scores + 0.5 * results) * compute


@lru_cache(maxsize=1 << 14)
def layer_cost(costing: Costing, layer: Layer, choice: LayerChoice, recompute: str) -> LayerCost:
    """See LayerCost. recompute: one of RECOMPUTE; "selective" keeps attention's results and those of every other
    product, as torchtitan does."""
    pieces = _Pieces(costing, layer, choice.tensor)
    products = [pieces.product(one) for one in layer.products]
    attention = sum(pieces.attention(one) for one in layer.attentions)
    pointwise = pieces.pointwise()
    forward_products = sum(one for one, _ in products)
    forward = forward_products + attention + pointwise
    backward = sum(one for _, one in products) + BACKWARD_ATTENTION * attention + 2 * pointwise
    wait = pieces.waits(attention)
    backward_wait = wait
    if recompute == "full":
        backward, backward_wait = backward + forward, 2 * wait
    elif recompute == "selective":
        backward += 0.5 * forward_products + pointwise
    kept, whole = pieces.kept(recompute), pieces.kept("none")
    working = pieces.number(layer.working) / max(pieces.cut, pieces.dealt) * costing.precision.compute
    border = pieces.number(layer.border) / pieces.dealt * costing.precision.compute
    sent = _sent(costing, layer, choice)
    return LayerCost(forward, backward, wait, backward_wait, *sent[:3],
                     sent[3] * UPDATE_BYTES / costing.machine.chip.bandwidth / costing.machine.chip.efficiency.memory,
                     sent[4], kept, max(0.0, whole - kept) + working, sent[5], sent[6], layer.tensors, border)


def _sent(costing: Costing, layer: Layer, choice: LayerChoice
          ) -> tuple[float, float, float, float, float, float, str]:
    """Seconds of gather, regather and reduce; elements that are updated; bytes held, bytes gathered; the link."""
    machine, precision, work = costing.machine, costing.precision, costing.workload
    elements = float(layer.parameters)
    if choice.tensor == "cut":
        elements -= layer.cut_parameters * (1 - 1 / costing.degrees.tensor)
    group = costing.degrees.weights_group(choice.tensor)
    states = work.master_bytes + work.state_bytes
    weights, gradients = elements * precision.gather, elements * precision.reduce

    def take(kind: str, total: float, where: Group) -> float:
        return seconds(kind, total, where, machine)

    if choice.data == "ddp" or group.size == 1:
        copy = precision.gather if precision.gather < work.master_bytes else 0.0
        held = elements * (states + precision.gradient + copy)
        return 0.0, 0.0, take("all_reduce", gradients, group), elements, held, 0.0, group.link(machine)
    if choice.data == "hsdp":
        local = Group(group.per_node(machine), group.stride)
        across = Group(group.size // local.size, group.stride * local.size)
        gather, reduce = take("all_gather", weights, local), take("reduce_scatter", gradients, local)
        reduce += take("all_reduce", gradients / local.size, across)
        shard = elements / local.size
        return gather, gather, reduce, shard, shard * (states + precision.gradient), elements * precision.gather, \
            group.link(machine)
    shard = elements / group.size
    gather, reduce = take("all_gather", weights, group), take("reduce_scatter", gradients, group)
    if choice.data == "fsdp":
        held = shard * (states + precision.gradient)
        return gather, gather, reduce, shard, held, elements * precision.gather, group.link(machine)
    whole = precision.gather + (precision.gradient if choice.data == "zero1" else 0.0)
    held = elements * whole + shard * (states + (0.0 if choice.data == "zero1" else precision.gradient))
    return gather, 0.0, reduce, shard, held, 0.0, group.link(machine)
