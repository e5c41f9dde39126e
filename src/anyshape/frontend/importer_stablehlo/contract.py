"""Translations of StableHLO's products: dot_general, convolution, what linear algebra does by PyTorch; and batch norms.

    batch_norm_inference(x, scale, offset, mean, variance)       scale * (x - mean) / sqrt(variance + epsilon) + offset
    batch_norm_training(x, scale, offset)                        the same with those of x; also these two
    batch_norm_grad(x, scale, mean, variance, gradient)          gradients of x, scale and offset
"""
from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from anyshape.frontend.aten.matmul import of_bytes
from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.shapes import padded, spaced
from anyshape.frontend.importer_stablehlo.table import COMPLEX, Call, held, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Size, floordiv, product

aten = torch.ops.aten
HALF = ("f16", "bf16")


@translates("dot_general")
def dot_general(c: Call) -> Any:
    how = c.attr("dot_dimension_numbers")
    return _contracted(c, *(list(how[f"{side}_{kind}_dimensions"]) for kind in ("batching", "contracting")
                            for side in ("lhs", "rhs")))


@translates("dot")
def dot(c: Call) -> Any:
    return _contracted(c, [], [], [len(c.sizes_of(0)) - 1], [0])


@translates("einsum")
def einsum(c: Call) -> Any:
    said = c.attr("einsum_config").replace(" ", "")
    found = re.fullmatch(r"(\w*),(\w*)->(\w*)", said)
    left, right, into = found.groups() if found is not None else ("",) * 3
    ranks = [len(c.sizes_of(place)) for place in (0, 1)]
    if found is None or any(len(set(one)) != len(one) for one in (left, right, into)) or (
            ranks != [len(left), len(right)]):
        raise Decline(f"the sum {said}")
    both = [one for one in left if one in right]
    batch, inner = [one for one in both if one in into], [one for one in both if one not in into]
    order = batch + [one for one in left + right if one not in both]
    if sorted(order) != sorted(into):
        raise Decline(f"the sum {said}")
    product = _contracted(c, *([side.index(one) for one in letters] for letters in (batch, inner)
                               for side in (left, right)))
    return c.t.permute(product, [order.index(one) for one in into])


def _contracted(c: Call, left: list[int], right: list[int], inner_left: list[int], inner_right: list[int]) -> Value:
    """A product over the inner dims of both operands, for each place of `left` and `right`: those dims come first, then
    the others of both."""
    x, y = c.value(0), c.value(1)
    if c.dtype != "i32" or not {x.tensor.dtype, y.tensor.dtype} <= {"i8", "u8"}:  # of which there are products
        x, y = (_as_result(c, k) for k in (0, 1))
    free_left = [d for d in range(x.tensor.rank) if d not in left + inner_left]
    free_right = [d for d in range(y.tensor.rank) if d not in right + inner_right]
    # sizes that meet are written alike
    want = list(y.tensor.shape)
    for a, b in zip((*left, *inner_left), (*right, *inner_right), strict=True):
        want[b] = x.tensor.shape[a]
    y = c.shaped(y, want)
    batch = [x.tensor.shape[d] for d in left]
    rows, columns = [x.tensor.shape[d] for d in free_left], [y.tensor.shape[d] for d in free_right]
    inner = product(x.tensor.shape[d] for d in inner_left)
    result = (*batch, *rows, *columns)
    x = c.t.reshape(c.t.permute(x, left + free_left + inner_left), (*batch, product(rows), inner))
    y = c.t.reshape(c.t.permute(y, right + inner_right + free_right), (*batch, inner, product(columns)))
    return c.t.reshape(_product(c, x, y), result)


def _as_result(c: Call, place: int) -> Value:
    x = c.value(place)
    if c.dtype in COMPLEX and x.tensor.dtype not in COMPLEX:
        half = c.t.cast(x, "f32" if c.dtype == "c64" else "f64")
        return c.of_parts(half, c.t.full(0.0, x.tensor.shape, half.tensor.dtype))
    if x.tensor.dtype in COMPLEX:
        return x if x.tensor.dtype == c.dtype else c.extern(  # type: ignore[no-any-return]
            "prims.convert_element_type.default", x, {"c64": torch.complex64, "c128": torch.complex128}[c.dtype],
            types=c.type(x.tensor.shape))
    return c.t.cast(x, held(c.dtype))


