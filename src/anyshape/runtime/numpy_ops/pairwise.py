"""Pairwise coupling: probabilities of classes out of those of pairs of classes, by numpy, as libsvm and onnxruntime
estimate them."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
MOST_ROUNDS = 100


def coupled(pairs: Array) -> Array:
    """Pairwise coupling (Wu, Lin and Weng, 2004, the second method): the probabilities that fit those of pairs best.

    Args:
        pairs: [samples, pairs], of the first class of (0, 1), (0, 2), ..., (1, 2), ..., above 0 and below 1.

    Returns:
        [samples, classes]; rounds end at a sample where its error is below 0.005 / classes.

    Raises:
        ValueError: no number of classes has so many pairs.
    """
    samples, count = pairs.shape
    kinds = (1 + math.isqrt(1 + 8 * count)) // 2
    if not count or kinds * (kinds - 1) // 2 != count:
        raise ValueError(f"{count} are no pairs of classes")
    first, second = np.triu_indices(kinds, 1)
    r = np.zeros((samples, kinds, kinds), pairs.dtype)
    r[:, first, second], r[:, second, first] = pairs, 1 - pairs
    q = -r * r.transpose(0, 2, 1)
    every = np.arange(kinds)
    q[:, every, every] = (r * r).sum(1)
    result = np.full((samples, kinds), 1 / kinds, pairs.dtype)
    left = np.arange(samples)
    for _ in range(MOST_ROUNDS):
        p, now = result[left], q[left]
        qp = (now @ p[..., None])[..., 0]
        total = (p * qp).sum(1)
        going = ~(np.abs(qp - total[:, None]).max(1, initial=0) < 0.005 / kinds)
        left, p, now, qp, total = (one[going] for one in (left, p, now, qp, total))
        if not left.size:
            break
        for kind in range(kinds):
            own = now[:, kind, kind]
            step = (total - qp[:, kind]) / own
            p[:, kind] += step
            total = (total + step * (step * own + 2 * qp[:, kind])) / (1 + step) ** 2
            qp = (qp + step[:, None] * now[:, kind]) / (1 + step)[:, None]
            p /= (1 + step)[:, None]
        result[left] = p
    return result


OPERATORS: dict[str, Callable[..., Any]] = {"onnx.coupled": coupled}
