"""The recurrence of recurrent layers over time, in the native subset; see ops/recurrence.py.

    for each thread its rows of the batch; for each time: backend/cpu/microkernels/recurrence.py

Rows do not know each other, so threads do not meet before the end. The state of a time is read where it was written as
a result of the time before; rows whose sequence has no such time take theirs along, and their results are cleared when
the next time has been done.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import PARALLEL_FLOPS, CallBlock, Functions, RecurrenceStep
from anyshape.backend.cpu.native.records import Struct, array_at, call_void, copy_bytes, fill_zero, i64, minimum, new
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.threads import parallel_for, share
from anyshape.ir.op import LENGTH


class RecurrenceWork(Struct):
    """What the threads of a step share."""

    functions: Functions
    block: CallBlock
    step: RecurrenceStep


def run_recurrence(block: CallBlock, step: RecurrenceStep) -> int:
    """All rows, over all times; a length that is none is the call's status, and nothing is done."""
    if step.lengths.slot >= 0:
        lengths = array_at(i64, address(block, step.lengths))
        for row in range(step.batch):
            if lengths[row] < 0 or lengths[row] > step.time:
                block.status = LENGTH
                return 0
    data = new(RecurrenceWork)
    data.functions = block.functions
    data.block = block
    data.step = step
    work = step.time * step.batch * step.hidden * step.hidden * step.gates_count
    units = (step.batch + step.height - 1) // step.height
    return parallel_for(block, recurrence_range, data, minimum(minimum(block.threads, units), work // PARALLEL_FLOPS))


def recurrence_range(data: RecurrenceWork, number: int, team: int) -> int:
    """The rows of one thread."""
    step = data.step
    block = data.block
    height = step.height
    units = (step.batch + height - 1) // height
    begin = share(units, number, team) * height
    end = minimum(share(units, number + 1, team) * height, step.batch)
    if begin >= end:
        return 0
    rows = end - begin
    line = step.hidden * 4
    cells = 0
    if step.last_c.slot >= 0:
        cells = address(block, step.last_c) + begin * line
    if step.c.slot >= 0:
        copy_bytes(cells, address(block, step.c) + begin * line, rows * line)
    lengths = 0
    if step.lengths.slot >= 0:
        lengths = address(block, step.lengths) + begin * 8
    last = 0
    before = address(block, step.h) + begin * line
    gates = address(block, step.gates) + begin * step.gates_row
    results = address(block, step.y) + begin * line
    for turn in range(step.time):
        time = turn if step.reverse == 0 else step.time - 1 - turn
        after = results + time * step.batch * line
        if lengths == 0:
            run_rows(data, rows, before, gates + time * step.gates_time, cells, after)
        else:
            run_inside(data, lengths, time, rows, before, gates + time * step.gates_time, cells, after)
            if turn > 0:
                clear_outside(lengths, last, rows, before, line)
        last = time
        before = after
    copy_bytes(address(block, step.last_h) + begin * line, before, rows * line)
    if lengths != 0 and step.time > 0:
        clear_outside(lengths, last, rows, before, line)
    return 0


def run_inside(data: RecurrenceWork, lengths: int, time: int, rows: int, before: int, gates: int, cells: int,
               after: int) -> int:
    """One time of the rows whose sequences have it, as many at once as lie side by side; the others keep their
    state."""
    step = data.step
    line = step.hidden * 4
    ends = array_at(i64, lengths)
    row = 0
    while row < rows:
        first = row
        while row < rows and ends[row] > time:
            row += 1
        if row > first:
            run_rows(data, row - first, before + first * line, gates + first * step.gates_row, cells + first * line,
                     after + first * line)
        first = row
        while row < rows and ends[row] <= time:
            row += 1
        copy_bytes(after + first * line, before + first * line, (row - first) * line)
    return 0


def clear_outside(lengths: int, time: int, rows: int, results: int, line: int) -> int:
    """The results of a time of rows whose sequences do not have it."""
    ends = array_at(i64, lengths)
    for row in range(rows):
        if ends[row] <= time:
            fill_zero(results + row * line, line)
    return 0


def run_rows(data: RecurrenceWork, rows: int, before: int, gates: int, cells: int, after: int) -> int:
    """One time of some rows."""
    step = data.step
    if step.routines == 1:
        call_rows(data, step.function, rows, before, gates, cells, after)
    else:
        line = step.hidden * 4
        reset = cells + step.batch * line
        call_rows(data, step.function, rows, before, gates, cells, reset)
        copy_bytes(after, before, rows * line)
        call_rows(data, step.function + 2, rows, reset, gates, cells, after)
    return 0


def call_rows(data: RecurrenceWork, function: int, rows: int, before: int, gates: int, cells: int, after: int) -> int:
    """A routine for some rows: as many as there are whole groups of, then one by one."""
    step = data.step
    block = data.block
    entries = array_at(i64, data.functions)
    line = step.hidden * 4
    weights = address(block, step.weights)
    bias = address(block, step.bias)
    whole = rows // step.height * step.height
    if whole > 0:
        call_void(entries[function], weights, bias, before, line, gates, step.gates_row, cells, after, line, whole,
                  step.blocks, step.hidden)
    if rows > whole:
        call_void(entries[function + 1], weights, bias, before + whole * line, line,
                  gates + whole * step.gates_row, step.gates_row, cells + whole * line, after + whole * line, line,
                  rows - whole, step.blocks, step.hidden)
    return 0
