"""Allocation kinds of a plan's buffers: where each lives, a closed set of classes, immutable values all.

    h  Temp()        in the call's arena                  x  Input(0)    the caller's tensor
    y  Output(0)     a tensor allocated for the caller    s  Saved(1)    in the arena, kept for the backward

What is asked of several kinds alike stands as properties of `Buffer` (plan/ir/program.py). A kind has no fields of its
own: what is generated for the two classes that they are made of serves them all.
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


class Input(IndexedHome):
    """The caller's tensor `index` (position among all graph inputs)."""

    __slots__ = ()
    word: ClassVar[str] = "input"


class Output(IndexedHome):
    """A tensor allocated for the caller, output `index`."""

    __slots__ = ()
    word: ClassVar[str] = "output"


class Temp(Home):
    """In the call's arena, free after its last step."""

    __slots__ = ()
    word: ClassVar[str] = "arena"


class Saved(IndexedHome):
    """In the call's arena, kept for the backward program as tape entry `index`."""

    __slots__ = ()
    word: ClassVar[str] = "saved"


class Restored(IndexedHome):
    """(backward) The tape's entry `index`: a piece of the forward's arena or a tensor it held."""

    __slots__ = ()
    word: ClassVar[str] = "tape"


class External(Home):
    """Made by PyTorch in the buffer's first step, dropped after its last."""

    __slots__ = ()
    word: ClassVar[str] = "extern"


class RestoredBase(IndexedHome):
    """(backward) A saved buffer of the forward, of which tape entry `index` is a window: where the forward kept it, or,
    if it is computed again, in the arena between its first and its last step."""

    __slots__ = ()
    word: ClassVar[str] = "kept"


class Recomputed(Home):
    """In the arena in calls that run its steps, which are optional."""

    __slots__ = ()
    word: ClassVar[str] = "again"
