"""Packed GEMM: products of the host from packed panels, in the native subset: blocks of rows, panels, blocks of the
inner dim.

    for each block of rows of the result, and some columns, shared out among threads:
        for each block of k:
            pack the rows of B
            for each panel of columns: pack it from A; multiply it with all panels of rows, and meanwhile fetch what the
                                       next one is packed from

In the terms of the words, which are a column-major library's: `columns` run along M, where the result is contiguous;
`rows` along N. The routines are those of backend/cpu/microkernels/gemm.py. A panel of columns lies in the first caches,
the rows in the second. Sums of f32 lie in the result from the first block on, on top of the addend. In half precision
they are rounded once, so that all blocks of k of some columns follow each other. Scratch of a thread: panels of rows, a
panel of columns, sums (of one pair of panels, or of all rows and columns, in half precision with several blocks).
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    F32,
    FLAT,
    FUNCTIONS,
    GOMP_PARALLEL,
    HEAD_SCRATCH,
    LINE,
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
    PACKED_BEGIN,
    PACKED_C_ITEM,
    PACKED_CHUNK,
    PACKED_COLUMNS,
    PACKED_END,
    PACKED_FINISH,
    PACKED_FINISH_WIDE,
    PACKED_GRAIN,
    PACKED_GROUP,
    PACKED_LANES,
    PACKED_LARGE,
    PACKED_PAD,
    PACKED_PER_WORD,
    PACKED_ROWS,
    PACKED_ROWS_WAY,
    PACKED_TURN,
    PACKED_WIDE,
    PACKED_WORDS,
    PARALLEL_FLOPS,
    PROGRAM,
    SCRATCH,
    TEAM_SIZE,
    THREAD_NUMBER,
    THREADS,
)
from anyshape.backend.cpu.native.compiler import call, call_void, maximum, minimum, set_word, word, words
from anyshape.backend.cpu.routines.blas_gemm import address, copy_run
from anyshape.backend.cpu.routines.threads import fork


def run_packed(block: int, step: int) -> int:
    """A batch of products, or several ones with the same rows, whose words follow each other; shared out by panels of
    columns of blocks of rows."""
    data = words(7)
    threads = packed_threads(block, step, data)
    if threads == 1:
        packed_share(data, 0, 1)
    elif threads > 1:
        fork(block, packed_part, data, threads)
    return 0


def packed_threads(block: int, step: int, data: int) -> int:
    """On how many threads such products are worth to run, 0 where there is nothing to do; writes to `data` (7 words)
    how they are shared out."""
    batches = word(step, MATMUL_BATCHES)
    rows = word(step, MATMUL_N)
    members = word(step, 1) // MATMUL_DIMS if word(step, MATMUL_RANK) == 0 else 1
    columns = 0
    panels = 0
    for member in range(members):
        size = word(step + 8 * MATMUL_DIMS * member, MATMUL_M)
        columns += size
        panels += parts(size, 2 * word(step, PACKED_LANES))
    if batches <= 0 or columns <= 0 or rows <= 0:
        return 0
    functions = word(block, FUNCTIONS)
    high = 3 * word(step, PACKED_GRAIN)
    threads = minimum(word(block, THREADS), columns * rows * word(step, MATMUL_K) * batches // PARALLEL_FLOPS)
    if word(functions, GOMP_PARALLEL) == 0:
        threads = 1
    down = parts(rows, word(step, PACKED_ROWS))
    # a thread packs the rows and the columns of its share: neither is to be many times the other
    while down * high < rows and down * batches < threads and (
            panels * down * batches < threads or FLAT * batches * columns * down * down < threads * rows):
        down += 1
    set_word(data, 0, functions)
    set_word(data, 1, block)
    set_word(data, 2, step)
    set_word(data, 3, panels)
    set_word(data, 4, parts(parts(rows, down), high) * high)
    set_word(data, 5, parts(rows, word(data, 4)))
    set_word(data, 6, members)
    return maximum(threads, 1)


def parts(size: int, part: int) -> int:
    """How many parts of a size there are; the last may be smaller."""
    return (size + part - 1) // part


def packed_part(data: int) -> int:
    """What one thread does."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    packed_share(data, number, call(word(functions, TEAM_SIZE)) & 4294967295)
    return 0


