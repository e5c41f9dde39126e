"""Grouped GEMM: products of groups of rows, whose ends are data, in the native subset; see
backend/cpu/bytecode/encode_grouped_gemm.py and ops/matmul.py.

    for each group, in order: count its rows; the part of its columns and rows that is this thread's:
        few rows: backend/cpu/microkernels/gemv.py; others: packed panels, or the library

All groups are one piece of work for the threads: a thread takes what lies between two marks of the sum of the groups'
costs, so that it packs the rows and reads the weights of few groups. A group costs its rows and the reading of its
weights.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    FUNCTIONS,
    GOMP_PARALLEL,
    GROUPED_ALONG,
    GROUPED_COUNT,
    GROUPED_END_ITEM,
    GROUPED_END_STEP,
    GROUPED_ENDS,
    GROUPED_LANE,
    GROUPED_LIBRARY,
    GROUPED_MOST_FEW,
    GROUPED_OURS,
    GROUPED_PANELS,
    GROUPED_READ,
    GROUPED_SIZE,
    GROUPED_STEPS,
    GROUPED_THIN,
    GROUPED_WIDE,
    MATMUL_A,
    MATMUL_B,
    MATMUL_C,
    MATMUL_DIMS,
    MATMUL_ITEM,
    MATMUL_K,
    MATMUL_LDC,
    MATMUL_M,
    MATMUL_N,
    MATMUL_THIN,
    MATMUL_THIN_COUNT,
    PACKED_GRAIN,
    PACKED_ROWS,
    PARALLEL_FLOPS,
    TEAM_SIZE,
    THREAD_NUMBER,
    THREADS,
)
from anyshape.backend.cpu.native.compiler import (
    call,
    copy_bytes,
    fill_zero,
    load32,
    load64,
    maximum,
    minimum,
    set_word,
    word,
    words,
)
from anyshape.backend.cpu.routines.blas_gemm import address, matmul_range
from anyshape.backend.cpu.routines.packed_gemm import packed_range, parts
from anyshape.backend.cpu.routines.threads import fork


def run_grouped(block: int, step: int) -> int:
    """All groups, and zeros past the last one."""
    plain = step + 8 * GROUPED_LIBRARY
    rows = word(step, GROUPED_ALONG) == MATMUL_N
    size = word(step, GROUPED_SIZE)
    total = 0
    reached = 0
    begin = 0
    falls = 0
    for group in range(word(step, GROUPED_COUNT)):
        end = end_of(block, step, group)
        total += cost_of(step, end - begin)
        if end < begin:
            falls = 1
        reached = maximum(reached, end)
        begin = end
    if rows != 0:
        if word(plain, MATMUL_K) == 0:
            reached = 0
        line = word(plain, MATMUL_LDC) * word(plain, MATMUL_ITEM)
        fill_zero(address(block, plain + 8 * MATMUL_C) + reached * line, (size - reached) * line)
        if reached == 0:
            return 0
    functions = word(block, FUNCTIONS)
    other = word(plain, MATMUL_K) if rows != 0 else word(plain, MATMUL_N)
    threads = minimum(word(block, THREADS), total * other * word(plain, MATMUL_M) // PARALLEL_FLOPS)
    data = words(4)
    set_word(data, 0, functions)
    set_word(data, 1, block)
    set_word(data, 2, step)
    set_word(data, 3, total)
    # groups that lie on each other are written in order
    if threads < 2 or falls != 0 or word(functions, GOMP_PARALLEL) == 0:
        grouped_range(data, 0, 1)
        return 0
    fork(block, grouped_part, data, threads)
    return 0


def cost_of(step: int, count: int) -> int:
    """Of a group of `count` elements, in rows; one without rows has no result, a product over nothing has one."""
    cost = maximum(count, 0) + GROUPED_READ
    return 0 if count <= 0 and word(step, GROUPED_ALONG) == MATMUL_N else cost


def end_of(block: int, step: int, group: int) -> int:
    """Where a group ends, as Python's slices take it."""
    at = address(block, step + 8 * GROUPED_ENDS) + group * word(step, GROUPED_END_STEP)
    size = word(step, GROUPED_SIZE)
    end = 0
    if word(step, GROUPED_END_ITEM) == 8:
        end = load64(at)
    else:
        end = load32(at)
        end -= end >> 31 << 32
    if end < 0:
        end += size
    return minimum(maximum(end, 0), size)


