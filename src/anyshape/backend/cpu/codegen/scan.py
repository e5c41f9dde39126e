"""Prefix scans: what there is so far goes from vector to vector in a stack slot (which LLVM turns into a
register).

    lanes of rows:      so far = so far + x;   the result is what there is so far
    lanes of columns:   x0 x1 x2 x3  -->  x0 x01 x12 x23  -->  x0 x01 x012 x0123;   all of them + so far

A linear recurrence h' = a h + b is the same with pairs: (a2, b2) after (a1, b1) is (a1 a2, a2 b1 + b2).
"""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.backend.cpu.codegen.reduction import combine, identity
from anyshape.backend.cpu.llvm.ir_builder import BITS, Code, Value, constant
from anyshape.kernel.loop_ir.program import Instruction


class Scan:
    """One scan instruction of a stage. along: the lanes are columns; else there are `lanes` rows, 0 for scalar code."""

    def __init__(self, code: Code, instruction: Instruction, lanes: int, along: bool) -> None:
        self.code = code
        self.op = instruction.combine
        self.dtype = instruction.dtype
        self.along = along
        self.part = code.target.vector_bytes * 8 // BITS.get(self.dtype, 8) if along else lanes
        linear = self.op == "linear"
        self.starts = (-0.0, 1) if linear else (identity(self.op, self.dtype),)  # -0.0 + b is b
        self.nothing = [constant(self.dtype, one, self.part) for one in self.starts]
        self.slot = code.slot(f"scan {instruction.result} {code.fresh('s')}", self.dtype, self.part)
        code.do(f"store {self.nothing[0].typed}, ptr {self.slot.text}")

    def next(self, operands: Sequence[Value], mask: Value | None, lanes: int) -> Value:
        """The result at the lanes that come next; those that the mask has not are not counted."""
        code = self.code
        operands = [code.spread(one, lanes) for one in operands]
        before = code.load(self.dtype, self.part, self.slot, code.top, False)
        if not self.along:
            result = self._combine([before], operands)[0]
            code.do(f"store {result.typed}, ptr {self.slot.text}")
            return result
        if mask is not None:
            operands = [code.select(mask, one, constant(self.dtype, start, lanes))
                        for one, start in zip(operands, self.starts, strict=True)]
        part = min(self.part, lanes)
        found = []
        for start in range(0, lanes, part):
            line = [one if part == lanes else code.shuffle(one, range(start, start + part)) for one in operands]
            if part < self.part:
                line = [code.shuffle(one, [*range(part), *[part - 1] * (self.part - part)]) for one in line]
            line = self._line(line)
            result = self._combine([before], line)[0]
            found.append(result if part == self.part else code.shuffle(result, range(part)))
            before = self._combine([before], [code.shuffle(one, [part - 1] * self.part) for one in line])[0]
        code.do(f"store {before.typed}, ptr {self.slot.text}")
        return code.concat(found)

    def _line(self, line: list[Value]) -> list[Value]:
        """The scan within one vector."""
        step, lanes = 1, line[0].lanes
        while step < lanes:
            order = [k - step if k >= step else lanes + k for k in range(lanes)]
            moved = [self.code.merge(one, none, order) for one, none in zip(line, self.nothing, strict=True)]
            line = self._combine(moved, line)
            step *= 2
        return line

    def _combine(self, left: Sequence[Value], right: Sequence[Value]) -> list[Value]:
        """What `right` makes of `left`: of a linear recurrence terms, and factors where `left` has them too."""
        if self.op != "linear":
            return [combine(self.code, self.op, left[0], right[0])]
        term, factor = right
        grown = [combine(self.code, "mul", factor, one) for one in left]
        return [combine(self.code, "add", grown[0], term), *grown[1:]]
