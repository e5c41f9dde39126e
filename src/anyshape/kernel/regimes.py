"""Versions of a kernel for regimes of sizes: rows of few columns are taken many at a time.

    rows (i0: n0), columns (i1: n1) vector i1   -->   where n1 <= 6 and n0 >= 16: vector i0;  else as it is

A row of columns fills vectors only as far as it goes, and its reductions end in a sum across lanes. With few columns
one vector over neighbouring rows, which steps through the columns one by one, does the work of many.
"""
from __future__ import annotations

import dataclasses

from anyshape.kernel.loop import LoopProgram
from anyshape.sym.expr import Size, product

FEW_COLUMNS = 6
MANY_ROWS = 16  # lanes of a vector of f32

# loop programs, each with sizes over its own that must all be at least 0 for it to be used
Versions = tuple[tuple[LoopProgram, tuple[Size, ...]], ...]


def versions(program: LoopProgram) -> Versions:
    """In order of choice; the last one may always be used. The parameters and sizes of all are the same."""
    if program.parts or not program.rows or not program.columns or program.vector != program.columns[-1][0]:
        return ((program, ()),)
    reduces = any(one.op == "reduce" for stage in program.stages for one in stage.instructions)
    if not reduces or any(one.op == "scatter" for stage in program.stages for one in stage.instructions):
        return ((program, ()),)
    name, rows = program.rows[-1]
    limits = (FEW_COLUMNS - product(extent for _, extent in program.columns), rows - MANY_ROWS)
    if any(isinstance(limit, int) and limit < 0 for limit in limits):
        return ((program, ()),)
    strips = dataclasses.replace(program, vector=name)
    conditions = tuple(limit for limit in limits if not isinstance(limit, int))
    return ((strips, conditions), (program, ())) if conditions else ((strips, ()),)
