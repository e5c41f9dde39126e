"""Attention of the host, in the native subset: some rows of scores at a time, in a thread's scratch.

    forward, for each tile of rows of each head:
        scores = scale * q @ k^T; weigh; result = scores @ v
    backward, for each head of keys, for each tile of rows, the last one first, which sees the most keys:
        scores = scale * q @ k^T; dscores = dresult @ v^T; unweigh
        dq = scale * dscores @ k; dk += scale * dscores^T @ q; dv += scores^T @ dresult

Products are the library's; of up to `COUNT` rows in all, those of backend/llvm_thin.py. The rows' own work is
backend/llvm_attention.py. The words are in host_words.py. After Dao and others, FlashAttention (2022), with whole rows
of scores in place of blocks: a tile has fewer rows where the rows are long.
"""
from __future__ import annotations

from anyshape.backend.host_library import address
from anyshape.backend.host_words import (
    ATTENTION_BACKWARD,
    ATTENTION_BATCH,
    ATTENTION_CAUSAL,
    ATTENTION_COLUMNS,
    ATTENTION_DEPTH,
    ATTENTION_DOT,
    ATTENTION_GROUPS,
    ATTENTION_ITEM,
    ATTENTION_ONE,
    ATTENTION_OPERANDS,
    ATTENTION_PRODUCT,
    ATTENTION_ROWS,
    ATTENTION_SCALE,
    ATTENTION_SHARE,
    ATTENTION_SPREAD,
    ATTENTION_STEP,
    ATTENTION_TILE,
    ATTENTION_WEIGH,
    ATTENTION_ZERO,
    DKEY,
    DQUERY,
    DVALUE,
    FUNCTIONS,
    GOMP_PARALLEL,
    GRADIENT,
    HEAD_SCRATCH,
    HEAD_SCRATCH_AT,
    KEY,
    MASK,
    PARALLEL_FLOPS,
    PLAIN,
    PRODUCTS,
    PROGRAM,
    QUERY,
    RESULT,
    SUMS,
    TEAM_SIZE,
    TEMP,
    THREAD_NUMBER,
    THREADS,
    TURNED,
    VALUE,
)
from anyshape.backend.native import call, call_void, fill_zero, maximum, minimum, set_word, word, words


