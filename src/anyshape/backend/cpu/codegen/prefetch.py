"""Software prefetch: a kernel asks for the next row while it works on this one.

A kernel of several stages reads a row from memory in its first, and from the cache in the others: so memory rests while
these compute. The second stage asks, with every vector of its own, for the same place of the next row.
"""
from __future__ import annotations

from anyshape.backend.cpu.codegen.memory_access import BufferAccess, Space
from anyshape.backend.cpu.llvm.ir_builder import Value, constant
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.directives import SplitReduction
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import Size, coefficient_of, product, substitute, symbol, symbols_of

LINE = 64  # bytes
ROW = 512 << 10  # bytes: what is asked for of a longer row is gone before it is read
ALL = 1 << 20  # bytes: less may well be near as it is


def ahead(program: LoopProgram) -> tuple[int, tuple[tuple[str, Size], ...]]:
    """The number of the stage that asks, and what for: buffers, and offsets in the next row. No stage is -1."""
    inside = [k for k, stage in enumerate(program.stages) if stage.level == "column"]
    if len(inside) < 2 or not program.rows or not program.columns or program.directive(SplitReduction):
        return -1, ()
    row, column = program.rows[-1][0], program.columns[-1][0]
    roles = {param.name: param.role for param in program.params}
    if program.vector != column or any(symbols_of(extent) - set(program.sizes) for _, extent in program.columns):
        return -1, ()
    found = {(one.buffer, substitute(one.offset, {row: symbol(row) + 1}))
             for one in program.stages[inside[0]].instructions if _is_read(one, row, column)
             and roles.get(one.buffer) == "in"}
    return (inside[1], tuple(sorted(found, key=str))) if found else (-1, ())


def _is_read(one: Instruction, row: str, column: str) -> bool:
    """A load of consecutive elements, of others in another row?"""
    if one.op != "load" or any(name[0] == "%" for name in symbols_of(one.offset)) or row not in symbols_of(one.offset):
        return False
    along = coefficient_of(one.offset, column)
    return along is not None and along[0] == 1


def is_worth(program: LoopProgram, wanted: tuple[tuple[str, Size], ...], space: Space) -> Value | None:
    """The scalar bool whether to ask at these sizes; None where nothing is wanted."""
    if not wanted:
        return None
    code = space.code
    kinds = {param.name: param.dtype for param in program.params}
    one = sum(size_of(kinds[name]) for name, _ in wanted) * product(extent for _, extent in program.columns)
    every = space.size(one * product(extent for _, extent in program.rows))
    return code.binary("and", code.compare("sle", space.size(one), constant("i64", ROW)),
                       code.compare("sge", every, constant("i64", ALL)))


def ask(space: Space, buffers: dict[str, BufferAccess], wanted: tuple[tuple[str, Size], ...],
        worth: Value | None) -> None:
    """Ask for what lies at the lanes that the space stands at, where it is worth it."""
    if not wanted or worth is None:
        return
    space.code.open_if(worth)
    for name, offset in wanted:
        fetch(space, buffers[name], offset)
    space.code.close_section()


def fetch(space: Space, buffer: BufferAccess, offset: Size) -> None:
    """Ask for the lines of as many consecutive elements as the space has lanes."""
    code = space.code
    first = code.address(buffer.pointer, buffer.stored, space.size(offset))
    for begin in range(0, space.lanes * size_of(buffer.dtype), LINE):
        code.prefetch(code.address(first, "i8", constant("i64", begin)))