def packed_share(data: int, number: int, team: int) -> int:
    """The share of thread `number` of the panels."""
    panels = word(word(data, 2), MATMUL_BATCHES) * word(data, 3) * word(data, 5)
    packed_range(data, panels * number // team, panels * (number + 1) // team, number)
    return 0


def packed_range(data: int, begin: int, end: int, thread: int) -> int:
    """The panels begin..end-1: all columns of a block of rows, then of the next one. Rows are packed once for all
    columns, but in half precision with several blocks of k: there for as many as there is room for their sums."""
    block = word(data, 1)
    step = word(data, 2)
    scratch = word(block, SCRATCH) + thread * word(word(block, PROGRAM), HEAD_SCRATCH)
    panels = word(data, 3)
    blocks = maximum(parts(word(step, MATMUL_K), word(step, PACKED_WORDS) * word(step, PACKED_PER_WORD)), 1)
    frame = words(20)
    set_word(frame, 11, blocks)
    index = begin
    while index < end:
        first = index % panels
        stop = minimum(end, index - first + panels)
        if word(step, MATMUL_ITEM) == F32 or blocks == 1:
            for part in range(blocks):
                packed_members(data, frame, index // panels, first, first + stop - index, scratch, part)
        else:
            packed_members(data, frame, index // panels, first, first + stop - index, scratch, -1)
        index = stop
    return 0


def packed_members(data: int, frame: int, rows: int, first: int, last: int, scratch: int, part: int) -> int:
    """The panels first..last-1, counted over all members, of block `rows` of the rows; block `part` of k, or, if that
    is -1, all blocks of some columns after each other."""
    wide = 2 * word(word(data, 2), PACKED_LANES)
    before = 0
    new = 1
    for member in range(word(data, 6)):
        step = word(data, 2) + 8 * MATMUL_DIMS * member
        size = word(step, MATMUL_M)
        begin = maximum(first - before, 0) * wide
        end = minimum((last - before) * wide, size)
        while begin < end:
            width = end - begin if part >= 0 else minimum(end - begin, word(step, PACKED_COLUMNS))
            aim(data, frame, step, rows // word(data, 5), begin, rows % word(data, 5), scratch)
            set_word(frame, 2, width)
            if part >= 0:
                packed_tile(frame, part, new)
                new = 0
            else:
                for each in range(word(frame, 11)):
                    packed_tile(frame, each, 1)
            begin += width
        before += parts(size, wide)
    return 0


def aim(data: int, frame: int, step: int, batch: int, first_column: int, row: int, scratch: int) -> int:
    """Writes into `frame` what belongs to some columns of block `row` of the rows of a product."""
    block = word(data, 1)
    first_row = row * word(data, 4)
    set_word(frame, 0, word(data, 0) + 8 * word(step, MATMUL_FUNCTION))
    set_word(frame, 1, step)
    set_word(frame, 3, minimum(word(data, 4), word(step, MATMUL_N) - first_row))
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
    set_word(frame, 10, word(frame, 9) + group_of(step) * (8 * word(step, PACKED_LANES) * deep + PACKED_PAD))
    return 0


def group_of(step: int) -> int:
    """Panels of columns that are packed at a time."""
    return PACKED_GROUP if word(step, PACKED_GRAIN) == word(step, PACKED_LANES) else 1


def packed_tile(frame: int, part: int, new: int) -> int:
    """Adds block `part` of k to all columns of the frame, panel by panel; `new`: its rows are to be packed."""
    step = word(frame, 1)
    columns = word(frame, 2)
    target = word(frame, 4)
    bias = word(frame, 5)
    sums = word(frame, 10)
    item = word(step, MATMUL_ITEM)
    inner = word(step, MATMUL_BIAS_COLUMN)
    a_step = word(step, PACKED_A_LANE)
    per_word = word(step, PACKED_PER_WORD)
    deep = word(step, PACKED_WORDS) * per_word
    first = part * deep
    count = minimum(deep, word(step, MATMUL_K) - first)
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    if new != 0:
        pack(frame, word(frame, 7) + first * word(step, PACKED_B_INNER), word(step, PACKED_B_ITEM),
             word(step, PACKED_B_LANE), word(step, PACKED_B_INNER), word(frame, 3), count, word(frame, 8), 3 * grain,
             grain, 1)
    set_word(frame, 12, parts(parts(count, per_word), lanes) * lanes)
    source = word(frame, 6) + first * word(step, PACKED_A_INNER)
    most = 2 * lanes * group_of(step)
    column = 0
    while column < columns:
        width = minimum(most, columns - column)
        place = target + column * word(step, PACKED_C_ITEM)
        if part == 0 and bias != 0 and inner != item:
            for i in range(word(frame, 3)):
                copy_run(place + i * word(step, MATMUL_LDC) * item,
                         bias + i * word(step, MATMUL_BIAS_ROW) + column * inner, width, item, inner, item)
        pack(frame, source + column * a_step, word(step, PACKED_A_ITEM), a_step, word(step, PACKED_A_INNER), width,
             count, word(frame, 9), 2 * lanes, lanes, 0)
        if column + width < columns:
            look_ahead(frame, source + (column + width) * a_step, minimum(most, columns - column - width), count)
        else:  # the first panel of the next block, or nothing
            look_ahead(frame, source + deep * word(step, PACKED_A_INNER), minimum(most, columns),
                       minimum(deep, word(step, MATMUL_K) - first - deep))
        set_word(frame, 2, width)
        set_word(frame, 4, place)
        set_word(frame, 5, bias + column * inner if bias != 0 else 0)
        if word(frame, 11) > 1 and item != F32:
            set_word(frame, 10, sums + 4 * column)
        multiply_panels(frame, parts(count, per_word), part)
        column += width
    set_word(frame, 2, columns)
    set_word(frame, 4, target)
    set_word(frame, 5, bias)
    set_word(frame, 10, sums)
    return 0


def look_ahead(frame: int, source: int, size: int, count: int) -> int:
    """Writes into the frame (13 on) which lines the tiles are to fetch: those of `size` lanes by `count` elements of A,
    if there are any."""
    step = word(frame, 1)
    item = word(step, PACKED_A_ITEM)
    lane_step = word(step, PACKED_A_LANE)
    inner_step = word(step, PACKED_A_INNER)
    runs = 0
    run = 0
    run_step = 0
    if inner_step == item:
        runs = size
        run = parts(count * item, LINE)
        run_step = lane_step
        if lane_step == count * item:  # one after the other
            run = parts(size * lane_step, LINE)
            runs = 1
    elif lane_step == item:
        runs = count
        run = parts(size * item, LINE)
        run_step = inner_step
        source += LINE - 1  # the line of the first byte is one of the panel before, or nearly all of it
    if size <= 0 or count <= 0 or runs == 0:
        source = word(frame, 9)
        runs = 1
        run = 1
    power = 0
    while 1 << power < run:
        power += 1
    set_word(frame, 13, source)
    set_word(frame, 14, run_step)
    set_word(frame, 15, power)
    set_word(frame, 16, 0)
    set_word(frame, 17, (runs << power) - 1)
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
         top: int, grain: int, rows: int) -> int:
    """Packs `size` lanes by `count` elements along k into panels of `top` lanes, the last of a multiple of `grain`.
    `rows`: they are rows; where whole tiles are multiplied, these are as many as a vector has lanes, and the words of
    each lie side by side."""
    step = word(frame, 1)
    lanes = word(step, PACKED_LANES)
    way = PACKED_ANY
    if inner_step == item:
        way = PACKED_TURN
    elif lane_step == item:
        way = PACKED_ALONG
    if item != word(step, MATMUL_ITEM):
        way += PACKED_WIDE
    lane_room = 4
    whole = 1 if rows != 0 and grain == lanes else 0
    if whole != 0:
        way += PACKED_ROWS_WAY
    function = word(word(frame, 0), way)
    room = parts(parts(count, word(step, PACKED_PER_WORD)), lanes) * lanes
    chunk = PACKED_CHUNK if lane_step == item and inner_step != item else maximum(count, 1)
    if whole != 0:
        lane_room = 4 * room
        chunk = maximum(chunk, 2 * lanes)
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
                word_room = 4 if whole != 0 else 4 * width
                call_void(function, source + lane * lane_step, lane_step, inner_step, minimum(lanes, end - lane),
                          minimum(chunk, count - part), panel + lane_room * (lane - first) + word_room * words_before,
                          lane_room if whole != 0 else word_room)
                lane += lanes
            panel += 4 * width * room + PACKED_PAD
            first += width
        source += chunk * inner_step
        part += chunk
    return 0


def multiply_panels(frame: int, count: int, part: int) -> int:
    """Every panel of columns with every panel of rows, over `count` words; block `part` of those of k. Panels of
    columns have room for as many words as word 12 of the frame says, which may be more. Words 13 on: see `fetch` in
    backend/cpu/microkernels/gemm.py."""
    entry = word(frame, 0)
    step = word(frame, 1)
    columns = word(frame, 2)
    rows = word(frame, 3)
    blocks = word(frame, 11)
    in_place = word(step, MATMUL_ITEM) == F32
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    room = parts(count, lanes) * lanes
    item = word(step, MATMUL_ITEM)
    there = 1 if word(frame, 5) == word(frame, 4) or word(step, MATMUL_BIAS_COLUMN) != item else 0  # the addend
    more = 1 if in_place != 0 and (part > 0 or (word(frame, 5) != 0 and there != 0)) else 0  # to what is in the result
    apart = 1 if in_place == 0 or (part == 0 and word(frame, 5) != 0 and there == 0) else 0
    c_item = word(step, PACKED_C_ITEM)
    c_step = word(step, MATMUL_LDC) * c_item
    finish = word(entry, PACKED_FINISH)
    if c_item != item:
        finish = word(entry, PACKED_FINISH_WIDE)
    sums = word(frame, 10)
    whole = blocks > 1 and in_place == 0  # sums of the whole tile wait for the next block
    sums_step = 4 * word(step, PACKED_COLUMNS) if whole else 8 * lanes
    set_word(frame, 19, c_step)
    past = 1 if grain == lanes and c_step % LINE == 0 and word(step, MATMUL_N) * c_step >= PACKED_LARGE else 0
    if grain == lanes:
        call_void(word(entry, PACKED_BEGIN))
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
            set_word(frame, 18, target)
            if apart == 0 and thirds * grain <= rows - row and width <= columns - column:
                call_void(tile, column_panel, row_panel, count, target, c_step, more, frame + 104)
            else:
                here = sums + row * sums_step + 4 * column if whole else sums
                call_void(tile, column_panel, row_panel, count, here, sums_step, 1 if whole and part > 0 else 0,
                          frame + 104)
                addend = word(frame, 5)
                addend_step = word(step, MATMUL_BIAS_ROW)
                if addend != 0:
                    addend += row * addend_step + column * item
                if (addend != 0 and there != 0) or more != 0:
                    addend = target
                    addend_step = c_step
                if part == blocks - 1 or in_place != 0:
                    call_void(finish, here, sums_step, target, c_step, minimum(rows - row, thirds * grain),
                              minimum(columns - column, width), addend, addend_step, step + 8 * MATMUL_ALPHA,
                              past if target % LINE == 0 and width * item == LINE else 0)
            set_word(frame, 16, word(frame, 16) + count)
            row_panel += 4 * thirds * grain * room + PACKED_PAD
            row += thirds * grain
        column_panel += 4 * width * word(frame, 12) + PACKED_PAD
        column += width
    if grain == lanes:
        call_void(word(entry, PACKED_END))
    return 0


PACKED_ROUTINES = (run_packed, packed_threads, parts, packed_part, packed_share, packed_range, packed_members, aim,
                   group_of, packed_tile, look_ahead, batch_place, pack, multiply_panels)
