"""Prediction of which branches a router will take next: from the joint profile of two routers, and from popularity.

    cells of each branch now, counts [Ea]; P(cell takes j | it took i), [Ea, Eb]  -->  P(branch j is taken), [Eb]

Cells choose independently given their branch before, so P(nobody takes j) = prod_i (1 - P(j|i)) ** counts[i]. Beside it
stand two moving averages of whether a branch was taken: one over many calls, one over the last few. Of each router the
prediction is used that was best so far, by its moving Brier score: a profile that has gone stale loses to what is seen.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SLOW, FAST = 0.98, 0.6  # what the past weighs in the averages
SCORE = 0.95  # what the past weighs in scores
SMOOTH = 1.0  # cells that each branch has seen go where all cells go
MOST = 1 - 1e-9


class BranchPredictor:
    """How probable it is that each branch of a router is taken next. Not thread-safe.

    Args:
        popular: per router, how probable each branch is to be taken in a call, [branches].
        joint: per pair of routers, how many cells took branch i of the first and j of the second, [Ea, Eb].
    """

    def __init__(self, popular: Sequence[Floats], joint: Mapping[tuple[int, int], Floats]) -> None:
        self.slow = [np.array(one, np.float64) for one in popular]
        self.fast = [one.copy() for one in self.slow]
        self.escape = {pair: log_escape(counts) for pair, counts in joint.items()}
        self.scores: list[dict[str, float]] = [{} for _ in popular]
        self.pending: list[dict[str, Floats]] = [{} for _ in popular]

    def observe(self, router: int, counts: NDArray[np.int64]) -> None:
        """A router's cells of each branch in a call."""
        taken = (counts > 0).astype(np.float64)
        scores = self.scores[router]
        for name, predicted in self.pending[router].items():
            error = float(np.square(predicted - taken).mean())
            scores[name] = SCORE * scores.get(name, error) + (1 - SCORE) * error
        self.pending[router] = {}
        for average, past in ((self.slow[router], SLOW), (self.fast[router], FAST)):
            average += (1 - past) * (taken - average)

    def popularity(self, router: int) -> Floats:
        """P(a branch is taken in a call of which nothing is known)."""
        return self.slow[router]

    def predict(self, seen: int, counts: NDArray[np.int64], router: int) -> Floats:
        """P(a branch of `router` is taken in its next call), [branches], after `seen` had such cells of each branch."""
        found = {"slow": self.slow[router].copy(), "fast": self.fast[router].copy()}
        escape = self.escape.get((seen, router))
        if escape is not None:
            found["joint"] = 1 - np.exp(counts @ escape)
        self.pending[router] = found
        scores = self.scores[router]
        # what has no score yet is used first: the joint profile, then the long average
        best = min(("joint", "slow", "fast"), key=lambda name: scores.get(name, 0.0) if name in found else np.inf)
        return found[best]


def log_escape(joint: Floats) -> Floats:
    """log P(a cell does not take j | it took i), [Ea, Eb], of joint counts."""
    joint = np.asarray(joint, np.float64)
    everywhere = joint.sum(0) / max(joint.sum(), 1.0)
    given = (joint + SMOOTH * everywhere) / (joint.sum(1, keepdims=True) + SMOOTH)
    return np.log1p(-np.minimum(given, MOST))
