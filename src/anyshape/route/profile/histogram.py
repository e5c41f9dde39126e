"""Log-bucketed histograms of whole numbers: exact below 16, then eight buckets for each doubling.

A bucket above is at most an eighth of its least number wide, so that a percentile that is read from it is at most an
eighth too large (the buckets of HdrHistogram, with three bits).
"""
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EXACT, PARTS = 16, 8
BUCKETS = EXACT + 28 * PARTS  # numbers below 2 ** 32

Ints = NDArray[np.int64]


def bucket(numbers: Ints) -> Ints:
    """The bucket of each number; those of 2 ** 32 and more are in the last one."""
    number = np.asarray(numbers, np.int64)
    octave = np.frexp(np.maximum(number, 1).astype(np.float64))[1].astype(np.int64) - 1  # floor(log2(number))
    part = (number >> np.maximum(octave - 3, 0)) & (PARTS - 1)
    found = np.where(number < EXACT, number, EXACT + (octave - 4) * PARTS + part)
    return np.clip(found, 0, BUCKETS - 1)


def largest_of(buckets: Ints) -> Ints:
    """The largest number of each bucket."""
    place = np.asarray(buckets, np.int64)
    octave, part = (place - EXACT) // PARTS + 4, (place - EXACT) % PARTS
    return np.where(place < EXACT, place, ((part + PARTS + 1) << np.maximum(octave - 3, 0)) - 1)


def add(histogram: Ints, numbers: Ints) -> None:
    """Count numbers [calls, branches] in a histogram [branches, BUCKETS], in place."""
    calls, branches = numbers.shape
    np.add.at(histogram, (np.broadcast_to(np.arange(branches), (calls, branches)), bucket(numbers)), 1)


def percentile(histogram: Ints, percents: NDArray[np.float64]) -> Ints:
    """[percents, branches]: the least number that at least so many of a hundred numbers do not exceed."""
    sums = histogram.cumsum(1)
    wanted = np.maximum(np.ceil(percents[:, None] / 100 * sums[:, -1]), 1)
    return largest_of((sums[None] < wanted[:, :, None]).sum(2).clip(max=BUCKETS - 1))
