"""A stored roofline: its lines, and the numbers that are read off them. Needs no torch."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyshape_bench.harness import result_files

FILE = "roofline.json"
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
class Roofline:
    """A run: where and how, and its lines in order."""

    machine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Writes `roofline.json`; another process never sees half a file."""
        return result_files.write(self, folder, FILE)


def load(path: Path) -> Roofline:
    """Reads what `save` wrote, from the folder or the file.

    Raises:
        InputError: there is no such file, or it is no roofline.
    """
    return result_files.read(path, FILE, lambda data: Roofline(data["machine"], data["options"],
                                                         [Line(**line) for line in data["lines"]]),
                       "a roofline", "anyshape bench --roofline")


def beside(folder: Path) -> Roofline | None:
    """The roofline that is stored in the folder of other results, if there is one."""
    return load(folder) if (folder / FILE).exists() else None


def failed(found: Roofline) -> bool:
    """Has a function failed, or given other numbers than eager's?"""
    return any(line.error or line.wrong for line in found.lines)
