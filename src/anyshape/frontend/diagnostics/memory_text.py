"""How `memory()` looks: formulas, and a plot of bytes alive over the steps: blocks on a terminal, else plain signs.

     63.1 MB |        ....
             |     .......... .         .  everything kept      #  under the limit      -  the limit
     38.3 MB |----####.######-.-------
             |  ####### ########..
           0 +---------|--------------
              forward    backward
"""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.base.units import bytes_text
from anyshape.frontend.diagnostics.explain_data import AliveNote, MemoryCurve, WayBack
from anyshape.frontend.messages.size_text import arena_text, number, said
from anyshape.sym.expr import Size, symbols_of

WIDTH, HEIGHT = 72, 12  # of a plot, in characters
MOST = 8  # rows of a list
LEFT = 10  # characters in front of the axis
LINE = 70  # characters of a line of the model
SEEN = 1.3  # times the peak: a limit above is not drawn


@dataclass(frozen=True, slots=True)
class Marks:
    """The signs of a plot. chosen: from nearly empty to full; kept: what is alive with everything kept; limit: its
    line; border: where the backward begins."""

    chosen: str
    kept: str
    limit: str
    axis: str
    floor: str
    border: str


BLOCKS = Marks("▁▂▃▄▅▆▇█", "░", "─", "│", "─", "┴")
PLAIN = Marks("#", ".", "-", "|", "-", "|")


@dataclass(frozen=True, slots=True, repr=False)
class MemoryNote:
    """What `memory()` returns. programs: (name, arena formula, saved formula, outputs formula).

    values: the sizes given. placed: per program, bytes of the arena of a call at these sizes, at most what the formula
    says; None while a size is not given. `bytes` is the predicted peak over the programs, or None. limits: (program,
    what a call at these sizes does to stay within the limit), where one is set. curves: of the programs whose sizes are
    given.
    """

    programs: tuple[tuple[str, Size, Size, Size], ...]
    values: tuple[tuple[str, int], ...]
    placed: tuple[int | None, ...] = ()
    limits: tuple[tuple[str, str], ...] = ()
    curves: tuple[MemoryCurve, ...] = ()

    @property
    def bytes(self) -> int | None:
        """The highest peak (arena and outputs) of any program at the given sizes, inputs and parameters aside."""
        handed = [number(outputs, dict(self.values)) for _, _, _, outputs in self.programs]
        found = [placed + outputs for placed, outputs in zip(self.placed, handed, strict=True)
                 if placed is not None and outputs is not None]
        return max(found) if found and len(found) == len(self.programs) else None

    def missing(self) -> tuple[str, ...]:
        """Names of sizes that the peak depends on and that were not given."""
        names: set[str] = set()
        for _, arena, _, outputs in self.programs:
            names |= symbols_of(arena + outputs)
        return tuple(sorted(names - dict(self.values).keys()))

    def __str__(self) -> str:
        return text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return view(self)


def text(note: MemoryNote) -> str:
    """The view without colours: in blocks if the standard output is a terminal that has them."""
    blocks = sys.stdout is not None and sys.stdout.isatty() and (sys.stdout.encoding or "").lower().startswith("utf")
    return "\n".join(lines(note, BLOCKS if blocks else PLAIN))


def view(note: MemoryNote) -> Any:
    """The view in colours, for rich."""
    from rich.text import Text
    shown = Text("\n".join(lines(note, BLOCKS)), no_wrap=True, overflow="ellipsis")
    for style, signs in (("blue", BLOCKS.chosen), ("bright_black", BLOCKS.kept)):
        shown.highlight_regex(f"[{signs}]+", style)
    shown.highlight_regex(r"(?m)(?<=│).*─.*$", "red")
    return shown


def lines(note: MemoryNote, marks: Marks) -> list[str]:
    """The view, line by line."""
    if not note.programs:
        return ["nothing is compiled yet: call the program first"]
    found = []
    for (name, arena, saved, outputs), placed in zip(note.programs, note.placed, strict=True):
        found.append(f"{name}: arena {arena_text(arena, placed, note.values)}, of it saved {said(saved, note.values)}, "
                     f"outputs {said(outputs, note.values)}")
    if note.bytes is not None:
        found.append(f"peak {bytes_text(note.bytes)}")
    elif note.missing():
        found.append(f"peak: give {', '.join(note.missing())}")
    found += [f"{name}: {what}" for name, what in note.limits]
    for curve in note.curves:
        found += ["", *_curve(curve, marks)]
    return found


def limit_text(limit: str, curve: MemoryCurve) -> str:
    """What a call does to stay within a limit, which is given in words."""
    whole, choice = bytes_text(curve.needed), curve.choice
    if curve.refused:
        return f"limit {limit}: too low for {whole}; {curve.refused}"
    if choice is None:
        return f"limit {limit}: {whole} are needed, everything is kept"
    moved = f", {choice.moved} moved out ({bytes_text(choice.away)})" if choice.moved else ""
    return (f"limit {limit}: {whole} with everything kept, {bytes_text(curve.needs)} with {choice.dropped} of "
            f"{choice.saved} saved values computed again{moved}, some {curve.seconds * 1e3:.1f} ms of work")


