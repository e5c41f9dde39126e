"""Codegen of split reductions: the rows of a part run one after another, and `fold` combines over them.

    split_reduction (i3: 32)                  i3 = pid
      columns (i2: 512)                       fold8 = tl.full([R, C], 0.0, tl.float32)
        fold p4[i2 + 512*i3] r8 with add -->  for begin in range(first_row, last_row, R):
                                                  fold8 = fold8 + r8
                                              fold8 = tl.reduce(fold8, 0, _add, keep_dims=True)
                                              tl.store(p4 + i2 + 512*i3, fold8, mask=cmask)

What is folded is kept in registers where a tile has all columns, or programs along the columns have a tile each. It
lies in memory, combined into at each block of rows, where the columns are gone through.
"""
from __future__ import annotations

from anyshape.backend.triton.codegen.form import GRID, LOOP, Form
from anyshape.backend.triton.codegen.kernel import COLUMN, NONE, ROW, Printer
from anyshape.backend.triton.codegen.scalars import TYPES, cast, combine, identity, reducer
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.directives import SplitReduction
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import product


class FoldPrinter(Printer):
    """The work on a function of a program with a split reduction."""

    def __init__(self, program: LoopProgram, form: Form, split: SplitReduction) -> None:
        super().__init__(program, form)
        self.split_reduction = split
        self.folds = [one for stage in program.stages for one in stage.instructions if one.op == "fold"]
        if form.strip or form.points or form.scratch:
            raise VerifyError("a split reduction takes its rows as they come",
                              do="report this as a bug of the compiler")

    def body(self) -> None:
        """The rows of a part."""
        axis, parts = self.split_reduction.axis, self.divisor(self.split_reduction.parts)
        total = self.size(product(extent for _, extent in self.program.rows))
        if self.form.columns == GRID:
            self.put(f"tiles = tl.cdiv({self.size(self.total)}, C)")
            self.put("first = pid % tiles * C")
        self.put(f"{axis} = pid // tiles" if self.form.columns == GRID else f"{axis} = pid")
        self.axes[axis] = NONE
        self.put(f"first_row = {total} * {axis} // {parts}")
        self.put(f"last_row = {total} * ({axis} + 1) // {parts}")
        self.whole_columns()
        self._begin()
        self.put("for begin in range(first_row, last_row, R):")
        self.depth += 1
        if self.form.columns == LOOP and self.folds:
            self.put("tl.debug_barrier()")
        self.put(f"row = begin + {self.lanes('R')}")
        self.put("rmask = row < last_row")
        self.axes["row"] = ROW
        self.split("row", "", self.program.rows, ROW)
        self.stages()
        self.depth -= 1
        if self.form.columns != LOOP:
            self.in_column = True
            for one in self.folds:
                name = f"fold{one.args[0]}"
                self.put(f"{name} = tl.reduce({name}, 0, {reducer(one.combine, one.dtype)}, keep_dims=True)")
                self.store(one.buffer, self.offset(one.offset), name, COLUMN)

    def _begin(self) -> None:
        """What the folds start with, in registers or in memory."""
        if self.form.columns != LOOP:
            for one in self.folds:
                self.put(f"fold{one.args[0]} = tl.full([R, C], {identity(one.combine, one.dtype)}, {TYPES[one.dtype]})")
            return
        self.put(f"for start in range(0, {self.size(self.total)}, C):")
        self.depth += 1
        self.tile_columns("start")
        self.in_column = True
        for one in self.folds:
            self.store(one.buffer, self.offset(one.offset), identity(one.combine, one.dtype), COLUMN)
        self.in_column = False
        self.depth -= 1

    def _fold(self, one: Instruction) -> None:
        value = f"tl.broadcast_to(r{one.args[0]}, [R, C])"
        value = f"tl.where(rmask & cmask, {value}, {identity(one.combine, one.dtype)})"
        if self.form.columns != LOOP:
            name = f"fold{one.args[0]}"
            self.put(f"{name} = {combine(one.combine, name, value, one.dtype)}")
            return
        value = f"tl.reduce({value}, 0, {reducer(one.combine, one.dtype)}, keep_dims=True)"
        offset, stored = self.offset(one.offset), self.stored[one.buffer]
        place = self.place(one.buffer, offset, self.axes_of(offset), COLUMN)
        before = cast(f"tl.load({place}, mask=cmask, other=0)", stored, one.dtype)
        self.store(one.buffer, offset, combine(one.combine, before, value, one.dtype), COLUMN)
