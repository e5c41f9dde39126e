"""What the parts of the prover may ask of the whole of it (sym/facts.py): assumptions, bounds, and signs."""
from __future__ import annotations

from typing import Protocol

from anyshape.sym.expr import Size


class Prover(Protocol):
    """Facts, with the proofs that follow from them. The fields are those of `Facts`."""

    @property
    def ranges(self) -> tuple[tuple[str, int, int | None], ...]:
        """(symbol, least, greatest or None) each."""

    @property
    def hints(self) -> tuple[tuple[str, int], ...]:
        """(symbol, likely value) each."""

    @property
    def divisible(self) -> tuple[tuple[Size, int], ...]:
        """(size, divisor) each."""

    @property
    def known(self) -> tuple[Size, ...]:
        """Sizes that are at least 0."""

    def range_of(self, name: str) -> tuple[int, int | None]:
        """The least and the greatest value of a symbol."""

    def nonnegative(self, size: Size, depth: int) -> bool | None:
        """Whether the size is at least 0; None: it cannot be told within so many cases inside each other."""

    def bounds(self, size: Size) -> tuple[int | None, int | None]:
        """The least and the greatest value of a size; None: there is none, or none is known."""

    def within(self, ranges: tuple[tuple[str, int, int | None], ...]) -> Prover:
        """The same with other ranges."""