def _curve(curve: MemoryCurve, marks: Marks) -> list[str]:
    chosen, kept = max(curve.chosen), max(curve.kept)
    found = [f"bytes alive, step by step: {curve.name}", *plot(curve, marks)]
    found.append(f"{marks.chosen[-1]} alive: {bytes_text(chosen)} at the peak ({bytes_text(curve.needs)} with the "
                 f"layout), in {curve.step}")
    if curve.chosen != curve.kept:
        found.append(f"{marks.kept} with everything kept: {bytes_text(kept)} at the peak ("
                     f"{bytes_text(curve.needed)} with the layout)")
    if curve.limit:
        found.append(f"{marks.limit} limit: {bytes_text(curve.limit)}"
                     + (f"; no choice stays within it, this is the lowest: {curve.refused}" if curve.refused else ""))
    if curve.alive:
        found += _listed("alive at the peak", curve.alive, [one.kind for one in curve.alive])
    for way in ("computed again", "moved out"):
        some = [one for one in curve.back if one.way == way]
        if some:
            total = bytes_text(sum(one.bytes for one in some))
            seconds = _time(sum(one.seconds for one in some))
            costs = f"about {seconds} of work" if way == "computed again" else f"{seconds} of copying beside the steps"
            found += _listed(f"{way}: {len(some)} of the saved values, {total}, {costs}", some,
                             [_time(one.seconds) for one in some])
    if curve.back:
        found.append(f"in all some {_time(curve.seconds)} longer than with everything kept")
    return found


def plot(curve: MemoryCurve, marks: Marks) -> list[str]:
    """The plot: `HEIGHT` rows over an axis, with every step's bytes or, of many steps, the most of a few."""
    length = len(curve.kept)
    width = min(max(length, WIDTH // 2), WIDTH)
    spans = [(i * length // width, max((i + 1) * length // width, i * length // width + 1)) for i in range(width)]
    kept, chosen = ([max(one[a:b]) for a, b in spans] for one in (curve.kept, curve.chosen))
    top = max(*kept, *chosen, 1)
    limit = curve.limit if 0 < curve.limit <= SEEN * top else 0
    top = max(top, limit)
    level = min(int(limit / top * HEIGHT), HEIGHT - 1) if limit else -1
    rows = []
    for row in reversed(range(HEIGHT)):
        label = bytes_text(top) if row == HEIGHT - 1 else bytes_text(limit) if row == level else ""
        cells = [_cell(high / top * HEIGHT - row, low / top * HEIGHT - row, marks)
                 for high, low in zip(kept, chosen, strict=True)]
        if row == level:
            cells = [marks.limit if cell in (" ", marks.kept) else cell for cell in cells]
        rows.append(f"{label:>{LEFT}} {marks.axis}{''.join(cells)}".rstrip())
    border = next((i for i, (a, _) in enumerate(spans) if a >= curve.border), 0) if curve.border < length else 0
    floor = [marks.border if border and i == border else marks.floor for i in range(width)]
    rows.append(f"{0:>{LEFT}} {'+' if marks is PLAIN else '└'}{''.join(floor)}")
    names = f"{'forward':^{border}}{'backward':^{width - border}}" if border else f"{length} steps"
    return [*rows, f"{'':>{LEFT}}  {names}".rstrip()]


def _cell(high: float, low: float, marks: Marks) -> str:
    """A cell that the curve with everything kept fills up to `high` of its height, the chosen one up to `low`."""
    if low >= 1:
        return marks.chosen[-1]
    if high >= 0.5 > low * len(marks.chosen):
        return marks.kept
    if low > 0 and (len(marks.chosen) > 1 or low >= 0.5):
        return marks.chosen[max(round(low * len(marks.chosen)) - 1, 0)]
    return marks.kept if high >= 0.5 else " "


def _listed(title: str, values: Sequence[AliveNote | WayBack], notes: Sequence[str]) -> list[str]:
    found = [title]
    shown = values[:MOST]
    names, widest = max(len(one.name) for one in shown), max(map(len, notes[:MOST]))
    for one, note in zip(shown, notes, strict=False):
        where = one.where if len(one.where) <= LINE else one.where[:LINE - 3] + "..."
        found.append(f"  {bytes_text(one.bytes):>{LEFT}}  {one.name:<{names}}  {note:<{widest}}  {where}".rstrip())
    rest = values[MOST:]
    if rest:
        found.append(f"  {bytes_text(sum(one.bytes for one in rest)):>{LEFT}}  in {len(rest)} more")
    return found


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else (
        f"{seconds * 1e6:.0f} us")
