"""Tiling of scans: lets a scan across a large matrix go along its lines.

    rows (i1: n1) vector i1                    rows (i2: n1/2048)
      columns (i0: n0)                           columns (i0: n0, i1: 2048) vector i1
        r0 = load p0[i0*n1 + i1]         -->       r0 = load p0[i0*n1 + 2048*i2 + i1]
        r1 = scan add r0                           r1 = t[i1] + r0, or r0 where i0 is 0;  t[i1] = r1
        store p1[i0*n1 + i1] r1                    store p1[i0*n1 + 2048*i2 + i1] r1

A strip as wide as a vector reads memory in runs of a few lines; here what there is so far of many columns lies in a row
buffer, in the cache.
"""
from __future__ import annotations

import dataclasses
import itertools

from anyshape.kernel.loop_ir.directives import SplitReduction, Vectorize
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Scratch, Stage
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import ceildiv, minimum, substitute, symbol

WIDEST = 8  # bytes of an element that is scanned


def tiled_scan(program: LoopProgram, hardware: HardwareParams) -> LoopProgram | None:
    """The program with some of the last row variable, whose row buffer stays in the cache, as the inner columns; None
    where it does more than scan, or the target has no cache for row buffers."""
    tile = hardware.row_buffer_bytes // WIDEST
    every = [one for stage in program.stages for one in stage.instructions]
    if not tile or len(program.columns) != 1 or program.scratch or program.directive(SplitReduction) or any(
            one.op in ("reduce", "scatter", "fold") for one in every):
        return None
    names = dict((*program.rows, *program.columns))
    run = next(name for k in itertools.count() if (name := f"i{k}") not in names)
    (row, extent), (column, _) = program.rows[-1], program.columns[0]
    moved = {row: symbol(run) * tile + symbol(row)}
    free = 1 + max(one.result for one in every)
    scratch: list[Scratch] = []
    body: list[Instruction] = [Instruction(free, "index", (), "i64", offset=symbol(column)),
                               Instruction(free + 1, "constant", (), "i64", value=0),
                               Instruction(free + 2, "eq", (free, free + 1), "bool")]
    first, free = free + 2, free + 3
    for one in every:
        if one.op != "scan":
            body.append(dataclasses.replace(one, offset=substitute(one.offset, moved)))
            continue
        name = f"t{len(scratch)}"
        scratch.append(Scratch(name, one.dtype, tile))
        body.append(Instruction(free, "load", (), one.dtype, name, symbol(row)))
        before, combine, free = free, one.combine, free + 1
        if combine == "linear":
            body.append(Instruction(free, "mul", (one.args[1], before), one.dtype))
            before, combine, free = free, "add", free + 1
        body += [Instruction(free, combine, (before, one.args[0]), one.dtype),
                 Instruction(one.result, "where", (first, one.args[0], free), one.dtype),
                 Instruction(-1, "store", (one.result,), one.dtype, name, symbol(row))]
        free += 1
    if not scratch:
        return None
    rows = (*program.rows[:-1], (run, ceildiv(extent, tile)))
    columns = (program.columns[0], (row, minimum(tile, extent - symbol(run) * tile)))
    return dataclasses.replace(program, rows=rows, columns=columns, stages=(Stage("column", tuple(body)),),
                               scratch=tuple(scratch)).scheduled(Vectorize(row))
