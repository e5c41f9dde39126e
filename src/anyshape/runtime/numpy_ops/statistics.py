"""Order statistics and histograms, by numpy: the k-th value, the mode, medians without NaN, counts in bins."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anyshape.base.errors import InputError
from anyshape.runtime.numpy_ops.elements import order

Array = np.ndarray[Any, Any]


def _picked(x: Array, places: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """The elements at these places of each line [.., 1, ..], and the places."""
    values = np.take_along_axis(x, places, dim)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """aten.kthvalue: the k-th smallest element of each line, from 1, and its place."""
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    if not 1 <= k <= x.shape[dim]:
        raise InputError(f"kthvalue takes no element {k} of {x.shape[dim]}", why="elements count from 1",
                         do="pass longer lines")
    return _picked(x, np.take(order(x, dim, False), [k - 1], dim), dim, keepdim)


def mode(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """aten.mode: the most frequent element of each line, the smallest of several, and where it is last."""
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    length = x.shape[dim]
    places = order(x, dim, False)
    ordered = np.moveaxis(np.take_along_axis(x, places, dim), dim, -1)
    new = np.ones(ordered.shape, np.bool_)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    number = np.arange(length)
    run = number - np.maximum.accumulate(np.where(new, number, 0), -1)
    last = run.argmax(-1, keepdims=True)  # the first of the longest runs ends there
    return _picked(x, np.take_along_axis(places, np.moveaxis(last, -1, dim), dim), dim, keepdim)


def nanmedian(x: Array) -> Array:
    """aten.nanmedian of all elements that are numbers: the lower of two."""
    numbers = x[x == x]
    return np.sort(numbers, None)[(numbers.size - 1) // 2].reshape(()) if numbers.size else np.array(np.nan, x.dtype)


def _median_along(skips: bool) -> Callable[..., tuple[Array, Array]]:
    def run(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
        """aten.median, or aten.nanmedian where NaN are skipped, of each line, and its place."""
        if not x.ndim:
            return x.copy(), np.zeros((), np.int64)
        places = order(x, dim, False)
        missing = (x != x).sum(dim, keepdims=True)
        count = x.shape[dim] - missing
        at = np.maximum(count - 1, 0) // 2 if skips else np.where(missing > 0, count, (x.shape[dim] - 1) // 2)
        return _picked(x, np.take_along_axis(places, at, dim), dim, keepdim)
    return run


def histc(x: Array, bins: int = 100, low: float = 0, high: float = 0) -> Array:
    """aten.histc: how many elements lie in each of so many bins of equal width."""
    if low == high:
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        if low == high:
            low, high = low - 1, high + 1
    if not (np.isfinite(low) and np.isfinite(high)):
        raise InputError(f"histc cannot make bins from {low} to {high}", why="they are not finite",
                         do="pass finite elements")
    inside = x[(x >= low) & (x <= high)].ravel()
    places = np.minimum(((inside - x.dtype.type(low)) / (x.dtype.type(high) - x.dtype.type(low)) * bins).astype(
        np.int64), bins - 1)
    return np.bincount(places, minlength=bins).astype(x.dtype)


def histogram(x: Array, bins: int = 100, *, range: Any = None, weight: Array | None = None,
              density: bool = False) -> tuple[Array, Array]:
    """aten.histogram with a number of bins: counts, and the edges of the bins."""
    low, high = (float(one) for one in range) if range is not None else (
        (float(x.min()), float(x.max())) if x.size else (0.0, 0.0))
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1).astype(x.dtype)
    flat = x.ravel()
    inside = (flat >= low) & (flat <= high)
    places = np.clip(np.searchsorted(edges, flat[inside], "right") - 1, 0, bins - 1)
    counts = np.bincount(places, None if weight is None else weight.ravel()[inside], bins).astype(x.dtype)
    return (counts / (counts.sum() * np.diff(edges)) if density else counts).astype(x.dtype), edges


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.kthvalue.default": kthvalue, "aten.mode.default": mode, "aten.nanmedian.default": nanmedian,
    "aten.nanmedian.dim": _median_along(True), "aten.median.dim": _median_along(False), "aten.histc.default": histc,
    "aten.histogram.bin_ct": histogram,
}
