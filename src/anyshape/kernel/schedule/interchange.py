"""Loop interchange for kernels vectorised over rows: all rows take column 0, then column 1, so that strided loads share
cache lines.

    rows (i1: n1) vector i1                  rows (i1: n1) vector i1 abreast
      columns (i0: n0)                 -->     columns (i0: n0)
        r0 = load p0[i0*n1 + i1]                 r0 = load p0[i0*n1 + i1]
        r1 = reduce maximum r0                   r1 = reduce maximum r0

A strip as wide as a vector reads memory in runs of a few lines; abreast, as it lies. What is reduced is kept for every
row in a row buffer meanwhile, and what is scattered lies in memory anyway.
"""
from __future__ import annotations

import dataclasses

from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.lowering.loop_nest import used
from anyshape.sym.expr import coefficient_of, symbols_of


def abreast(program: LoopProgram) -> LoopProgram | None:
    """The program with its rows abreast; None where it is not over columns of rows that lie side by side."""
    every = [one for stage in program.stages for one in stage.instructions]
    inside = {name for name, _ in program.columns}
    if not program.rows or program.vector != program.rows[-1][0] or program.scratch or program.parts:
        return None
    if not inside or {one.op for one in every} & {"scan", "fold"}:
        return None
    varying: set[int] = set()  # from row to row
    runs = False
    for one in every:
        names = symbols_of(one.offset)
        if any(name[0] == "%" and int(name[1:]) in varying for name in names):
            return None
        along = program.vector in names
        if one.op in ("load", "store", "scatter"):
            found = coefficient_of(one.offset, program.vector)
            if found is None or (along and found[0] != 1) or (one.op != "load" and not along):
                return None
            runs = runs or (along and bool(names & inside or any(name[0] == "%" for name in names)))
        if along or one.op == "reduce" or varying.intersection(used(one)):
            varying.add(one.result)
    return dataclasses.replace(program, abreast=True) if runs else None
