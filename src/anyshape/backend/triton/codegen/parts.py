"""Loop peeling of a row's columns: parts of a row that are gone through by tiles of their own.

    columns (i1: n1)                 part ""    columns (i1: n1)             lanes of the width C
      r0: f32 = load p0[i1]     -->               r0: f32 = load p0[i1]
      r1: f32 = reduce add r0                     r1: f32 = reduce add r0
                                     part "_d"  columns (i1_d: n1)           lanes of the width D
                                                  r9: f32 = load p0[i1_d]
                                                  r1: f32 = reduce add r9

Each part does the same instructions, on its own columns and registers; what is reduced is combined over the parts. A
part whose lanes all exist needs no masks. Row buffers are a part's own, so nothing that goes along the columns (a scan)
has parts.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import substitute, symbol


@dataclass(frozen=True, slots=True)
class Part:
    """Some columns of each row.

    suffix: of its names. width: its lanes, as text. program: over names of its own. whole: all its lanes exist.
    """

    suffix: str
    width: str
    program: LoopProgram
    whole: bool = False

    @property
    def column(self) -> str:
        """The variable of its columns."""
        return f"column{self.suffix}"

    @property
    def mask(self) -> str:
        """The variable that says which of its lanes exist."""
        return f"cmask{self.suffix}"


def peeled(program: LoopProgram, suffix: str, number: int) -> LoopProgram:
    """The program of part `number`, from 1 on: its column stages have names of their own for all but reductions."""
    every = [one for stage in program.stages for one in stage.instructions]
    own = {one.result for stage in program.stages if stage.level == "column" for one in stage.instructions
           if one.op != "reduce"}
    free = number * (1 + max(one.result for one in every))
    registers = {register: register + free for register in own}
    names = {**{name: symbol(name + suffix) for name, _ in program.columns},
             **{f"%{old}": symbol(f"%{new}") for old, new in registers.items()}}
    scratch = {one.name: one.name + suffix for one in program.scratch}

    def renamed(one: Instruction) -> Instruction:
        return dataclasses.replace(
            one, result=registers.get(one.result, one.result), buffer=scratch.get(one.buffer, one.buffer),
            args=tuple(registers.get(arg, arg) for arg in one.args), offset=substitute(one.offset, names))

    return dataclasses.replace(
        program, columns=tuple((name + suffix, extent) for name, extent in program.columns),
        stages=tuple(dataclasses.replace(stage, instructions=tuple(renamed(one) for one in stage.instructions))
                     if stage.level == "column" else stage for stage in program.stages),
        scratch=tuple(dataclasses.replace(one, name=scratch[one.name]) for one in program.scratch))