def _product(c: Call, x: Value, y: Value) -> Value:
    *batch, rows, inner = x.tensor.shape
    shape = (*batch, rows, y.tensor.shape[-1])
    if c.dtype in COMPLEX:
        return c.extern("aten.matmul.default", x, y, types=c.type(shape))  # type: ignore[no-any-return]
    if kind_of(x.tensor.dtype) == "float":
        return c.op("matmul", x, y)
    if c.dtype == "i32" and {x.tensor.dtype, y.tensor.dtype} <= {"i8", "u8"}:
        return of_bytes(c.t, x, y)
    wide = (*batch, rows, inner, y.tensor.shape[-1])
    x = c.t.broadcast(c.t.reshape(x, (*batch, rows, inner, 1)), wide)
    y = c.t.broadcast(c.t.reshape(y, (*batch, 1, inner, y.tensor.shape[-1])), wide)
    if c.dtype == "bool":
        return c.op("any", c.op("bit_and", x, y), dims=(len(wide) - 2,), keep=False)
    total = c.op("sum", c.op("mul", x, y), dims=(len(wide) - 2,), keep=False)
    return c.wrapped(c.t.cast(total, held(c.dtype)))


# ---- convolution


@translates("convolution")
def convolution(c: Call) -> Any:
    how = c.attr("dimension_numbers")
    rank = len(how["input_spatial_dimensions"])
    ones = (1,) * rank
    strides, spread, dilated = (c.attr(name) or ones for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
    pairs = c.attr("padding")
    pairs = [(0, 0)] * rank if pairs is None else [(int(a), int(b)) for a, b in np.asarray(pairs).reshape(-1, 2)]
    return _convolved(c, how, strides, spread, dilated, pairs)


@translates("dynamic_conv")
def dynamic_conv(c: Call) -> Any:
    how = c.attr("dimension_numbers")
    rank = len(how["input_spatial_dimensions"])
    ones = (1,) * rank
    strides, spread, dilated = (c.attr(name) or ones for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
    sizes = c.sizes(2)
    return _convolved(c, how, strides, spread, dilated, list(zip(sizes[::2], sizes[1::2], strict=True)))


def _convolved(c: Call, how: Any, strides: Sequence[int], spread: Sequence[int], dilated: Sequence[int],
               pairs: Sequence[tuple[Size, Size]]) -> Value:
    """Complex numbers by their parts. Whole numbers by sums of f64, which are exact: those of 32 and 64 bits in pieces
    of 16."""
    x, kernel = (_as_result(c, k) for k in (0, 1))

    def done(one: Value, other: Value) -> Value:
        return _of_floats(c, one, other, how, strides, spread, dilated, pairs)
    if c.dtype in COMPLEX:
        (a, b), (p, q) = c.parts(x), c.parts(kernel)
        return c.of_parts(c.op("sub", done(a, p), done(b, q)), c.op("add", done(a, q), done(b, p)))
    if kind_of(x.tensor.dtype) == "float":
        return done(x, kernel)
    parts = [_limbs(c, one) for one in (x, kernel)]

    def whole(*values: Value) -> Value:
        return c.op("cast", done(*(c.op("cast", one, dtype="f64") for one in values)), dtype="i64")
    total: Any = None
    for far in range(len(parts[0])):  # what lies above is lost when sums wrap
        for place in range(far + 1):
            one = whole(parts[0][place], parts[1][far - place])
            one = c.op("shift_left", one, 16 * far) if far else one
            total = one if total is None else c.op("add", total, one)
    if c.dtype == "bool":
        return c.op("ne", total, 0)
    return c.wrapped(c.op("cast", total, dtype=held(c.dtype)) if held(c.dtype) != "i64" else total)


def _limbs(c: Call, x: Value) -> list[Value]:
    """Whole numbers in pieces of 16 bits, the lowest one first: only the last one has a sign."""
    count = {"i32": 2, "u32": 2, "i64": 4, "u64": 4}.get(c.dtype, 1)
    wide = c.op("cast", x, dtype="i64") if x.tensor.dtype != "i64" else x
    above = [c.op("shift_right", wide, 16 * k) if k else wide for k in range(count)]
    return [*(c.op("bit_and", one, 0xFFFF) for one in above[:-1]), above[-1]]


def _of_floats(c: Call, x: Value, kernel: Value, how: Any, strides: Sequence[int], spread: Sequence[int],
               dilated: Sequence[int], pairs: Sequence[tuple[Size, Size]]) -> Value:
    rank, groups = len(strides), c.attr("feature_group_count", 1)
    x = c.t.permute(x, [how["input_batch_dimension"], how["input_feature_dimension"], *how["input_spatial_dimensions"]])
    kernel = c.t.permute(kernel, [how["kernel_output_feature_dimension"], how["kernel_input_feature_dimension"],
                                  *how["kernel_spatial_dimensions"]])
    reversal = c.attr("window_reversal")
    flipped = tuple(2 + d for d in range(rank) if reversal is not None and reversal[d])
    if flipped:
        kernel = c.op("flip", kernel, dims=flipped)
    batches = c.attr("batch_group_count", 1)
    if batches > 1:  # groups of the batch are features of one image
        n, features, *space = x.tensor.shape
        x = c.t.reshape(x, (batches, floordiv(n, batches), features, *space))
        x = c.t.permute(x, (1, 0, 2, *range(3, 3 + rank)))
        x = c.t.reshape(x, (floordiv(n, batches), batches * features, *space))
        groups = batches
    for d, gap in enumerate(spread):
        x = spaced(c, x, 2 + d, gap - 1, 0.0)
    inside = [a if isinstance(a, int) and a == b and a >= 0 else 0 for a, b in pairs]
    low = [0, 0, *(a - s for (a, _), s in zip(pairs, inside, strict=True))]
    high = [0, 0, *(b - s for (_, b), s in zip(pairs, inside, strict=True))]
    for d, (a, b) in enumerate(zip(low, high, strict=True)):
        if isinstance(a, int) and isinstance(b, int) and min(a, b) < 0:
            cut = [max(-a, 0), max(-b, 0)]
            x = c.t.window(x, d, cut[0], x.tensor.shape[d] - sum(cut))
            low[d], high[d] = max(a, 0), max(b, 0)
    x = padded(c, x, low, high, 0.0)
    shape = [x.tensor.shape[0], kernel.tensor.shape[0]]
    for d in range(rank):
        reach = (kernel.tensor.shape[2 + d] - 1) * dilated[d] + 1
        left = x.tensor.shape[2 + d] + 2 * inside[d] - reach
        if isinstance(left, int) and left < 0:
            left = -strides[d]  # the window fits nowhere
        shape.append(floordiv(left, strides[d]) + 1 if strides[d] > 1 else left + 1)
    if rank > 3:
        raise Decline(f"convolutions over {rank} dims")
    if not rank:  # over one dim of size 1
        x, kernel = (c.t.reshape(one, (*one.tensor.shape, 1)) for one in (x, kernel))
        strides, dilated, inside, shape = (1,), (1,), [0], [*shape, 1]
    found = c.t.full(0.0, shape, x.tensor.dtype) if 0 in shape else c.aten(
        aten.convolution.default, x, kernel, None, list(strides), inside, list(dilated), False, [0] * len(strides),
        groups, types=c.type(shape, x.tensor.dtype))
    found = c.t.reshape(found, shape[:rank + 2])
    order = [0] * (rank + 2)
    for place, d in enumerate((how["output_batch_dimension"], how["output_feature_dimension"],
                               *how["output_spatial_dimensions"])):
        order[d] = place
    return c.t.permute(found, order)


# ---- by PyTorch


@translates("cholesky")
def cholesky(c: Call) -> Any:
    x = _solvable(c, c.value(0))
    found = c.extern("aten.linalg_cholesky.default", x, upper=not c.attr("lower", False), types=x.tensor.dense())
    return c.t.cast(found, held(c.dtype))


def _solvable(c: Call, x: Value) -> Value:
    """LAPACK has no floats of 16 bits."""
    return c.t.cast(x, "f32") if x.tensor.dtype in HALF else x


@translates("triangular_solve")
def triangular_solve(c: Call) -> Any:
    a, b = (_solvable(c, one) for one in c.values())
    way = c.attr("transpose_a", "NO_TRANSPOSE")
    upper = not c.attr("lower", False)
    if way != "NO_TRANSPOSE":
        order = [*range(a.tensor.rank - 2), a.tensor.rank - 1, a.tensor.rank - 2]
        a, upper = c.t.permute(a, order), not upper
        if way == "ADJOINT" and c.dtype in COMPLEX:
            a = c.aten(aten.conj_physical.default, a, types=a.tensor.dense())
    found = c.extern("aten.linalg_solve_triangular.default", a, b, upper=upper, left=bool(c.attr("left_side", True)),
                     unitriangular=bool(c.attr("unit_diagonal", False)), types=b.tensor.dense())
    return c.t.cast(found, held(c.dtype))


def complex_zeros(c: Call, shape: Sequence[Size]) -> Any:
    half = c.t.full(0.0, shape, "f64" if c.dtype == "c128" else "f32")
    return c.of_parts(half, half)


@translates("fft")
def fft(c: Call) -> Any:
    x, kind, lengths = c.value(0), c.attr("fft_type"), list(c.attr("fft_length"))
    dims = list(range(x.tensor.rank - len(lengths), x.tensor.rank))
    shape = list(x.tensor.shape)
    if kind == "RFFT":
        shape[-1] = lengths[-1] // 2 + 1
    elif kind == "IRFFT":
        shape[-1] = lengths[-1]
    if 0 in shape:  # of nothing, which libraries refuse
        return complex_zeros(c, shape) if c.dtype in COMPLEX else c.t.full(0.0, shape, held(c.dtype))
    name = {"FFT": "fft_fftn", "IFFT": "fft_ifftn", "RFFT": "fft_rfftn", "IRFFT": "fft_irfftn"}[kind]
    return c.extern(f"aten.{name}.default", x, lengths, dims, types=c.type(shape))


# ---- batch norms, by the formulas of the specification; floats of 16 bits are computed as f32


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
