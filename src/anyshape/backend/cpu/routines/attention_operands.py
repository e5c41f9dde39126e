"""What attention's products by the library and by panels share, in the native subset: operands, and rows of scores.

The rows' own work is backend/cpu/microkernels/softmax_rows.py. `data` is what backend/cpu/routines/attention.py makes
for a step.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import MASK, PRODUCTS, SUMS, AttentionStep, CallBlock, Functions
from anyshape.backend.cpu.native.records import Struct, call_void, fill_zero, i64, minimum
from anyshape.backend.cpu.routines.blas_gemm import address, entry_of


class AttentionWork(Struct):
    """What the threads of a step share: tiles of rows of each head, and how many of these, or of the heads of keys,
    there are in all."""

    functions: Functions
    block: CallBlock
    step: AttentionStep
    items: i64
    tiles: i64


def operand(data: AttentionWork, which: int, batch: int, head: int, row: int) -> int:
    """The address of a row of an operand; 0 where it is left out."""
    at = data.step.operands[which]
    if at.place.slot < 0:
        return 0
    return address(data.block, at.place) + batch * at.batch + head * at.head + row * at.row


def row_step(data: AttentionWork, which: int) -> int:
    """Bytes from row to row of an operand."""
    return data.step.operands[which].row


def visible(step: AttentionStep, end: int) -> int:
    """How many columns the rows before `end` see."""
    return minimum(end, step.columns) if step.causal != 0 \
        else step.columns


def weigh(data: AttentionWork, batch: int, head: int, first: int, rows: int, scores: int, gradients: int,
          factors: int) -> int:
    """The rows' own work on a tile of scores, and of their gradients in the backward; `factors` as weigh has it."""
    step = data.step
    causal = step.causal
    seen = visible(step, first + rows)
    limit = first + 1 if causal != 0 else seen
    scale = step.scale
    function = entry_of(data.functions, step.weigh)[0]
    mask = operand(data, MASK, batch, head, first)
    sums = operand(data, SUMS, batch, head, first)
    if step.backward == 0:
        call_void(function, scores, step.step, rows, seen, limit, causal, scale, mask,
                  row_step(data, MASK), sums, row_step(data, SUMS), factors)
    else:
        call_void(function, scores, step.step, rows, seen, limit, causal, scale, mask,
                  row_step(data, MASK), sums, row_step(data, SUMS), gradients,
                  operand(data, PRODUCTS, batch, head, first), row_step(data, PRODUCTS))
    return 0


def clear_rows(data: AttentionWork, which: int, place: int, rows: int) -> int:
    """Zeros in some rows of a result."""
    step = data.step
    for _ in range(rows):
        fill_zero(place, step.depth * step.item)
        place += row_step(data, which)
    return 0
