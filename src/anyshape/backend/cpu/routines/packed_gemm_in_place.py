"""Packed GEMM in place, in the native subset: the left operand, which dies in the step, is packed over itself.

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

from anyshape.backend.cpu.bytecode.format import F32, PACKED_FINISH, PARALLEL_FLOPS, CallBlock, Functions, PackedProduct
from anyshape.backend.cpu.native.records import Struct, call_void, copy_bytes, i64, minimum, new, words
from anyshape.backend.cpu.routines.blas_gemm import address, entry_of
from anyshape.backend.cpu.routines.packed_gemm import PackedFrame, look_ahead, pack, parts
from anyshape.backend.cpu.routines.threads import parallel_for, share


class OverWork(Struct):
    """What the threads of such a product share: addresses of its matrices."""

    functions: Functions
    step: PackedProduct
    a: i64
    b: i64
    c: i64


def run_over(block: CallBlock, step: PackedProduct) -> int:
    """One product, its rows packed over themselves."""
    columns = step.m
    rows = step.n
    if columns <= 0 or rows <= 0:
        return 0
    functions = block.functions
    threads = minimum(block.threads, columns * rows * step.k // PARALLEL_FLOPS)
    data = new(OverWork)
    data.functions = functions
    data.step = step
    data.a = address(block, step.a)
    data.b = address(block, step.b)
    data.c = address(block, step.c)
    parallel_for(block, pack_over, data, threads)
    parallel_for(block, multiply_over, data, threads)
    return 0


def pack_over(data: OverWork, thread: int, team: int) -> int:
    """Packs some of the whole panels of rows over themselves."""
    step = data.step
    high = 3 * step.grain
    bytes_ = high * step.k * F32
    panels = step.n // high
    copy = words(6160)  # OVER_INNER elements of a panel of 12 rows, and a vector that is written past the end
    for panel in range(share(panels, thread, team), share(panels, thread + 1, team)):
        at = data.b + panel * bytes_
        panel_of_rows(data, at, high, copy)
        copy_bytes(at, copy, bytes_)
    return 0


def panel_of_rows(data: OverWork, source: int, size: int, target: int) -> int:
    """Packs `size` rows as one panel; blocks of k lie one after another in it."""
    step = data.step
    grain = step.grain
    inner = step.k
    deep = step.deep
    width = parts(size, grain) * grain
    frame = new(PackedFrame)
    frame.entry = entry_of(data.functions, step.function)
    frame.step = step
    first = 0
    while first < inner:
        pack(frame, source + first * F32, F32, inner * F32, F32, size, minimum(deep, inner - first),
             target + first * width * F32, width, grain, 1)
        first += deep
    return 0


def multiply_over(data: OverWork, thread: int, team: int) -> int:
    """Some of the columns of the result."""
    step = data.step
    wide = 2 * step.lanes
    high = 3 * step.grain
    inner = step.k
    deep = step.deep
    whole = step.n // high * high
    rest = step.n - whole
    rest_panel = words(6160)
    if rest > 0:
        panel_of_rows(data, data.b + whole * inner * F32, rest, rest_panel)
    panel = words(4112)  # of TILE's words along k and 32 columns, and a vector
    frame = new(PackedFrame)
    frame.entry = entry_of(data.functions, step.function)
    frame.step = step
    frame.column_panels = panel
    frame.fetch.target_step = step.ldc * F32
    a_step = wide * step.a_lane
    pairs = parts(step.m, wide)
    end = share(pairs, thread + 1, team)
    for pair in range(share(pairs, thread, team), end):
        columns = minimum(wide, step.m - pair * wide)
        first = 0
        while first < inner:
            count = minimum(deep, inner - first)
            source = data.a + pair * a_step + first * step.a_inner
            pack(frame, source, F32, step.a_lane, step.a_inner, columns, count, panel, wide,
                 step.lanes, 0)
            if first + count < inner:
                look_ahead(frame, source + count * step.a_inner, columns,
                           minimum(deep, inner - first - count))
            else:
                look_ahead(frame, data.a + (pair + 1) * a_step,
                           minimum(wide, step.m - (pair + 1) * wide) if pair + 1 < end else 0,
                           minimum(deep, inner))
            target = data.c + pair * wide * F32
            multiply_over_rows(frame, panel, data.b + first * high * F32, count, target, whole, columns, first)
            if rest > 0:
                grain = step.grain
                multiply_over_rows(frame, panel, rest_panel + first * parts(rest, grain) * grain * F32, count,
                              target + whole * step.ldc * F32, rest, columns, first)
            first += deep
    return 0


def multiply_over_rows(frame: PackedFrame, panel: int, rows: int, count: int, target: int, size: int, columns: int,
                       more: int) -> int:
    """A panel of columns with the panels of `size` rows, over `count` elements along k; `more` is not 0: on top of what
    is in the result."""
    entry = frame.entry
    step = frame.step
    lanes = step.lanes
    grain = step.grain
    c_step = step.ldc * F32
    inner = step.k
    width = parts(columns, lanes)
    sums = words(192)  # of 12 rows and 32 columns
    row = 0
    while row < size:
        thirds = minimum(3, parts(size - row, grain))
        tile = entry[2 * (3 - thirds) + width - 1]
        frame.fetch.target = target
        frame.fetch.apart = width * lanes * F32
        if thirds * grain <= size - row and width * lanes == columns:
            call_void(tile, panel, rows, count, target, c_step, 1 if more != 0 else 0, frame.fetch)
        else:
            call_void(tile, panel, rows, count, sums, 8 * lanes, 0, frame.fetch)
            call_void(entry[PACKED_FINISH], sums, 8 * lanes, target, c_step, minimum(size - row, thirds * grain),
                      columns, target if more != 0 else 0, c_step, step + PackedProduct.alpha)
        frame.fetch.done += count
        rows += thirds * grain * inner * F32
        target += thirds * grain * c_step
        row += thirds * grain
    return 0
