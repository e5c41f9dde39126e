"""Attention of the host, in the native subset: some rows of scores at a time, in a thread's scratch.

    forward, for each tile of rows of each head:
        scores = q @ k^T; weigh; result = scores @ v
    backward, for each head of keys, for each tile of rows, the last one first, which sees the most keys:
        scores = q @ k^T; dscores = dresult @ v^T; unweigh
        dq = dscores @ k; dk += dscores^T @ q; dv += scores^T @ dresult

Here is how a step is shared out among threads. Products are those of attention_blas.py, in half precision of
attention_packed.py; the rows' own work is backend/cpu/microkernels/softmax_rows.py, which also scales scores and their
gradients. The words are in format.py. After Dao and others, FlashAttention (2022), with whole rows of scores in place
of blocks: a tile has fewer rows where the rows are long.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ATTENTION_BACKWARD,
    ATTENTION_BATCH,
    ATTENTION_COLUMNS,
    ATTENTION_DEPTH,
    ATTENTION_GROUPS,
    ATTENTION_LANES,
    ATTENTION_ROWS,
    ATTENTION_SHARE,
    ATTENTION_TILE,
    FUNCTIONS,
    GOMP_PARALLEL,
    HEAD_SCRATCH,
    PARALLEL_FLOPS,
    PROGRAM,
    SCRATCH,
    TEAM_SIZE,
    THREAD_NUMBER,
    THREADS,
)
from anyshape.backend.cpu.native.compiler import call, minimum, set_word, word, words
from anyshape.backend.cpu.routines.attention_blas import BLAS_ROUTINES, attention_head, attention_tile
from anyshape.backend.cpu.routines.attention_operands import ROW_ROUTINES
from anyshape.backend.cpu.routines.attention_packed import HALF_ROUTINES, half_head, half_tile
from anyshape.backend.cpu.routines.threads import fork


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
    fork(block, attention_part, data, threads)
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
    scratch = word(block, SCRATCH) + thread * word(program, HEAD_SCRATCH)
    tiles = word(data, 4)
    groups = word(step, ATTENTION_GROUPS)
    heads = groups * word(step, ATTENTION_SHARE)
    half = word(step, ATTENTION_LANES)
    packed = -1  # of which heads, counted through all batches, the panels of keys and values are in the scratch
    for index in range(begin, end):
        if word(step, ATTENTION_BACKWARD) != 0:
            if half != 0:
                half_head(data, index // groups, index % groups, tiles, scratch)
            else:
                attention_head(data, index // groups, index % groups, tiles, scratch)
        else:
            head = index // tiles
            if half != 0:
                keys = head // word(step, ATTENTION_SHARE)
                half_tile(data, head // heads, head % heads, index % tiles, scratch, 1 if keys != packed else 0)
                packed = keys
            else:
                attention_tile(data, head // heads, head % heads, index % tiles, scratch)
    return 0


ATTENTION_ROUTINES = (run_attention, attention_part, attention_range, *ROW_ROUTINES, *BLAS_ROUTINES, *HALF_ROUTINES)
