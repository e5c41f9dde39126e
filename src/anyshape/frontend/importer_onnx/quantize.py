"""Translations of quantised ONNX operators: whole numbers with a scale and a zero point.

    DequantizeLinear(x: u8, scale, zero)  -->  mul(sub(cast(x), cast(zero)), scale)
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anyshape.frontend.aten.table import Decline, Mismatch, is_float
from anyshape.frontend.importer_onnx.matmul import exact_in_f32, matmul, whole
from anyshape.frontend.importer_onnx.model import ELEMENTS
from anyshape.frontend.importer_onnx.pointwise import converted
from anyshape.frontend.importer_onnx.spatial import convolved, window
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.frontend.symbols.known import Known, known
from anyshape.ir.graph import Value
from anyshape.ir.panels import into_panels
from anyshape.sym.expr import Size, product

LIMITS = {"u8": (0.0, 255.0), "i8": (-128.0, 127.0), "i16": (-32768.0, 32767.0), "i32": (-2147483648.0, 2147483647.0),
          "u16": (0.0, 65535.0)}

MOVES = {("i8", "u8"): 128, ("u8", "i8"): -128}  # what is added where numbers of 8 bits are held by the other dtype


def aligned(c: Call, parameter: Value, x: Value, axis: int, block: int = 0) -> Value:
    """A scale or zero point as it meets the tensor: one for all, one per place of an axis, or one per block of it."""
    if parameter.tensor.count == 1:
        return c.t.reshape(parameter, ())  # type: ignore[no-any-return]
    rank = x.tensor.rank
    if block:
        repeated = c.op("repeat", parameter, dim=axis, times=block) if block > 1 else parameter
        return c.t.window(repeated, axis, 0, x.tensor.shape[axis])  # type: ignore[no-any-return]
    if parameter.tensor.rank != 1:
        raise Decline(f"a parameter of rank {parameter.tensor.rank}")
    shape: list[Size] = [1] * rank
    shape[axis] = parameter.tensor.shape[0]
    return c.t.reshape(parameter, shape)  # type: ignore[no-any-return]


def rounded(c: Call, x: Value, zero: Any, dtype: str) -> Value:
    """x, rounded to even, by the zero point away, as the narrow dtype holds it."""
    low, high = LIMITS[dtype]
    kind = x.tensor.dtype
    y = c.op("round", x)
    if zero is not None:
        y = c.t.pointwise("add", y, converted(c, zero, kind), dtype=kind)
    y = c.op("minimum", c.op("maximum", y, low), high)
    return converted(c, y, dtype)


@translates("QuantizeLinear")
def quantize(c: Call) -> Any:
    x, scale = c.value(0), c.value(1)
    rank = max(x.tensor.rank, 1)
    axis, block = c.attr("axis", 1) % rank if rank > 1 else 0, c.attr("block_size", 0)
    zero = c.value(2) if c.has(2) else None
    dtype = zero.tensor.dtype if zero is not None else ELEMENTS.get(c.attr("output_dtype", 0) or 2, "u8")
    if dtype not in LIMITS or c.attr("precision", 0):
        raise Decline(f"a result of {dtype}")
    y = c.t.pointwise("div", x, aligned(c, scale, x, axis, block), dtype="f32" if not is_float(x.tensor.dtype)
                      else x.tensor.dtype)
    y = c.t.cast(y, "f32") if y.tensor.dtype in ("f16", "bf16") else y
    return rounded(c, y, None if zero is None else aligned(c, zero, x, axis, block), dtype)


@translates("DequantizeLinear")
def dequantize(c: Call) -> Any:
    x, scale = c.numbers_of(0), c.value(1)
    rank = max(x.tensor.rank, 1)
    axis, block = c.attr("axis", 1) % rank if rank > 1 else 0, c.attr("block_size", 0)
    kind = scale.tensor.dtype
    inner = "f32" if kind in ("f16", "bf16") else kind
    y = converted(c, x, inner)
    if c.has(2):
        zero = converted(c, c.numbers_of(2), inner)
        y = c.t.pointwise("sub", y, aligned(c, zero, x, axis, block), dtype=inner)
    out = c.t.pointwise("mul", y, aligned(c, scale, x, axis, block), dtype=inner)
    wanted = ELEMENTS.get(c.attr("output_dtype", 0), kind)
    return c.t.cast(out, wanted)


@translates("DynamicQuantizeLinear")
def dynamic_quantize(c: Call) -> Any:
    return dynamic(c, c.value(0))


def dynamic(c: Call, x: Value) -> tuple[Value, Value, Value]:
    """The tensor as u8 with the scale and zero point that its range gives."""
    dims = tuple(range(x.tensor.rank))
    high = c.op("maximum", c.t.reduce("amax", x, dims), 0.0)
    low = c.op("minimum", c.t.reduce("amin", x, dims), 0.0)
    scale = c.op("div", c.op("sub", high, low), 255.0)
    safe = c.op("where", c.op("eq", scale, 0.0), 1.0, scale)
    zero = c.t.cast(c.op("round", c.op("minimum", c.op("maximum", c.op("div", c.op("neg", low), safe), 0.0), 255.0)),
                    "u8")
    return rounded(c, c.op("div", x, safe), zero, "u8"), safe, zero  # of zeros alone it is 1, as onnxruntime has it


def less_zero(c: Call, x: Value, zero: Value | None, axis: int) -> Value:
    """The whole numbers less their zero point, in f32, which is exact."""
    y = c.t.cast(x, "f32")
    if zero is None:
        return y  # type: ignore[no-any-return]
    if zero.tensor.rank == x.tensor.rank and zero.tensor.rank:
        away = zero
    else:
        away = aligned(c, zero, x, axis)
    return c.t.pointwise("sub", y, c.t.cast(away, "f32"), dtype="f32")  # type: ignore[no-any-return]


def weight_sums(c: Call, place: int, zero: int, dim: int) -> int | None:
    """The largest sum of the sizes of weights, less their zero point, that one result is made of; None: they are no
    constants. place, zero: where they stand; dim: along which results differ, counted from the last one."""
    given = [c.at(one) if c.has(one) else None for one in (place, zero)]
    if any(isinstance(one, Known) and one.symbolic for one in given) or not isinstance(given[0], Known) or not (
            given[1] is None or isinstance(given[1], Known)):
        return None
    weights = given[0].array.astype(np.int64)
    if isinstance(given[1], Known):
        away = given[1].array.astype(np.int64)
        if away.size > 1 and away.ndim == 1:
            away = away.reshape([-1 if d == weights.ndim + dim else 1 for d in range(weights.ndim)])
        weights = weights - (away.reshape(()) if away.size == 1 else away)
    over = (-2,) if dim == -1 else tuple(range(1, weights.ndim))
    return int(np.abs(weights).sum(over).max(initial=0)) if weights.ndim > 1 else None


def product_of_bytes(c: Call, a: Any, a_zero: Any, b: Any, b_zero: Any) -> Value:
    """The product of matrices of 8-bit numbers less their zero points, in i32. The routine takes u8 by i8, so what has
    another sign is moved by 128, and its zero point with it; zero points are taken off the sums:

        (a - p) @ (b - q)  =  a @ b  -  p * sum of b's columns  -  q * sum of a's rows  +  terms * p * q
    """
    left, p = _moved(c, a, a_zero, "u8")
    right, q = _moved(c, b, b_zero, "i8")
    lined = left.tensor.rank == 1, right.tensor.rank == 1
    constant = isinstance(b, Known) and not b.symbolic and len(b.shape) == 2
    total = by_panels(c, left, moved_numbers(b, "i8")) if constant else matmul(c, left, right, "matmul_bytes")
    terms = left.tensor.shape[-1]

    def sums(operand: Any, x: Value, dim: int, gone: bool) -> Value:
        dim = max(dim, -x.tensor.rank)
        if isinstance(operand, Known) and not operand.symbolic:
            numbers = operand.array.astype(np.int64) + MOVES.get((operand.dtype, x.tensor.dtype), 0)
            found = c.tensor(known(numbers.sum(dim, keepdims=True).astype(np.int32), "i32"))
        else:
            found = c.t.reduce("sum", c.t.cast(x, "i32"), (x.tensor.rank + dim,), keep=True)
        shape = list(found.tensor.shape)
        if x.tensor.rank == 1:
            return c.t.reshape(found, ())  # type: ignore[no-any-return]
        if gone:  # the other operand was a vector
            del shape[dim]
        return c.t.reshape(found, shape)  # type: ignore[no-any-return]

    def placed(zero: Value, x: Value, dim: int, gone: bool) -> Value:
        """A zero point as it meets the sums; one per row of a, per column of b, or as many as the operand has."""
        if zero.tensor.count == 1:
            return c.t.reshape(zero, ())  # type: ignore[no-any-return]
        shape: list[Size] = [1] * x.tensor.rank if zero.tensor.rank == 1 else list(zero.tensor.shape)
        if zero.tensor.rank == 1:
            shape[dim] = zero.tensor.shape[0]
        if gone or x.tensor.rank == 1:
            del shape[-3 - dim]
        return c.t.reshape(zero, shape)  # type: ignore[no-any-return]

    def i32(name: str, x: Value, y: Any) -> Value:
        return c.t.pointwise(name, x, y, dtype="i32")  # type: ignore[no-any-return]

    if p is not None:
        p = placed(p, left, -2, lined[1])
        total = i32("sub", total, i32("mul", p, sums(b, right, -2, lined[0])))
    if q is not None:
        q = placed(q, right, -1, lined[0])
        away = sums(a, left, -1, lined[1])
        if p is not None:
            away = i32("sub", away, i32("mul", p, c.t.cast(c.t.full(terms, (), "i64"), "i32")))
        total = i32("sub", total, i32("mul", q, away))
    return total


def by_panels(c: Call, left: Value, right: np.ndarray) -> Value:
    """The product of u8 [*, K] with a constant matrix [K, N] of i8, which is brought into panels once."""
    lead, columns = left.tensor.shape[:-1], right.shape[1]
    if left.tensor.shape[-1] != right.shape[0]:
        raise Mismatch(left.tensor.shape[-1], right.shape[0])
    rows = c.t.reshape(left, (product(lead), right.shape[0]))
    panels = c.constant(into_panels(right), "i8")
    found = c.op("matmul_bytes", rows, panels, columns=columns)
    return c.t.reshape(found, (*lead, columns))  # type: ignore[no-any-return]


def moved_numbers(operand: Known, wanted: str) -> np.ndarray:
    """The numbers of 8 bits of a constant as the dtype that the routine takes them in."""
    moved = operand.array.astype(np.int16) + MOVES.get((operand.dtype, wanted), 0)
    return moved.astype(np.uint8 if wanted == "u8" else np.int8)


def _moved(c: Call, operand: Any, zero: Any, wanted: str) -> tuple[Value, Value | None]:
    """An operand as the dtype that the routine takes it in, and its zero point in i32, None where that is 0."""
    x = c.tensor(operand)
    away = MOVES.get((x.tensor.dtype, wanted), 0)
    if away and isinstance(operand, Known) and not operand.symbolic:
        x = c.tensor(known(moved_numbers(operand, wanted), wanted))
    elif away:
        x = c.t.cast(c.t.pointwise("add", c.t.cast(x, "i32"), away, dtype="i32"), wanted)
    if zero is None:
        return x, c.t.full(away, (), "i32") if away else None
    if isinstance(zero, Known) and not zero.symbolic:
        there = zero.array.astype(np.int32) + away
        return x, c.tensor(known(there, "i32")) if there.any() else None
    found = c.t.cast(c.tensor(zero), "i32")
    return x, c.t.pointwise("add", found, away, dtype="i32") if away else found


@translates("MatMulInteger")
def matmul_integer(c: Call) -> Any:
    return product_of_bytes(c, c.at(0), c.at(2), c.at(1), c.at(3))


@translates("QLinearMatMul")
def qlinear_matmul(c: Call) -> Any:
    a, a_scale, _, b, b_scale, _, y_scale, y_zero = (c.value(place) for place in range(8))
    total = c.t.cast(product_of_bytes(c, c.at(0), c.at(2), c.at(3), c.at(5)), "f32")
    by = c.t.pointwise("div", c.t.pointwise("mul", column(c, a_scale, a, 2), column(c, b_scale, b, 1), dtype="f32"),
                       y_scale, dtype="f32")
    return rounded(c, c.t.pointwise("mul", total, by, dtype="f32"), y_zero, y_zero.tensor.dtype)


def column(c: Call, scale: Value, x: Value, back: int) -> Value:
    """A scale as it meets a product: one number, or one for each row (back: 2) or column (1) of a factor."""
    if scale.tensor.count == 1 or scale.tensor.rank != 1:
        return c.t.reshape(scale, ()) if scale.tensor.count == 1 else scale  # type: ignore[no-any-return]
    return aligned(c, scale, x, x.tensor.rank - back)


def convolution_of_bytes(c: Call, x: int, x_zero: int, w: int, w_zero: int) -> Value:
    """The convolution of 8-bit numbers less their zero points, in i32; of the operands at these places. By constant
    weights over one or two dims it is a routine of our own; channels in groups and volumes are done by floats."""
    known_weights = all(isinstance(one, Known) and not one.symbolic for one in (c.at(w), c.at(w_zero))
                        if one is not None)
    single = not c.has(x_zero) or c.kind(x_zero).count == 1
    if known_weights and single and c.attr("group", 1) == 1 and c.rank(x) in (3, 4):
        return _by_windows(c, c.value(x), c.at(x_zero), c.at(w), c.at(w_zero))
    images = less_zero(c, c.value(x), c.value(x_zero) if c.has(x_zero) else None, 1)
    kernels = less_zero(c, c.value(w), c.value(w_zero) if c.has(w_zero) else None, 0)
    return whole(c, _conv_total(c, images, kernels, weight_sums(c, w, w_zero, -kernels.tensor.rank)))


def _by_windows(c: Call, x: Value, zero: Any, weights: Known, weights_zero: Known | None) -> Value:
    """[N, C, *S] u8 or i8 by constant weights [O, C, *K]. What is around the images is their zero point; zero points
    are taken off as in `product_of_bytes`."""
    rank = x.tensor.rank
    outs, channels, *kernel = weights.shape
    if x.tensor.shape[1] != channels:
        raise Mismatch(x.tensor.shape[1], channels)
    strides, dilations, low, high = window(c, x.tensor.shape[2:], tuple(kernel))
    number = MOVES.get((x.tensor.dtype, "u8"), 0) if zero is None else (
        int(moved_numbers(zero, "u8").reshape(())) if isinstance(zero, Known) else None)
    x, p = _moved(c, x, zero, "u8")
    x = _around(c, c.t.permute(x, (0, *range(2, rank), 1)), low, high, number, p)
    numbers = moved_numbers(weights, "i8")
    matrix = numbers.transpose(*range(2, rank), 1, 0).reshape(-1, outs)
    ones = (1,) * (4 - rank)  # a line is an image of one line
    images = c.t.reshape(x, (x.tensor.shape[0], *ones, *x.tensor.shape[1:]))
    settings: dict[str, Any] = {"kernel": (*ones, *kernel), "stride": (*ones, *strides),
                                "dilation": (*ones, *dilations)}

    def seen(by: np.ndarray) -> Value:
        found = c.op("conv_bytes", images, c.constant(into_panels(by), "i8"), columns=by.shape[1], **settings)
        shape = found.tensor.shape
        return c.t.reshape(found, (shape[0], *shape[1 + len(ones):]))  # type: ignore[no-any-return]

    def less(total: Value, by: Any, times: Any) -> Value:
        away = c.t.pointwise("mul", by, times, dtype="i32")
        return c.t.pointwise("sub", total, away, dtype="i32")  # type: ignore[no-any-return]

    def constant(numbers: np.ndarray) -> Value:
        return c.tensor(known(numbers.astype(np.int32), "i32"))

    total = seen(matrix)
    away = np.int64(MOVES.get((weights.dtype, "i8"), 0)) + (
        0 if weights_zero is None else weights_zero.array.astype(np.int64).reshape(-1))
    # without the terms p * q, what is taken off the sums is p times the sums of weights less their zero points
    sums = matrix.astype(np.int64).sum(0) - len(matrix) * away
    if p is not None:
        total = less(total, c.t.reshape(p, ()), constant(sums))
    if away.any():
        total = less(total, seen(np.ones((len(matrix), 1), np.int8)), constant(np.broadcast_to(away, outs)))
    return c.t.permute(total, (0, rank - 1, *range(1, rank - 1)))  # type: ignore[no-any-return]


def _around(c: Call, x: Value, low: Sequence[Size], high: Sequence[Size], number: int | None,
            zero: Value | None) -> Value:
    """Images [N, *S, C] of u8 with their zero point around them; number: None where a call finds it."""
    if all(n == 0 for n in (*low, *high)):
        return x
    sizes: dict[str, Any] = {"low": (0, *low, 0), "high": (0, *high, 0)}
    if number is not None or zero is None:
        return c.op("pad", x, value=number, **sizes)
    inside = c.op("pad", c.t.full(1, x.tensor.shape, "u8"), value=0, **sizes)
    there = c.t.cast(c.t.reshape(zero, ()), "u8")
    return c.op("where", c.op("ne", inside, 0), c.op("pad", x, value=0, **sizes), there)


def _conv_total(c: Call, x: Value, w: Value, sums: int | None) -> Value:
    """The convolution of whole numbers, in f32 where that is exact, else in f64."""
    kind = "f32" if exact_in_f32(product(w.tensor.shape[1:]), sums) else "f64"
    return convolved(c, c.t.cast(x, kind), c.t.cast(w, kind), None)


@translates("ConvInteger")
def conv_integer(c: Call) -> Any:
    return convolution_of_bytes(c, 0, 2, 1, 3)


@translates("QLinearConv")
def qlinear_conv(c: Call) -> Any:
    x_scale, w_scale, y_scale, y_zero = (c.value(place) for place in (1, 4, 6, 7))
    total = convolution_of_bytes(c, 0, 2, 3, 5)
    count = total.tensor.rank
    if c.has(8):
        total = c.t.pointwise("add", total, aligned(c, c.value(8), total, 1), dtype="i32")
    scale = c.t.reshape(w_scale, ()) if w_scale.tensor.count == 1 else c.t.reshape(
        w_scale, (w_scale.tensor.shape[0],) + (1,) * (count - 2))
    by = c.t.pointwise("div", c.t.pointwise("mul", c.t.reshape(x_scale, ()), scale, dtype="f32"),
                       c.t.reshape(y_scale, ()), dtype="f32")
    return rounded(c, c.t.pointwise("mul", c.t.cast(total, "f32"), by, dtype="f32"), c.t.reshape(y_zero, ()),
                   y_zero.tensor.dtype)


@translates("DynamicQuantizeMatMul", "MatMulIntegerToFloat", domain=MICROSOFT)
def dynamic_matmul(c: Call) -> Any:
    if c.name == "DynamicQuantizeMatMul":
        a, a_scale, a_zero = dynamic(c, c.value(0))
        b, b_scale, b_zero, bias = c.at(1), c.value(2), c.at(3), c.at(4)
    else:
        a, b, a_scale, b_scale = c.at(0), c.at(1), c.value(2), c.value(3)
        a_zero, b_zero, bias = c.at(4), c.at(5), c.at(6)
    total = c.t.cast(product_of_bytes(c, a, a_zero, b, b_zero), "f32")
    by = c.t.pointwise("mul", c.t.reshape(a_scale, ()), column(c, b_scale, c.tensor(b), 1), dtype="f32")
    found = c.t.pointwise("mul", total, by, dtype="f32")
    return found if bias is None else c.t.pointwise("add", found, c.tensor(bias), dtype="f32")
