"""The recurrence of recurrent layers over time, in the native subset; see ops/recurrence.py.

    for each thread its rows of the batch; for each time: backend/cpu/microkernels/recurrence.py

Rows do not know each other, so threads do not meet before the end. The state of a time is read where it was written as
a result of the time before.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import PARALLEL_FLOPS, CallBlock, Functions, RecurrenceStep
from anyshape.backend.cpu.native.records import Struct, array_at, call_void, copy_bytes, i64, minimum, new
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.threads import parallel_for, share


class RecurrenceWork(Struct):
    """What the threads of a step share."""

    functions: Functions
    block: CallBlock
    step: RecurrenceStep


def run_recurrence(block: CallBlock, step: RecurrenceStep) -> int:
    """All rows, over all times."""
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
    if step.c.slot >= 0:
        cells = address(block, step.last_c) + begin * line
        copy_bytes(cells, address(block, step.c) + begin * line, rows * line)
    before = address(block, step.h) + begin * line
    gates = address(block, step.gates) + begin * step.gates_row
    results = address(block, step.y) + begin * line
    for turn in range(step.time):
        time = turn if step.reverse == 0 else step.time - 1 - turn
        after = results + time * step.batch * line
        run_rows(data, rows, before, gates + time * step.gates_time, cells, after)
        before = after
    copy_bytes(address(block, step.last_h) + begin * line, before, rows * line)
    return 0


def run_rows(data: RecurrenceWork, rows: int, before: int, gates: int, cells: int, after: int) -> int:
    """One time of some rows: as many as there are whole groups of, then one by one."""
    step = data.step
    block = data.block
    entries = array_at(i64, data.functions)
    line = step.hidden * 4
    weights = address(block, step.weights)
    bias = address(block, step.bias)
    whole = rows // step.height * step.height
    if whole > 0:
        call_void(entries[step.function], weights, bias, before, line, gates, step.gates_row, cells, after, line, whole,
                  step.blocks, step.hidden)
    if rows > whole:
        call_void(entries[step.function + 1], weights, bias, before + whole * line, line,
                  gates + whole * step.gates_row, step.gates_row, cells + whole * line, after + whole * line, line,
                  rows - whole, step.blocks, step.hidden)
    return 0
