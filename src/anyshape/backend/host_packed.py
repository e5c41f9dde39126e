"""Products of bf16 and f16 matrices of the host, in the native subset: tiles, panels, blocks of the inner dim.

    for each tile of the result, of all batches, shared out among threads:
        for each block of k:  pack the columns of A, pack the rows of B; for each pair of panels: multiply
        after the last block of k: round into the result

In the terms of the words, which are a column-major library's: `columns` run along M, where the result is contiguous;
`rows` along N. The routines are those of backend/llvm_packed.py. Scratch of a thread: panels of rows, panels of
columns, sums (of one pair of panels, or of the whole tile where there are several blocks of k).
"""
from __future__ import annotations

from anyshape.backend.host_library import address, copy_run
from anyshape.backend.host_words import (
    FUNCTIONS,
    GOMP_PARALLEL,
    HEAD_SCRATCH,
    HEAD_SCRATCH_AT,
    MATMUL_A,
    MATMUL_ALPHA,
    MATMUL_B,
    MATMUL_BATCHES,
    MATMUL_BIAS,
    MATMUL_BIAS_COLUMN,
    MATMUL_BIAS_ROW,
    MATMUL_C,
    MATMUL_DIMS,
    MATMUL_FUNCTION,
    MATMUL_ITEM,
    MATMUL_K,
    MATMUL_LDC,
    MATMUL_M,
    MATMUL_N,
    MATMUL_RANK,
    PACKED_A_INNER,
    PACKED_A_ITEM,
    PACKED_A_LANE,
    PACKED_ALONG,
    PACKED_ANY,
    PACKED_B_INNER,
    PACKED_B_ITEM,
    PACKED_B_LANE,
    PACKED_C_ITEM,
    PACKED_CHUNK,
    PACKED_COLUMNS,
    PACKED_FINISH,
    PACKED_GRAIN,
    PACKED_LANES,
    PACKED_PAD,
    PACKED_PER_WORD,
    PACKED_ROWS,
    PACKED_TURN,
    PACKED_WIDE,
    PACKED_WORDS,
    PARALLEL_FLOPS,
    PROGRAM,
    TEAM_SIZE,
    TEMP,
    THREAD_NUMBER,
    THREADS,
    TILES_PER_THREAD,
)
from anyshape.backend.native import call, call_void, maximum, minimum, set_word, word, words


