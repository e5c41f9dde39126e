"""Pipeline stages by dynamic programming: a chain of layers cut so that the slowest stage is fastest.

    best[s][k] = min over j of max(best[s - 1][j], seconds of layers j..k and of what crosses at j and k), where stage
                 s fits its memory

With equal devices the sum of all stages is the same for every cut, so that sum + (micro - 1) * slowest is least where
the slowest is (Narayanan et al., "PipeDream", 2019, section 3.1). Embedding and head are layers as all others.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def cut(seconds: Sequence[float], stages: int, fits: Callable[[int, int, int], bool] | None = None,
        borders: Sequence[float] = ()) -> tuple[int, ...] | None:
    """The first layer of each stage; every stage has at least one.

    Args:
        seconds: per layer.
        fits: (stage, first layer, the layer behind its last) -> whether it keeps to its memory.
        borders: per layer, seconds that both sides need for what crosses where a stage begins with it; none when left
            out.

    Returns:
        None where no cut fits, or there are fewer layers than stages.
    """
    count = len(seconds)
    if stages > count:
        return None
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    sent = np.array([*borders, 0.0]) if borders else np.zeros(count + 1)
    best = np.full((stages + 1, count + 1), np.inf)
    come = np.zeros((stages + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, count - (stages - stage) + 1):
            options = np.maximum(best[stage - 1, :end], sums[end] - sums[:end] + sent[:end] + sent[end])
            for place in np.argsort(options, kind="stable"):
                if not np.isfinite(options[place]):
                    break
                if fits is None or fits(stage - 1, int(place), end):
                    best[stage, end], come[stage, end] = options[place], place
                    break
    if not np.isfinite(best[stages, count]):
        return None
    found, end = [], count
    for stage in range(stages, 0, -1):
        end = int(come[stage, end])
        found.append(end)
    return tuple(reversed(found))
