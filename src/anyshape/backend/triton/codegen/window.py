"""Codegen of aligned windows: rows of any length are read and written 16 bytes at a time.

    n1 = 13, 4 elements in 16 bytes; row 1 begins at element 13 of the memory, at byte 52:

    element   12  13  14  15 | 16 ..     .. 23 | 24  25  26  27
    column        0   1   2    3  ..     .. 10   11  12
                [ head     ]   [ body         ]  [ tail ]

The body of a row, whole chunks of 16 bytes, is read and written as such; its lanes need no masks but at its end. The
head and the tail are a part of their own (parts.py), of two chunks, which is read and written element by element. (With
a lane for each thread it would have another layout than the body, which Triton then moves through shared memory.)
"""
from __future__ import annotations

from collections import Counter

from anyshape.backend.triton.codegen.form import GRID, Form
from anyshape.backend.triton.codegen.kernel import COLUMN, ROW, Axes, Printer
from anyshape.backend.triton.codegen.parts import Part, peeled
from anyshape.backend.triton.codegen.sizes import linear
from anyshape.base.errors import VerifyError
from anyshape.ir.types import size_of
from anyshape.kernel.loop_ir.program import LoopProgram, Stage
from anyshape.sym.expr import Size, coefficient_of, symbol, symbols_of

WIDEST = 16  # bytes of an access


def row_start(program: LoopProgram) -> tuple[Size, int] | None:
    """Where most accesses begin a row, in elements over the row variables, and how many elements 16 bytes hold; None
    where rows begin at multiples of 16 bytes anyway, have no columns side by side, or are scanned in order."""
    rows = {name for name, _ in program.rows}
    if len(program.columns) != 1 or not rows or symbols_of(program.columns[0][1]) & rows:
        return None
    stored = {param.name: param.dtype for param in program.params}
    column = program.columns[0][0]
    found: Counter[Size] = Counter()
    items, written = [], set()
    inside = [one for stage in program.stages if stage.level == "column" for one in stage.instructions]
    if any(one.op == "scan" for one in inside):
        return None
    for one in inside:
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
        number = len(self.parts)
        self.parts.append(Part("_e", str(2 * self.chunk), peeled(program, "_e", number)))
        self.buffers |= {one.name: one for one in self.parts[number].program.scratch}

    def whole_columns(self) -> None:
        """Where the whole chunks of the rows lie, and the columns that all column stages share."""
        start, shift = self.size(self.start), self.chunk.bit_length() - 1
        # shifts round down: what a row of a concatenation reads may begin, as it were, before the memory
        self.put(f"window = ({start} + {self.chunk - 1} >> {shift}) * {self.chunk}")
        self.put(f"head = window - {start}")
        self.put(f"body = ({self.size(self.total)} - head) // {self.chunk} * {self.chunk}")
        super().whole_columns()

    def tile_columns(self, first: str) -> None:
        """See `Printer`; `lane` counts from the start of the window."""
        part, chunk = self.part, self.chunk
        lane = f"lane{part.suffix}"
        if part is self.parts[-1]:
            self.put(f"{lane} = {self.lanes(part.width)}.to(INDEX)")
            self.put(f"{part.column} = tl.where({lane} < {chunk}, {lane}, {lane} + (head + body - {chunk}))")
            self.put(f"{part.mask} = ({part.column} < {self.size(self.total)})"
                     f" & (({lane} >= {chunk}) | ({lane} < head))")
        else:
            self.put(f"{lane} = " + (f"{first} + " if first else "") + f"{self.lanes(part.width)}.to(INDEX)")
            self.put(f"{part.column} = head + {lane}")
            self.put(f"{part.mask} = {lane} < body")
        self.columns = COLUMN | ROW
        self.split(part.column, "", part.program.columns, self.columns)

    def lanes_of_a_row(self) -> str:
        """See `Printer`."""
        return "body"

    def instructions(self, stage: Stage) -> None:
        """See `Printer`: of programs side by side one has the ends of a row."""
        if self.form.columns != GRID or self.part is not self.parts[-1]:
            super().instructions(stage)
            return
        self.put("if first == 0:")
        self.depth += 1
        super().instructions(stage)
        self.depth -= 1

    def place(self, buffer: str, offset: Size, axes: Axes, spread: Axes) -> str:
        """See `Printer`: an access along the window begins at a multiple of 16 bytes, which Triton sees."""
        if self.in_column and self.part is not self.parts[-1] and buffer in self.stored and \
                offset - symbol(self.part.program.columns[0][0]) == self.start:
            return f"{buffer} + (window + lane{self.part.suffix})"
        return super().place(buffer, offset, axes, spread)
