"""Translations of StableHLO's batch norms, by the formulas of its specification.

    batch_norm_inference(x, scale, offset, mean, variance)       scale * (x - mean) / sqrt(variance + epsilon) + offset
    batch_norm_training(x, scale, offset)                        the same with those of x; also these two
    batch_norm_grad(x, scale, mean, variance, gradient)          gradients of x, scale and offset

One dim of x holds features; all others are the batch. Floats of 16 bits are computed as f32.
"""
from __future__ import annotations

import math
from typing import Any

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.table import COMPLEX, Call, translates
from anyshape.ir.graph import Value

HALF = ("f16", "bf16")


class _Norm:
    """One operation: its operands, and what is of every feature as wide as the first of them."""

    def __init__(self, c: Call) -> None:
        if c.dtype in COMPLEX:
            raise Decline("of complex numbers")
        self.c = c
        self.op = c.op
        self.wide = "f32" if c.dtype in HALF else c.dtype
        self.x, *others = (c.t.cast(one, self.wide) for one in c.values())
        self.shape = self.x.tensor.shape
        self.feature = int(c.attr("feature_index"))
        features = self.shape[self.feature:self.feature + 1]
        self.others = [c.shaped(one, features if one.tensor.rank == 1 else self.shape) for one in others]
        self.dims = tuple(dim for dim in range(len(self.shape)) if dim != self.feature)
        self.epsilon = float(c.attr("epsilon"))

    def spread(self, value: Value) -> Value:
        """A number for each feature, for each element."""
        sizes = [size if dim == self.feature else 1 for dim, size in enumerate(self.shape)]
        return self.c.t.broadcast(self.c.t.reshape(value, sizes), self.shape)

    def sum(self, value: Value) -> Value:
        """Of each feature."""
        return self.op("sum", value, dims=self.dims, keep=False)

    def count(self, like: Value) -> Value:
        """How many elements each feature has."""
        return self.c.t.full(math.prod(self.shape[dim] for dim in self.dims), like.tensor.shape, self.wide)

    def deviation(self, variance: Value) -> Value:
        return self.op("sqrt", self.op("add", variance, self.epsilon))

    def normal(self, scale: Value, offset: Value, mean: Value, variance: Value) -> Value:
        """The normalised operand."""
        centred = self.op("sub", self.x, self.spread(mean))
        scaled = self.op("mul", self.spread(scale), centred)
        return self.op("add", self.op("div", scaled, self.spread(self.deviation(variance))), self.spread(offset))

    def results(self, *values: Value) -> tuple[Value, ...]:
        return tuple(self.c.t.cast(one, self.c.dtype) for one in values)


@translates("batch_norm_inference")
def batch_norm_inference(c: Call) -> Any:
    norm = _Norm(c)
    scale, offset, mean, variance = norm.others
    return norm.results(norm.normal(scale, offset, mean, variance))


@translates("batch_norm_training")
def batch_norm_training(c: Call) -> Any:
    norm = _Norm(c)
    scale, offset = norm.others
    total = norm.sum(norm.x)
    mean = c.op("div", total, norm.count(total))
    centred = c.op("sub", norm.x, norm.spread(mean))
    variance = c.op("div", norm.sum(c.op("mul", centred, centred)), norm.count(total))
    return norm.results(norm.normal(scale, offset, mean, variance), mean, variance)


@translates("batch_norm_grad")
def batch_norm_grad(c: Call) -> Any:
    norm = _Norm(c)
    scale, mean, variance, gradient = norm.others
    centred = c.op("sub", norm.x, norm.spread(mean))
    offset = norm.sum(gradient)
    along = norm.sum(c.op("mul", gradient, centred))
    deviation = norm.deviation(variance)
    count = norm.count(offset)
    slope = c.op("div", along, c.op("add", variance, norm.epsilon))
    inner = c.op("sub", c.op("sub", c.op("mul", gradient, norm.spread(count)), norm.spread(offset)),
                 c.op("mul", centred, norm.spread(slope)))
    factor = c.op("div", c.op("div", scale, deviation), count)
    return norm.results(c.op("mul", norm.spread(factor), inner), c.op("div", along, deviation), offset)
