"""Vectorised size evaluation: many sizes at once, as arrays. Layers repeat, so few formulas give all of them: each is
computed once.

    4*b*n, 64, 4*b*n, 4*b*n  -->  the formulas 4*b*n, 64 and the places 0 1 0 0
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from anyshape.base.align import align
from anyshape.plan.ir.liveness import LiveRange, LiveRanges
from anyshape.sym.expr import Size
from anyshape.sym.python_codegen import SizesFunction


class SizeTable:
    """What `sizes` are at the symbols' values, as int64 (KeyError if one is missing). `title` is what a traceback calls
    the source."""

    def __init__(self, sizes: Sequence[Size], title: str) -> None:
        distinct = {size: i for i, size in enumerate(dict.fromkeys(sizes))}
        self.function = SizesFunction(distinct, title)
        self.which = np.array([distinct[size] for size in sizes], np.int64)

    def __call__(self, values: Mapping[str, int]) -> np.ndarray:
        return np.array(self.function(values), np.int64)[self.which]


class LiveBytes:
    """Live ranges whose bytes are formulas, evaluated at the symbols' values. ranges, sizes: apart."""

    def __init__(self, ranges: Sequence[LiveRange], steps: int, title: str) -> None:
        self.ranges = LiveRanges([(one.first, one.last) for one in ranges], steps)
        self.sizes = SizeTable([one.bytes for one in ranges], title)

    def peak(self, values: Mapping[str, int]) -> int:
        """The most bytes that are live at one point, each range aligned."""
        return self.ranges.peak(align(self.sizes(values)))
