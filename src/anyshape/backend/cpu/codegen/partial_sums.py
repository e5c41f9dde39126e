"""Code for split (partial) reductions over rows: folds over the rows of a part, as loads and stores of a row buffer
that stays in the cache.

    fold p1[i2*n1 + i1] r0 with add      -->      r7 = load t[i1];  r8 = add r7, r0;  store t[i1] r8

After every few rows the row buffer is combined into its place in the part's result and starts anew: sums of many rows
are sums of sums, so that rounding stays small.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from anyshape.backend.cpu.codegen.reduction import identity
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Scratch, Stage
from anyshape.sym.expr import Size, maximum, symbol

TURN = 16  # rows between two times


@dataclass(frozen=True, slots=True)
class Folds:
    """program: without folds. start: a column stage, once before a part's rows; turn: one after every TURN rows."""

    program: LoopProgram
    start: Stage
    turn: Stage


def lower_split_reduction(program: LoopProgram) -> Folds:
    """The program with row buffers for its folds."""
    place: Size = 0
    count: Size = 1
    for name, extent in program.columns:
        place = place * extent + symbol(name)
        count = count * extent
    scratch = list(program.scratch)
    start: list[Instruction] = []
    turn: list[Instruction] = []
    stages: list[Stage] = []
    free = 1 + max((one.result for stage in program.stages for one in stage.instructions), default=0)
    for stage in program.stages:
        body: list[Instruction] = []
        for one in stage.instructions:
            if one.op != "fold":
                body.append(one)
                continue
            name, op, dtype = f"fold {len(scratch)}", one.combine, one.dtype
            scratch.append(Scratch(name, dtype, maximum(1, count)))
            body += [Instruction(free, "load", (), dtype, name, place),
                     Instruction(free + 1, op, (free, one.args[0]), dtype),
                     Instruction(-1, "store", (free + 1,), dtype, name, place)]
            nothing = Instruction(free + 2, "constant", (), dtype, value=identity(op, dtype))
            empty = Instruction(-1, "store", (free + 2,), dtype, name, place)
            start += [nothing, empty, Instruction(-1, "store", (free + 2,), dtype, one.buffer, one.offset)]
            turn += [Instruction(free + 3, "load", (), dtype, name, place),
                     Instruction(free + 4, "load", (), dtype, one.buffer, one.offset),
                     Instruction(free + 5, op, (free + 4, free + 3), dtype),
                     Instruction(-1, "store", (free + 5,), dtype, one.buffer, one.offset), nothing, empty]
            free += 6
        stages.append(Stage(stage.level, tuple(body), stage.where))
    return Folds(dataclasses.replace(program, stages=tuple(stages), scratch=tuple(scratch)),
                 Stage("column", tuple(start)), Stage("column", tuple(turn)))
