"""The recurrence of a quantised LSTM over time, in the native subset; `recurrence_bytes` of ops/recurrence.py.

    for each time: the state of all rows to bytes, then the cells of all rows

The range of the whole state decides how each row is quantised, so that rows cannot go on without each other: one thread
does them.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import ByteRecurrenceStep, CallBlock
from anyshape.backend.cpu.native.records import Struct, array_at, call_void, copy_bytes, i64, new
from anyshape.backend.cpu.routines.blas_gemm import address

QUANTIZE = 2  # its routine stands so many behind that of many rows


class Quantized(Struct):
    """How a state was quantised."""

    scale: i64  # the bits of a float
    zero: i64


def run_byte_recurrence(block: CallBlock, step: ByteRecurrenceStep) -> int:
    """All times."""
    entries = array_at(i64, block.functions)
    found = new(Quantized)
    line = step.hidden * 4
    cells = address(block, step.last_c)
    copy_bytes(cells, address(block, step.c), step.batch * line)
    before = address(block, step.h)
    state = address(block, step.state)
    for turn in range(step.time):
        time = turn if step.reverse == 0 else step.time - 1 - turn
        after = address(block, step.y) + time * step.batch * line
        call_void(entries[step.function + QUANTIZE], before, step.batch, step.hidden, state, step.words * 4, found)
        run_byte_rows(block, step, found, state, address(block, step.gates) + time * step.gates_time, cells, after)
        before = after
    copy_bytes(address(block, step.last_h), before, step.batch * line)
    return 0


def run_byte_rows(block: CallBlock, step: ByteRecurrenceStep, found: Quantized, state: int, gates: int, cells: int,
                  after: int) -> int:
    """One time: as many rows as there are whole groups of, then one by one."""
    entries = array_at(i64, block.functions)
    line = step.hidden * 4
    weights = address(block, step.weights)
    sums = address(block, step.sums)
    scales = address(block, step.scales)
    whole = step.batch // step.height * step.height
    if whole > 0:
        call_void(entries[step.function], weights, sums, scales, state, step.words * 4, gates, step.gates_row, cells,
                  after, line, whole, step.blocks, step.hidden, step.words, found.scale, found.zero)
    if step.batch > whole:
        call_void(entries[step.function + 1], weights, sums, scales, state + whole * step.words * 4, step.words * 4,
                  gates + whole * step.gates_row, step.gates_row, cells + whole * line, after + whole * line, line,
                  step.batch - whole, step.blocks, step.hidden, step.words, found.scale, found.zero)
    return 0
