"""Resizing of tensors in all of ONNX's modes by numpy: along one dim after the other, by each element's neighbours.

Coordinates, weights and rounding are those of the operator's specification (ONNX operators, Resize-19).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MOST = 1 << 28  # numbers of one dim's weights


def _coordinates(size: int, out: int, scale: float, mode: str, region: tuple[float, float]) -> Array:
    """Where each element of the result lies in the operand, in f64."""
    at = np.arange(out, dtype=np.float64)
    if mode == "asymmetric":
        return at / scale
    if mode == "align_corners":
        length = scale * size
        return np.zeros_like(at) if length == 1 else at * (size - 1) / (length - 1)
    if mode == "tf_crop_and_resize":
        begin, end = region
        if out > 1:
            return begin * (size - 1) + at * (end - begin) * (size - 1) / (out - 1)
        return at * 0 + 0.5 * (begin + end) * (size - 1)
    if mode == "pytorch_half_pixel" and out == 1:
        return at * 0 - 0.5
    if mode == "half_pixel_symmetric":
        adjusted = out / (scale * size)
        return size / 2 * (1 - adjusted) + (at + 0.5) / scale - 0.5
    return (at + 0.5) / scale - 0.5  # half_pixel


def _nearest(at: Array, mode: str) -> Array:
    if mode == "round_prefer_floor":
        return np.ceil(at - 0.5)
    if mode == "round_prefer_ceil":
        return np.floor(at + 0.5)
    return np.floor(at) if mode == "floor" else np.ceil(at)


def cubic(distance: Array, a: float) -> Array:
    """Keys' kernel (Cubic Convolution Interpolation for Digital Image Processing, 1981)."""
    x = np.abs(distance)
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, inner, np.where(x < 2, outer, 0))


def neighbours(at: Array, size: int, scale: float, mode: str, a: float, exclude: bool, antialias: bool
             ) -> tuple[Array, Array]:
    """The neighbours of each element of one dim, and their weights: [out, some]."""
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = math.ceil((1 if mode == "linear" else 2) / shrink)
    if 2 * reach * len(at) > MOST:
        raise ValueError(f"the scale {scale} is too small")
    places = np.floor(at).astype(np.int64)[:, None] + np.arange(-reach + 1, reach + 1)
    distance = (places - at[:, None]) * shrink
    weights = np.maximum(1 - np.abs(distance), 0) if mode == "linear" else cubic(distance, a)
    if antialias:
        weights = weights / weights.sum(1, keepdims=True)
    if exclude:
        weights = np.where((places >= 0) & (places < size), weights, 0)
        weights = weights / weights.sum(1, keepdims=True)
    return np.clip(places, 0, size - 1), weights


def resize(x: Array, shape: Sequence[int], scales: Sequence[float], mode: str, coordinates: str, nearest: str,
           a: float, exclude: bool, extrapolation: float, antialias: bool, roi: Sequence[float],
           axes: Sequence[int]) -> Array:
    """The tensor in another shape. scales: by dim, negative where the sizes say it; roi: begins, then ends, by axes."""
    regions = {axis: (roi[place], roi[place + len(axes)]) for place, axis in enumerate(axes)} if roi else {}
    dtype = x.dtype
    plain = mode == "nearest"
    y = x if plain else x.astype(np.float64 if dtype == np.float64 else np.float32, copy=False)
    outside = []
    for d, out in enumerate(shape):
        size, scale = x.shape[d], scales[d]
        scale = out / size if scale < 0 and size else scale
        region = regions.get(d, (0.0, 1.0))
        if out == size and scale in (1.0, -1.0) and coordinates != "tf_crop_and_resize":
            continue
        if out and not size:
            raise ValueError("it has no elements to be resized")
        at = _coordinates(size, out, scale, coordinates, region)
        if coordinates == "tf_crop_and_resize":
            outside.append((d, (at < 0) | (at > size - 1)))
        if plain:
            y = np.take(y, np.clip(_nearest(at, nearest), 0, size - 1).astype(np.int64), d)
            continue
        y = along(y, d, *neighbours(at, size, scale, mode, a, exclude, antialias))
    for d, mask in outside:
        y = np.where(mask.reshape([-1 if k == d else 1 for k in range(y.ndim)]), y.dtype.type(extrapolation), y)
    if dtype.kind != "f" and not plain:
        limits = np.iinfo(dtype)
        y = np.clip(np.rint(y), limits.min, limits.max)
    return y.astype(dtype, copy=False)


def along(y: Array, d: int, places: Array, weights: Array) -> Array:
    """The sum over each element's neighbours along one dim; those at an edge stand there more than once."""
    used = weights != 0
    most = int(used.sum(1).max()) if used.size else 0
    order = np.argsort(~used, 1, kind="stable")[:, :most]
    places, weights = np.take_along_axis(places, order, 1), np.take_along_axis(weights, order, 1).astype(y.dtype)
    shape = [-1 if k == d else 1 for k in range(y.ndim)]
    total = np.zeros((*y.shape[:d], len(places), *y.shape[d + 1:]), y.dtype)
    for place in range(most):
        part = np.take(y, places[:, place], d)
        part *= weights[:, place].reshape(shape)
        total += part
    return total


OPERATORS: dict[str, Callable[..., Any]] = {"onnx.resize": resize}
