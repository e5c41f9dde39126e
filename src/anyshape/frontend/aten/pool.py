"""Translations of pooling over small windows: the padded operand, one strided slice per place in the window, combined.

    aten.max_pool2d(x, 2, stride=2)  -->  maximum(maximum(x[::2, ::2], x[::2, 1::2]), maximum(x[1::2, ::2], ...))

One pass over the result, without the positions that the library keeps for a backward. Where a trace uses those
positions, the call stays the library's.
"""
from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from anyshape.frontend.aten.index import padded
from anyshape.frontend.aten.reduce import mean
from anyshape.frontend.aten.table import Decline, Translator, is_float, translates, wide
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.sym.expr import Size, divide
from anyshape.torch_compat import aten, operator_name
from anyshape.torch_compat.dtypes import TORCH_DTYPES

_MOST_PLACES = 49


def _per_dim(given: Any, count: int, default: Sequence[int] = ()) -> tuple[int, ...]:
    """One number per dimension from a number, a list of one, a list, or nothing (the default)."""
    found = [given] if isinstance(given, int) else list(given or default)
    if not all(isinstance(n, int) for n in found):
        raise Decline("a window of symbolic size")
    return tuple(found * count if len(found) == 1 else found)


def _places(t: Translator, x: Value, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
            dilation: tuple[int, ...], ceil_mode: bool, outside: Any) -> list[Value]:
    """For each place in the window the elements that stand there, in the shape of the result."""
    if math.prod(kernel) > _MOST_PLACES:
        raise Decline(f"a window of {math.prod(kernel)} elements")
    count = len(kernel)
    first = x.tensor.rank - count
    # a window that is kept because of ceil_mode begins at an element or before it, and ends this far behind
    behind = [d * (k - 1) if ceil_mode else p for k, d, p in zip(kernel, dilation, padding, strict=True)]
    whole = padded(t, x, [0] * first + list(padding), [0] * first + behind, outside)
    found = []
    for place in itertools.product(*map(range, kernel)):
        part = whole
        for at, step, apart, dim in zip(place, stride, dilation, range(first, first + count), strict=True):
            part = t.window(part, dim, at * apart, t.out.shape[dim], step)
        found.append(part)
    return found


def _lowest(dtype: str) -> Any:
    if is_float(dtype):
        return -math.inf
    if kind_of(dtype) == "bool":
        raise Decline("a pool of bools")
    return torch.iinfo(TORCH_DTYPES[dtype]).min


def _positions_used(t: Translator) -> bool:
    assert t.node is not None
    # a trace also takes results out of the tuple that nothing reads
    return any(user.target is not operator.getitem or (user.args[1] != 0 and user.users) for user in t.node.users)


@translates(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default)
def max_pool_with_indices(t: Translator, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
                          ceil_mode: bool = False) -> tuple[Value, None]:
    if _positions_used(t):
        raise Decline("the positions of the maxima are used")
    return max_pool(t, x, kernel, stride, padding, dilation, ceil_mode), None


@translates(aten.max_pool2d.default, aten.max_pool3d.default, aten.max_pool1d.default)
def max_pool(t: Translator, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
             ceil_mode: bool = False) -> Value:
    count = _spatial(t)
    window = _per_dim(kernel, count)
    parts = _places(t, x, window, _per_dim(stride, count, window), _per_dim(padding, count), _per_dim(dilation, count),
                    ceil_mode, _lowest(x.tensor.dtype))
    return _combined(t, "maximum", parts)


def _spatial(t: Translator) -> int:
    assert t.node is not None
    name = operator_name(t.node.target)
    return next(n for n in (1, 2, 3) if f"pool{n}d" in name)


def _combined(t: Translator, name: str, parts: list[Value]) -> Value:
    result = parts[0]
    for part in parts[1:]:
        result = t.op(name, result, part)
    return result


@translates(aten.avg_pool2d.default, aten.avg_pool3d.default, aten.avg_pool1d.default)
def avg_pool(t: Translator, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
             count_include_pad: bool = True, divisor_override: int | None = None) -> Value:
    if not is_float(x.tensor.dtype):
        raise Decline("an average of whole numbers")
    count = _spatial(t)
    window = _per_dim(kernel, count)
    steps, around = _per_dim(stride, count, window), _per_dim(padding, count)
    y = t.cast(x, wide(x.tensor.dtype))
    total = _combined(t, "add", _places(t, y, window, steps, around, (1,) * count, ceil_mode, 0.0))
    by: Any = float(divisor_override or math.prod(window))
    if divisor_override is None and (ceil_mode or (any(around) and not count_include_pad)):
        by = _counts(t, x, window, steps, around, count_include_pad)
    return t.cast(t.op("div", total, by), t.out.dtype)


def _counts(t: Translator, x: Value, kernel: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
            with_padding: bool) -> Value:
    """How many elements each window averages: a product of one factor per dimension."""
    count = len(kernel)
    shape = t.out.shape[-count:]
    kind = wide(x.tensor.dtype)
    result = None
    for d, (k, s, p) in enumerate(zip(kernel, stride, padding, strict=True)):
        size = x.tensor.shape[x.tensor.rank - count + d]
        begin = t.iota(shape[d], -p, s)
        end = t.op("minimum", t.op("add", begin, k), size + p if with_padding else size)
        begin = begin if with_padding else t.op("maximum", begin, 0)
        factor = t.reshape(t.cast(t.op("sub", end, begin), kind), (shape[d],) + (1,) * (count - 1 - d))
        result = factor if result is None else t.op("mul", result, factor)
    assert result is not None
    return result


@translates(aten._adaptive_avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(t: Translator, x: Value, output_size: Any) -> Value:
    count = _spatial(t)
    first = x.tensor.rank - count
    kind = wide(x.tensor.dtype)
    shape: list[Size] = list(x.tensor.shape[:first])
    for own, wanted in zip(x.tensor.shape[first:], t.out.shape[first:], strict=True):
        window: Size
        rest: Size
        if wanted == 0 or wanted == 1 or own == wanted:
            window, rest = (own, 0) if wanted == 1 else (1, 0)
        else:
            window, rest = divide(own, wanted)
        if rest != 0:
            raise Decline("windows of different sizes")
        shape += [wanted, window]
    grouped = t.reshape(t.cast(x, kind), shape)
    return t.cast(mean(t, grouped, tuple(range(first + 1, first + 2 * count, 2)), False), t.out.dtype)
