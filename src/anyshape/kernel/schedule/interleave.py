"""Interleaved access: a short loop is unrolled inside of a long one, where elements lie one after another along both.

    rows (i4: n0)                                  rows (i4: n0)
      columns (i5: 4) vector i5                    interleave i5 inside of i4
        r0 = load p0[i5*n0 + i4]             -->     columns (i5: 4) vector i5
        store p1[4*i4 + i5] r0                         r0 = load p0[i5*n0 + i4]
                                                       store p1[4*i4 + i5] r0

Vectors along a few columns are nearly empty, and those along the rows are stored element by element. With a vector
along the rows for each of the columns, what is stored (or loaded) is whole vectors, interleaved in registers. (Depth to
space, channels last, the last two dims exchanged.)

A short loop whose extent is a size takes it from the first call: then that is a version for this very size.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from anyshape.kernel.loop_ir.def_use import varying
from anyshape.kernel.loop_ir.directives import Interleave, SplitReduction
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.sym.expr import Size, coefficient_of, evaluate, substitute, symbol, symbols_of

Loop = tuple[str, Size]


def interleaved(program: LoopProgram, hardware: HardwareParams, likely: Mapping[str, int] | None
                ) -> tuple[LoopProgram, tuple[Size, ...]] | None:
    """The program with two of its loops interleaved, and what must be at least 0 for that to be right and worth it;
    None where there are no such loops. likely: the program's sizes in the first call."""
    stages = [stage for stage in program.stages if stage.level == "column"]
    every = [one for stage in program.stages for one in stage.instructions]
    if len(stages) != 1 or len(program.columns) != 1 or program.vector != program.columns[0][0]:
        return None
    if {one.op for one in every} & {"reduce", "scan", "scatter", "fold"} or program.scratch \
            or program.directive(SplitReduction) or symbols_of(program.columns[0][1]) - set(program.sizes):
        return None
    for row in reversed(program.rows):
        for short, long in ((program.columns[0], row), (row, program.columns[0])):
            fixed = _fixed(short, likely, hardware)
            if fixed is not None and _is_worth(every, short, long, program.columns[0][0], hardware):
                return _at(program, fixed).scheduled(Interleave(short[0], long[0])), (
                    *_equal(fixed), substitute(long[1], dict(fixed)) - hardware.vector_lanes // 4)
    return None


def _fixed(short: Loop, likely: Mapping[str, int] | None, hardware: HardwareParams) -> Mapping[str, int] | None:
    """The sizes that the short loop's extent is made of, with their values; None where it is not short."""
    names = symbols_of(short[1])
    if names and (likely is None or not names <= likely.keys()):
        return None
    fixed = {name: likely[name] for name in sorted(names)} if likely is not None else {}
    return fixed if 1 < evaluate(short[1], fixed) <= hardware.vector_lanes else None


def _is_worth(every: list[Instruction], short: Loop, long: Loop, column: str, hardware: HardwareParams) -> bool:
    """Is everything that is loaded or stored along the two loops a vector along the long one, or interleaved, and is
    something interleaved that is not a vector along the columns, or not a near one?"""
    gains, uneven = False, varying(every, {short[0], long[0]})
    for one in every:
        if one.op not in ("load", "store"):
            continue
        if any(name[0] == "%" and int(name[1:]) in uneven for name in symbols_of(one.offset)):
            return False
        along, across = (coefficient_of(one.offset, loop[0]) for loop in (long, short))
        if along is None or across is None:
            return False
        if along[0] == short[1] and across[0] == 1:
            if (one.op == "store" and len(one.args) > 1) or (one.args and one.op == "load" and (
                    one.value != 0 or one.args[0] in uneven)):
                return False
            gains = gains or one.op == "store" or (column == long[0] and not (
                isinstance(short[1], int) and short[1] <= hardware.max_load_stride))
        elif along[0] not in (0, 1) or (one.op == "store" and along[0] == 0):
            return False
    # where nothing lies across, rows as they are are as good
    return gains and any(one.op in ("load", "store") and _step(one, long[0]) == 1 for one in every)


def _step(one: Instruction, name: str) -> Size:
    found = coefficient_of(one.offset, name)
    return found[0] if found is not None else 0


def _at(program: LoopProgram, fixed: Mapping[str, int]) -> LoopProgram:
    """The program at these values of some of its sizes."""
    if not fixed:
        return program

    def put(size: Size) -> Size:
        return substitute(size, dict(fixed))

    return dataclasses.replace(
        program, rows=tuple((name, put(extent)) for name, extent in program.rows),
        columns=tuple((name, put(extent)) for name, extent in program.columns),
        stages=tuple(Stage(stage.level, tuple(dataclasses.replace(one, offset=put(one.offset))
                                              for one in stage.instructions), stage.where)
                     for stage in program.stages))


def _equal(fixed: Mapping[str, int]) -> list[Size]:
    """Sizes that are all at least 0 where the fixed ones have these values."""
    return [size for name, value in fixed.items() for size in (symbol(name) - value, value - symbol(name))]
