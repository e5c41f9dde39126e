"""Packed GEMM of the host, in the native subset: blocks of rows, panels, blocks of the inner dim.

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
    LINE,
    MATMUL_DIMS,
    OF_A,
    OF_B,
    OF_BIAS,
    OF_C,
    PACKED_ALONG,
    PACKED_ANY,
    PACKED_BEGIN,
    PACKED_CHUNK,
    PACKED_END,
    PACKED_FINISH,
    PACKED_FINISH_WIDE,
    PACKED_GROUP,
    PACKED_LARGE,
    PACKED_PAD,
    PACKED_ROWS_WAY,
    PACKED_TURN,
    PACKED_WIDE,
    PARALLEL_FLOPS,
    ByteConvStep,
    CallBlock,
    Functions,
    PackedProduct,
)
from anyshape.backend.cpu.native.records import (
    Array,
    Nested,
    Struct,
    call_void,
    copy_bytes,
    i64,
    load64,
    maximum,
    minimum,
    new,
    size_of,
)
from anyshape.backend.cpu.routines.blas_gemm import address, copy_run, entry_of
from anyshape.backend.cpu.routines.threads import parallel_for, share
from anyshape.ir.panels import PANEL


class PackedWork(Struct):
    """What the threads of products by packed panels share: panels of columns in all, rows of a block and blocks of
    rows, and how many products there are."""

    functions: Functions
    block: CallBlock
    step: PackedProduct
    panels: i64
    high: i64
    blocks: i64
    members: i64
    sources: i64  # 0, or the order in which the rows of B are read
    windows: ByteConvStep  # 0, or where the elements of the rows of B are


class Fetch(Struct):
    """Which lines the tiles are to fetch: see `fetch` in backend/cpu/microkernels/gemm.py."""

    source: i64
    step: i64
    power: i64
    done: i64
    last: i64
    target: i64
    target_step: i64
    apart: i64  # bytes from word to word of the columns that a tile multiplies


class PackedFrame(Struct):
    """Some columns of a block of rows."""

    entry: Array[i64]  # of the dtype's first routine
    step: PackedProduct
    columns: i64
    rows: i64
    target: i64
    bias: i64  # 0: none
    a: i64
    first: i64  # which column lies there; 0, too, where it does not count
    b: i64
    sources: i64  # of these rows; 0: one after the other
    windows: ByteConvStep  # 0, or where the elements of the rows are; the first row, and the first element to be packed
    row: i64
    element: i64
    gathered: i64  # where rows are gathered before they are packed
    row_panels: i64
    column_panels: i64
    sums: i64
    blocks: i64  # of k
    room: i64  # words that a panel of columns has room for, which may be more than there are
    fetch: Nested[Fetch]


def run_packed(block: CallBlock, step: PackedProduct) -> int:
    """A batch of products, or several ones with the same rows, whose words follow each other; shared out by panels of
    columns of blocks of rows."""
    data = new(PackedWork)
    threads = packed_threads(block, step, data)
    if threads > 0:
        parallel_for(block, packed_share, data, threads)
    return 0


def run_byte_conv(block: CallBlock, step: ByteConvStep) -> int:
    """A convolution of 8-bit numbers: a product, of which the rows are found in the images as they are packed."""
    data = new(PackedWork)
    threads = packed_threads(block, step.product, data)
    data.windows = step
    data.members = 1
    if threads > 0:
        parallel_for(block, packed_share, data, threads)
    return 0


def packed_threads(block: CallBlock, step: PackedProduct, data: PackedWork) -> int:
    """On how many threads such products are worth to run, 0 where there is nothing to do; writes to `data`
    how they are shared out."""
    batches = step.batches
    rows = step.n
    members = step.length // MATMUL_DIMS if step.rank == 0 else 1
    columns = 0
    panels = 0
    for member in range(members):
        size = PackedProduct(step + size_of(PackedProduct) * member).m
        columns += size
        panels += parts(size, 2 * step.lanes)
    if batches <= 0 or columns <= 0 or rows <= 0:
        return 0
    functions = block.functions
    high = 3 * step.grain
    threads = minimum(block.threads, columns * rows * step.k * batches // PARALLEL_FLOPS)
    if functions.gomp_parallel == 0:
        threads = 1
    down = parts(rows, step.rows)
    # a thread packs the rows and the columns of its share: neither is to be many times the other
    while down * high < rows and down * batches < threads and (
            panels * down * batches < threads or FLAT * batches * columns * down * down < threads * rows):
        down += 1
    data.functions = functions
    data.block = block
    data.step = step
    data.panels = panels
    data.high = parts(parts(rows, down), high) * high
    data.blocks = parts(rows, data.high)
    data.members = members
    return maximum(threads, 1)


def parts(size: int, part: int) -> int:
    """How many parts of a size there are; the last may be smaller."""
    return (size + part - 1) // part


def packed_share(data: PackedWork, number: int, team: int) -> int:
    """The share of thread `number` of the panels."""
    panels = data.step.batches * data.panels * data.blocks
    packed_range(data, share(panels, number, team), share(panels, number + 1, team), number)
    return 0


def packed_range(data: PackedWork, begin: int, end: int, thread: int) -> int:
    """The panels begin..end-1: all columns of a block of rows, then of the next one. Rows are packed once for all
    columns, but in half precision with several blocks of k: there for as many as there is room for their sums."""
    block = data.block
    step = data.step
    scratch = block.scratch + thread * block.program.scratch
    panels = data.panels
    blocks = maximum(parts(step.k, step.deep * step.per_word), 1)
    frame = new(PackedFrame)
    frame.blocks = blocks
    index = begin
    while index < end:
        first = index % panels
        stop = minimum(end, index - first + panels)
        if step.item == F32 or blocks == 1:
            for part in range(blocks):
                packed_members(data, frame, index // panels, first, first + stop - index, scratch, part)
        else:
            packed_members(data, frame, index // panels, first, first + stop - index, scratch, -1)
        index = stop
    return 0


def packed_members(data: PackedWork, frame: PackedFrame, rows: int, first: int, last: int, scratch: int,
                   part: int) -> int:
    """The panels first..last-1, counted over all members, of block `rows` of the rows; block `part` of k, or, if that
    is -1, all blocks of some columns after each other."""
    wide = 2 * data.step.lanes
    before = 0
    new = 1
    for member in range(data.members):
        step = PackedProduct(data.step + size_of(PackedProduct) * member)
        size = step.m
        begin = maximum(first - before, 0) * wide
        end = minimum((last - before) * wide, size)
        while begin < end:
            width = end - begin if part >= 0 else minimum(end - begin, step.columns)
            aim(data, frame, step, rows // data.blocks, begin, rows % data.blocks, scratch)
            frame.columns = width
            if part >= 0:
                packed_tile(frame, part, new)
                new = 0
            else:
                for each in range(frame.blocks):
                    packed_tile(frame, each, 1)
            begin += width
        before += parts(size, wide)
    return 0


def aim(data: PackedWork, frame: PackedFrame, step: PackedProduct, batch: int, first_column: int, row: int,
        scratch: int) -> int:
    """Writes into `frame` what belongs to some columns of block `row` of the rows of a product."""
    block = data.block
    first_row = row * data.high
    frame.entry = entry_of(data.functions, step.function)
    frame.step = step
    frame.rows = minimum(data.high, step.n - first_row)
    item = step.c_item
    frame.target = (address(block, step.c) + batch_place(step, batch, OF_C) + first_column * item
             + first_row * step.ldc * item)
    frame.bias = 0
    frame.a = address(block, step.a) + batch_place(step, batch, OF_A)
    frame.first = 0
    if step.a_item == 0:
        frame.first = first_column
    else:
        frame.a += first_column * step.a_lane
    frame.b = address(block, step.b) + batch_place(step, batch, OF_B)
    frame.sources = 0
    frame.windows = data.windows
    frame.row = first_row
    if data.sources != 0:
        frame.sources = data.sources + 8 * first_row
    elif data.windows == 0:
        frame.b += first_row * step.b_lane
    frame.gathered = scratch + step.scratch
    if step.bias.slot >= 0:
        frame.bias = (address(block, step.bias) + batch_place(step, batch, OF_BIAS)
                 + first_row * step.bias_row + first_column * step.bias_column)
    deep = step.deep
    frame.row_panels = scratch
    frame.column_panels = (scratch + 4 * step.rows * deep
             + PACKED_PAD * parts(step.rows, 3 * step.grain))
    frame.sums = frame.column_panels + group_of(step) * (8 * step.lanes * deep + PACKED_PAD)
    return 0


def group_of(step: PackedProduct) -> int:
    """Panels of columns that are packed at a time."""
    return PACKED_GROUP if step.grain == step.lanes else 1


def packed_tile(frame: PackedFrame, part: int, new: int) -> int:
    """Adds block `part` of k to all columns of the frame, panel by panel; `new`: its rows are to be packed."""
    step = frame.step
    columns = frame.columns
    target = frame.target
    bias = frame.bias
    sums = frame.sums
    item = step.item
    inner = step.bias_column
    a_step = step.a_lane
    per_word = step.per_word
    deep = step.deep * per_word
    first = part * deep
    count = minimum(deep, step.k - first)
    lanes = step.lanes
    grain = step.grain
    frame.element = first
    if new != 0:
        pack(frame, frame.b + first * step.b_inner, step.b_item,
             step.b_lane, step.b_inner, frame.rows, count, frame.row_panels, 3 * grain,
             grain, 1)
    frame.room = parts(parts(count, per_word), lanes) * lanes
    ready = step.a_item == 0  # A lies in panels
    source = frame.a + (part * step.deep if ready else first) * step.a_inner
    most = 2 * lanes * group_of(step)
    column = 0
    while column < columns:
        width = minimum(most, columns - column)
        place = target + column * step.c_item
        if part == 0 and bias != 0 and inner != item:
            for i in range(frame.rows):
                copy_run(place + i * step.ldc * item,
                         bias + i * step.bias_row + column * inner, width, item, inner, item)
        if ready:
            frame.column_panels = source + column_place(frame, column)
        else:
            pack(frame, source + column * a_step, step.a_item, a_step, step.a_inner, width,
                 count, frame.column_panels, 2 * lanes, lanes, 0)
        if column + width < columns:
            look_ahead(frame, source + column_place(frame, column + width), minimum(most, columns - column - width),
                       count)
        else:  # the first panel of the next block, or nothing
            look_ahead(frame, source + (step.deep if ready else deep) * step.a_inner + column_place(frame, 0),
                       minimum(most, columns), minimum(deep, step.k - first - deep))
        frame.columns = width
        frame.target = place
        frame.bias = bias + column * inner if bias != 0 else 0
        if frame.blocks > 1 and item != F32:
            frame.sums = sums + 4 * column
        multiply_panels(frame, parts(count, per_word), part)
        column += width
    frame.columns = columns
    frame.target = target
    frame.bias = bias
    frame.sums = sums
    return 0


def column_place(frame: PackedFrame, column: int) -> int:
    """Bytes from where the frame's columns begin to one of them, which begins a panel or a half or quarter of it."""
    step = frame.step
    if step.a_item == 0:
        column += frame.first
        return column // PANEL * step.a_lane + column % PANEL * (step.a_inner // PANEL)
    return column * step.a_lane


