"""Prefix scans: scans: what there is so far goes from vector to vector in a stack slot (which LLVM turns into a
register).

    lanes of rows:      so far = so far + x;   the result is what there is so far
    lanes of columns:   x0 x1 x2 x3  -->  x0 x01 x12 x23  -->  x0 x01 x012 x0123;   all of them + so far
"""
from __future__ import annotations

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
        self.nothing = constant(self.dtype, identity(self.op, self.dtype), self.part)
        self.slot = code.slot(f"scan {instruction.result} {code.fresh('s')}", self.dtype, self.part)
        code.do(f"store {self.nothing.typed}, ptr {self.slot.text}")

    def next(self, value: Value, mask: Value | None, lanes: int) -> Value:
        """The result at the lanes that come next; those that the mask has not are not counted."""
        code = self.code
        value = code.spread(value, lanes)
        before = code.load(self.dtype, self.part, self.slot, code.top, False)
        if not self.along:
            result = combine(code, self.op, before, value)
            code.do(f"store {result.typed}, ptr {self.slot.text}")
            return result
        if mask is not None:
            value = code.select(mask, value, constant(self.dtype, identity(self.op, self.dtype), lanes))
        part = min(self.part, lanes)
        found = []
        for start in range(0, lanes, part):
            line = value if part == lanes else code.shuffle(value, range(start, start + part))
            if part < self.part:
                line = code.shuffle(line, [*range(part), *[part - 1] * (self.part - part)])
            line = self._line(line)
            result = combine(code, self.op, before, line)
            found.append(result if part == self.part else code.shuffle(result, range(part)))
            before = combine(code, self.op, before, code.shuffle(line, [part - 1] * self.part))
        code.do(f"store {before.typed}, ptr {self.slot.text}")
        return code.concat(found)

    def _line(self, line: Value) -> Value:
        """The scan within one vector."""
        step = 1
        while step < line.lanes:
            moved = self.code.merge(line, self.nothing, [k - step if k >= step else line.lanes + k
                                                         for k in range(line.lanes)])
            line = combine(self.code, self.op, moved, line)
            step *= 2
        return line
