"""Pools over windows of one to three dims, by numpy: one place of the window after the other, over the parts of the
operand and the result that it reaches."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from anyshape.runtime.numpy_ops.convolution import index, windows

Array = np.ndarray[Any, Any]
Numbers = Sequence[int]


def least(dtype: np.dtype[Any]) -> Any:
    """What is no larger than anything of the dtype."""
    return -math.inf if dtype.kind == "f" else np.iinfo(dtype).min


def _each(numbers: Numbers, count: int) -> list[int]:
    found = [int(n) for n in numbers]
    return found * count if len(found) == 1 else found


def _counts(sizes: Numbers, kernel: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers, up: bool
            ) -> list[int]:
    """How many windows there are along each dim; one that begins behind the tensor does not count."""
    found = []
    for n, k, s, p, a in zip(sizes, kernel, stride, padding, dilation, strict=True):
        room = n + 2 * p - a * (k - 1) - 1
        count = (-(-room // s) if up else room // s) + 1
        found.append(count - 1 if up and (count - 1) * s >= n + p else count)
    if min(found) < 0 or min((*stride, *kernel, *dilation)) < 1 or min(padding) < 0:
        raise ValueError(f"windows {kernel} do not fit {sizes}")
    return found


def max_pool(x: Array, kernel: Numbers, strides: Numbers, dilations: Numbers, low: Numbers, out: Numbers,
             steps: Numbers) -> tuple[Array, Array]:
    """The maxima of windows, and where each lies: the sum of place * step. NaN is larger than numbers."""
    dims = len(kernel)
    shape = (*x.shape[:x.ndim - dims], *out)
    best = np.full(shape, least(x.dtype), x.dtype)
    where = np.full(shape, -1, np.int64)
    if not best.size or not x.size:
        return best, where
    for at, to, source in windows(x.shape[x.ndim - dims:], out, kernel, strides, low, dilations):
        part = x[index(..., *source)]
        place: Any = 0
        for d in range(dims):
            own = (np.arange(to[d].start, to[d].stop) * strides[d] + at[d] * dilations[d] - low[d]) * steps[d]
            place = place + own.reshape([-1 if k == d else 1 for k in range(dims)])
        have = best[index(..., *to)]
        held = where[index(..., *to)]
        more = (part > have) | ((part != part) & (have == have)) | ((held < 0) & (part == have))
        np.copyto(have, part, where=more)
        np.copyto(held, np.broadcast_to(place, held.shape), where=more)
    return best, where


def max_pool_with_indices(x: Array, kernel: Numbers, stride: Numbers = (), padding: Numbers = (0,),
                          dilation: Numbers = (1,), up: bool = False, *, dims: int) -> tuple[Array, Array]:
    """aten.max_pool2d_with_indices and its like: places count rows of the last dims."""
    kernel = _each(kernel, dims)
    stride, padding, dilation = (_each(one, dims) for one in (stride or kernel, padding, dilation))
    sizes = x.shape[x.ndim - dims:]
    out = _counts(sizes, kernel, stride, padding, dilation, up)
    return max_pool(x, kernel, stride, dilation, padding, out, [math.prod(sizes[d + 1:]) for d in range(dims)])


def max_pool_positions(x: Array, kernel: Numbers, strides: Numbers, dilations: Numbers, low: Numbers, high: Numbers,
                       out: Numbers, order: int) -> tuple[Array, Array]:
    """ONNX MaxPool with places in the whole tensor, counted by rows or (order 1) by columns."""
    sizes = x.shape[2:]
    steps = [math.prod(sizes[:d] if order else sizes[d + 1:]) for d in range(len(kernel))]
    best, where = max_pool(x, kernel, strides, dilations, low, out, steps)
    first = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(kernel)) * math.prod(sizes)
    return best, where + first


def avg_pool(x: Array, kernel: Numbers, stride: Numbers = (), padding: Numbers = (0,), up: bool = False,
             count_pad: bool = True, divisor: int | None = None, *, dims: int) -> Array:
    """aten.avg_pool2d and its like."""
    kernel = _each(kernel, dims)
    stride, padding = _each(stride or kernel, dims), _each(padding, dims)
    sizes, ones = x.shape[x.ndim - dims:], [1] * dims
    out = _counts(sizes, kernel, stride, padding, ones, up)
    total = np.zeros((*x.shape[:x.ndim - dims], *out), x.dtype)
    if total.size:
        for _, to, source in windows(sizes, out, kernel, stride, padding, ones):
            total[index(..., *to)] += x[index(..., *source)]
    if divisor is not None:
        return total / divisor if x.dtype.kind == "f" else total // divisor
    for d, (n, k, s, p, count) in enumerate(zip(sizes, kernel, stride, padding, out, strict=True)):
        begin = np.arange(count) * s - p
        end = np.minimum(begin + k, n + p)
        number = end - begin if count_pad else np.minimum(end, n) - np.maximum(begin, 0)
        total /= number.astype(x.dtype).reshape([-1 if e == d else 1 for e in range(dims)])
    return total


def _regions(size: int, out: int) -> Iterator[tuple[int, int]]:
    """From and to of each region of an adaptive pool."""
    for place in range(out):
        yield place * size // out, -(-(place + 1) * size // out)


def adaptive_avg_pool(x: Array, size: Numbers, *, dims: int) -> Array:
    """aten._adaptive_avg_pool2d and its like: one dim after the other, as regions are products of ranges."""
    for d, out in enumerate(_each(size, dims)):
        axis = x.ndim - dims + d
        if not 0 <= out <= 1 << 31:
            raise ValueError(f"{out} regions")
        found = np.empty((*x.shape[:axis], out, *x.shape[axis + 1:]), x.dtype)
        for place, (begin, end) in enumerate(_regions(x.shape[axis], out)):
            before = (slice(None),) * axis
            found[index(*before, place)] = x[index(*before, slice(begin, end))].mean(axis)
        x = found
    return x


def adaptive_max_pool(x: Array, size: Numbers, *, dims: int) -> tuple[Array, Array]:
    """aten.adaptive_max_pool2d and its like, with places in rows of the last dims."""
    sizes, outs = x.shape[x.ndim - dims:], _each(size, dims)
    shape = (*x.shape[:x.ndim - dims], *outs)
    best, where = np.empty(shape, x.dtype), np.empty(shape, np.int64)
    for at in itertools.product(*map(range, outs)):
        bounds = [(place * n // out, -(-(place + 1) * n // out))
                  for place, n, out in zip(at, sizes, outs, strict=True)]
        part = x[index(..., *(slice(*own) for own in bounds))]
        flat = part.reshape(*shape[:part.ndim - dims], math.prod(part.shape[part.ndim - dims:]))
        found = flat.argmax(-1)  # a NaN comes first
        best[index(..., *at)] = np.take_along_axis(flat, found[..., None], -1)[..., 0]
        place = np.zeros_like(found)
        for own, (begin, _), n in zip(np.unravel_index(found, part.shape[part.ndim - dims:]), bounds, sizes,
                                      strict=True):
            place = place * n + own + begin
        where[index(..., *at)] = place
    return best, where


def _of(dims: int, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **keywords: function(*arguments, **keywords, dims=dims)


OPERATORS: dict[str, Callable[..., Any]] = {
    "onnx.max_pool_positions": max_pool_positions,
    **{f"aten.max_pool{d}d_with_indices.default": _of(d, max_pool_with_indices) for d in (2, 3)},
    **{f"aten.avg_pool{d}d.default": _of(d, avg_pool) for d in (1, 2, 3)},
    **{f"aten._adaptive_avg_pool{d}d.default": _of(d, adaptive_avg_pool) for d in (2, 3)},
    **{f"aten.adaptive_max_pool{d}d.default": _of(d, adaptive_max_pool) for d in (2, 3)},
}
