"""Medians, quantiles and geometric means of what was measured."""
from __future__ import annotations

import math
from collections.abc import Iterable


def median(values: Iterable[float]) -> float | None:
    """The middle value; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_of(values: Iterable[float]) -> float:
    """The middle value of at least one."""
    found = median(values)
    assert found is not None
    return found


def quantile(times: list[float], share: float) -> float:
    """The smallest time that at least `share` of all times do not exceed."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The mean of ratios; None of nothing."""
    logs = [math.log(v) for v in values if v]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None
