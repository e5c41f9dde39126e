"""Targets: what is aimed at, beside what was measured, with "short" where it is not reached."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyshape_bench.harness.tables import MISSING, Table

HEAD = ("measure", "aim", "measured", "of", "")
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Measure:
    """One line. value: as a ratio, or seconds where `unit` is "us"; None: not in the results. most: the aim is an upper
    bound. note: of which models it is, or which is the worst."""

    name: str
    aim: float
    most: bool
    value: float | None
    note: str = ""
    unit: str = "x"

    def said(self, value: float) -> str:
        return {"x": f"{value:.2f}x", "%": f"{value * 100:.0f} %", "us": f"{value * 1e6:.1f} us",
                "0.01 %": f"{value * 100:.2f} %", "": f"{value:g}"}[self.unit]

    def verdict(self) -> str:
        if self.value is None:
            return NOT_MEASURED
        return "reached" if (self.value <= self.aim if self.most else self.value >= self.aim) else "short"

    def cells(self) -> tuple[str, ...]:
        """The columns of HEAD."""
        return (self.name, ("at most " if self.most else "at least ") + self.said(self.aim),
                MISSING if self.value is None else self.said(self.value), self.note, self.verdict())


def worst(name: str, aim: float, most: bool, values: dict[str, float], of: str = "") -> Measure:
    """The value that is farthest from the aim, and whose it is."""
    if not values:
        return Measure(name, aim, most, None)
    last = (max if most else min)(values, key=values.__getitem__)
    return Measure(name, aim, most, values[last], f"the {'greatest' if most else 'least'}{of}: `{last}`")


def table(found: Sequence[Measure]) -> Table:
    """One line per measure."""
    return Table("What is aimed at", HEAD, [one.cells() for one in found], words=(0, 3, 4),
                 styles=["yellow" if one.verdict() == "short" else None for one in found])
