"""Tiling of transposed reads: lets a kernel that reads across its columns go through them in tiles.

    rows (i0: n0)                               rows (i0: n0) in tiles
      columns (i1: n1) vector i1          -->     columns (i1: n1) vector i1
        r0 = load p0[i1*n0 + i0]                    r0 = load p0[i1*n0 + i0]

Neighbouring columns of the load lie far apart, neighbouring rows side by side: element by element, every one costs a
cache line. A tile of rows and columns reads each line once, and turns it in registers.
"""
from __future__ import annotations

import dataclasses

from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import Size, coefficient_of, symbols_of

NEAR = 4  # elements: steps up to here stay within the lines that a vector reads


def tiled(program: LoopProgram) -> LoopProgram | None:
    """The program in tiles of its columns and of one row variable, which becomes the last one; None where no load
    lies across, or more is done than a point at a time."""
    stages = [stage for stage in program.stages if stage.level == "column"]
    ops = {one.op for stage in program.stages for one in stage.instructions}
    if len(stages) != 1 or len(program.columns) != 1 or program.vector != program.columns[0][0] or program.parts:
        return None
    if ops & {"reduce", "scan", "scatter", "fold"} or program.scratch:
        return None
    for name, extent in reversed(program.rows):
        if any(turns(one, name, program.vector) for one in stages[0].instructions):
            others = tuple(row for row in program.rows if row[0] != name)
            return dataclasses.replace(program, rows=(*others, (name, extent)), tiled=True)
    return None


def turns(one: Instruction, row: str, column: str) -> bool:
    """Does a load step evenly along both, by one along the row variable and by more along the columns?"""
    if one.op != "load" or one.args:
        return False
    along, across = (_step(one.offset, name) for name in (row, column))
    return along == 1 and across is not None and not (isinstance(across, int) and abs(across) <= NEAR)


def _step(offset: Size, name: str) -> Size | None:
    """How far `offset` goes with one more of `name`; None where that is not the same everywhere."""
    found = coefficient_of(offset, name)
    if found is None or name in symbols_of(found[0]) or any(s[0] == "%" for s in symbols_of(offset)):
        return None
    return found[0]
