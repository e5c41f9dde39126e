"""What `explain()` knows: everything that was decided for one compiled object, as data.

Sizes are formulas over names in the user's words (`ids_0` is dim 0 of input `ids`). Where sizes are given, the same
formulas stand as numbers too.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyshape.frontend.compilation import Fallback
from anyshape.frontend.size_text import arena_text, bytes_text, number, said
from anyshape.sym.expr import Expr, Size, symbols_of


@dataclass(frozen=True, slots=True)
class RegimeNote:
    """A version of a kernel, and when it runs; empty: where none before it does. then: kernels that run after it."""

    kernel: str
    when: str
    then: tuple[str, ...] = ()


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
    """Work that a library (`why` empty) or PyTorch does. uses: number of such steps."""

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
    with equations before and after. likely: sizes that the trace saw. placed: bytes of the arena of a call at the sizes
    given, at most what the formula says. edited: files whose text stands in place of a computed stage. undecided: bytes
    of different values of which no proof says how they compare.
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
class Explanation:
    """Programs, fallbacks and written-out attention of one compiled object. values: the sizes given to `explain`."""

    name: str
    programs: tuple[ProgramNote, ...]
    fallbacks: tuple[Fallback, ...]
    graphs: int
    values: tuple[tuple[str, int], ...] = ()
    attentions: tuple[AttentionUse, ...] = ()

    def number(self, size: Size) -> int | None:
        """`size` in numbers, where the given sizes determine it."""
        return number(size, dict(self.values))

    def to_dict(self) -> dict[str, Any]:
        """Everything as dicts, lists, numbers and text, fit for JSON. A formula becomes its text; where the given
        sizes determine it, {"formula": text, "value": number}."""
        result = _plain(self, dict(self.values))
        assert isinstance(result, dict)
        return result

    def __str__(self) -> str:
        from anyshape.frontend import explain_view
        return explain_view.text(self)

    def __rich__(self) -> Any:
        from anyshape.frontend import explain_view
        return explain_view.view(self)


@dataclass(frozen=True, slots=True)
class MemoryNote:
    """What `memory()` returns. programs: (name, arena formula, saved formula, outputs formula).

    values: the sizes given. placed: per program, bytes of the arena of a call at these sizes, at most what the formula
    says; None while a size is not given. `bytes` is the predicted peak over the programs, or None. limits: (program,
    what a call at these sizes does to stay within the limit), where one is set.
    """

    programs: tuple[tuple[str, Size, Size, Size], ...]
    values: tuple[tuple[str, int], ...]
    placed: tuple[int | None, ...] = ()
    limits: tuple[tuple[str, str], ...] = ()

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
        if not self.programs:
            return "nothing is compiled yet: call the program first"
        lines = []
        for (name, arena, saved, outputs), placed in zip(self.programs, self.placed, strict=True):
            lines.append(f"{name}: arena {arena_text(arena, placed, self.values)}, "
                         f"of it saved {said(saved, self.values)}, outputs {said(outputs, self.values)}")
        if self.bytes is not None:
            lines.append(f"peak {bytes_text(self.bytes)}")
        elif self.missing():
            lines.append(f"peak: give {', '.join(self.missing())}")
        return "\n".join([*lines, *(f"{name}: {what}" for name, what in self.limits)])


def _plain(value: Any, values: Mapping[str, int]) -> Any:
    if isinstance(value, Expr):
        found = number(value, values)
        return str(value) if found is None else {"formula": str(value), "value": found}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), values) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item, values) for item in value]
    return value