def grouped_part(data: int) -> int:
    """One thread's share."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    return grouped_range(data, number, call(word(functions, TEAM_SIZE)) & 4294967295)


def grouped_range(data: int, number: int, team: int) -> int:
    """The share of thread `number` of `team`: of each group the units (panels of columns of a block of rows) whose cost
    lies between two marks."""
    block = word(data, 1)
    step = word(data, 2)
    low = word(data, 3) * number // team
    high = word(data, 3) * (number + 1) // team
    begin = 0
    before = 0
    for group in range(word(step, GROUPED_COUNT)):
        end = end_of(block, step, group)
        count = maximum(end - begin, 0)
        cost = cost_of(step, count)
        if cost > 0 and before < high and before + cost > low:
            ours = word(step, GROUPED_OURS) != 0 and count > word(step, GROUPED_MOST_FEW)
            panels = parts(word(step + 8 * GROUPED_LIBRARY, MATMUL_M), word(step, GROUPED_WIDE))
            blocks = 1
            if ours != 0:
                product = step + 8 * GROUPED_PANELS
                rows = count if word(step, GROUPED_ALONG) == MATMUL_N else word(product, MATMUL_N)
                blocks = parts(rows, word(product, PACKED_ROWS))
                while blocks * 3 * word(product, PACKED_GRAIN) < rows and blocks * panels < team:
                    blocks += 1
                blocks = parts(rows, height(product, rows, blocks))
            units = panels * blocks
            first = maximum(low - before, 0) * units // cost
            last = minimum(high - before, cost) * units // cost
            if first < last:
                group_range(data, number, group, begin, count, ours, first, last, panels, blocks)
        before += cost
        begin = end
    return 0


def height(product: int, rows: int, blocks: int) -> int:
    """Rows of a block, whole panels, where there are at most so many blocks."""
    high = 3 * word(product, PACKED_GRAIN)
    return parts(parts(rows, blocks), high) * high


def group_range(data: int, number: int, group: int, begin: int, count: int, ours: int, first: int, last: int,
                panels: int, blocks: int) -> int:
    """The units first..last-1 of a group of `count` elements from `begin` on."""
    block = word(data, 1)
    step = word(data, 2)
    along = word(step, GROUPED_ALONG)
    if count == 0:
        if along == MATMUL_K:
            clear_group(block, step, group, first, last, panels * blocks)
        return 0
    product = words(37)  # MATMUL_DIMS
    copy_bytes(product, step + 8 * (GROUPED_PANELS if ours != 0 else GROUPED_LIBRARY), 8 * MATMUL_DIMS)
    set_word(product, along, count)
    steps = step + 8 * GROUPED_STEPS
    set_word(product, MATMUL_A + 1, word(product, MATMUL_A + 1) + group * word(steps, 0) + begin * word(steps, 3))
    set_word(product, MATMUL_B + 1, word(product, MATMUL_B + 1) + group * word(steps, 1) + begin * word(steps, 4))
    set_word(product, MATMUL_C + 1, word(product, MATMUL_C + 1) + group * word(steps, 2) + begin * word(steps, 5))
    frame = words(7)
    set_word(frame, 0, word(data, 0))
    set_word(frame, 1, block)
    set_word(frame, 2, product)
    if ours != 0:
        set_word(frame, 3, panels)
        set_word(frame, 4, height(product, word(product, MATMUL_N), blocks))
        set_word(frame, 5, blocks)
        set_word(frame, 6, 1)
        packed_range(frame, first, last, number)
        return 0
    from_column = first * word(step, GROUPED_WIDE)
    to_column = minimum(last * word(step, GROUPED_WIDE), word(product, MATMUL_M))
    if along == MATMUL_N and count <= word(step, GROUPED_MOST_FEW):
        set_word(product, MATMUL_THIN, word(step, GROUPED_THIN + count - 1))
        set_word(product, MATMUL_THIN_COUNT, count)
    else:
        set_word(product, MATMUL_THIN, 0)
        set_word(product, MATMUL_M, to_column - from_column)
        set_word(product, MATMUL_A + 1, word(product, MATMUL_A + 1) + from_column * word(step, GROUPED_LANE))
        set_word(product, MATMUL_C + 1, word(product, MATMUL_C + 1) + from_column * word(product, MATMUL_ITEM))
    matmul_range(frame, 0, 1, from_column, to_column)
    return 0


def clear_group(block: int, step: int, group: int, first: int, last: int, units: int) -> int:
    """Zeros in the parts first..last-1 of `units` of a group's result, a product over nothing."""
    product = step + 8 * GROUPED_LIBRARY
    rows = word(product, MATMUL_N)
    line = word(product, MATMUL_LDC) * word(product, MATMUL_ITEM)
    begin = rows * first // units
    place = address(block, product + 8 * MATMUL_C) + group * word(step, GROUPED_STEPS + 2)
    fill_zero(place + begin * line, (rows * last // units - begin) * line)
    return 0


GROUPED_ROUTINES = (run_grouped, cost_of, end_of, grouped_part, grouped_range, height, group_range, clear_group)
