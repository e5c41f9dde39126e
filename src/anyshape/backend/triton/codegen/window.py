"""Codegen of aligned windows: rows of any length are read and written 16 bytes at a time.

    n1 = 13, 4 elements in 16 bytes; row 1 begins at element 13 of the memory, at byte 52:

    element   12  13  14  15 | 16 ..     .. 23 | 24  25  26  27
    column        0   1   2    3  ..     .. 10   11  12
              [ some lanes   ] [ whole chunks ] [ some lanes   ]

The lanes of a tile begin at the last multiple of 16 bytes before the row. Each chunk of 16 bytes that holds an element
of the row is loaded whole (it cannot reach into another page), and what is not the row's is dropped. Chunks that are
the row's as a whole are stored as such, the two at its ends element by element.
"""
from __future__ import annotations

from collections import Counter

from anyshape.backend.triton.codegen.form import Form
from anyshape.backend.triton.codegen.kernel import COLUMN, ROW, Printer
from anyshape.backend.triton.codegen.scalars import cast, constant
from anyshape.backend.triton.codegen.sizes import linear
from anyshape.base.errors import VerifyError
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.program import Instruction, LoopProgram
from anyshape.sym.expr import Size, coefficient_of, product, symbol, symbols_of

WIDEST = 16  # bytes of an access


def row_start(program: LoopProgram) -> tuple[Size, int] | None:
    """Where most accesses begin a row, in elements over the row variables, and how many elements 16 bytes hold; None
    where rows begin at multiples of 16 bytes anyway, or have no columns side by side."""
    rows = {name for name, _ in program.rows}
    if len(program.columns) != 1 or not rows or symbols_of(program.columns[0][1]) & rows:
        return None
    stored = {param.name: param.dtype for param in program.params}
    column = program.columns[0][0]
    found: Counter[Size] = Counter()
    items, written = [], set()
    for one in (one for stage in program.stages if stage.level == "column" for one in stage.instructions):
        step = coefficient_of(one.offset, column) if one.buffer in stored else None
        if one.op not in ("load", "store") or step is None or step[0] != 1 or any(
                name[0] == "%" for name in symbols_of(step[1])):
            continue
        if symbols_of(step[1]) & rows:
            at = linear(step[1], program.rows, "row")
            found[at] += 1
            items.append(size_of(stored[one.buffer]))
            if one.op == "store":
                written.add(at)
    if not found:
        return None
    chunk = WIDEST // min(items)
    start = max(found, key=lambda at: (found[at], at in written))
    if isinstance(start, int) or chunk < 2 or all(factor % chunk == 0 for _, factor in start.terms):
        return None
    return start, chunk


class WindowPrinter(Printer):
    """The work on a function over aligned windows."""

    def __init__(self, program: LoopProgram, form: Form) -> None:
        super().__init__(program, form)
        found = row_start(program)
        if found is None or form.strip or form.points or form.scratch:
            raise VerifyError("rows have no aligned windows", do="report this as a bug of the compiler")
        self.start, self.chunk = found

    def end(self) -> Size:
        """Lanes that a row may need."""
        return product(extent for _, extent in self.program.columns) + (self.chunk - 1)

    def tile_columns(self, first: str) -> None:
        """See `Printer`; `lane` counts from the start of the window."""
        total, chunk = self.size(self.total), self.chunk
        self.put("lane = " + (f"{first} + " if first else "") + f"{self.lanes('C')}.to(INDEX)")
        first_of_row = self.size(self.start)
        if not isinstance(self.start, int) and any(factor < 0 for _, factor in self.start.terms):
            # Triton divides towards 0: what a row of a concatenation reads may begin, as it were, before the memory
            self.put(f"first_of_row = {first_of_row}")
            first_of_row = f"(first_of_row - tl.where(first_of_row < 0, {chunk - 1}, 0))"
        self.put(f"window = {first_of_row} // {chunk} * {chunk}")
        self.put(f"shift = {self.size(self.start)} - window")
        self.put("column = lane - shift")
        self.put(f"cmask = (column >= 0) & (column < {total})")
        self.put(f"chunk = lane // {chunk} * {chunk} - shift")
        self.put(f"some_of_chunk = (chunk + {chunk} > 0) & (chunk < {total})")
        self.put(f"whole_chunk = (chunk >= 0) & (chunk + {chunk} <= {total})")
        self.columns = COLUMN | ROW
        self.split("column", "", self.program.columns, self.columns)

    def _is_window(self, one: Instruction) -> bool:
        """Does the access go along the window?"""
        column = symbol(self.program.columns[0][0])
        return (self.in_column and not one.args[one.op == "store":] and one.buffer in self.stored
                and linear(one.offset - column, self.program.rows, "row") == self.start)

    def _load(self, one: Instruction) -> None:
        if not self._is_window(one) or self.is_loaded(one):
            super()._load(one)
            return
        stored = self.stored[one.buffer]
        other = constant(one.value, stored)
        text = f"tl.load({one.buffer} + (window + lane), mask=rmask & some_of_chunk, other={other})"
        self.let(one, cast(f"tl.where(cmask, {text}, {other})", stored, one.dtype), ROW | COLUMN)
        self.remember(one)

    def _store(self, one: Instruction) -> None:
        if not self._is_window(one):
            super()._store(one)
            return
        place, value = f"{one.buffer} + (window + lane)", f"r{one.args[0]}"
        self.put(f"tl.store({place}, {value}, mask=rmask & whole_chunk)")
        self.put(f"tl.store({place}, {value}, mask=rmask & cmask & (whole_chunk == 0))")
