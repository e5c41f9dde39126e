"""Vector widths and scratch, settled before a kernel is printed: its vector widths, its bytes of scratch, and how much
work a row is."""
from __future__ import annotations

from anyshape.backend.cpu.llvm.scalar_ops import weight_of
from anyshape.backend.cpu.machine.target import Machine
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import Interchange, Interleave, SplitReduction, Tile
from anyshape.kernel.loop_ir.program import LoopProgram, Stage
from anyshape.sym.expr import Size, ceildiv, product, substitute

LIGHT = 8  # operations at a point of a copy, or of little more
SHORT = 16  # columns of a short row


def work_of(program: LoopProgram) -> Size:
    """Estimated operations per row."""
    first = {name: 0 for name, _ in program.rows}  # where columns depend on the row, the first has the most
    columns = product(substitute(extent, first) for _, extent in program.columns)
    total: Size = 1
    for stage in program.stages:
        weight = sum(weight_of(one.op) for one in stage.instructions)
        total = total + (weight * columns if stage.level == "column" else weight)
    return total


class VectorLayout:
    """Vector widths and scratch offsets of a kernel."""

    def __init__(self, program: LoopProgram, target: Machine, block: int) -> None:
        self.columns = program.columns
        self.interchanged = program.directive(Interchange) is not None
        self.columns_are_lanes = self.interchanged or bool(
            program.vector and program.columns and program.columns[-1][0] == program.vector)
        self.rows_are_lanes = bool(program.vector and not self.columns_are_lanes)
        self.basic = self._basic(program, target)
        self.interleaved = program.directive(Interleave) is not None
        self.tiled = program.directive(Tile) is not None
        self.light = self._is_light(program)
        self.short_rows = self._are_short(program)
        self.wide = {k: self.width(stage) for k, stage in enumerate(program.stages)}
        self.strip = min(self.wide.values(), default=self.basic) if self.rows_are_lanes else 0
        self.block = block or self.strip or 1  # values of the last row variable in a row block
        self.scratch_offsets: dict[str, Size] = {}
        end: Size = 0
        for row_buffer in program.scratch:
            self.scratch_offsets[row_buffer.name] = end
            size = row_buffer.count * size_of(row_buffer.dtype) * (self.strip or 1)
            end = end + ceildiv(size, 64) * 64
        self.scratch_bytes = end

    def _are_short(self, program: LoopProgram) -> bool:
        """Do rows do so little that going from one to the next takes its share?"""
        extent = program.columns[-1][1] if len(program.columns) == 1 and self.columns_are_lanes else None
        few = isinstance(extent, int) and extent <= SHORT
        plain = not (self.interchanged or self.tiled or program.directive(SplitReduction) or program.scratch)
        every = {one.op for stage in program.stages for one in stage.instructions}
        plain = plain and not every & {"reduce", "scan", "fold"}
        return plain and bool(program.rows) and (
            self.interleaved or (len(program.rows) > 1 and (few or self.light)))

    def _is_light(self, program: LoopProgram) -> bool:
        """Do rows along the columns do so little at a point that the start and end of a loop take their share? A
        copy of heads of 32 numbers takes 0.6 times as long when its rows are emitted for that."""
        every = [one for stage in program.stages for one in stage.instructions]
        plain = self.columns_are_lanes and not (self.interchanged or self.tiled or self.interleaved or program.scratch
                                                or program.directive(SplitReduction))
        return plain and not {one.op for one in every} & {"reduce", "scan", "fold", "scatter"} and sum(
            weight_of(one.op) for one in every) <= LIGHT

    @staticmethod
    def _basic(program: LoopProgram, target: Machine) -> int:
        floats = {one.dtype for stage in program.stages for one in stage.instructions if one.dtype in ("f32", "f64")}
        return max(target.lanes // 2, 2) if floats == {"f64"} else target.lanes

    def width(self, stage: Stage) -> int:
        """Several vectors at once for small bodies: their additions do not wait for each other."""
        weight = sum(weight_of(one.op) for one in stage.instructions)
        eights = sum(one.dtype in ("i64", "f64") for one in stage.instructions if one.op not in ("constant", "index"))
        weight += 2 * eights
        if self.tiled:
            return 2 * self.basic  # the columns of a tile are few
        if self.interleaved:
            return self.basic  # of which there are several beside each other
        if not self.rows_are_lanes and not self.interchanged and any(one.op == "scatter" for one in stage.instructions):
            return self.basic  # lanes that may meet are written out one by one
        wide = self.basic * (4 if weight <= 12 else 2 if weight <= 128 else 1)
        extent = self.columns[-1][1] if self.columns_are_lanes and not self.interchanged else 0
        if isinstance(extent, int) and 4 <= extent < self.basic and not any(one.op in ("reduce", "scan", "fold")
                                                               for one in stage.instructions):
            wide = min(wide, 1 << (extent.bit_length() - 1))  # else no step is whole
        return wide
