"""Packed GEMM in place: products of the host whose left operand is packed over itself, in the native subset: it dies in
the step.

    pack every panel of rows where it lies
    for each pair of vectors of columns, shared out among threads:
        for each block of k: pack the columns of A; multiply with all panels of rows

So rows are packed once, and a thread needs no scratch but a panel of columns, which fits on its stack. That counts
where the largest result of a call is made: then nothing else is alive but the operand, and memory is at its peak.

The words are those of backend/cpu/routines/packed_gemm.py, whose terms these are. The rows lie one after another (B, of
f32), as long as whole vectors; there is no addend. Rows that fill no panel stay as they are; each thread packs them for
itself.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    F32,
    FUNCTIONS,
    GOMP_PARALLEL,
    MATMUL_A,
    MATMUL_ALPHA,
    MATMUL_B,
    MATMUL_C,
    MATMUL_FUNCTION,
    MATMUL_K,
    MATMUL_LDC,
    MATMUL_M,
    MATMUL_N,
    PACKED_A_INNER,
    PACKED_A_LANE,
    PACKED_FINISH,
    PACKED_GRAIN,
    PACKED_LANES,
    PACKED_WORDS,
    PARALLEL_FLOPS,
    TEAM_SIZE,
    THREAD_NUMBER,
    THREADS,
)
from anyshape.backend.cpu.native.compiler import call, call_void, copy_bytes, minimum, set_word, word, words
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.packed_gemm import look_ahead, pack, parts
from anyshape.backend.cpu.routines.threads import fork


def run_over(block: int, step: int) -> int:
    """One product, its rows packed over themselves."""
    columns = word(step, MATMUL_M)
    rows = word(step, MATMUL_N)
    if columns <= 0 or rows <= 0:
        return 0
    functions = word(block, FUNCTIONS)
    threads = minimum(word(block, THREADS), columns * rows * word(step, MATMUL_K) // PARALLEL_FLOPS)
    data = words(6)
    set_word(data, 0, functions)
    set_word(data, 1, step)
    set_word(data, 2, address(block, step + 8 * MATMUL_A))
    set_word(data, 3, address(block, step + 8 * MATMUL_B))
    set_word(data, 4, address(block, step + 8 * MATMUL_C))
    if threads < 2 or word(functions, GOMP_PARALLEL) == 0:
        pack_over(data, 0, 1)
        multiply_over(data, 0, 1)
        return 0
    fork(block, pack_over_part, data, threads)
    fork(block, multiply_over_part, data, threads)
    return 0


def pack_over_part(data: int) -> int:
    """One thread's share of the panels of rows."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    pack_over(data, number, call(word(functions, TEAM_SIZE)) & 4294967295)
    return 0