def look_ahead(frame: PackedFrame, source: int, size: int, count: int) -> int:
    """Writes into the frame which lines the tiles are to fetch: those of `size` lanes by `count` elements of A,
    if there are any."""
    step = frame.step
    item = step.a_item
    lane_step = step.a_lane
    inner_step = step.a_inner
    runs = 0
    run = 0
    run_step = 0
    if item == 0:
        runs = 1
        run = parts(parts(count, step.per_word) * inner_step, LINE)
    elif inner_step == item:
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
        source = frame.column_panels
        runs = 1
        run = 1
    power = 0
    while 1 << power < run:
        power += 1
    frame.fetch.source = source
    frame.fetch.step = run_step
    frame.fetch.power = power
    frame.fetch.done = 0
    frame.fetch.last = (runs << power) - 1
    return 0


def batch_place(step: PackedProduct, index: int, which: int) -> int:
    """Bytes from the first matrix of A, B, C, bias (`which`) to that of batch `index`."""
    place = 0
    rank = step.rank
    for back in range(rank):
        dim = step.dims[rank - 1 - back]
        place += index % dim.size * dim.steps[which]
        index = index // dim.size
    return place


def pack(frame: PackedFrame, source: int, item: int, lane_step: int, inner_step: int, size: int, count: int,
         target: int, top: int, grain: int, rows: int) -> int:
    """Packs `size` lanes by `count` elements along k into panels of `top` lanes, the last of a multiple of `grain`.
    `rows`: they are rows; where whole tiles are multiplied, these are as many as a vector has lanes, and the words of
    each lie side by side."""
    step = frame.step
    lanes = step.lanes
    way = PACKED_ANY
    gathered = 0
    if rows != 0:
        gathered = frame.windows if frame.windows != 0 else frame.sources
    if inner_step == item or gathered != 0:
        way = PACKED_TURN
    elif lane_step == item:
        way = PACKED_ALONG
    if item != step.item:
        way += PACKED_WIDE
    lane_room = 4
    whole = 1 if rows != 0 and grain == lanes else 0
    if whole != 0:
        way += PACKED_ROWS_WAY
    function = frame.entry[way]
    room = parts(parts(count, step.per_word), lanes) * lanes
    chunk = maximum(count, 1)
    if lane_step == item and inner_step != item and gathered == 0:
        chunk = PACKED_CHUNK
    if whole != 0:
        lane_room = 4 * room
        chunk = maximum(chunk, 2 * lanes)
    part = 0
    while part < maximum(count, 1):
        words_before = part // step.per_word
        panel = target
        first = 0
        while first < size:
            width = lanes_of_panel(size - first, top, grain)
            end = minimum(first + width, size)
            lane = first
            while lane < end:
                word_room = 4 if whole != 0 else 4 * width
                place = source + lane * lane_step
                lane_apart = lane_step
                inner_apart = inner_step
                if gathered != 0:
                    place = frame.gathered
                    lane_apart = gather(frame, source, item, inner_step, lane, minimum(lanes, end - lane), part,
                                        minimum(chunk, count - part))
                    inner_apart = item
                call_void(function, place, lane_apart, inner_apart, minimum(lanes, end - lane),
                          minimum(chunk, count - part), panel + lane_room * (lane - first) + word_room * words_before,
                          lane_room if whole != 0 else word_room)
                lane += lanes
            panel += 4 * width * room + PACKED_PAD
            first += width
        source += chunk * inner_step
        part += chunk
    return 0


