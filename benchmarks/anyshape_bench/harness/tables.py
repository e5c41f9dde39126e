"""Tables of results, for a terminal and in Markdown, and how their numbers are written."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import rich.table

MISSING = "-"


def seconds(value: float | None) -> str:
    """A duration with its unit: 3 us, 1.20 ms, 4.1 s."""
    if value is None:
        return MISSING
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def size(value: float | None) -> str:
    """Bytes in MB (10^6)."""
    return MISSING if value is None else f"{value / 1e6:.1f} MB"


def ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def share(value: float | None) -> str:
    return MISSING if value is None else f"{value * 100:.0f} %"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts.

    Attributes:
        title: above it in a terminal; head: of the columns; rows: a text for each column.
        words: columns of words, which stand on the left; all others on the right.
        styles: of the rows in a terminal, by their number.
        narrow: headers break at their spaces in a terminal, to leave room for the numbers.
        grouped: a line is drawn in a terminal where the first column changes.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    styles: Sequence[str | None] = ()
    narrow: bool = False
    grouped: bool = False

    def terminal(self) -> rich.table.Table:
        shown = rich.table.Table(title=self.title, title_justify="left")
        for place, name in enumerate(self.head):
            shown.add_column(name.replace(" ", "\n") if self.narrow else name,
                             justify="left" if place in self.words else "right")
        for number, row in enumerate(self.rows):
            if self.grouped and number and row[0] != self.rows[number - 1][0]:
                shown.add_section()
            shown.add_row(*row, style=self.styles[number] if self.styles else None)
        return shown

    def markdown(self) -> str:
        rule = "".join("---|" if place in self.words else "---:|" for place in range(len(self.head)))
        return "".join(f"{line}\n" for line in (_line(self.head), f"|{rule}", *map(_line, self.rows)))


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def bullets(texts: Iterable[str]) -> str:
    """A list in Markdown, each text on one line."""
    return "".join(f"- {' '.join(text.split())}\n" for text in texts)
