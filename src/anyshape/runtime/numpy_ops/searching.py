"""Searches, order statistics, distances and checks of data, by numpy."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anyshape.base.errors import InputError

Array = np.ndarray[Any, Any]


def searchsorted(ordered: Array, x: Any, out_int32: bool = False, right: bool = False, side: str | None = None,
                 sorter: Array | None = None) -> Array:
    """aten.searchsorted: where each of x [..., M] goes into its line of `ordered` [..., N] or [N]."""
    if sorter is not None:
        ordered = np.take_along_axis(ordered, sorter, -1)
    x = np.asarray(x)

    def places(line: Array, values: Array) -> Any:
        return np.searchsorted(line, values, "right" if right or side == "right" else "left")

    dtype = np.int32 if out_int32 else np.int64
    if ordered.ndim == 1:
        return np.asarray(places(ordered, x), dtype)
    if ordered.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"{ordered.shape} and {x.shape} are not of the same lines")
    found = np.empty(x.shape, dtype)
    for line in np.ndindex(*x.shape[:-1]):
        found[line] = places(ordered[line], x[line])
    return found


def bucketize(x: Any, boundaries: Array, out_int32: bool = False, right: bool = False) -> Array:
    """aten.bucketize."""
    return searchsorted(boundaries, x, out_int32, right)


def median(x: Array) -> Array:
    """aten.median of all elements: the lower of two, and NaN where there is one."""
    if not x.size:
        return np.array(math.nan, x.dtype)
    missing = x[x != x]
    return missing[:1].reshape(()) if missing.size else np.sort(x, None)[(x.size - 1) // 2].reshape(())


def cdist(a: Array, b: Array, p: float, mode: int | None = None) -> Array:
    """Distances of the rows of a [..., P, M] from those of b [..., R, M]: [..., P, R]."""
    lines = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    found = np.zeros((*lines, a.shape[-2], b.shape[-2]), np.result_type(a, b))
    for row in range(a.shape[-2]):  # all at once would take memory for each coordinate
        apart = np.abs(a[..., row:row + 1, :] - b)
        if p == 0:
            found[..., row, :] = (apart != 0).sum(-1)
        elif math.isinf(p):
            found[..., row, :] = apart.max(-1, initial=0)
        else:
            found[..., row, :] = apart.sum(-1) if p == 1 else (apart ** p).sum(-1) ** (1 / p)
    return found


def pdist(x: Array, p: float = 2.0) -> Array:
    """aten._pdist_forward: distances of the rows of x [N, M] from all later ones [N * (N - 1) / 2]."""
    return cdist(x, x, p)[np.triu_indices(len(x), 1)]


def euclidean(a: Array, b: Array) -> Array:
    """aten._euclidean_dist: as `cdist` with p = 2."""
    return cdist(a, b, 2.0)


def check(x: Array, words: str = "") -> tuple[()]:
    """aten._assert_async: a condition of the data.

    Raises:
        InputError: it does not hold.
    """
    if not x.all():
        raise InputError("the program does not take this data", why=words[:300] or "a condition of it does not hold",
                         do="pass data that the program's author allows")
    return ()


OPERATORS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("aten.searchsorted.Tensor", "aten.searchsorted.Scalar"), searchsorted),
    **dict.fromkeys(("aten.bucketize.Tensor", "aten.bucketize.Scalar"), bucketize),
    "aten.median.default": median, "aten._cdist_forward.default": cdist,
    "aten._pdist_forward.default": pdist, "aten._euclidean_dist.default": euclidean,
}
CHECKS: dict[str, Callable[..., Any]] = {"aten._assert_async.default": check, "aten._assert_async.msg": check}
