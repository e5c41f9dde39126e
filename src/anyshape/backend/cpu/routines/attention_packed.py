"""Attention in half precision, in the native subset: tiles and heads whose products are made from packed panels.

Scores, their gradients, and the sums of the gradients of keys and values are f32, which products write in whole panels:
the scratch has room for them. Weights and gradients of scores are rounded when they are packed as factors, results
once. Keys and values are packed once for all the rows of a thread that meet them. Panels and products are those of
backend/cpu/routines/packed_gemm.py.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    DKEY,
    DQUERY,
    DVALUE,
    F32,
    GRADIENT,
    KEY,
    PACKED_FINISH,
    QUERY,
    RESULT,
    VALUE,
    AttentionStep,
    PackedProduct,
)
from anyshape.backend.cpu.native.records import call_void, maximum, minimum, new
from anyshape.backend.cpu.routines.attention_operands import (
    AttentionWork,
    clear_rows,
    operand,
    row_step,
    visible,
    weigh,
)
from anyshape.backend.cpu.routines.blas_gemm import entry_of
from anyshape.backend.cpu.routines.packed_gemm import PackedFrame, multiply_panels, pack, parts


def half_tile(data: AttentionWork, batch: int, head: int, tile: int, scratch: int, unpacked: int) -> int:
    """Some rows of one head's result; `unpacked`: its keys and values are to be packed."""
    step = data.step
    first = tile * step.tile
    rows = minimum(step.tile, step.rows - first)
    depth = step.depth
    columns = step.columns
    item = step.item
    scores = step.step
    lanes = step.lanes
    seen = visible(step, first + rows)
    group = head // step.share
    result = operand(data, RESULT, batch, head, first)
    keys = scratch + step.keys
    values = scratch + step.values
    row_panels = scratch + step.row_panels
    frame = new(PackedFrame)
    inner = new(PackedProduct)
    half_frame(data, frame, inner, scratch)
    if unpacked != 0 and columns > 0:
        column_panels(frame, operand(data, KEY, batch, group, 0), row_step(data, KEY), item, columns, depth, keys)
        column_panels(frame, operand(data, VALUE, batch, group, 0), item, row_step(data, VALUE), depth, columns, values)
    if seen > 0:
        pack_rows(frame, operand(data, QUERY, batch, head, first), item, row_step(data, QUERY), item, rows, depth,
                  row_panels)
        into_sums(frame, rows, seen, columns, depth, row_panels, keys, depth, scratch, scores, 0)
    factors = scratch + step.factors
    weigh(data, batch, head, first, rows, scratch, 0, factors)
    if seen == 0:
        clear_rows(data, RESULT, result, rows)
        return 0
    sums = scratch + step.sums
    wide = 4 * parts(depth, lanes) * lanes
    pack_rows(frame, scratch, F32, scores, F32, rows, seen, row_panels)
    into_sums(frame, rows, depth, depth, seen, row_panels, values, columns, sums, wide, 0)
    finish = frame.entry[PACKED_FINISH]
    for i in range(rows):
        call_void(finish, sums + i * wide, wide, result + i * row_step(data, RESULT), 0, 1, depth, 0, 0,
                  factors + 8 * i, 0)
    return 0


def half_head(data: AttentionWork, batch: int, group: int, tiles: int, scratch: int) -> int:
    """The gradients of one head of keys and values, and of the queries that it serves."""
    step = data.step
    columns = step.columns
    depth = step.depth
    item = step.item
    key = operand(data, KEY, batch, group, 0)
    key_step = row_step(data, KEY)
    wide = 4 * parts(depth, step.lanes) * step.lanes  # bytes from row to row of the sums
    frame = new(PackedFrame)
    inner = new(PackedProduct)
    half_frame(data, frame, inner, scratch)
    if columns > 0:
        column_panels(frame, key, key_step, item, columns, depth, scratch + step.keys)
        column_panels(frame, key, item, key_step, depth, columns, scratch + step.keys_again)
        column_panels(frame, operand(data, VALUE, batch, group, 0), row_step(data, VALUE), item, columns, depth,
                      scratch + step.values)
    reached = 0
    for member in range(step.share):
        for back in range(tiles):
            seen = half_gradients(data, frame, batch, group * step.share + member, tiles - 1 - back, scratch, wide,
                                  1 if reached > 0 else 0)
            reached = maximum(reached, seen)
    dkey = operand(data, DKEY, batch, group, 0)
    dvalue = operand(data, DVALUE, batch, group, 0)
    finish = frame.entry[PACKED_FINISH]
    one = step + AttentionStep.one
    call_void(finish, scratch + step.dkeys, wide, dkey, row_step(data, DKEY), reached, depth, 0, 0, one, 0)
    call_void(finish, scratch + step.dvalues, wide, dvalue, row_step(data, DVALUE), reached, depth, 0, 0, one, 0)
    clear_rows(data, DKEY, dkey + reached * row_step(data, DKEY), columns - reached)
    clear_rows(data, DVALUE, dvalue + reached * row_step(data, DVALUE), columns - reached)
    return 0


