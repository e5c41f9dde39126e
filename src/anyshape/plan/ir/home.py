"""Allocation kinds of a plan's buffers: where each lives, a closed set of classes, immutable values all.

    h  Temp()        in the call's arena                  x  Input(0)    the caller's tensor
    y  Output(0)     a tensor allocated for the caller    s  Saved(1)    in the arena, kept for the backward

What is asked of several kinds alike stands as properties of `Buffer` (plan/ir/program.py).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Home:
    """Where a buffer lives. word: in the text of plans."""

    word: ClassVar[str]


@dataclass(frozen=True, slots=True)
class IndexedHome(Home):
    """A home that is one of several, from 0: of the program's inputs, of its outputs, or of the tape's entries."""

    index: int


@dataclass(frozen=True, slots=True)
class Input(IndexedHome):
    """The caller's tensor `index` (position among all graph inputs)."""

    word: ClassVar[str] = "input"


@dataclass(frozen=True, slots=True)
class Output(IndexedHome):
    """A tensor allocated for the caller, output `index`."""

    word: ClassVar[str] = "output"


@dataclass(frozen=True, slots=True)
class Temp(Home):
    """In the call's arena, free after its last step."""

    word: ClassVar[str] = "arena"


@dataclass(frozen=True, slots=True)
class Saved(IndexedHome):
    """In the call's arena, kept for the backward program as tape entry `index`."""

    word: ClassVar[str] = "saved"


@dataclass(frozen=True, slots=True)
class Restored(IndexedHome):
    """(backward) The tape's entry `index`: a piece of the forward's arena or a tensor it held."""

    word: ClassVar[str] = "tape"


@dataclass(frozen=True, slots=True)
class External(Home):
    """Made by PyTorch in the buffer's first step, dropped after its last."""

    word: ClassVar[str] = "extern"


@dataclass(frozen=True, slots=True)
class RestoredBase(IndexedHome):
    """(backward) A saved buffer of the forward, of which tape entry `index` is a window: where the forward kept it, or,
    if it is computed again, in the arena between its first and its last step."""

    word: ClassVar[str] = "kept"


@dataclass(frozen=True, slots=True)
class Recomputed(Home):
    """In the arena in calls that run its steps, which are optional."""

    word: ClassVar[str] = "again"
