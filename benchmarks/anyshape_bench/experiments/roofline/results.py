"""A stored roofline: its lines, and the numbers that are read off them. Needs no torch."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from anyshape_bench.harness.result_files import StoredRun

SHARE, LEAST_SHARE = 0.8, 0.5  # of the copy's rate: what is asked for, and what none may be under


@dataclass(slots=True)
class Line:
    """One function, one way. Seconds and bytes; `ours`, `eager` and `copy` are medians.

    Attributes:
        way: "forward" or "backward".
        sizes: what it was measured at; compiled_at: what it was compiled at.
        moved: bytes that have to be moved at least.
        copied: bytes that the copy moves, read and written.
        launches: what our program ran: kernels, products, calls of PyTorch, copies.
        wrong: how its results differ from eager's; empty when they do not.
        error: why there are no numbers.
    """

    name: str
    way: str
    sizes: list[int]
    compiled_at: list[int]
    moved: int = 0
    copied: int = 0
    ours: float | None = None
    eager: float | None = None
    copy: float | None = None
    rounds: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    wrong: str = ""
    error: str = ""

    def rate(self) -> float | None:
        """Bytes per second of our program."""
        return self.moved / self.ours if self.ours else None

    def share(self) -> float | None:
        """Of the copy's rate."""
        rate = self.rate()
        return rate * self.copy / self.copied if rate and self.copy else None

    def eager_share(self) -> float | None:
        return self.moved / self.eager * self.copy / self.copied if self.eager and self.copy else None


@dataclass(slots=True)
class Roofline(StoredRun):
    """A run, with its lines in order."""

    FILE = "roofline.json"
    WHAT = "a roofline"
    COMMAND = "anyshape bench --roofline"
    lines: list[Line] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """What a worker found: its lines; threads: of torch; kept: whether freed memory stayed with the process."""

    threads: int
    kept: bool = False
    lines: list[Line] = field(default_factory=list)
    error: str = ""


def beside(folder: Path) -> Roofline | None:
    """The roofline that is stored in the folder of other results, if there is one."""
    return Roofline.load(folder) if (folder / Roofline.FILE).exists() else None
