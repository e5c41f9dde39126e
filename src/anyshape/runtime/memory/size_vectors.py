"""Vectorised size evaluation: many sizes at once, as arrays. Layers repeat, so few formulas give all of them: each is
computed once.

    4*b*n, 64, 4*b*n, 4*b*n  -->  the formulas 4*b*n, 64 and the places 0 1 0 0
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anyshape.sym.expr import Size
from anyshape.sym.python_codegen import function_of


class SizeTable:
    """What `sizes` are at the symbols' values, as int64 (KeyError if one is missing). `title` is what a traceback calls
    the source."""

    def __init__(self, sizes: Sequence[Size], title: str) -> None:
        distinct = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
        self.function = function_of(distinct, title)
        self.which = np.array([distinct[size] for size in sizes], np.int64)

    def __call__(self, values: Mapping[str, int]) -> np.ndarray:
        return np.array(self.function(values), np.int64)[self.which]


class LiveRanges:
    """Steps between which things are alive, both inclusive: arrays of int64."""

    def __init__(self, lives: Sequence[tuple[int, int]] | np.ndarray, steps: int) -> None:
        columns = np.array(lives, np.int64).reshape(-1, 2)
        self.first, self.last, self.steps = columns[:, 0].copy(), columns[:, 1].copy(), steps

    def ending(self, ends: Mapping[int, int]) -> LiveRanges:
        """The same, but that some, by number, end at another step."""
        other = LiveRanges((), self.steps)
        other.first, other.last = self.first, self.last.copy()
        other.last[[*ends]] = [*ends.values()]
        return other

    def most(self, sizes: np.ndarray) -> int:
        """The largest sum of sizes alive at one step: see `live_bytes` (plan/memory/symbolic_allocator.py)."""
        return int(self.curve(sizes).max(initial=0))

    def curve(self, sizes: np.ndarray) -> np.ndarray:
        """The sum of sizes alive at each step, int64."""
        there = np.where(self.first <= self.last, sizes, 0)
        change = np.zeros(self.steps + 3, np.int64)
        np.add.at(change, self.first, there)
        np.subtract.at(change, self.last + 1, there)
        return np.cumsum(change)
