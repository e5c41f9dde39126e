"""The report model: what was decided for a compiled object, and what is in memory while it runs, as data that
`explain()`, `memory()` and the report show.

Sizes are formulas over names in the user's words (`ids_0` is dim 0 of input `ids`). Where sizes are given, the same
formulas stand as numbers too.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anyshape.sym.expr import Expr, Size


@dataclass(frozen=True, slots=True)
class RegimeNote:
    """A version of a kernel, and when it runs; empty: where none before it does. then: kernels that run after it."""

    kernel: str
    when: str
    then: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionNote:
    """Which version of a kernel a device has run. version: in words; of two the second is for addresses that are no
    multiples of 16 bytes. sizes: those of the calls, at most some."""

    kernel: str
    version: str
    sizes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KernelNote:
    """A fused kernel. read, written: bytes moved; uses: how often the program runs it; regimes: in order of choice."""

    name: str
    ops: tuple[str, ...]
    lines: tuple[str, ...]
    rows: Size
    columns: Size
    read: Size
    written: Size
    uses: int
    regimes: tuple[RegimeNote, ...] = ()


@dataclass(frozen=True, slots=True)
class CallNote:
    """Work that a native routine or PyTorch does. why: PyTorch does it, or which routine was measured to be the faster
    one on this machine. uses: number of such steps."""

    target: str
    why: str
    lines: tuple[str, ...]
    uses: int


@dataclass(frozen=True, slots=True)
class RefusalNote:
    """Fusions that were considered and not made, for one reason. bytes: what they would have saved."""

    reason: str
    values: tuple[str, ...]
    bytes: Size


@dataclass(frozen=True, slots=True)
class StepNote:
    """A step of the plan and the bytes of the arena that are alive while it runs."""

    number: int
    what: str
    where: str
    live: Size


@dataclass(frozen=True, slots=True)
class ProgramNote:
    """A compiled program.

    why: what forced it, empty for the first. sizes: (name, place). arena: bytes at once while it runs; saved: of those,
    kept for the backward; outputs: bytes handed to the caller. seconds: time of every stage; passes: of every pass,
    with equations before and after; plan_passes: of those over the plan, with its steps. likely: sizes that the trace
    saw. placed: bytes of the arena of a call at the sizes given, at most what the formula says. edited: files whose
    text stands in place of a computed stage. undecided: bytes of different values of which no proof says how they
    compare. other: `arena` in the other order of steps, where calls choose between two by their sizes. versions: of
    kernels on a device, at the sizes that calls had.
    """

    name: str
    role: str
    where: str
    way: str
    why: str
    sizes: tuple[tuple[str, str], ...]
    kernels: tuple[KernelNote, ...]
    libraries: tuple[CallNote, ...]
    externs: tuple[CallNote, ...]
    refusals: tuple[RefusalNote, ...]
    steps: tuple[StepNote, ...]
    arena: Size
    saved: Size
    outputs: Size
    seconds: tuple[tuple[str, float], ...]
    passes: tuple[tuple[str, int, int, float], ...]
    likely: tuple[tuple[str, int], ...]
    placed: int | None = None
    edited: tuple[str, ...] = ()
    undecided: tuple[tuple[Size, Size], ...] = ()
    other: Size | None = None
    plan_passes: tuple[tuple[str, int, int, float], ...] = ()
    versions: tuple[VersionNote, ...] = ()

    def peak(self) -> Size:
        """Bytes that the program holds at its highest: its arena and its outputs."""
        return self.arena + self.outputs


@dataclass(frozen=True, slots=True)
class AttentionUse:
    """Attention that the model writes out, by the line of its softmax. taken: one operator stands in its place; what:
    the operator, or why it was left; graph: the captured graph's number; uses: how often that line comes in it."""

    graph: int
    where: str
    taken: bool
    what: str
    uses: int


@dataclass(frozen=True, slots=True)
class RouterNote:
    """A router of a dynamic network. way: grouped (one module over all branches' rows), branch by branch (a stack
    without a grouped form, and why), or split (a module for each); recorded: whether a profile is recorded now."""

    name: str
    branches: int
    way: str
    decides: str
    combine: str
    drop: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class Position:
    """A step in the line of a program, or of a forward and its backward, or the end of one. part: forward or backward,
    empty without a backward; optional: it runs where something is computed again."""

    part: str
    number: int
    what: str
    where: str
    optional: bool

    def __str__(self) -> str:
        return f"{self.part or 'step'} {self.number}: {self.what}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no choice stays within a limit, and what to do."""

    what: str
    why: str
    do: str


@dataclass(frozen=True, slots=True)
class Choice:
    """How many values a call does not keep, of `saved` ones: dropped, to be computed again, and moved out, of `away`
    bytes. number: among all choices, from the most memory to the least."""

    number: int
    saved: int
    dropped: int
    moved: int
    away: int


@dataclass(frozen=True, slots=True)
class AliveNote:
    """A value in memory. kind: saved (for the backward), temporary, result, or made by PyTorch; where: the line of the
    model that makes it."""

    name: str
    bytes: int
    kind: str
    where: str


@dataclass(frozen=True, slots=True)
class WayBack:
    """A value that is not kept for the backward. way: "computed again" or "moved out"; first, last: the positions of
    the line between which its memory is free; of a value whose copies take too long, none. seconds: of computing it
    again on the threads that run, or of copying it out and back, beside the steps; by estimate."""

    name: str
    bytes: int
    way: str
    first: int
    last: int
    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes alive at every position of one line: the steps of a program, or of a forward, then of its backward.

    name: of the program, or of both. kept: bytes with everything kept; chosen: what a call does under the limit.
    border: the position where the backward begins; the length, where there is none. limit: bytes that a call may take,
    0: any number. needed, needs: what the layouts take with everything kept, and as chosen. peak: the fullest position,
    step: what happens there, alive: who is. back: what is not kept, and how it comes back. seconds: that this takes in
    all, by estimate. refused: what to do where no choice stays within the limit; the curve is that of the lowest.
    """

    name: str
    kept: tuple[int, ...]
    chosen: tuple[int, ...]
    border: int
    limit: int
    needed: int
    needs: int
    peak: int
    step: str
    alive: tuple[AliveNote, ...]
    back: tuple[WayBack, ...] = ()
    seconds: float = 0.0
    refusal: Refusal | None = None
    scratch: tuple[int, int] = (0, 0)
    choice: Choice | None = None

    @property
    def refused(self) -> str:
        """What to do where no choice stays within the limit."""
        return "" if self.refusal is None else self.refusal.do


def plain(value: Any, formula: Callable[[Expr], Any] = str) -> Any:
    """Data as dicts, lists, numbers and text, fit for JSON; a formula as `formula` gives it."""
    if isinstance(value, Expr):
        return formula(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), formula) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item, formula) for item in value]
    return value