def run_packed(block: int, step: int) -> int:
    """A batch of products, shared out by tiles."""
    batches = word(step, MATMUL_BATCHES)
    columns = word(step, MATMUL_M)
    rows = word(step, MATMUL_N)
    if batches <= 0 or columns <= 0 or rows <= 0:
        return 0
    functions = word(block, FUNCTIONS)
    tile_columns = word(step, PACKED_COLUMNS)
    tile_rows = word(step, PACKED_ROWS)
    wide = 2 * word(step, PACKED_LANES)
    high = 3 * word(step, PACKED_GRAIN)
    threads = minimum(word(block, THREADS), columns * rows * word(step, MATMUL_K) * batches // PARALLEL_FLOPS)
    if word(functions, GOMP_PARALLEL) == 0:
        threads = 1
    if threads > 1:
        wanted = TILES_PER_THREAD * threads
        while parts(columns, tile_columns) * parts(rows, tile_rows) * batches < wanted and tile_columns > 2 * wide:
            tile_columns = parts(tile_columns, 2 * wide) * wide
        while parts(columns, tile_columns) * parts(rows, tile_rows) * batches < wanted and tile_rows > 2 * high:
            tile_rows = parts(tile_rows, 2 * high) * high
    across = parts(columns, tile_columns)
    down = parts(rows, tile_rows)
    data = words(7)
    set_word(data, 0, functions)
    set_word(data, 1, block)
    set_word(data, 2, step)
    set_word(data, 3, parts(parts(columns, across), wide) * wide)
    set_word(data, 4, parts(parts(rows, down), high) * high)
    set_word(data, 5, across)
    set_word(data, 6, down)
    if threads < 2:
        packed_range(data, 0, batches * across * down, 0)
        return 0
    call_void(word(functions, GOMP_PARALLEL), packed_part, data, threads, 0)
    return 0


def parts(size: int, part: int) -> int:
    """How many parts of a size there are; the last may be smaller."""
    return (size + part - 1) // part


def packed_part(data: int) -> int:
    """One thread's share of the tiles."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    team = call(word(functions, TEAM_SIZE)) & 4294967295
    tiles = word(word(data, 2), MATMUL_BATCHES) * word(data, 5) * word(data, 6)
    packed_range(data, tiles * number // team, tiles * (number + 1) // team, number)
    return 0


def packed_range(data: int, begin: int, end: int, thread: int) -> int:
    """The tiles begin..end-1: all rows of some columns, then of the next ones, so that columns are packed once where
    one block of k is all."""
    block = word(data, 1)
    step = word(data, 2)
    program = word(block, PROGRAM)
    scratch = word(block, TEMP) + word(program, HEAD_SCRATCH_AT) + thread * word(program, HEAD_SCRATCH)
    down = word(data, 6)
    one_block = word(step, MATMUL_K) <= word(step, PACKED_WORDS) * word(step, PACKED_PER_WORD)
    packed = -1
    for index in range(begin, end):
        column = index // down
        ready = one_block if column == packed else 0
        packed_tile(data, column, index % down, scratch, ready)
        packed = column
    return 0


def packed_tile(data: int, column: int, row: int, scratch: int, ready: int) -> int:
    """One tile of the result: number `column` of all columns of all batches. `ready`: its columns are packed."""
    block = word(data, 1)
    step = word(data, 2)
    batch = column // word(data, 5)
    first_column = column % word(data, 5) * word(data, 3)
    columns = minimum(word(data, 3), word(step, MATMUL_M) - first_column)
    first_row = row * word(data, 4)
    rows = minimum(word(data, 4), word(step, MATMUL_N) - first_row)
    if columns <= 0 or rows <= 0:
        return 0
    a = address(block, step + 8 * MATMUL_A) + batch_place(step, batch, 1) + first_column * word(step, PACKED_A_LANE)
    b = address(block, step + 8 * MATMUL_B) + batch_place(step, batch, 2) + first_row * word(step, PACKED_B_LANE)
    item = word(step, MATMUL_ITEM)
    c_item = word(step, PACKED_C_ITEM)
    c_step = word(step, MATMUL_LDC) * c_item
    c = address(block, step + 8 * MATMUL_C) + batch_place(step, batch, 3) + first_row * c_step + first_column * c_item
    frame = words(12)
    set_word(frame, 0, word(data, 0) + 8 * word(step, MATMUL_FUNCTION))
    set_word(frame, 1, step)
    set_word(frame, 2, columns)
    set_word(frame, 3, rows)
    set_word(frame, 4, c)
    set_word(frame, 5, c_step)
    if word(step, MATMUL_BIAS) >= 0:
        bias = address(block, step + 8 * MATMUL_BIAS) + batch_place(step, batch, 4)
        bias += first_row * word(step, MATMUL_BIAS_ROW) + first_column * word(step, MATMUL_BIAS_COLUMN)
        set_word(frame, 6, bias)
        set_word(frame, 7, word(step, MATMUL_BIAS_ROW))
        if word(step, MATMUL_BIAS_COLUMN) != item:
            for i in range(rows):
                copy_run(c + i * c_step, bias + i * word(step, MATMUL_BIAS_ROW), columns, item,
                         word(step, MATMUL_BIAS_COLUMN), item)
            set_word(frame, 6, c)
            set_word(frame, 7, c_step)
    deep = word(step, PACKED_WORDS)
    set_word(frame, 8, scratch)
    set_word(frame, 9, scratch + 4 * word(step, PACKED_ROWS) * deep
             + PACKED_PAD * parts(word(step, PACKED_ROWS), 3 * word(step, PACKED_GRAIN)))
    set_word(frame, 10, word(frame, 9) + 4 * word(step, PACKED_COLUMNS) * deep
             + PACKED_PAD * parts(word(step, PACKED_COLUMNS), 2 * word(step, PACKED_LANES)))
    inner = word(step, MATMUL_K)
    deep = deep * word(step, PACKED_PER_WORD)
    blocks = maximum(parts(inner, deep), 1)
    set_word(frame, 11, blocks)
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    for part in range(blocks):
        first = part * deep
        count = minimum(deep, inner - first)
        if ready == 0:
            pack(frame, a + first * word(step, PACKED_A_INNER), word(step, PACKED_A_ITEM), word(step, PACKED_A_LANE),
                 word(step, PACKED_A_INNER), columns, count, word(frame, 9), 2 * lanes, lanes)
        pack(frame, b + first * word(step, PACKED_B_INNER), word(step, PACKED_B_ITEM), word(step, PACKED_B_LANE),
             word(step, PACKED_B_INNER), rows, count, word(frame, 8), 3 * grain, grain)
        multiply_panels(frame, parts(count, word(step, PACKED_PER_WORD)), part)
    return 0


def batch_place(step: int, index: int, which: int) -> int:
    """Bytes from the first matrix of A, B, C, bias (`which`: 1, 2, 3, 4) to that of batch `index`."""
    place = 0
    rank = word(step, MATMUL_RANK)
    for back in range(rank):
        dim = step + 8 * (MATMUL_DIMS + 5 * (rank - 1 - back))
        place += index % word(dim, 0) * word(dim, which)
        index = index // word(dim, 0)
    return place


def pack(frame: int, source: int, item: int, lane_step: int, inner_step: int, size: int, count: int, target: int,
         top: int, grain: int) -> int:
    """Packs `size` lanes by `count` elements along k into panels of `top` lanes, the last of a multiple of `grain`."""
    step = word(frame, 1)
    lanes = word(step, PACKED_LANES)
    way = PACKED_ANY
    if inner_step == item:
        way = PACKED_TURN
    elif lane_step == item:
        way = PACKED_ALONG
    if item != word(step, MATMUL_ITEM):
        way += PACKED_WIDE
    function = word(word(frame, 0), way)
    room = parts(parts(count, word(step, PACKED_PER_WORD)), lanes) * lanes
    chunk = PACKED_CHUNK if lane_step == item and inner_step != item else maximum(count, 1)
    part = 0
    while part < maximum(count, 1):
        words_before = part // word(step, PACKED_PER_WORD)
        panel = target
        first = 0
        while first < size:
            width = minimum(top, parts(size - first, grain) * grain)
            end = minimum(first + width, size)
            lane = first
            while lane < end:
                call_void(function, source + lane * lane_step, lane_step, inner_step, minimum(lanes, end - lane),
                          minimum(chunk, count - part), panel + 4 * (lane - first) + 4 * width * words_before,
                          4 * width)
                lane += lanes
            panel += 4 * width * room + PACKED_PAD
            first += width
        source += chunk * inner_step
        part += chunk
    return 0


def multiply_panels(frame: int, count: int, part: int) -> int:
    """Every panel of columns with every panel of rows, over `count` words; block `part` of those of k."""
    entry = word(frame, 0)
    step = word(frame, 1)
    columns = word(frame, 2)
    rows = word(frame, 3)
    blocks = word(frame, 11)
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    room = parts(count, lanes) * lanes
    item = word(step, MATMUL_ITEM)
    c_item = word(step, PACKED_C_ITEM)
    finish = word(entry, PACKED_FINISH)
    if c_item != item:
        finish = word(entry, PACKED_FINISH + PACKED_WIDE)
    sums = word(frame, 10)
    sums_step = 8 * lanes
    if blocks > 1:
        sums_step = 4 * word(step, PACKED_COLUMNS)
    column = 0
    column_panel = word(frame, 9)
    while column < columns:
        width = minimum(2 * lanes, parts(columns - column, lanes) * lanes)
        row = 0
        row_panel = word(frame, 8)
        while row < rows:
            thirds = minimum(3, parts(rows - row, grain))
            here = sums
            if blocks > 1:
                here = sums + row * sums_step + 4 * column
            call_void(word(entry, 2 * (3 - thirds) + width // lanes - 1), column_panel, row_panel, count, here,
                      sums_step, 1 if part > 0 else 0)
            if part == blocks - 1:
                addend = word(frame, 6)
                if addend != 0:
                    addend += row * word(frame, 7) + column * item
                call_void(finish, here, sums_step,
                          word(frame, 4) + row * word(frame, 5) + column * c_item, word(frame, 5),
                          minimum(rows - row, thirds * grain), minimum(columns - column, width), addend,
                          word(frame, 7), step + 8 * MATMUL_ALPHA)
            row_panel += 4 * thirds * grain * room + PACKED_PAD
            row += thirds * grain
        column_panel += 4 * width * room + PACKED_PAD
        column += width
    return 0


PACKED_ROUTINES = (run_packed, parts, packed_part, packed_range, packed_tile, batch_place, pack, multiply_panels)
