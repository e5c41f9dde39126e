"""Attention in f32 and f64, in the native subset: tiles and heads whose products are the library's.

Products of up to `COUNT` rows in all are those of backend/cpu/microkernels/gemv.py.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    DKEY,
    DQUERY,
    DVALUE,
    GRADIENT,
    KEY,
    PLAIN,
    QUERY,
    RESULT,
    TURNED,
    VALUE,
    AttentionStep,
)
from anyshape.backend.cpu.native.records import Struct, call_void, i64, maximum, minimum, new, words
from anyshape.backend.cpu.routines.attention_operands import (
    AttentionWork,
    clear_rows,
    operand,
    row_step,
    visible,
    weigh,
)
from anyshape.backend.cpu.routines.blas_gemm import entry_of


class Sizes(Struct):
    """What the library is told of a product, by address."""

    transpose_a: i64
    transpose_b: i64
    m: i64
    n: i64
    k: i64
    lda: i64
    ldb: i64
    ldc: i64


def attention_tile(data: AttentionWork, batch: int, head: int, tile: int, scratch: int) -> int:
    """Some rows of one head's result."""
    step = data.step
    first = tile * step.tile
    rows = minimum(step.tile, step.rows - first)
    depth = step.depth
    seen = visible(step, first + rows)
    group = head // step.share
    scores = step.step
    query = operand(data, QUERY, batch, head, first)
    key = operand(data, KEY, batch, group, 0)
    value = operand(data, VALUE, batch, group, 0)
    result = operand(data, RESULT, batch, head, first)
    few = step.dot
    if seen > 0 and few != 0:
        few_rows(data, few, rows, key, row_step(data, KEY), depth, seen, query, row_step(data, QUERY), scratch, scores)
    elif seen > 0:
        product(data, 1, seen, rows, depth, key, row_step(data, KEY), query, row_step(data, QUERY),
                step + AttentionStep.zero, scratch, scores)
    weigh(data, batch, head, first, rows, scratch, 0, 0)
    if seen == 0:
        clear_rows(data, RESULT, result, rows)
    elif few != 0:
        few_rows(data, step.spread, rows, value, row_step(data, VALUE), seen, depth, scratch, scores,
                 result, row_step(data, RESULT))
    else:
        product(data, 0, depth, rows, seen, value, row_step(data, VALUE), scratch, scores,
                step + AttentionStep.zero, result, row_step(data, RESULT))
    return 0


def attention_head(data: AttentionWork, batch: int, group: int, tiles: int, scratch: int) -> int:
    """The gradients of one head of keys and values, and of the queries that it serves."""
    step = data.step
    share = step.share
    columns = step.columns
    depth = step.depth
    scores = step.step
    gradients = scratch + step.tile * scores
    key = operand(data, KEY, batch, group, 0)
    value = operand(data, VALUE, batch, group, 0)
    dkey = operand(data, DKEY, batch, group, 0)
    dvalue = operand(data, DVALUE, batch, group, 0)
    key_step = row_step(data, KEY)
    value_step = row_step(data, VALUE)
    beta = step + AttentionStep.zero
    reached = 0
    for member in range(share):
        head = group * share + member
        for back in range(tiles):
            first = (tiles - 1 - back) * step.tile
            rows = minimum(step.tile, step.rows - first)
            seen = visible(step, first + rows)
            query = operand(data, QUERY, batch, head, first)
            change = operand(data, GRADIENT, batch, head, first)
            dquery = operand(data, DQUERY, batch, head, first)
            if seen == 0:
                clear_rows(data, DQUERY, dquery, rows)
                continue
            product(data, 1, seen, rows, depth, key, key_step, query, row_step(data, QUERY),
                    step + AttentionStep.zero, scratch, scores)
            product(data, 1, seen, rows, depth, value, value_step, change, row_step(data, GRADIENT),
                    step + AttentionStep.zero, gradients, scores)
            weigh(data, batch, head, first, rows, scratch, gradients, 0)
            product(data, 0, depth, rows, seen, key, key_step, gradients, scores,
                    step + AttentionStep.zero, dquery, row_step(data, DQUERY))
            product(data, 2, depth, seen, rows, query, row_step(data, QUERY), gradients, scores,
                    beta, dkey, row_step(data, DKEY))
            product(data, 2, depth, seen, rows, change, row_step(data, GRADIENT), scratch, scores,
                    beta, dvalue, row_step(data, DVALUE))
            beta = step + AttentionStep.one
            reached = maximum(reached, seen)
    clear_rows(data, DKEY, dkey + reached * row_step(data, DKEY), columns - reached)
    clear_rows(data, DVALUE, dvalue + reached * row_step(data, DVALUE), columns - reached)
    return 0


def product(data: AttentionWork, turns: int, m: int, n: int, k: int, a: int, a_step: int, b: int, b_step: int,
            beta: int, c: int, c_step: int) -> int:
    """c = a @ b + beta * c in the terms of a column-major library; `beta`: its address. turns: 0, 1 (a is
    transposed) or 2 (b is)."""
    step = data.step
    item = step.item
    sizes = new(Sizes)
    sizes.transpose_a = TURNED if turns == 1 else PLAIN
    sizes.transpose_b = TURNED if turns == 2 else PLAIN
    sizes.m = m
    sizes.n = n
    sizes.k = k
    sizes.lda = a_step // item
    sizes.ldb = b_step // item
    sizes.ldc = c_step // item
    call_void(entry_of(data.functions, step.product)[0], sizes + Sizes.transpose_a, sizes + Sizes.transpose_b,
              sizes + Sizes.m, sizes + Sizes.n, sizes + Sizes.k, step + AttentionStep.one, a, sizes + Sizes.lda, b,
              sizes + Sizes.ldb, beta, c, sizes + Sizes.ldc, 1, 1)
    return 0


def few_rows(data: AttentionWork, entry: int, rows: int, matrix: int, matrix_step: int, inner: int, end: int,
             vectors: int, vectors_step: int, result: int, result_step: int) -> int:
    """result = vectors times a matrix, by the routine `entry`."""
    step = data.step
    item = step.item
    places = words(16)
    for i in range(8):
        row = minimum(i, rows - 1)
        places[i] = vectors + row * vectors_step
        places[8 + i] = result + row * result_step
    scalars = words(2)
    scalars[0] = step.one
    call_void(entry_of(data.functions, entry)[0], matrix, matrix_step, inner, 0, end, places, item, item, scalars)
    return 0
