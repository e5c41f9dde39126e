"""Translations of ONNX reductions, softmax, scans and normalisations.

    ReduceL2(x, axes=[1])  -->  sqrt(sum(mul(x, x) | dims=(1,)))
"""
from __future__ import annotations

import math
from typing import Any

from anyshape.frontend.aten.reduce import mean, variance
from anyshape.frontend.aten.table import Decline, Mismatch, is_float, wide
from anyshape.frontend.importer_onnx.table import MICROSOFT, Call, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType, kind_of
from anyshape.sym.expr import product
from anyshape.torch_compat import aten


def _axes(c: Call) -> tuple[int, ...] | None:
    """The axes of a reduction; None: it is the identity."""
    rank = c.rank()
    axes = c.ints(1, "axes")
    if not axes:
        return None if (c.attr("noop_with_empty_axes", 0) and axes is not None) or (
            axes is None and c.attr("noop_with_empty_axes", 0)) else tuple(range(rank))
    return tuple(sorted({c.dim(axis, rank) for axis in axes}))


def _least(dtype: str, sign: int) -> Any:
    if is_float(dtype):
        return -math.inf if sign < 0 else math.inf
    bits = int(dtype[1:])
    if kind_of(dtype) == "uint":
        return 0 if sign < 0 else (1 << bits) - 1
    return -(1 << bits - 1) if sign < 0 else (1 << bits - 1) - 1


def _extreme(c: Call, x: Value, row: str, axes: tuple[int, ...], keep: bool) -> Value:
    dtype = x.tensor.dtype
    if dtype == "bool":
        return c.t.reduce("any" if row == "amax" else "all", x, axes, keep)
    if any(x.tensor.shape[axis] == 0 for axis in axes):
        shape = tuple(1 if d in axes else n for d, n in enumerate(x.tensor.shape) if keep or d not in axes)
        return c.t.full(_least(dtype, -1 if row == "amax" else 1), shape, dtype)
    return c.t.reduce(row, x, axes, keep)