def multiply_over_part(data: int) -> int:
    """One thread's share of the columns."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    multiply_over(data, number, call(word(functions, TEAM_SIZE)) & 4294967295)
    return 0


def pack_over(data: int, thread: int, team: int) -> int:
    """Packs some of the whole panels of rows over themselves."""
    step = word(data, 1)
    high = 3 * word(step, PACKED_GRAIN)
    bytes_ = high * word(step, MATMUL_K) * F32
    panels = word(step, MATMUL_N) // high
    copy = words(6160)  # OVER_INNER elements of a panel of 12 rows, and a vector that is written past the end
    for panel in range(panels * thread // team, panels * (thread + 1) // team):
        at = word(data, 3) + panel * bytes_
        panel_of_rows(data, at, high, copy)
        copy_bytes(at, copy, bytes_)
    return 0


def panel_of_rows(data: int, source: int, size: int, target: int) -> int:
    """Packs `size` rows as one panel; blocks of k lie one after another in it."""
    step = word(data, 1)
    grain = word(step, PACKED_GRAIN)
    inner = word(step, MATMUL_K)
    deep = word(step, PACKED_WORDS)
    width = parts(size, grain) * grain
    frame = words(2)
    set_word(frame, 0, word(data, 0) + 8 * word(step, MATMUL_FUNCTION))
    set_word(frame, 1, step)
    first = 0
    while first < inner:
        pack(frame, source + first * F32, F32, inner * F32, F32, size, minimum(deep, inner - first),
             target + first * width * F32, width, grain, 1)
        first += deep
    return 0


def multiply_over(data: int, thread: int, team: int) -> int:
    """Some of the columns of the result."""
    step = word(data, 1)
    wide = 2 * word(step, PACKED_LANES)
    high = 3 * word(step, PACKED_GRAIN)
    inner = word(step, MATMUL_K)
    deep = word(step, PACKED_WORDS)
    whole = word(step, MATMUL_N) // high * high
    rest = word(step, MATMUL_N) - whole
    rest_panel = words(6160)
    if rest > 0:
        panel_of_rows(data, word(data, 3) + whole * inner * F32, rest, rest_panel)
    panel = words(4112)  # of TILE's words along k and 32 columns, and a vector
    frame = words(20)
    set_word(frame, 0, word(data, 0) + 8 * word(step, MATMUL_FUNCTION))
    set_word(frame, 1, step)
    set_word(frame, 9, panel)
    set_word(frame, 19, word(step, MATMUL_LDC) * F32)
    a_step = wide * word(step, PACKED_A_LANE)
    pairs = parts(word(step, MATMUL_M), wide)
    end = pairs * (thread + 1) // team
    for pair in range(pairs * thread // team, end):
        columns = minimum(wide, word(step, MATMUL_M) - pair * wide)
        first = 0
        while first < inner:
            count = minimum(deep, inner - first)
            source = word(data, 2) + pair * a_step + first * word(step, PACKED_A_INNER)
            pack(frame, source, F32, word(step, PACKED_A_LANE), word(step, PACKED_A_INNER), columns, count, panel, wide,
                 word(step, PACKED_LANES), 0)
            if first + count < inner:
                look_ahead(frame, source + count * word(step, PACKED_A_INNER), columns,
                           minimum(deep, inner - first - count))
            else:
                look_ahead(frame, word(data, 2) + (pair + 1) * a_step,
                           minimum(wide, word(step, MATMUL_M) - (pair + 1) * wide) if pair + 1 < end else 0,
                           minimum(deep, inner))
            target = word(data, 4) + pair * wide * F32
            multiply_over_rows(frame, panel, word(data, 3) + first * high * F32, count, target, whole, columns, first)
            if rest > 0:
                grain = word(step, PACKED_GRAIN)
                multiply_over_rows(frame, panel, rest_panel + first * parts(rest, grain) * grain * F32, count,
                              target + whole * word(step, MATMUL_LDC) * F32, rest, columns, first)
            first += deep
    return 0


def multiply_over_rows(frame: int, panel: int, rows: int, count: int, target: int, size: int, columns: int,
                       more: int) -> int:
    """A panel of columns with the panels of `size` rows, over `count` elements along k; `more` is not 0: on top of what
    is in the result."""
    entry = word(frame, 0)
    step = word(frame, 1)
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    c_step = word(step, MATMUL_LDC) * F32
    inner = word(step, MATMUL_K)
    width = parts(columns, lanes)
    sums = words(192)  # of 12 rows and 32 columns
    row = 0
    while row < size:
        thirds = minimum(3, parts(size - row, grain))
        tile = word(entry, 2 * (3 - thirds) + width - 1)
        set_word(frame, 18, target)
        if thirds * grain <= size - row and width * lanes == columns:
            call_void(tile, panel, rows, count, target, c_step, 1 if more != 0 else 0, frame + 104)
        else:
            call_void(tile, panel, rows, count, sums, 8 * lanes, 0, frame + 104)
            call_void(word(entry, PACKED_FINISH), sums, 8 * lanes, target, c_step, minimum(size - row, thirds * grain),
                      columns, target if more != 0 else 0, c_step, step + 8 * MATMUL_ALPHA)
        set_word(frame, 16, word(frame, 16) + count)
        rows += thirds * grain * inner * F32
        target += thirds * grain * c_step
        row += thirds * grain
    return 0


OVER_ROUTINES = (run_over, pack_over_part, multiply_over_part, pack_over, panel_of_rows, multiply_over,
                 multiply_over_rows)
