"""Convolutions over one to three dims by numpy: the elements under a window side by side (im2col), for a band of the
result at a time, and one product a group of channels. Nothing is padded: what lies outside of the operand is left 0.

    x [N, C, *S], w [O, C/g, *K]    -->    w [O/g, C/g*K] @ band [C/g*K, places of the window]
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from anyshape.ir.panels import from_panels

Array = np.ndarray[Any, Any]
Numbers = Sequence[int]
BAND = 1 << 20  # elements of a band, at most, where one line of the result has fewer
NEAR = 1 << 16  # elements of the result that stay in a near cache while the places of a window go by


def index(*parts: Any) -> Any:
    """What stands between brackets behind an array."""
    return parts


def _checked(x: Array, w: Array, groups: int, *numbers: Numbers) -> list[list[int]]:
    """The numbers of each dim; one stands for all."""
    count = x.ndim - 2
    if not 1 <= count <= 3 or w.ndim != x.ndim or groups < 1 or w.shape[0] % groups:
        raise ValueError(f"{x.shape} with weights {w.shape} in {groups} groups is no convolution")
    found = [[int(n) for n in one] * (count if len(one) == 1 else 1) for one in numbers]
    if any(len(one) != count for one in found) or min(found[0] + found[2]) < 1 or min(found[1]) < 0:
        raise ValueError(f"strides {found[0]}, padding {found[1]}, dilation {found[2]} do not fit {count} dims")
    return found


def _reach(begin: int, out: int, size: int, stride: int) -> tuple[int, int]:
    """The places t of the result, from and to, whose element begin + t*stride is inside of the operand."""
    first = max(0, -(begin // stride)) if begin < 0 else 0
    return first, max(first, min(out, -(-(size - begin) // stride)))


def windows(sizes: Numbers, outs: Numbers, kernel: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers,
             line: int = 0) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """For each place of a window: the place, the part of the result that it reaches, and of the operand. line: the
    first one of the result, which is a band."""
    axes = []
    for d, (size, out, k, s, p, a) in enumerate(zip(sizes, outs, kernel, stride, padding, dilation, strict=True)):
        own = []
        for place in range(k):
            begin = place * a - p + (line * s if d == 0 else 0)
            first, last = _reach(begin, out, size, s)
            if last > first:
                at = begin + first * s
                own.append((place, slice(first, last), slice(at, at + (last - first - 1) * s + 1, s)))
        axes.append(own)
    for one in itertools.product(*axes):
        yield tuple(part[0] for part in one), tuple(part[1] for part in one), tuple(part[2] for part in one)


def convolve(x: Array, w: Array, bias: Array | None, stride: Numbers, padding: Numbers, dilation: Numbers,
             groups: int, last: bool = False) -> Array:
    """[N, C, *S] with [O, C/groups, *K] -> [N, O, *T]; where `last`, [N, *S, C] -> [N, *T, O].

    Raises:
        ValueError: these do not fit each other, or a window is larger than what it slides over.
    """
    stride, padding, dilation = _checked(x, w, groups, stride, padding, dilation)
    kernel = w.shape[2:]
    first = np.moveaxis(x, -1, 1) if last else x
    sizes = first.shape[2:]
    outs = [(n + 2 * p - a * (k - 1) - 1) // s + 1
            for n, k, s, p, a in zip(sizes, kernel, stride, padding, dilation, strict=True)]
    if first.shape[1] != w.shape[1] * groups or min(outs) < 0:
        raise ValueError(f"{first.shape} does not fit weights {w.shape} in {groups} groups")
    shape = (x.shape[0], *outs, w.shape[0]) if last else (x.shape[0], w.shape[0], *outs)
    dtype = np.result_type(x, w)
    result = np.zeros(shape, dtype)
    if result.size and x.size and w.size:
        settings = kernel, stride, padding, dilation
        if w.shape[1] == 1 and w.shape[0] == groups:
            _depthwise(x, w, result, sizes, outs, settings, last)
        else:
            _by_products(first, w, np.moveaxis(result, -1, 1) if last else result, sizes, outs, settings, groups)
    if bias is not None:
        result += bias if last else bias.reshape(-1, *[1] * len(outs))
    return result


def _by_products(x: Array, w: Array, result: Array, sizes: Numbers, outs: list[int], settings: tuple[Numbers, ...],
                 groups: int) -> None:
    """Into `result` [N, O, *T], in any order of memory."""
    kernel, stride, padding, dilation = settings
    channels, number = w.shape[1], w.shape[0] // groups
    taps = math.prod(kernel)
    weights = w.reshape(groups, number, channels * taps)
    channels_last = result.strides[1] == result.itemsize != result.strides[-1]
    plain = taps == 1 and set(stride) == {1} and not any(padding)
    rest = math.prod(outs[1:])
    lines = max(1, min(outs[0], BAND // max(1, channels * taps * rest)))
    if channels_last:  # [places, K, C] @ [K, C, O]: what is next to each other stays so
        turned = np.ascontiguousarray(w.reshape(groups, number, channels, taps).transpose(0, 3, 2, 1)).reshape(
            groups, taps * channels, number)
    for n, group, line in itertools.product(range(x.shape[0]), range(groups), range(0, outs[0], lines)):
        count = min(lines, outs[0] - line)
        own = x[n, group * channels:(group + 1) * channels]
        into = result[n, group * number:(group + 1) * number, line:line + count]
        band = [count, *outs[1:]]
        if plain:
            part = own[:, line:line + count]
        elif channels_last:
            place = np.zeros((*band, *kernel, channels), x.dtype)
            part = np.moveaxis(place, -1, 0)
        else:
            part = np.zeros((channels, *kernel, *band), x.dtype)
        if not plain:
            for at, to, source in windows(sizes, band, kernel, stride, padding, dilation, line):
                target = part[index(slice(None), *to, *at)] if channels_last else part[index(slice(None), *at, *to)]
                target[...] = own[index(slice(None), *source)]
        if channels_last:
            rows = np.moveaxis(part, 0, -1).reshape(count * rest, taps * channels)
            np.moveaxis(into, 0, -1)[...] = (rows @ turned[group]).reshape(*band, number)
        else:
            into[...] = (weights[group] @ part.reshape(channels * taps, count * rest)).reshape(number, *band)


def _depthwise(x: Array, w: Array, result: Array, sizes: Numbers, outs: list[int], settings: tuple[Numbers, ...],
               last: bool) -> None:
    """One channel by itself: products of the operand's parts with a weight a channel, added up."""
    kernel, stride, padding, dilation = settings
    per_line = math.prod(outs[1:]) * w.shape[0]
    lines = max(1, min(outs[0], NEAR // max(1, per_line)))
    for n, line in itertools.product(range(x.shape[0]), range(0, outs[0], lines)):
        count = min(lines, outs[0] - line)
        into = result[n, line:line + count] if last else result[n, :, line:line + count]
        product = np.empty_like(into)
        for at, to, source in windows(sizes, [count, *outs[1:]], kernel, stride, padding, dilation, line):
            own = w[index(slice(None), 0, *at)]
            if last:
                part = np.multiply(x[index(n, *source)], own, out=product[to])
                into[to] += part
            else:
                region = index(slice(None), *to)
                part = np.multiply(x[index(n, slice(None), *source)], own.reshape(-1, *[1] * len(outs)),
                                   out=product[region])
                into[region] += part


def transposed(x: Array, w: Array, bias: Array | None, stride: Numbers, padding: Numbers, dilation: Numbers,
               more: Numbers, groups: int) -> Array:
    """[N, C, *S] with [C, O/groups, *K] -> [N, O, *T]: each element puts its window into the result.

    Raises:
        ValueError: these do not fit each other.
    """
    stride, padding, dilation, more = _checked(x, w, groups, stride, padding, dilation, more)
    kernel, sizes = w.shape[2:], x.shape[2:]
    if x.shape[1] != w.shape[0]:
        raise ValueError(f"{x.shape} does not fit weights {w.shape}")
    outs = [(n - 1) * s - 2 * p + a * (k - 1) + 1 + e
            for n, k, s, p, a, e in zip(sizes, kernel, stride, padding, dilation, more, strict=True)]
    number, channels, taps = w.shape[1], w.shape[0] // groups, math.prod(kernel)
    if min(outs) < 0:
        raise ValueError(f"{x.shape} with weights {w.shape} has no result")
    result = np.zeros((x.shape[0], groups * number, *outs), np.result_type(x, w))
    turned = w.reshape(groups, channels, number * taps).swapaxes(1, 2)
    rest = math.prod(sizes[1:])
    lines = max(1, min(sizes[0], BAND // max(1, number * taps * rest))) if x.size else 1
    for n, group, line in itertools.product(range(x.shape[0]), range(groups), range(0, sizes[0], lines)):
        count = min(lines, sizes[0] - line)
        band = [count, *sizes[1:]]
        own = x[n, group * channels:(group + 1) * channels, line:line + count]
        found = (turned[group] @ own.reshape(channels, count * rest)).reshape(number, *kernel, *band)
        into = result[n, group * number:(group + 1) * number]
        for at, to, target in windows(outs, band, kernel, stride, padding, dilation, line):
            into[index(slice(None), *target)] += found[index(slice(None), *at, *to)]
    if bias is not None:
        result += bias.reshape(-1, *[1] * len(outs))
    return result


def aten_convolution(x: Array, w: Array, bias: Array | None, stride: Numbers, padding: Numbers, dilation: Numbers,
                     is_transposed: bool, more: Numbers, groups: int) -> Array:
    """aten.convolution."""
    if is_transposed:
        return transposed(x, w, bias, stride, padding, dilation, more, groups)
    return convolve(x, w, bias, stride, padding, dilation, groups)


def direct(attrs: dict[str, Any], operands: Sequence[Array]) -> Array:
    """The result of `direct_conv` (ops/convolution.py)."""
    x, weight, *more = operands
    behind = [more.pop() for key in ("added", "shifted", "scaled") if attrs.get(key)]
    result = convolve(x, weight, more[0] if more else None, attrs["stride"], attrs["padding"], attrs["dilation"], 1,
                      last=True)
    if attrs.get("scaled"):
        result *= behind.pop()
    for other in reversed(behind):  # shifts, and what is added
        result += other
    return np.maximum(result, 0) if attrs.get("relu") else result


def byte_conv(attrs: dict[str, Any], x: Array, w: Array) -> Array:
    """`conv_bytes` (ops/convolution.py): f64 holds the sums, which wrap around in i32."""
    kernel, stride, dilation, columns = (attrs[key] for key in ("kernel", "stride", "dilation", "columns"))
    channels = x.shape[3]
    matrix = from_panels(w, kernel[0] * kernel[1] * channels, columns).astype(np.float64)
    outs = [(n - a * (k - 1) - 1) // s + 1 for n, k, s, a in zip(x.shape[1:3], kernel, stride, dilation, strict=True)]
    total = np.zeros((x.shape[0], *outs, columns))
    for number, place in enumerate(itertools.product(*map(range, kernel))):
        part = x[index(slice(None), *(slice(at * a, at * a + (n - 1) * s + 1, s) for at, a, n, s in zip(
            place, dilation, outs, stride, strict=True)))]
        total += part.astype(np.float64) @ matrix[number * channels:(number + 1) * channels]
    return total.astype(np.int64).astype(np.int32)
