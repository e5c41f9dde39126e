"""Loop interchange for kernels vectorised over rows: all rows take column 0, then column 1, so that strided loads share
cache lines.

    rows (i1: n1) vector i1                  rows (i1: n1) vector i1
      columns (i0: n0)                       interchange i1 by 8192
        r0 = load p0[i0*n1 + i1]         -->   columns (i0: n0)
        r1 = reduce maximum r0                   r0 = load p0[i0*n1 + i1]
                                                 r1 = reduce maximum r0

A strip as wide as a vector reads memory in runs of a few lines; interchanged, it is read as it lies. What is reduced is
kept for every row of a strip in a row buffer meanwhile, and what is scattered lies in memory anyway.
"""
from __future__ import annotations

from anyshape.kernel.loop_ir.def_use import used
from anyshape.kernel.loop_ir.directives import Interchange, SplitReduction
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import coefficient_of, symbols_of

PER_ROW = 16  # bytes of the row buffers of a reduction: what is added up, in f32 and in f64


def interchanged(program: LoopProgram, hardware: HardwareParams) -> LoopProgram | None:
    """The program with its rows inside of its columns; None where it is not over columns of rows that lie side by
    side."""
    every = [one for stage in program.stages for one in stage.instructions]
    inside = {name for name, _ in program.columns}
    if not program.rows or program.vector != program.rows[-1][0] or program.scratch:
        return None
    if program.directive(SplitReduction):
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
    strip = hardware.near_cache_bytes // PER_ROW
    return program.scheduled(Interchange(program.vector, strip)) if runs else None
