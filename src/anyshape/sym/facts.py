"""Assumptions about the symbols of a graph: ranges, likely values, divisibility, inequalities."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from anyshape.sym.expr import Size, evaluate, symbols_of


@dataclass(frozen=True, slots=True)
class Facts:
    """ranges: (symbol, low, high or None) each; hints: (symbol, likely value) each, used to rank, never to prove;
    divisible: (size, divisor) pairs known to divide; known: sizes known to be at least 0. memo: see there."""

    ranges: tuple[tuple[str, int, int | None], ...] = ()
    hints: tuple[tuple[str, int], ...] = ()
    divisible: tuple[tuple[Size, int], ...] = ()
    known: tuple[Size, ...] = ()
    memo: Memo = field(default_factory=lambda: Memo(), init=False, repr=False, compare=False)

    def range_of(self, name: str) -> tuple[int, int | None]:
        """Smallest and largest value of a symbol; an unknown symbol is at least 0."""
        table = self.memo.ranges
        if table is None:
            table = self.memo.ranges = {known: (low, high) for known, low, high in reversed(self.ranges)}
        return table.get(name, (0, None))

    def hint(self, size: Size) -> int:
        """A likely value of `size`, for ranking only: 64 stands for a symbol without a hint, kept in its range."""
        if isinstance(size, int):
            return size
        table = self.memo.hints
        if table is None:
            table = self.memo.hints = dict(self.hints)
        values = {}
        for name in symbols_of(size):
            low, high = self.range_of(name)
            likely = max(low, table.get(name, 64))
            values[name] = likely if high is None else min(high, likely)
        try:
            return evaluate(size, values)
        except ZeroDivisionError:
            return 1


class Memo:
    """Tables made of the facts, and what was proved of them (`proofs`, of sym/prover.py); no part of their value."""

    __slots__ = ("hints", "proofs", "ranges")

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[int, int | None]] | None = None
        self.hints: dict[str, int] | None = None
        self.proofs: Any = None

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()
