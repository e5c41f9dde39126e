"""Sorting and running results along a dim, by numpy. NaN is larger than numbers, and of equal elements the first comes
first, as in PyTorch's stable sort."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def order(x: Array, dim: int, descending: bool) -> Array:
    """The places of the elements of each line in order."""
    if not descending:
        return np.argsort(x, dim, kind="stable")
    # the places from the back, of the lines from the back: equal elements keep their order
    back = np.flip(np.argsort(np.flip(x, dim), dim, kind="stable"), dim)
    return x.shape[dim] - 1 - back


def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """aten.sort: the elements of each line in order, and their places."""
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    places = order(x, dim, descending)
    return np.take_along_axis(x, places, dim), places


def stable_sort(x: Array, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """aten.sort with `stable`, as it is in either case."""
    return sort(x, dim, descending)


def topk(x: Array, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> tuple[Array, Array]:
    """The largest or smallest elements of each line, sorted, and their places."""
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    places = np.take(order(x, dim, largest), range(k), dim)
    return np.take_along_axis(x, places, dim), places


def _running(name: str) -> Callable[..., tuple[Array, Array]]:
    def run(x: Array, dim: int) -> tuple[Array, Array]:
        """Running extremes, and where each was met last."""
        if not x.size or not x.ndim:
            return x.copy(), np.zeros(x.shape, np.int64)
        values = (np.maximum if name == "max" else np.minimum).accumulate(x, dim)
        shape = [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]
        met = (x == values) | ((x != x) & (values != values))
        places = np.where(met, np.arange(x.shape[dim]).reshape(shape), 0)
        return values, np.maximum.accumulate(places, dim)
    return run


def cumprod(x: Array, dim: int, dtype: str | None = None) -> Array:
    """aten.cumprod; whole numbers become i64."""
    kind = np.float32 if dtype in ("f16", "bf16") else np.dtype(_KINDS[dtype]) if dtype else \
        np.int64 if x.dtype.kind in "iub" else x.dtype
    return x.astype(kind) if not x.ndim else np.cumprod(x, dim, kind)


_KINDS = {"f32": "f4", "f64": "f8", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8", "u8": "u1", "bool": "?"}


def logcumsumexp(x: Array, dim: int) -> Array:
    """aten.logcumsumexp."""
    return x.copy() if not x.ndim else np.logaddexp.accumulate(x, dim)


def onnx_topk(x: Array, count: int, dim: int, largest: bool) -> tuple[Array, Array]:
    """ONNX TopK: as `topk`."""
    return topk(x, count, dim, largest)


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.sort.default": sort, "aten.sort.stable": stable_sort, "aten.topk.default": topk, "onnx.topk": onnx_topk,
    "aten.cummax.default": _running("max"), "aten.cummin.default": _running("min"),
    "aten.cumprod.default": cumprod, "aten.logcumsumexp.default": logcumsumexp,
}
