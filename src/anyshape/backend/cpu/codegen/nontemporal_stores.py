"""Non-temporal (streaming) stores: what a kernel writes of a large result goes past the caches.

An ordinary store reads its line from memory before it writes it: a third of a copy's traffic, and where rows lie apart
all of the waiting. Streamed stores write whole lines, so their addresses must be aligned: what a row has before the
first line that begins in it, and after the last, is stored as ever. Where a result is small, it is left in the caches
for who reads it next.
"""
from __future__ import annotations

from anyshape.backend.cpu.codegen.memory_access import BufferAccess, Space
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram, Stage
from anyshape.sym.expr import coefficient_of, product, substitute, symbols_of

LINE = 64  # bytes

LARGE = 16 << 20  # bytes of results: with what they are made of, more than caches keep


def streamed(program: LoopProgram) -> frozenset[str]:
    """The buffers that may be streamed: only written, one element for every point, as they lie in memory."""
    if not program.vector:
        return frozenset()
    every = [one for stage in program.stages for one in stage.instructions]
    point = "column" if program.columns else "row"
    found = {one.buffer for stage in program.stages if stage.level == point for one in stage.instructions
             if is_along(one, program.vector)}
    found &= {param.name for param in program.params if param.role == "out"}
    return frozenset(found - {one.buffer for one in every if one.op != "store" or not is_along(one, program.vector)})


def is_along(one: Instruction, vector: str) -> bool:
    """Is it a store of consecutive elements, of all of them?"""
    if one.op != "store" or len(one.args) > 1:
        return False
    found = coefficient_of(one.offset, vector)
    return found is not None and found[0] == 1 and not any(name[0] == "%" for name in symbols_of(one.offset))


def is_large(program: LoopProgram, names: frozenset[str], space: Space) -> Value:
    """The scalar bool whether what is written to `names` is streamed."""
    bytes_ = sum(size_of(param.dtype) for param in program.params if param.name in names)
    first = {name: 0 for name, _ in program.rows}  # where columns depend on the row, the first has the most
    points = product(substitute(extent, first) for _, extent in (*program.rows, *program.columns))
    return space.code.compare("sge", space.size(points * bytes_), constant("i64", LARGE))


def past_line(code: Code, buffer: BufferAccess, offset: Value) -> Value:
    """How many elements before that at `offset` its line begins."""
    address = code.convert("ptrtoint", code.address(buffer.pointer, buffer.stored, offset), "i64")
    bytes_ = code.binary("and", address, constant("i64", LINE - 1))
    return code.binary("lshr", bytes_, constant("i64", size_of(buffer.dtype).bit_length() - 1))


def first_stored(stage: Stage, names: frozenset[str]) -> Instruction | None:
    """The store whose lines a stage keeps to; None where sums would depend on where they are in memory."""
    if any(one.op in ("reduce", "scan") for one in stage.instructions):
        return None
    return next((one for one in stage.instructions if one.op == "store" and one.buffer in names), None)
