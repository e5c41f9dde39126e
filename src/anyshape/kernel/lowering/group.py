"""The fusion group: what is lowered, what comes of it, and that it cannot be."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyshape.base.errors import AnyShapeError
from anyshape.ir.graph import Node, Value
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.sym.expr import Size


class NotLowerable(AnyShapeError):
    """The group cannot be one kernel; the message says which value asks for what."""


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """What to lower. nodes: the equations inside, in graph order; roots: the values to store; dims: the iteration space
    as (size, is reduced) in row-major order of the full space; sums: reductions over the rows, with what is stored of
    each: a result for every part of the rows, along the first dimension."""

    nodes: tuple[Node, ...]
    roots: tuple[Value, ...]
    dims: tuple[tuple[Size, bool], ...]
    sums: tuple[tuple[Node, Value], ...] = ()

    def loops(self) -> list[tuple[Size, bool]]:
        """The dims that are more than one element; and one that is reduced, where each of these is one element: what is
        reduced is read in a column stage."""
        found = [(size, reduced) for size, reduced in self.dims if size != 1]
        if not any(reduced for _, reduced in found):
            found += [(1, True) for _, reduced in self.dims if reduced][:1]
        return found

    @property
    def stored(self) -> tuple[Value, ...]:
        """Everything that the kernel stores."""
        return (*self.roots, *(value for _, value in self.sums))


@dataclass(frozen=True, slots=True)
class Lowered:
    """A loop program with its binding: value name of every param ("" is the status word), the size bound to every size
    name, and at which indices each inner value was asked for (used by fusion)."""

    program: LoopProgram
    values: tuple[str, ...]
    sizes: tuple[Size, ...]
    asked: Mapping[str, int]
