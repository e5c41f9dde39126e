"""Order selection: of two orders of its steps, a program takes at given sizes the one whose peak is lower there.

    order 1   16 MB * rows + 411 MB       order 2   18 MB * rows       -->  2 up to 205 rows, 1 from there on

An order that needs no more at any size stands alone (plan/schedule/reorder.py). Where two need less at different sizes,
the program has an executable for each, with the same kernels; a forward whose backward has two is there twice, for
where its values lie depends on what its backward does. A call asks when it meets new sizes, and its record says which
it was.
"""
from __future__ import annotations

import threading
from collections.abc import Mapping

from anyshape.runtime.budget.footprint import ExternalBytes
from anyshape.runtime.specialize.joint_layout import ProgramLifetimes
from anyshape.runtime.specialize.specialization import Specializer

CLEARLY = 0.99  # of what the first order needs, what the second has to come to
REMEMBERED = 512  # sizes
NOTHING: frozenset[str] = frozenset()


class OrderSelection:
    """Says which of two programs, alike but for the order of their steps, needs less. May be used from several
    threads."""

    def __init__(self, first: Specializer, second: Specializer) -> None:
        self.parts = [(ProgramLifetimes(one), ExternalBytes(one.plan)) for one in (first, second)]
        self.unknown = dict.fromkeys(first.layout.symbols, 0)  # of a backward, sizes that nothing depends on
        self.known: dict[tuple[tuple[str, int], ...], bool] = {}
        self.lock = threading.Lock()

    def is_second(self, values: Mapping[str, int]) -> bool:
        """Does the second need clearly less at the symbols' `values`?"""
        key = tuple(values.items())
        with self.lock:
            known = self.known.get(key)
        if known is None:
            at = {**self.unknown, **values}
            needs = [half.peak(at) + held.most(at, NOTHING, {}) for half, held in self.parts]
            known = needs[1] < CLEARLY * needs[0]
            with self.lock:
                while len(self.known) >= REMEMBERED:
                    self.known.pop(next(iter(self.known)))
                self.known[key] = known
        return known
