"""Reductions over the columns of a stage: accumulators in stack slots (which LLVM turns into registers)."""
from __future__ import annotations

from anyshape.backend.cpu.llvm.ir_builder import BITS, FLOATS, Code, Value, constant
from anyshape.backend.cpu.llvm.scalar_ops import float_extreme
from anyshape.kernel.loop_ir.program import Instruction
from anyshape.sym.expr import Size
from anyshape.sym.index_arithmetic import most


def combine(code: Code, op: str, a: Value, b: Value) -> Value:
    """`op` (add, mul, maximum, minimum, and, or) of two values of one type."""
    if a.dtype in FLOATS:
        if op in ("maximum", "minimum"):
            return float_extreme(code, op, a, b)
        return code.binary({"add": "fadd contract", "mul": "fmul"}[op], a, b)
    if a.dtype == "bool":
        return code.binary({"add": "or", "or": "or", "maximum": "or"}.get(op, "and"), a, b)
    if op in ("maximum", "minimum"):
        return code.intrinsic(("u" if a.dtype == "u8" else "s") + op[:3], a, b)
    return code.binary(op, a, b)


def identity(op: str, dtype: str) -> float | int | bool:
    """What combines with x to x."""
    if dtype == "bool":
        return op in ("and", "mul", "minimum")
    if op in ("add", "or"):
        return 0
    if op == "mul":
        return 1
    if op == "and":
        return -1
    if dtype in FLOATS:
        return float("-inf") if op == "maximum" else float("inf")
    low, high = (0, 255) if dtype == "u8" else (-(1 << BITS[dtype] - 1), (1 << BITS[dtype] - 1) - 1)
    return low if op == "maximum" else high


def chunk(step: int, extent: Size) -> int:
    """How far a loop goes, in steps of `step`, between two times that its sums are added to their totals."""
    if step == 1 and 0 <= most(extent) <= 256:
        return 16  # as many chunks as a chunk has elements, or fewer
    return max(step * 64, 256)


class Reduction:
    """One reduce instruction of a stage, with an accumulator for each loop of the stage (`lanes`: their widths).

    Float sums are added up in chunks: `add` fills a partial sum, `flush` moves it to the total.
    """

    def __init__(self, code: Code, instruction: Instruction, lanes: tuple[int, ...]) -> None:
        self.code = code
        self.op = instruction.combine
        self.dtype = instruction.dtype
        self.lanes = lanes
        self.which = 0
        self.is_chunked = self.op == "add" and self.dtype == "f32"
        start = identity(self.op, self.dtype)
        key = f"reduce {instruction.result} {code.fresh('r')}"
        self.totals = [code.slot(f"{key} total {k}", self.dtype, width) for k, width in enumerate(lanes)]
        self.slots = list(self.totals)
        if self.is_chunked:
            self.slots[0] = code.slot(f"{key} partial", self.dtype, lanes[0])
        for slot, width in {s.text: (s, w) for s, w in zip(self.totals + self.slots, lanes * 2, strict=True)}.values():
            code.do(f"store {constant(self.dtype, start, width).typed}, ptr {slot.text}")

    def add(self, value: Value, mask: Value | None) -> None:
        """Combine `value` into the accumulator, in the lanes of `mask`."""
        code = self.code
        width = self.lanes[self.which]
        value = code.spread(value, width)
        if mask is not None and width:
            value = code.select(mask, value, constant(self.dtype, identity(self.op, self.dtype), width))
        self._update(self.slots[self.which], width, value)

    def _update(self, slot: Value, width: int, value: Value) -> None:
        code = self.code
        old = code.load(self.dtype, width, slot, code.top, False)
        code.do(f"store {combine(code, self.op, old, value).typed}, ptr {slot.text}")

    def flush(self, which: int) -> None:
        """Move the partial sum of a finished chunk to the total, if there is one."""
        code = self.code
        if self.slots[which] == self.totals[which]:
            return
        width = self.lanes[which]
        partial = code.load(self.dtype, width, self.slots[which], code.top, False)
        self._update(self.totals[which], width, partial)
        code.do(f"store {constant(self.dtype, 0, width).typed}, ptr {self.slots[which].text}")

    def finish(self, across: bool) -> Value:
        """The reduced register; with `across` the lanes are combined into one scalar."""
        code = self.code
        values = [code.load(self.dtype, width, slot, code.top, False)
                  for slot, width in zip(self.totals, self.lanes, strict=True)]
        result = values[0]
        if len(values) == 2:
            result = combine(code, self.op, self._fold(result, self.lanes[1]), values[1])
        return self._fold(result, 1) if across and result.lanes else result

    def _fold(self, value: Value, lanes: int) -> Value:
        """Combine the halves until `lanes` are left; one lane becomes a scalar."""
        code = self.code
        while value.lanes > lanes:
            half = value.lanes // 2
            low = code.shuffle(value, range(half))
            high = code.shuffle(value, range(half, 2 * half))
            value = combine(code, self.op, low, high)
        return code.element(value, 0) if lanes == 1 else value
