"""What a person sees while the demo runs: a live table on a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from anyshape.base.units import bytes_text
from anyshape.tools.demo.show import chart

PLAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes that the steps so far took: predicted and counted. again: values that the last step
    computed again to stay within the limit."""

    limit: int
    predicted: Sequence[int]
    counted: Sequence[int]
    again: int


@dataclass(frozen=True, slots=True)
class Status:
    """One step's line. speed: tokens per second; arena, resident: bytes; arena 0 means that there is none. peaks: None
    where no limit is set."""

    step: int
    loss: float
    speed: float
    rows: int
    length: int
    shapes: int
    programs: int
    arena: int
    resident: int
    peaks: Peaks | None = None


class Display(Protocol):
    """A place for status and notes; enter it around the training loop."""

    def __enter__(self) -> Display: ...
    def __exit__(self, *error: Any) -> None: ...
    def show(self, status: Status) -> None: ...
    def note(self, text: str) -> None: ...


class LiveDisplay:
    """A progress bar over a table that is redrawn in place."""

    def __init__(self, console: Console, backend: str, done: int, steps: int) -> None:
        self._console = console
        self._backend = backend
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, expand=True,
        )
        self._task = self._progress.add_task("first step: compiling" if backend != "eager" else "training",
                                             total=steps, completed=done)
        self._live = Live(self._progress, console=console, refresh_per_second=8)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def show(self, status: Status) -> None:
        """Redraw with the numbers of the step just done."""
        self._progress.update(self._task, completed=status.step, description=f"training, {self._backend}")
        parts: list[Any] = [self._progress, status_table(status)]
        if status.peaks is not None:
            peaks = status.peaks
            label = f"limit {bytes_text(peaks.limit)}"
            parts.append(chart.peaks(peaks.predicted, peaks.counted, peaks.limit, label, self._console.width - 1))
        self._live.update(Group(*parts))

    def note(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, highlight=False, markup=False)


class PlainDisplay:
    """One line for the first step, one about every five seconds, one for the last."""

    def __init__(self, console: Console, backend: str, steps: int) -> None:
        self._console = console
        self._backend = backend
        self._steps = steps
        self._printed = float("-inf")

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: Any) -> None:
        return

    def show(self, status: Status) -> None:
        """Print the status when it is due."""
        now = time.monotonic()
        if now - self._printed < PLAIN_SECONDS and status.step != self._steps:
            return
        self._printed = now
        memory = f"resident {bytes_text(status.resident)}"
        if status.arena:
            memory = f"arena {bytes_text(status.arena)}, {memory}"
        if status.peaks is not None:
            memory += f"  {peaks_text(status.peaks)}"
        self.note(
            f"step {status.step:>4}/{self._steps}  loss {status.loss:6.3f}  {status.speed:7,.0f} tokens/s  "
            f"shape {status.rows:>3} x {status.length:<4} shapes {status.shapes:<4} programs {status.programs}  "
            f"{memory}"
        )

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def status_table(status: Status) -> Table:
    """The live table: a row of names and a row of numbers."""
    table = Table(expand=True, box=None, padding=(0, 1))
    cells = [
        ("step", str(status.step)), ("loss", f"[bold]{status.loss:.3f}[/]"), ("tokens/s", f"{status.speed:,.0f}"),
        ("this shape", f"{status.rows} x {status.length}"), ("shapes so far", str(status.shapes)),
        ("programs", str(status.programs)), ("arena", bytes_text(status.arena) if status.arena else "none"),
        ("resident", bytes_text(status.resident)),
    ]
    if status.peaks is not None:
        peaks = status.peaks
        cells[-2:] = [
            ("predicted", bytes_text(peaks.predicted[-1])), ("counted", bytes_text(peaks.counted[-1])),
            ("limit", bytes_text(peaks.limit)), ("computed again", str(peaks.again)),
        ]
    for name, _ in cells:
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    table.add_row(*(text for _, text in cells))
    return table


def peaks_text(peaks: Peaks) -> str:
    """The last step's peak in words."""
    return (f"peak {bytes_text(peaks.predicted[-1])} predicted, {bytes_text(peaks.counted[-1])} counted, "
            f"limit {bytes_text(peaks.limit)}, {peaks.again} computed again")


def make(console: Console, backend: str, done: int, steps: int) -> Display:
    """The display that fits where `console` writes."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, backend, done, steps)
    return PlainDisplay(console, backend, steps)