def lanes_of_panel(left: int, top: int, grain: int) -> int:
    """Lanes of the next panel, of so many that are left: at most `top`, whole grains. Of four grains of rows two and
    two, for the sums of one grain do not hide the latency of a multiply-add."""
    whole = parts(left, grain) * grain
    if top == 3 * grain and whole == 4 * grain:
        return 2 * grain
    return minimum(top, whole)


def gather(frame: PackedFrame, source: int, item: int, inner_step: int, first: int, count: int, begin: int,
           inner: int) -> int:
    """Brings so many rows side by side, so many elements of each; bytes from one to the next."""
    if frame.windows != 0:
        return gather_windows(frame, first, count, begin, inner)
    return gather_rows(frame, source, item, inner_step, first, count, inner)


def gather_rows(frame: PackedFrame, source: int, item: int, inner_step: int, first: int, count: int,
                inner: int) -> int:
    """The rows `first` and so on of the frame, so many with so many elements, side by side; bytes from one to the
    next."""
    apart = inner * item + LINE
    for i in range(count):
        row = source + load64(frame.sources + 8 * (first + i)) * frame.step.b_lane
        copy_elements(frame.gathered + i * apart, row, inner, item, inner_step)
    return apart


def gather_windows(frame: PackedFrame, first: int, count: int, begin: int, inner: int) -> int:
    """What the windows at so many positions of the frame see, from element `begin` of the block on, side by side;
    bytes from one to the next."""
    step = frame.windows
    apart = inner + LINE
    for i in range(count):
        position = frame.row + first + i
        line = position // step.out_x
        source = (frame.b + line // step.out_y * step.image + line % step.out_y * step.down
                  + position % step.out_x * step.across)
        target = frame.gathered + i * apart
        run = (frame.element + begin) // step.run
        skip = (frame.element + begin) % step.run
        left = inner
        while left > 0:
            size = minimum(step.run - skip, left)
            copy_bytes(target, source + run // step.wide * step.apart_y + run % step.wide * step.apart_x + skip, size)
            target += size
            left -= size
            skip = 0
            run += 1
    return apart


def copy_elements(target: int, source: int, count: int, item: int, step: int) -> int:
    """So many elements, which may lie apart in the source."""
    if step == item:
        copy_bytes(target, source, count * item)
    else:
        copy_run(target, source, count, item, step, item)
    return 0


def multiply_panels(frame: PackedFrame, count: int, part: int) -> int:
    """Every panel of columns with every panel of rows, over `count` words; block `part` of those of k. Panels of
    columns have room for as many words as the frame says, which may be more."""
    step = frame.step
    if step.grain == step.lanes:
        call_void(frame.entry[PACKED_BEGIN])
    multiply_tiles(frame, count, part)
    if step.grain == step.lanes:
        call_void(frame.entry[PACKED_END])
    return 0


def multiply_tiles(frame: PackedFrame, count: int, part: int) -> int:
    """The same, where the processor is set up for its tiles."""
    entry = frame.entry
    step = frame.step
    columns = frame.columns
    rows = frame.rows
    blocks = frame.blocks
    in_place = step.item == F32
    lanes = step.lanes
    grain = step.grain
    room = parts(count, lanes) * lanes
    item = step.item
    there = 1 if frame.bias == frame.target or step.bias_column != item else 0  # the addend
    more = 1 if in_place != 0 and (part > 0 or (frame.bias != 0 and there != 0)) else 0  # to what is in the result
    apart = 1 if in_place == 0 or (part == 0 and frame.bias != 0 and there == 0) else 0
    c_item = step.c_item
    c_step = step.ldc * c_item
    finish = entry[PACKED_FINISH_WIDE if c_item != item else PACKED_FINISH]
    sums = frame.sums
    whole = blocks > 1 and in_place == 0  # sums of the whole tile wait for the next block
    sums_step = 4 * step.columns if whole else 8 * lanes
    frame.fetch.target_step = c_step
    past = 1 if grain == lanes and c_step % LINE == 0 and step.n * c_step >= PACKED_LARGE else 0
    column = 0
    column_panel = frame.column_panels
    while column < columns:
        width = minimum(2 * lanes, parts(columns - column, lanes) * lanes)
        frame.fetch.apart = step.a_inner if step.a_item == 0 else 4 * width
        row = 0
        row_panel = frame.row_panels
        while row < rows:
            thirds = lanes_of_panel(rows - row, 3 * grain, grain) // grain
            tile = entry[2 * (3 - thirds) + width // lanes - 1]
            target = frame.target + row * c_step + column * c_item
            frame.fetch.target = target
            if apart == 0 and thirds * grain <= rows - row and width <= columns - column:
                call_void(tile, column_panel, row_panel, count, target, c_step, more, frame.fetch)
            else:
                here = sums + row * sums_step + 4 * column if whole else sums
                call_void(tile, column_panel, row_panel, count, here, sums_step, 1 if whole and part > 0 else 0,
                          frame.fetch)
                addend = frame.bias
                addend_step = step.bias_row
                if addend != 0:
                    addend += row * addend_step + column * item
                if (addend != 0 and there != 0) or more != 0:
                    addend = target
                    addend_step = c_step
                if part == blocks - 1 or in_place != 0:
                    call_void(finish, here, sums_step, target, c_step, minimum(rows - row, thirds * grain),
                              minimum(columns - column, width), addend, addend_step, step + PackedProduct.alpha,
                              past if target % LINE == 0 and width * item == LINE else 0)
            frame.fetch.done += count
            row_panel += 4 * thirds * grain * room + PACKED_PAD
            row += thirds * grain
        column_panel += 4 * width * frame.room + PACKED_PAD
        column += width
    return 0
