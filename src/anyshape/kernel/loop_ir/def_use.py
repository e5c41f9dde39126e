"""Def-use of registers: what an instruction of a loop program reads, and what it is computed from."""
from __future__ import annotations

from collections.abc import Sequence, Set

from anyshape.kernel.loop_ir.program import Instruction
from anyshape.sym.expr import symbols_of

EFFECTS = ("store", "scatter", "fold", "check")


def used(i: Instruction) -> list[int]:
    """The registers that an instruction reads, in its offset too."""
    return [*i.args, *(int(name[1:]) for name in symbols_of(i.offset) if name.startswith("%"))]


def varying(every: Sequence[Instruction], loops: Set[str]) -> set[int]:
    """The registers that differ from point to point of these loop variables."""
    found: set[int] = set()
    for one in every:
        if loops & symbols_of(one.offset) or not found.isdisjoint(used(one)):
            found.add(one.result)
    return found


def needed(known: Sequence[Instruction], readers: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Those of `known` that the readers are computed from, in order."""
    wanted = {register for one in readers for register in used(one)}
    found: list[Instruction] = []
    for one in reversed(known):
        if one.result in wanted:
            wanted.update(used(one))
            found.append(one)
    return tuple(reversed(found))