@translates("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
            "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
def reduction(c: Call) -> Any:
    x, keep, name = c.value(0), bool(c.attr("keepdims", 1)), c.name.removeprefix("Reduce")
    dtype, axes = x.tensor.dtype, _axes(c)
    if name in ("Max", "Min"):
        return x if axes is None else _extreme(c, x, "amax" if name == "Max" else "amin", axes, keep)
    if axes is None:
        axes = ()
    kind = wide(dtype) if is_float(dtype) else dtype
    y = c.t.cast(x, kind)
    exact = is_float(kind) or name in ("Sum", "Prod", "SumSquare", "L1")
    y = y if exact else c.t.cast(y, "f64")
    if name in ("L2", "SumSquare"):
        y = c.op("mul", y, y)
    elif name == "L1":
        y = y if kind_of(y.tensor.dtype) == "uint" else c.op("abs", y)
    if name == "Mean":
        result = mean(c.t, y, axes, keep)
    elif name == "LogSumExp":
        result = _log_sum_exp(c, y, axes, keep)
    else:
        result = c.t.reduce("prod" if name == "Prod" else "sum", y, axes, keep)
    if name == "L2":
        result = c.op("sqrt", result)
    elif name == "LogSum":
        result = c.op("log", result)
    return c.t.cast(result, dtype)


def _log_sum_exp(c: Call, y: Value, axes: tuple[int, ...], keep: bool) -> Value:
    if not axes:
        return y
    if any(y.tensor.shape[axis] == 0 for axis in axes):
        return c.op("log", c.t.reduce("sum", y, axes, keep))
    top = c.t.reduce("amax", y, axes, True)
    top = c.op("where", c.op("isinf", top), 0.0, top)
    total = c.op("log", c.t.reduce("sum", c.op("exp", c.op("sub", y, top)), axes, True))
    result = c.op("add", total, top)
    shape = tuple(n for d, n in enumerate(y.tensor.shape) if d not in axes)
    return result if keep else c.t.reshape(result, shape)


@translates("ArgMax", "ArgMin")
def position(c: Call) -> Any:
    x, keep = c.value(0), bool(c.attr("keepdims", 1))
    axis = c.axis(0)
    last = bool(c.attr("select_last_index", 0))
    if last:
        x = c.op("flip", x, dims=(axis,))
    size = x.tensor.shape[axis]
    shape = tuple(1 if d == axis else n for d, n in enumerate(x.tensor.shape) if keep or d != axis)
    found = c.aten(aten.argmax.default if c.name == "ArgMax" else aten.argmin.default, x, axis, keep,
                   types=TensorType("i64", shape))
    return c.op("sub", c.t.full(size - 1, shape, "i64"), found) if last else found


@translates("Softmax", "LogSoftmax", "Hardmax")
def softmax(c: Call) -> Any:
    x = c.value(0)
    shape, rank = x.tensor.shape, x.tensor.rank
    old = c.version < 13
    axis = c.axis(1 if old else -1)
    if old:  # the dims from the axis on are one
        x = c.t.reshape(x, (product(shape[:axis]), product(shape[axis:])))
    at = 1 if old else axis
    if c.name == "Hardmax":
        kind = TensorType("i64", tuple(1 if d == at else n for d, n in enumerate(x.tensor.shape)))
        first = c.aten(aten.argmax.default, x, at, True, types=kind)
        line = c.t.reshape(c.t.iota(x.tensor.shape[at]), (x.tensor.shape[at],) + (1,) * (x.tensor.rank - 1 - at))
        result = c.t.cast(c.op("eq", first, line), x.tensor.dtype)
    else:
        target = aten._softmax.default if c.name == "Softmax" else aten._log_softmax.default
        result = c.aten(target, x, at, False, types=x.tensor) if rank else c.t.full(1.0, (), x.tensor.dtype)
    return c.t.reshape(result, shape)


@translates("CumSum", "CumProd")
def scan(c: Call) -> Any:
    x = c.value(0)
    axis = c.dim(int(c.numbers(1)[0]), x.tensor.rank)
    row = c.name.lower()
    if c.attr("reverse", 0):
        x = c.op("flip", x, dims=(axis,))
    if c.attr("exclusive", 0):
        size = x.tensor.shape[axis]
        low = [int(d == axis) for d in range(x.tensor.rank)]
        one = 0 if row == "cumsum" else 1
        x = c.op("pad", x, low=tuple(low), high=(0,) * x.tensor.rank,
                 value=float(one) if is_float(x.tensor.dtype) else one)
        x = c.t.window(x, axis, 0, size)
    result = c.op(row, x, dim=axis)
    return c.op("flip", result, dims=(axis,)) if c.attr("reverse", 0) else result


# ---- normalisations


def _line(c: Call, v: Value, rank: int, at: int = 1) -> Value:
    """A number per channel, aligned."""
    return c.t.reshape(v, (v.tensor.shape[0],) + (1,) * (rank - 1 - at))


@translates("BatchNormalization")
def batch_norm(c: Call) -> Any:
    x, scale, bias, middle, spread = (c.value(place) for place in range(5))
    eps = float(c.attr("epsilon", 1e-5))
    kind = wide(x.tensor.dtype)
    if c.attr("training_mode", 0):
        return _trained(c, kind, eps)
    rank = x.tensor.rank
    if rank == 4 and x.tensor.dtype == "f32":
        kinds = (x.tensor, TensorType(kind, (0,)), TensorType(kind, (0,)))
        return c.aten(aten._native_batch_norm_legit_no_training.default, x, scale, bias, middle, spread, 0.1, eps,
                      types=kinds)[0]
    factor = c.op("rsqrt", c.op("add", _line(c, c.t.cast(spread, kind), rank), eps))
    out = c.t.pointwise("sub", x, _line(c, middle, rank), dtype=kind)
    out = c.t.pointwise("mul", out, factor, dtype=kind)
    out = c.t.pointwise("mul", out, _line(c, scale, rank), dtype=kind)
    return c.t.cast(c.t.pointwise("add", out, _line(c, bias, rank), dtype=kind), x.tensor.dtype)


def _trained(c: Call, kind: str, eps: float) -> tuple[Value, ...]:
    x, scale, bias, middle, spread = (c.value(place) for place in range(5))
    y = c.t.cast(x, kind)
    dims = tuple(d for d in range(x.tensor.rank) if d != 1)
    own, center = variance(c.t, y, dims, 0, True)
    out = c.op("mul", c.op("sub", y, center), c.op("rsqrt", c.op("add", own, eps)))
    rank = x.tensor.rank
    out = c.t.pointwise("add", c.t.pointwise("mul", out, _line(c, scale, rank), dtype=kind), _line(c, bias, rank),
                        dtype=kind)
    keep = float(c.attr("momentum", 0.9))
    count = (x.tensor.shape[1],)

    def running(old: Value, new: Value) -> Value:
        new = c.t.reshape(new, count)
        both = c.op("add", c.op("mul", c.t.cast(old, kind), keep), c.op("mul", new, 1.0 - keep))
        return c.t.cast(both, old.tensor.dtype)
    return c.t.cast(out, x.tensor.dtype), running(middle, center), running(spread, own)


@translates("InstanceNormalization")
def instance_norm(c: Call) -> Any:
    x, scale, bias = c.value(0), c.value(1), c.value(2)
    kind, rank = wide(x.tensor.dtype), x.tensor.rank
    y = c.t.cast(x, kind)
    spread, middle = variance(c.t, y, tuple(range(2, rank)), 0, True)
    out = c.op("mul", c.op("sub", y, middle), c.op("rsqrt", c.op("add", spread, float(c.attr("epsilon", 1e-5)))))
    out = c.t.pointwise("mul", out, _line(c, scale, rank), dtype=kind)
    return c.t.cast(c.t.pointwise("add", out, _line(c, bias, rank), dtype=kind), x.tensor.dtype)


@translates("LayerNormalization")
def layer_norm(c: Call) -> Any:
    return layer_norm_of(c, c.value(0), c.value(1), c.value(2) if c.has(2) else None, c.axis(-1))


def layer_norm_of(c: Call, x: Value, scale: Value, bias: Value | None, axis: int,
                  epsilon: float = 1e-5) -> tuple[Any, ...]:
    """The norm over the dims from an axis on, with its mean and factor. epsilon: where the node has none."""
    kind = wide(x.tensor.dtype)
    y = c.t.cast(x, kind)
    spread, middle = variance(c.t, y, tuple(range(axis, x.tensor.rank)), 0, True)
    factor = c.op("rsqrt", c.op("add", spread, float(c.attr("epsilon", epsilon))))
    out = c.t.pointwise("mul", c.op("mul", c.op("sub", y, middle), factor), scale, dtype=kind)
    if bias is not None:
        out = c.t.pointwise("add", out, bias, dtype=kind)
    return c.t.cast(out, x.tensor.dtype), middle, factor


@translates("SkipLayerNormalization", domain="com.microsoft")
def skiplayer_norm_of(c: Call) -> Any:
    x = c.t.pointwise("add", c.value(0), c.value(1), dtype=c.dtype())
    if c.has(4):
        x = c.t.pointwise("add", x, c.value(4), dtype=c.dtype())
    done = layer_norm_of(c, x, c.value(2), c.value(3) if c.has(3) else None, x.tensor.rank - 1)
    return (*done, x)


@translates("GroupNorm", "SkipGroupNorm", domain="com.microsoft")
def group_norm(c: Call) -> Any:
    """Of sums, for SkipGroupNorm. x: [batch, ..., channels], or channels second."""
    x = c.value(0)
    kind, dtype, rank = wide(x.tensor.dtype), x.tensor.dtype, x.tensor.rank
    last = bool(c.attr("channels_last", 1))
    for place in (3, 4) if c.name == "SkipGroupNorm" else ():
        if c.has(place):
            one = c.value(place)
            if one.tensor.rank == 2:  # [batch, channels]
                shape = one.tensor.shape
                ones = (1,) * (rank - 2)
                one = c.t.reshape(one, (shape[0], *ones, shape[1]) if last else (*shape, *ones))
            elif one.tensor.rank == 1 and not last:
                one = _line(c, one, rank)
            x = c.t.pointwise("add", x, one, dtype=dtype)
    y = c.t.cast(x, kind)
    y = y if last else c.t.permute(y, (0, *range(2, rank), 1))
    shape = y.tensor.shape
    channels, = c.fixed(shape[-1:])
    groups = int(c.attr("groups"))
    split = c.t.reshape(y, (*shape[:-1], groups, channels // groups))
    spread, middle = variance(c.t, split, (*range(1, rank - 1), rank), 0, True)
    factor = c.op("rsqrt", c.op("add", spread, float(c.attr("epsilon", 1e-5))))
    out = c.t.reshape(c.op("mul", c.op("sub", split, middle), factor), shape)
    out = c.t.pointwise("mul", out, c.value(1), dtype=kind)
    out = c.t.pointwise("add", out, c.value(2), dtype=kind)
    if c.attr("activation", 0):  # SiLU
        out = c.op("mul", out, c.op("sigmoid", out))
    out = out if last else c.t.permute(out, (0, rank - 1, *range(1, rank - 1)))
    return c.t.cast(out, dtype), x


@translates("LpNormalization")
def lp_norm(c: Call) -> Any:
    x, axis = c.value(0), c.axis(-1)
    kind = wide(x.tensor.dtype)
    y = c.t.cast(x, kind)
    if c.attr("p", 2) == 1:
        size = c.t.reduce("sum", c.op("abs", y), (axis,), True)
    else:
        size = c.op("sqrt", c.t.reduce("sum", c.op("mul", y, y), (axis,), True))
    return c.t.cast(c.op("where", c.op("eq", size, 0.0), 0.0, c.op("div", y, size)), x.tensor.dtype)


@translates("LRN")
def local_response(c: Call) -> Any:
    x, size = c.value(0), c.attr("size")
    alpha, beta, bias = (float(c.attr(key, value)) for key, value in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    low = tuple(before if d == 1 else 0 for d in range(x.tensor.rank))
    high = tuple(after if d == 1 else 0 for d in range(x.tensor.rank))
    squares = c.op("pad", c.op("mul", x, x), low=low, high=high, value=0.0)
    total = c.t.window(squares, 1, 0, x.tensor.shape[1])
    for start in range(1, size):
        total = c.op("add", total, c.t.window(squares, 1, start, x.tensor.shape[1]))
    return c.op("div", x, c.op("pow", c.op("add", c.op("mul", total, alpha / size), bias), beta))


@translates("Inverse", domain=MICROSOFT)
def inverse(c: Call) -> Any:
    if not is_float(c.dtype()):
        raise Decline("an inverse of whole numbers")
    return c.extern("aten.linalg_inv.default", c.value(0), types=c.type(c.kind(0).shape))


@translates("CDist", domain=MICROSOFT)
def distances(c: Call) -> Any:
    """Of rows [M, K] to rows [N, K]."""
    a, b = c.value(0), c.value(1)
    if a.tensor.shape[1] != b.tensor.shape[1]:
        raise Mismatch(a.tensor.shape[1], b.tensor.shape[1])
    rows, columns = ((a.tensor.shape[0], 1, a.tensor.shape[1]), (1, *b.tensor.shape))
    apart = c.op("sub", c.t.reshape(a, rows), c.t.reshape(b, columns))
    found = c.t.reduce("sum", c.op("mul", apart, apart), (2,), keep=False)
    return c.op("sqrt", found) if c.attr("metric", "sqeuclidean") == "euclidean" else found


@translates("Det")
def determinant(c: Call) -> Any:
    if not is_float(c.dtype()):
        raise Decline("a determinant of whole numbers")
    return c.extern("aten.linalg_det.default", c.value(0), types=c.type(c.kind(0).shape[:-2]))
