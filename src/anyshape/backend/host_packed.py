"""Products of the host from packed panels, in the native subset: tiles, panels, blocks of the inner dim.

    for some columns of the result, and some rows, shared out among threads:
        for each block of k:
            pack the columns of A
            for each tile of rows: pack the rows of B; for each pair of panels: multiply

In the terms of the words, which are a column-major library's: `columns` run along M, where the result is contiguous;
`rows` along N. The routines are those of backend/llvm_packed.py. Sums of f32 lie in the result from the first block on,
on top of the addend, which is there already or is copied there, tile by tile.
In half precision they are rounded once, so that all blocks of a tile follow each other. Scratch of a thread: panels of
rows, panels of columns, sums (of one pair of panels, or of the whole tile, in half precision with several blocks).
"""
from __future__ import annotations

from anyshape.backend.host_library import address, copy_run
from anyshape.backend.host_words import (
    F32,
    FUNCTIONS,
    GOMP_PARALLEL,
    HEAD_SCRATCH,
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
    SCRATCH,
    TEAM_SIZE,
    THREAD_NUMBER,
    THREADS,
    TILES_PER_THREAD,
)
from anyshape.backend.native import call, call_void, copy_bytes, maximum, minimum, set_word, word, words


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
    """The tiles begin..end-1: all rows of some columns, then of the next ones. Columns are packed once for all of these
    rows where sums need no room between two blocks of k: with one block, or in f32, where they lie in the result."""
    block = word(data, 1)
    step = word(data, 2)
    program = word(block, PROGRAM)
    scratch = word(block, SCRATCH) + thread * word(program, HEAD_SCRATCH)
    down = word(data, 6)
    blocks = maximum(parts(word(step, MATMUL_K), word(step, PACKED_WORDS) * word(step, PACKED_PER_WORD)), 1)
    frame = words(13)
    index = begin
    while index < end:
        column = index // down
        stop = minimum(end, (column + 1) * down)
        if word(step, MATMUL_ITEM) != F32 and blocks > 1:
            stop = index + 1
        for part in range(blocks):
            for tile in range(index, stop):
                if aim(data, frame, column, tile % down, scratch, blocks) != 0:
                    packed_tile(frame, part, 1 if tile == index else 0)
        index = stop
    return 0


def aim(data: int, frame: int, column: int, row: int, scratch: int, blocks: int) -> int:
    """Writes into `frame` what belongs to one tile of the result, number `column` of all columns of all batches; 0 when
    there is nothing in it."""
    block = word(data, 1)
    step = word(data, 2)
    batch = column // word(data, 5)
    first_column = column % word(data, 5) * word(data, 3)
    first_row = row * word(data, 4)
    set_word(frame, 0, word(data, 0) + 8 * word(step, MATMUL_FUNCTION))
    set_word(frame, 1, step)
    set_word(frame, 2, minimum(word(data, 3), word(step, MATMUL_M) - first_column))
    set_word(frame, 3, minimum(word(data, 4), word(step, MATMUL_N) - first_row))
    if word(frame, 2) <= 0 or word(frame, 3) <= 0:
        return 0
    item = word(step, PACKED_C_ITEM)
    set_word(frame, 4, address(block, step + 8 * MATMUL_C) + batch_place(step, batch, 3) + first_column * item
             + first_row * word(step, MATMUL_LDC) * item)
    set_word(frame, 5, 0)
    set_word(frame, 6, address(block, step + 8 * MATMUL_A) + batch_place(step, batch, 1)
             + first_column * word(step, PACKED_A_LANE))
    set_word(frame, 7, address(block, step + 8 * MATMUL_B) + batch_place(step, batch, 2)
             + first_row * word(step, PACKED_B_LANE))
    if word(step, MATMUL_BIAS) >= 0:
        set_word(frame, 5, address(block, step + 8 * MATMUL_BIAS) + batch_place(step, batch, 4)
                 + first_row * word(step, MATMUL_BIAS_ROW) + first_column * word(step, MATMUL_BIAS_COLUMN))
    deep = word(step, PACKED_WORDS)
    set_word(frame, 8, scratch)
    set_word(frame, 9, scratch + 4 * word(step, PACKED_ROWS) * deep
             + PACKED_PAD * parts(word(step, PACKED_ROWS), 3 * word(step, PACKED_GRAIN)))
    set_word(frame, 10, word(frame, 9) + 4 * word(step, PACKED_COLUMNS) * deep
             + PACKED_PAD * parts(word(step, PACKED_COLUMNS), 2 * word(step, PACKED_LANES)))
    set_word(frame, 11, blocks)
    return 1


