"""Codegen of scatters by destination: programs share the columns out by where they scatter to, and so run in parallel
without atomics; what meets in one element is combined by one program, in the order of the columns.

    columns (i0: n0)                        for start in range(0, n0, C):
      r0: i64 = load p1[i0]                     key = 512 * (the indices of C columns)
      r1: f32 = load p2[512*i0 + i1]  -->       mine = hash(key) == bucket
      scatter p0[512*%0 + i1] r1 with add       for left in range(tl.sum(mine)):
                                                    i0 = the first of mine
                                                    p0[512*r0 + i1] += p2[512*i0 + i1]

Each program reads all indices, many at a time, and does the columns whose destination falls into its bucket. A sum is
the same at every run, as on the CPU.
"""
from __future__ import annotations

import re

from anyshape.backend.triton.codegen.form import Form
from anyshape.backend.triton.codegen.kernel import NONE, Printer
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.def_use import needed, used, varying
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import Size, substitute, symbols_of

EFFECTS = ("store", "scatter", "fold", "check", "reduce", "scan")


def destination(program: LoopProgram) -> Size | None:
    """The part of the one scatter's offset that does not depend on the row; None where programs cannot share its
    columns out by it: something else is done there, or the offset or the mask needs what differs from row to row."""
    inside = [stage for stage in program.stages if stage.level == "column"]
    effects = [one for stage in program.stages for one in stage.instructions if one.op in EFFECTS]
    rows = {name for name, _ in program.rows}
    if len(inside) != 1 or len(effects) != 1 or effects[0].op != "scatter" or program.scratch:
        return None
    if any(symbols_of(extent) & rows for _, extent in program.columns):
        return None
    uneven = varying([one for stage in program.stages for one in stage.instructions], rows)
    scatter = effects[0]
    if uneven & {*scatter.args[1:], *used(Instruction(-1, "index", offset=scatter.offset))}:
        return None
    key = substitute(scatter.offset, dict.fromkeys(rows, 0))
    return key if any(name[0] == "%" for name in symbols_of(key)) else None


class ScatterPrinter(Printer):
    """The work on a function whose programs have the columns of a bucket each."""

    def __init__(self, program: LoopProgram, form: Form) -> None:
        super().__init__(program, form)
        key = destination(program)
        if key is None:
            raise VerifyError("columns cannot be shared out by where they scatter to",
                              do="report this as a bug of the compiler")
        self.key = key

    def body(self) -> None:
        """A block of rows, and the columns of a bucket."""
        self.put(f"bucket = pid % {self.form.buckets}")
        self.put(f"block = pid // {self.form.buckets}")
        self.tile_rows("block")
        self.stages()

    def columns_of(self, number: int) -> None:
        """The loop over the columns of this bucket; the lines that follow are for one column."""
        stage = self.program.stages[number]
        scatter = next(one for one in stage.instructions if one.op == "scatter")
        first = len(self.lines)
        self.put(f"for start in range(0, {self.size(self.total)}, C):")
        self.depth += 1
        self.tile_columns("start")
        reader = Instruction(-1, "index", scatter.args[1:], offset=self.key)
        for one in needed(stage.instructions, [reader]):
            self.one(one)
        self.put(f"key = {self.size(self.offset(self.key))}")
        mask = "".join(f" & r{register}" for register in scatter.args[1:])
        self.put(f"mine = cmask{mask} & (((key.to(tl.uint32) * 0x9E3779B1) >> 16) % {self.form.buckets} == bucket)")
        self._rename(first)
        self.put("for left in range(tl.sum(mine.to(tl.int32))):")
        self.depth += 1
        self.put(f"column = tl.min(tl.where(mine, all_column, {self.size(self.total)}))")
        self.put("mine = mine & (all_column != column)")
        self.columns = NONE
        self.split("column", "", self.program.columns, NONE)

    def _rename(self, first: int) -> None:
        """The names of what the lines from `first` on define: that of all columns, not of one."""
        mine = ("key", "mine")
        names = {match[1] for line in self.lines[first:] if (match := re.match(r"\s*(\w+) = ", line))} - set(mine)
        pattern = re.compile(r"\b(" + "|".join(sorted(names)) + r")\b")
        self.lines[first:] = [pattern.sub(r"all_\1", line) for line in self.lines[first:]]
