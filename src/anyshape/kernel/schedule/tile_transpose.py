"""Tiling of transposed reads: lets a kernel that reads across its columns go through them in tiles.

    rows (i0: n0)                               rows (i0: n0)
      columns (i1: n1) vector i1                tile (i0, i1) by (128, 128) transposed r0
        r0 = load p0[i1*n0 + i0]          -->     columns (i1: n1) vector i1
                                                    r0 = load p0[i1*n0 + i0]

Neighbouring columns of the load lie far apart, neighbouring rows side by side: element by element, every one costs a
cache line. A tile of rows and columns reads each line once, and transposes it in registers.
"""
from __future__ import annotations

import dataclasses

from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import SplitReduction, Tile
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import Size, coefficient_of, symbols_of

LINES = 8  # cache lines of a row of a tile, as it lies in memory: what is far apart is read in runs of so many


def tiled_transpose(program: LoopProgram, hardware: HardwareParams) -> LoopProgram | None:
    """The program in tiles of its columns and of one row variable, which becomes the last one; None where no load
    lies across, or more is done than a point at a time."""
    stages = [stage for stage in program.stages if stage.level == "column"]
    ops = {one.op for stage in program.stages for one in stage.instructions}
    if len(stages) != 1 or len(program.columns) != 1 or program.vector != program.columns[0][0]:
        return None
    if ops & {"reduce", "scan", "scatter", "fold"} or program.scratch or program.directive(SplitReduction):
        return None
    for name, extent in reversed(program.rows):
        across = [one for one in stages[0].instructions
                  if _is_across(one, name, program.vector, hardware.max_load_stride)]
        if across:
            others = tuple(row for row in program.rows if row[0] != name)
            tile = Tile((name, program.vector), _sizes(program, across, hardware), tuple(one.result for one in across))
            return dataclasses.replace(program, rows=(*others, (name, extent))).scheduled(tile)
    return None


def _sizes(program: LoopProgram, across: list[Instruction], hardware: HardwareParams) -> tuple[int, int]:
    """Rows and columns of a tile: its rows of the widest load are some cache lines each, and all of it is near."""
    kinds = {param.name: param.dtype for param in program.params}
    run = LINES * hardware.cache_line_bytes
    columns = hardware.near_cache_bytes // 2 // run
    return min(2 * columns, run // max(size_of(kinds[one.buffer]) for one in across)), columns


def _is_across(one: Instruction, row: str, column: str, near: int) -> bool:
    """Does a load step evenly along both, by one along the row variable and by more than `near` along the columns?"""
    if one.op != "load" or one.args:
        return False
    along, across = (_step(one.offset, name) for name in (row, column))
    return along == 1 and across is not None and not (isinstance(across, int) and abs(across) <= near)


def _step(offset: Size, name: str) -> Size | None:
    """How far `offset` goes with one more of `name`; None where that is not the same everywhere."""
    found = coefficient_of(offset, name)
    if found is None or name in symbols_of(found[0]) or any(s[0] == "%" for s in symbols_of(offset)):
        return None
    return found[0]