def packed_tile(frame: int, part: int, new: int) -> int:
    """Adds block `part` of k to a tile; `new`: its columns are to be packed."""
    step = word(frame, 1)
    item = word(step, MATMUL_ITEM)
    bias = word(frame, 5)
    inner = word(step, MATMUL_BIAS_COLUMN)
    if part == 0 and bias != 0 and bias != word(frame, 4) and (item == F32 or inner != item):
        for i in range(word(frame, 3)):
            target = word(frame, 4) + i * word(step, MATMUL_LDC) * item
            if inner == item:
                copy_bytes(target, bias + i * word(step, MATMUL_BIAS_ROW), word(frame, 2) * item)
            else:
                copy_run(target, bias + i * word(step, MATMUL_BIAS_ROW), word(frame, 2), item, inner, item)
    deep = word(step, PACKED_WORDS) * word(step, PACKED_PER_WORD)
    first = part * deep
    count = minimum(deep, word(step, MATMUL_K) - first)
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    if new != 0:
        pack(frame, word(frame, 6) + first * word(step, PACKED_A_INNER), word(step, PACKED_A_ITEM),
             word(step, PACKED_A_LANE), word(step, PACKED_A_INNER), word(frame, 2), count, word(frame, 9), 2 * lanes,
             lanes)
    pack(frame, word(frame, 7) + first * word(step, PACKED_B_INNER), word(step, PACKED_B_ITEM),
         word(step, PACKED_B_LANE), word(step, PACKED_B_INNER), word(frame, 3), count, word(frame, 8), 3 * grain, grain)
    count = parts(count, word(step, PACKED_PER_WORD))
    set_word(frame, 12, parts(count, lanes) * lanes)
    multiply_panels(frame, count, part)
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
    """Every panel of columns with every panel of rows, over `count` words; block `part` of those of k. Panels of
    columns have room for as many words as word 12 of the frame says, which may be more."""
    entry = word(frame, 0)
    step = word(frame, 1)
    columns = word(frame, 2)
    rows = word(frame, 3)
    blocks = word(frame, 11)
    in_place = word(step, MATMUL_ITEM) == F32
    more = 1 if in_place != 0 and (part > 0 or word(frame, 5) != 0) else 0  # to what is in the result
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    room = parts(count, lanes) * lanes
    item = word(step, MATMUL_ITEM)
    c_item = word(step, PACKED_C_ITEM)
    c_step = word(step, MATMUL_LDC) * c_item
    finish = word(entry, PACKED_FINISH)
    if c_item != item:
        finish = word(entry, PACKED_FINISH + PACKED_WIDE)
    sums = word(frame, 10)
    whole = blocks > 1 and in_place == 0  # sums of the whole tile wait for the next block
    sums_step = 4 * word(step, PACKED_COLUMNS) if whole else 8 * lanes
    column = 0
    column_panel = word(frame, 9)
    while column < columns:
        width = minimum(2 * lanes, parts(columns - column, lanes) * lanes)
        row = 0
        row_panel = word(frame, 8)
        while row < rows:
            thirds = minimum(3, parts(rows - row, grain))
            tile = word(entry, 2 * (3 - thirds) + width // lanes - 1)
            target = word(frame, 4) + row * c_step + column * c_item
            if in_place != 0 and thirds * grain <= rows - row and width <= columns - column:
                call_void(tile, column_panel, row_panel, count, target, c_step, more)
            else:
                here = sums + row * sums_step + 4 * column if whole else sums
                call_void(tile, column_panel, row_panel, count, here, sums_step, 1 if whole and part > 0 else 0)
                addend = word(frame, 5)
                addend_step = word(step, MATMUL_BIAS_ROW)
                if addend != 0:
                    addend += row * addend_step + column * item
                if (addend != 0 and word(step, MATMUL_BIAS_COLUMN) != item) or more != 0:
                    addend = target
                    addend_step = c_step
                if part == blocks - 1 or in_place != 0:
                    call_void(finish, here, sums_step, target, c_step, minimum(rows - row, thirds * grain),
                              minimum(columns - column, width), addend, addend_step, step + 8 * MATMUL_ALPHA)
            row_panel += 4 * thirds * grain * room + PACKED_PAD
            row += thirds * grain
        column_panel += 4 * width * word(frame, 12) + PACKED_PAD
        column += width
    return 0


PACKED_ROUTINES = (run_packed, parts, packed_part, packed_range, aim, packed_tile, batch_place, pack, multiply_panels)
