"""Attention in f32 and f64, in the native subset: tiles and heads whose products are the library's.

Products of up to `COUNT` rows in all are those of backend/cpu/microkernels/gemv.py.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ATTENTION_COLUMNS,
    ATTENTION_DEPTH,
    ATTENTION_DOT,
    ATTENTION_ITEM,
    ATTENTION_ONE,
    ATTENTION_PRODUCT,
    ATTENTION_ROWS,
    ATTENTION_SHARE,
    ATTENTION_SPREAD,
    ATTENTION_STEP,
    ATTENTION_TILE,
    ATTENTION_ZERO,
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
)
from anyshape.backend.cpu.native.compiler import call_void, maximum, minimum, set_word, word, words
from anyshape.backend.cpu.routines.attention_operands import clear_rows, operand, row_step, visible, weigh


def attention_tile(data: int, batch: int, head: int, tile: int, scratch: int) -> int:
    """Some rows of one head's result."""
    step = word(data, 2)
    first = tile * word(step, ATTENTION_TILE)
    rows = minimum(word(step, ATTENTION_TILE), word(step, ATTENTION_ROWS) - first)
    depth = word(step, ATTENTION_DEPTH)
    seen = visible(step, first + rows)
    group = head // word(step, ATTENTION_SHARE)
    scores = word(step, ATTENTION_STEP)
    query = operand(data, QUERY, batch, head, first)
    key = operand(data, KEY, batch, group, 0)
    value = operand(data, VALUE, batch, group, 0)
    result = operand(data, RESULT, batch, head, first)
    few = word(step, ATTENTION_DOT)
    if seen > 0 and few != 0:
        few_rows(data, few, rows, key, row_step(data, KEY), depth, seen, query, row_step(data, QUERY), scratch, scores)
    elif seen > 0:
        product(data, 1, seen, rows, depth, key, row_step(data, KEY), query, row_step(data, QUERY),
                ATTENTION_ZERO, scratch, scores)
    weigh(data, batch, head, first, rows, scratch, 0, 0)
    if seen == 0:
        clear_rows(data, RESULT, result, rows)
    elif few != 0:
        few_rows(data, word(step, ATTENTION_SPREAD), rows, value, row_step(data, VALUE), seen, depth, scratch, scores,
                 result, row_step(data, RESULT))
    else:
        product(data, 0, depth, rows, seen, value, row_step(data, VALUE), scratch, scores,
                ATTENTION_ZERO, result, row_step(data, RESULT))
    return 0


def attention_head(data: int, batch: int, group: int, tiles: int, scratch: int) -> int:
    """The gradients of one head of keys and values, and of the queries that it serves."""
    step = word(data, 2)
    share = word(step, ATTENTION_SHARE)
    columns = word(step, ATTENTION_COLUMNS)
    depth = word(step, ATTENTION_DEPTH)
    scores = word(step, ATTENTION_STEP)
    gradients = scratch + word(step, ATTENTION_TILE) * scores
    key = operand(data, KEY, batch, group, 0)
    value = operand(data, VALUE, batch, group, 0)
    dkey = operand(data, DKEY, batch, group, 0)
    dvalue = operand(data, DVALUE, batch, group, 0)
    key_step = row_step(data, KEY)
    value_step = row_step(data, VALUE)
    beta = ATTENTION_ZERO
    reached = 0
    for member in range(share):
        head = group * share + member
        for back in range(tiles):
            first = (tiles - 1 - back) * word(step, ATTENTION_TILE)
            rows = minimum(word(step, ATTENTION_TILE), word(step, ATTENTION_ROWS) - first)
            seen = visible(step, first + rows)
            query = operand(data, QUERY, batch, head, first)
            change = operand(data, GRADIENT, batch, head, first)
            dquery = operand(data, DQUERY, batch, head, first)
            if seen == 0:
                clear_rows(data, DQUERY, dquery, rows)
                continue
            product(data, 1, seen, rows, depth, key, key_step, query, row_step(data, QUERY),
                    ATTENTION_ZERO, scratch, scores)
            product(data, 1, seen, rows, depth, value, value_step, change, row_step(data, GRADIENT),
                    ATTENTION_ZERO, gradients, scores)
            weigh(data, batch, head, first, rows, scratch, gradients, 0)
            product(data, 0, depth, rows, seen, key, key_step, gradients, scores,
                    ATTENTION_ZERO, dquery, row_step(data, DQUERY))
            product(data, 2, depth, seen, rows, query, row_step(data, QUERY), gradients, scores,
                    beta, dkey, row_step(data, DKEY))
            product(data, 2, depth, seen, rows, change, row_step(data, GRADIENT), scratch, scores,
                    beta, dvalue, row_step(data, DVALUE))
            beta = ATTENTION_ONE
            reached = maximum(reached, seen)
    clear_rows(data, DKEY, dkey + reached * row_step(data, DKEY), columns - reached)
    clear_rows(data, DVALUE, dvalue + reached * row_step(data, DVALUE), columns - reached)
    return 0


def product(data: int, turns: int, m: int, n: int, k: int, a: int, a_step: int, b: int, b_step: int,
            beta: int, c: int, c_step: int) -> int:
    """c = a @ b + beta * c in the terms of a column-major library; beta: the number of a word. turns: 0, 1 (a is
    transposed) or 2 (b is)."""
    step = word(data, 2)
    item = word(step, ATTENTION_ITEM)
    sizes = words(8)
    set_word(sizes, 0, TURNED if turns == 1 else PLAIN)
    set_word(sizes, 1, TURNED if turns == 2 else PLAIN)
    set_word(sizes, 2, m)
    set_word(sizes, 3, n)
    set_word(sizes, 4, k)
    set_word(sizes, 5, a_step // item)
    set_word(sizes, 6, b_step // item)
    set_word(sizes, 7, c_step // item)
    call_void(word(word(data, 0), word(step, ATTENTION_PRODUCT)), sizes, sizes + 8, sizes + 16, sizes + 24, sizes + 32,
              step + 8 * ATTENTION_ONE, a, sizes + 40, b, sizes + 48, step + 8 * beta, c, sizes + 56, 1, 1)
    return 0


def few_rows(data: int, entry: int, rows: int, matrix: int, matrix_step: int, inner: int, end: int, vectors: int,
             vectors_step: int, result: int, result_step: int) -> int:
    """result = vectors times a matrix, by the routine `entry`."""
    step = word(data, 2)
    item = word(step, ATTENTION_ITEM)
    places = words(16)
    for i in range(8):
        row = minimum(i, rows - 1)
        set_word(places, i, vectors + row * vectors_step)
        set_word(places, 8 + i, result + row * result_step)
    scalars = words(2)
    set_word(scalars, 0, word(step, ATTENTION_ONE))
    call_void(word(word(data, 0), entry), matrix, matrix_step, inner, 0, end, places, item, item, scalars)
    return 0


BLAS_ROUTINES = (attention_tile, attention_head, product, few_rows)