def run_attention(block: int, step: int) -> int:
    """All heads of a batch: tiles of rows are shared out among threads, backwards whole heads of keys."""
    tiles = (word(step, ATTENTION_ROWS) + word(step, ATTENTION_TILE) - 1) // word(step, ATTENTION_TILE)
    heads = word(step, ATTENTION_BATCH) * word(step, ATTENTION_GROUPS)
    items = heads if word(step, ATTENTION_BACKWARD) != 0 else heads * word(step, ATTENTION_SHARE) * tiles
    if items <= 0:
        return 0
    functions = word(block, FUNCTIONS)
    data = words(5)
    set_word(data, 0, functions)
    set_word(data, 1, block)
    set_word(data, 2, step)
    set_word(data, 3, items)
    set_word(data, 4, tiles)
    cost = heads * word(step, ATTENTION_SHARE) * word(step, ATTENTION_ROWS) * word(step, ATTENTION_COLUMNS)
    threads = minimum(minimum(word(block, THREADS), items), 2 * cost * word(step, ATTENTION_DEPTH) // PARALLEL_FLOPS)
    if threads < 2 or word(functions, GOMP_PARALLEL) == 0:
        attention_range(data, 0, items, 0)
        return 0
    call_void(word(functions, GOMP_PARALLEL), attention_part, data, threads, 0)
    return 0


def attention_part(data: int) -> int:
    """One thread's share."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    team = call(word(functions, TEAM_SIZE)) & 4294967295
    items = word(data, 3)
    attention_range(data, items * number // team, items * (number + 1) // team, number)
    return 0


def attention_range(data: int, begin: int, end: int, thread: int) -> int:
    """The tiles, or heads of keys, begin..end-1."""
    block = word(data, 1)
    step = word(data, 2)
    program = word(block, PROGRAM)
    scratch = word(block, TEMP) + word(program, HEAD_SCRATCH_AT) + thread * word(program, HEAD_SCRATCH)
    tiles = word(data, 4)
    groups = word(step, ATTENTION_GROUPS)
    heads = groups * word(step, ATTENTION_SHARE)
    for index in range(begin, end):
        if word(step, ATTENTION_BACKWARD) != 0:
            attention_head(data, index // groups, index % groups, tiles, scratch)
        else:
            head = index // tiles
            attention_tile(data, head // heads, head % heads, index % tiles, scratch)
    return 0


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


def product(data: int, turns: int, m: int, n: int, k: int, alpha: int, a: int, a_step: int, b: int, b_step: int,
            beta: int, c: int, c_step: int) -> int:
    """c = alpha * a @ b + beta * c in the terms of a column-major library; alpha and beta: numbers of words. turns: 0,
    1 (a is transposed) or 2 (b is)."""
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
              step + 8 * alpha, a, sizes + 40, b, sizes + 48, step + 8 * beta, c, sizes + 56, 1, 1)
    return 0


def few_rows(data: int, entry: int, rows: int, matrix: int, matrix_step: int, inner: int, end: int, vectors: int,
             vectors_step: int, result: int, result_step: int, alpha: int) -> int:
    """result = alpha * vectors times a matrix, by the routine `entry`."""
    step = word(data, 2)
    item = word(step, ATTENTION_ITEM)
    places = words(16)
    for i in range(8):
        row = minimum(i, rows - 1)
        set_word(places, i, vectors + row * vectors_step)
        set_word(places, 8 + i, result + row * result_step)
    scalars = words(2)
    set_word(scalars, 0, word(step, alpha))
    call_void(word(word(data, 0), entry), matrix, matrix_step, inner, 0, end, places, item, item, scalars)
    return 0


def weigh(data: int, batch: int, head: int, first: int, rows: int, scores: int, gradients: int) -> int:
    """The rows' own work on a tile of scores, and of their gradients in the backward."""
    step = word(data, 2)
    causal = word(step, ATTENTION_CAUSAL)
    seen = visible(step, first + rows)
    limit = first + 1 if causal != 0 else seen
    function = word(word(data, 0), word(step, ATTENTION_WEIGH))
    mask = operand(data, MASK, batch, head, first)
    sums = operand(data, SUMS, batch, head, first)
    if word(step, ATTENTION_BACKWARD) == 0:
        call_void(function, scores, word(step, ATTENTION_STEP), rows, seen, limit, causal, mask, row_step(data, MASK),
                  sums, row_step(data, SUMS))
    else:
        call_void(function, scores, word(step, ATTENTION_STEP), rows, seen, limit, causal, mask, row_step(data, MASK),
                  sums, row_step(data, SUMS), gradients, operand(data, PRODUCTS, batch, head, first),
                  row_step(data, PRODUCTS))
    return 0


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
        few_rows(data, few, rows, key, row_step(data, KEY), depth, seen, query, row_step(data, QUERY), scratch, scores,
                 ATTENTION_SCALE)
    elif seen > 0:
        product(data, 1, seen, rows, depth, ATTENTION_SCALE, key, row_step(data, KEY), query, row_step(data, QUERY),
                ATTENTION_ZERO, scratch, scores)
    weigh(data, batch, head, first, rows, scratch, 0)
    if seen == 0:
        clear_rows(data, RESULT, result, rows)
    elif few != 0:
        few_rows(data, word(step, ATTENTION_SPREAD), rows, value, row_step(data, VALUE), seen, depth, scratch, scores,
                 result, row_step(data, RESULT), ATTENTION_ONE)
    else:
        product(data, 0, depth, rows, seen, ATTENTION_ONE, value, row_step(data, VALUE), scratch, scores,
                ATTENTION_ZERO, result, row_step(data, RESULT))
    return 0


def clear_rows(data: int, which: int, place: int, rows: int) -> int:
    """Zeros in some rows of a result."""
    step = word(data, 2)
    for _ in range(rows):
        fill_zero(place, word(step, ATTENTION_DEPTH) * word(step, ATTENTION_ITEM))
        place += row_step(data, which)
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
            product(data, 1, seen, rows, depth, ATTENTION_SCALE, key, key_step, query, row_step(data, QUERY),
                    ATTENTION_ZERO, scratch, scores)
            product(data, 1, seen, rows, depth, ATTENTION_ONE, value, value_step, change, row_step(data, GRADIENT),
                    ATTENTION_ZERO, gradients, scores)
            weigh(data, batch, head, first, rows, scratch, gradients)
            product(data, 0, depth, rows, seen, ATTENTION_SCALE, key, key_step, gradients, scores,
                    ATTENTION_ZERO, dquery, row_step(data, DQUERY))
            product(data, 2, depth, seen, rows, ATTENTION_SCALE, query, row_step(data, QUERY), gradients, scores,
                    beta, dkey, row_step(data, DKEY))
            product(data, 2, depth, seen, rows, ATTENTION_ONE, change, row_step(data, GRADIENT), scratch, scores,
                    beta, dvalue, row_step(data, DVALUE))
            beta = ATTENTION_ONE
            reached = maximum(reached, seen)
    clear_rows(data, DKEY, dkey + reached * row_step(data, DKEY), columns - reached)
    clear_rows(data, DVALUE, dvalue + reached * row_step(data, DVALUE), columns - reached)
    return 0


ATTENTION_ROUTINES = (run_attention, attention_part, attention_range, operand, row_step, visible, product, few_rows,
                      weigh, attention_tile, clear_rows, attention_head)