def half_gradients(data: AttentionWork, frame: PackedFrame, batch: int, head: int, tile: int, scratch: int, wide: int,
                   more: int) -> int:
    """The gradients of some rows of queries, and what these give to those of keys and values, in sums with rows of
    `wide` bytes; `more`: on top of what is there. How many columns the rows see."""
    step = data.step
    first = tile * step.tile
    rows = minimum(step.tile, step.rows - first)
    columns = step.columns
    depth = step.depth
    item = step.item
    scores = step.step
    seen = visible(step, first + rows)
    query = operand(data, QUERY, batch, head, first)
    query_step = row_step(data, QUERY)
    change = operand(data, GRADIENT, batch, head, first)
    change_step = row_step(data, GRADIENT)
    dquery = operand(data, DQUERY, batch, head, first)
    gradients = scratch + step.gradients
    row_panels = scratch + step.row_panels
    others = scratch + step.column_panels
    if seen == 0:
        clear_rows(data, DQUERY, dquery, rows)
        return 0
    pack_rows(frame, query, item, query_step, item, rows, depth, row_panels)
    into_sums(frame, rows, seen, columns, depth, row_panels, scratch + step.keys, depth, scratch, scores, 0)
    pack_rows(frame, change, item, change_step, item, rows, depth, row_panels)
    into_sums(frame, rows, seen, columns, depth, row_panels, scratch + step.values, depth, gradients, scores, 0)
    weigh(data, batch, head, first, rows, scratch, gradients, 0)
    pack_rows(frame, gradients, F32, scores, F32, rows, seen, row_panels)
    into_result(frame, rows, depth, seen, row_panels, scratch + step.keys_again, columns, dquery,
                row_step(data, DQUERY))
    pack_rows(frame, gradients, F32, F32, scores, seen, rows, row_panels)
    column_panels(frame, query, item, query_step, depth, rows, others)
    into_sums(frame, seen, depth, depth, rows, row_panels, others, rows, scratch + step.dkeys, wide, more)
    pack_rows(frame, scratch, F32, F32, scores, seen, rows, row_panels)
    column_panels(frame, change, item, change_step, depth, rows, others)
    into_sums(frame, seen, depth, depth, rows, row_panels, others, rows, scratch + step.dvalues, wide, more)
    return seen


def half_frame(data: AttentionWork, frame: PackedFrame, inner: PackedProduct, scratch: int) -> int:
    """Makes a frame as backend/cpu/routines/packed_gemm.py has it, with a step of its own."""
    step = data.step
    frame.entry = entry_of(data.functions, step.product)
    frame.step = inner
    frame.sums = scratch + step.sums
    frame.blocks = 1
    inner.item = step.item
    inner.a_item = step.item
    inner.alpha = step.one
    inner.lanes = step.lanes
    inner.grain = step.grain
    inner.per_word = step.per_word
    return 0


def column_panels(frame: PackedFrame, source: int, lane_step: int, inner_step: int, size: int, count: int,
                  target: int) -> int:
    """Packs columns in half precision: `size` lanes by `count` elements."""
    step = frame.step
    lanes = step.lanes
    pack(frame, source, step.item, lane_step, inner_step, size, count, target, 2 * lanes, lanes, 0)
    return 0


def pack_rows(frame: PackedFrame, source: int, item: int, lane_step: int, inner_step: int, size: int, count: int,
              target: int) -> int:
    """Packs rows; those of f32 are rounded."""
    grain = frame.step.grain
    pack(frame, source, item, lane_step, inner_step, size, count, target, 3 * grain, grain, 1)
    return 0


def into_sums(frame: PackedFrame, rows: int, columns: int, most: int, count: int, row_panels: int, panels: int,
              room: int, target: int, target_step: int, more: int) -> int:
    """Sums in f32 of `rows` by `columns` of the `most` columns that are packed, whole panels of them, over `count`
    elements; the panels have room for `room`. `more`: to what is there."""
    step = frame.step
    lanes = step.lanes
    grain = step.grain
    item = step.item
    step.item = F32
    step.c_item = F32
    step.ldc = target_step // F32
    frame.columns = minimum(parts(columns, 2 * lanes) * 2, parts(most, lanes)) * lanes
    frame.rows = parts(rows, grain) * grain
    frame.target = target
    frame.bias = more
    multiply_half(frame, count, row_panels, panels, room)
    step.item = item
    return 0


def into_result(frame: PackedFrame, rows: int, columns: int, count: int, row_panels: int, panels: int, room: int,
                target: int, target_step: int) -> int:
    """The same, rounded."""
    step = frame.step
    item = step.item
    step.c_item = item
    step.ldc = target_step // item
    frame.columns = columns
    frame.rows = rows
    frame.target = target
    frame.bias = 0
    multiply_half(frame, count, row_panels, panels, room)
    return 0


def multiply_half(frame: PackedFrame, count: int, row_panels: int, panels: int, room: int) -> int:
    """The product of panels that `frame` is set up for."""
    step = frame.step
    lanes = step.lanes
    frame.row_panels = row_panels
    frame.column_panels = panels
    frame.room = parts(parts(room, step.per_word), lanes) * lanes
    frame.fetch.source = panels  # nothing to fetch that is not there
    multiply_panels(frame, parts(count, step.per_word), 0)
    return 0
