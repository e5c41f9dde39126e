"""What attention's products by the library and by panels share, in the native subset: operands, and rows of scores.

The rows' own work is backend/cpu/microkernels/softmax_rows.py. `data` is what backend/cpu/routines/attention.py makes
for a step.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ATTENTION_BACKWARD,
    ATTENTION_CAUSAL,
    ATTENTION_COLUMNS,
    ATTENTION_DEPTH,
    ATTENTION_ITEM,
    ATTENTION_OPERANDS,
    ATTENTION_SCALE,
    ATTENTION_STEP,
    ATTENTION_WEIGH,
    MASK,
    PRODUCTS,
    SUMS,
)
from anyshape.backend.cpu.native.compiler import call_void, fill_zero, minimum, word
from anyshape.backend.cpu.routines.blas_gemm import address


def operand(data: int, which: int, batch: int, head: int, row: int) -> int:
    """The address of a row of an operand; 0 where it is left out."""
    at = word(data, 2) + 8 * (ATTENTION_OPERANDS + 5 * which)
    if word(at, 0) < 0:
        return 0
    return address(word(data, 1), at) + batch * word(at, 2) + head * word(at, 3) + row * word(at, 4)


def row_step(data: int, which: int) -> int:
    """Bytes from row to row of an operand."""
    return word(word(data, 2), ATTENTION_OPERANDS + 5 * which + 4)


def visible(step: int, end: int) -> int:
    """How many columns the rows before `end` see."""
    return minimum(end, word(step, ATTENTION_COLUMNS)) if word(step, ATTENTION_CAUSAL) != 0 \
        else word(step, ATTENTION_COLUMNS)


def weigh(data: int, batch: int, head: int, first: int, rows: int, scores: int, gradients: int,
          factors: int) -> int:
    """The rows' own work on a tile of scores, and of their gradients in the backward; `factors` as weigh has it."""
    step = word(data, 2)
    causal = word(step, ATTENTION_CAUSAL)
    seen = visible(step, first + rows)
    limit = first + 1 if causal != 0 else seen
    scale = word(step, ATTENTION_SCALE)
    function = word(word(data, 0), word(step, ATTENTION_WEIGH))
    mask = operand(data, MASK, batch, head, first)
    sums = operand(data, SUMS, batch, head, first)
    if word(step, ATTENTION_BACKWARD) == 0:
        call_void(function, scores, word(step, ATTENTION_STEP), rows, seen, limit, causal, scale, mask,
                  row_step(data, MASK), sums, row_step(data, SUMS), factors)
    else:
        call_void(function, scores, word(step, ATTENTION_STEP), rows, seen, limit, causal, scale, mask,
                  row_step(data, MASK), sums, row_step(data, SUMS), gradients,
                  operand(data, PRODUCTS, batch, head, first), row_step(data, PRODUCTS))
    return 0


def clear_rows(data: int, which: int, place: int, rows: int) -> int:
    """Zeros in some rows of a result."""
    step = word(data, 2)
    for _ in range(rows):
        fill_zero(place, word(step, ATTENTION_DEPTH) * word(step, ATTENTION_ITEM))
        place += row_step(data, which)
    return 0


ROW_ROUTINES = (operand, row_step, visible, weigh, clear_rows)
