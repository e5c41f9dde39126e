"""Attention in half precision, in the native subset: tiles and heads whose products are made from packed panels.

Scores, their gradients, and the sums of the gradients of keys and values are f32, which products write in whole panels:
the scratch has room for them. Weights and gradients of scores are rounded when they are packed as factors, results
once. Keys and values are packed once for all the rows of a thread that meet them. Panels and products are those of
backend/cpu/routines/packed_gemm.py.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ATTENTION_COLUMN_PANELS,
    ATTENTION_COLUMNS,
    ATTENTION_DEPTH,
    ATTENTION_DKEYS,
    ATTENTION_DVALUES,
    ATTENTION_FACTORS,
    ATTENTION_GRADIENTS,
    ATTENTION_GRAIN,
    ATTENTION_ITEM,
    ATTENTION_KEYS,
    ATTENTION_KEYS_AGAIN,
    ATTENTION_LANES,
    ATTENTION_ONE,
    ATTENTION_PER_WORD,
    ATTENTION_PRODUCT,
    ATTENTION_ROW_PANELS,
    ATTENTION_ROWS,
    ATTENTION_SHARE,
    ATTENTION_STEP,
    ATTENTION_SUMS,
    ATTENTION_TILE,
    ATTENTION_VALUES,
    DKEY,
    DQUERY,
    DVALUE,
    F32,
    GRADIENT,
    KEY,
    MATMUL_ALPHA,
    MATMUL_ITEM,
    MATMUL_LDC,
    PACKED_C_ITEM,
    PACKED_FINISH,
    PACKED_GRAIN,
    PACKED_LANES,
    PACKED_PER_WORD,
    QUERY,
    RESULT,
    VALUE,
)
from anyshape.backend.cpu.native.compiler import call_void, maximum, minimum, set_word, word, words
from anyshape.backend.cpu.routines.attention_operands import clear_rows, operand, row_step, visible, weigh
from anyshape.backend.cpu.routines.packed_gemm import multiply_panels, pack, parts


def half_tile(data: int, batch: int, head: int, tile: int, scratch: int, new: int) -> int:
    """Some rows of one head's result; `new`: its keys and values are to be packed."""
    step = word(data, 2)
    first = tile * word(step, ATTENTION_TILE)
    rows = minimum(word(step, ATTENTION_TILE), word(step, ATTENTION_ROWS) - first)
    depth = word(step, ATTENTION_DEPTH)
    columns = word(step, ATTENTION_COLUMNS)
    item = word(step, ATTENTION_ITEM)
    scores = word(step, ATTENTION_STEP)
    lanes = word(step, ATTENTION_LANES)
    seen = visible(step, first + rows)
    group = head // word(step, ATTENTION_SHARE)
    result = operand(data, RESULT, batch, head, first)
    keys = scratch + word(step, ATTENTION_KEYS)
    values = scratch + word(step, ATTENTION_VALUES)
    row_panels = scratch + word(step, ATTENTION_ROW_PANELS)
    frame = words(57)
    half_frame(data, frame, scratch)
    if new != 0 and columns > 0:
        column_panels(frame, operand(data, KEY, batch, group, 0), row_step(data, KEY), item, columns, depth, keys)
        column_panels(frame, operand(data, VALUE, batch, group, 0), item, row_step(data, VALUE), depth, columns, values)
    if seen > 0:
        pack_rows(frame, operand(data, QUERY, batch, head, first), item, row_step(data, QUERY), item, rows, depth,
                  row_panels)
        into_sums(frame, rows, seen, columns, depth, row_panels, keys, depth, scratch, scores, 0)
    factors = scratch + word(step, ATTENTION_FACTORS)
    weigh(data, batch, head, first, rows, scratch, 0, factors)
    if seen == 0:
        clear_rows(data, RESULT, result, rows)
        return 0
    sums = scratch + word(step, ATTENTION_SUMS)
    wide = 4 * parts(depth, lanes) * lanes
    pack_rows(frame, scratch, F32, scores, F32, rows, seen, row_panels)
    into_sums(frame, rows, depth, depth, seen, row_panels, values, columns, sums, wide, 0)
    finish = word(word(frame, 0), PACKED_FINISH)
    for i in range(rows):
        call_void(finish, sums + i * wide, wide, result + i * row_step(data, RESULT), 0, 1, depth, 0, 0,
                  factors + 8 * i, 0)
    return 0


def half_head(data: int, batch: int, group: int, tiles: int, scratch: int) -> int:
    """The gradients of one head of keys and values, and of the queries that it serves."""
    step = word(data, 2)
    share = word(step, ATTENTION_SHARE)
    columns = word(step, ATTENTION_COLUMNS)
    depth = word(step, ATTENTION_DEPTH)
    item = word(step, ATTENTION_ITEM)
    scores = word(step, ATTENTION_STEP)
    lanes = word(step, ATTENTION_LANES)
    gradients = scratch + word(step, ATTENTION_GRADIENTS)
    key = operand(data, KEY, batch, group, 0)
    key_step = row_step(data, KEY)
    keys = scratch + word(step, ATTENTION_KEYS)
    values = scratch + word(step, ATTENTION_VALUES)
    keys_again = scratch + word(step, ATTENTION_KEYS_AGAIN)
    row_panels = scratch + word(step, ATTENTION_ROW_PANELS)
    others = scratch + word(step, ATTENTION_COLUMN_PANELS)
    dkeys = scratch + word(step, ATTENTION_DKEYS)
    dvalues = scratch + word(step, ATTENTION_DVALUES)
    wide = 4 * parts(depth, lanes) * lanes  # bytes from row to row of these two
    frame = words(57)
    half_frame(data, frame, scratch)
    if columns > 0:
        column_panels(frame, key, key_step, item, columns, depth, keys)
        column_panels(frame, key, item, key_step, depth, columns, keys_again)
        column_panels(frame, operand(data, VALUE, batch, group, 0), row_step(data, VALUE), item, columns, depth, values)
    more = 0
    reached = 0
    for member in range(share):
        head = group * share + member
        for back in range(tiles):
            first = (tiles - 1 - back) * word(step, ATTENTION_TILE)
            rows = minimum(word(step, ATTENTION_TILE), word(step, ATTENTION_ROWS) - first)
            seen = visible(step, first + rows)
            query = operand(data, QUERY, batch, head, first)
            query_step = row_step(data, QUERY)
            change = operand(data, GRADIENT, batch, head, first)
            change_step = row_step(data, GRADIENT)
            dquery = operand(data, DQUERY, batch, head, first)
            if seen == 0:
                clear_rows(data, DQUERY, dquery, rows)
                continue
            pack_rows(frame, query, item, query_step, item, rows, depth, row_panels)
            into_sums(frame, rows, seen, columns, depth, row_panels, keys, depth, scratch, scores, 0)
            pack_rows(frame, change, item, change_step, item, rows, depth, row_panels)
            into_sums(frame, rows, seen, columns, depth, row_panels, values, depth, gradients, scores, 0)
            weigh(data, batch, head, first, rows, scratch, gradients, 0)
            pack_rows(frame, gradients, F32, scores, F32, rows, seen, row_panels)
            into_result(frame, rows, depth, seen, row_panels, keys_again, columns, dquery, row_step(data, DQUERY))
            pack_rows(frame, gradients, F32, F32, scores, seen, rows, row_panels)
            column_panels(frame, query, item, query_step, depth, rows, others)
            into_sums(frame, seen, depth, depth, rows, row_panels, others, rows, dkeys, wide, more)
            pack_rows(frame, scratch, F32, F32, scores, seen, rows, row_panels)
            column_panels(frame, change, item, change_step, depth, rows, others)
            into_sums(frame, seen, depth, depth, rows, row_panels, others, rows, dvalues, wide, more)
            more = 1
            reached = maximum(reached, seen)
    dkey = operand(data, DKEY, batch, group, 0)
    dvalue = operand(data, DVALUE, batch, group, 0)
    finish = word(word(frame, 0), PACKED_FINISH)
    one = step + 8 * ATTENTION_ONE
    call_void(finish, dkeys, wide, dkey, row_step(data, DKEY), reached, depth, 0, 0, one, 0)
    call_void(finish, dvalues, wide, dvalue, row_step(data, DVALUE), reached, depth, 0, 0, one, 0)
    clear_rows(data, DKEY, dkey + reached * row_step(data, DKEY), columns - reached)
    clear_rows(data, DVALUE, dvalue + reached * row_step(data, DVALUE), columns - reached)
    return 0


def half_frame(data: int, frame: int, scratch: int) -> int:
    """Makes a frame as backend/cpu/routines/packed_gemm.py has it, with the words of a step behind it."""
    step = word(data, 2)
    inner = frame + 8 * 20
    set_word(frame, 0, word(data, 0) + 8 * word(step, ATTENTION_PRODUCT))
    set_word(frame, 1, inner)
    set_word(frame, 10, scratch + word(step, ATTENTION_SUMS))
    set_word(frame, 11, 1)
    set_word(inner, MATMUL_ITEM, word(step, ATTENTION_ITEM))
    set_word(inner, MATMUL_ALPHA, word(step, ATTENTION_ONE))
    set_word(inner, PACKED_LANES, word(step, ATTENTION_LANES))
    set_word(inner, PACKED_GRAIN, word(step, ATTENTION_GRAIN))
    set_word(inner, PACKED_PER_WORD, word(step, ATTENTION_PER_WORD))
    return 0


def column_panels(frame: int, source: int, lane_step: int, inner_step: int, size: int, count: int, target: int) -> int:
    """Packs columns in half precision: `size` lanes by `count` elements."""
    step = word(frame, 1)
    lanes = word(step, PACKED_LANES)
    pack(frame, source, word(step, MATMUL_ITEM), lane_step, inner_step, size, count, target, 2 * lanes, lanes, 0)
    return 0


def pack_rows(frame: int, source: int, item: int, lane_step: int, inner_step: int, size: int, count: int,
              target: int) -> int:
    """Packs rows; those of f32 are rounded."""
    grain = word(word(frame, 1), PACKED_GRAIN)
    pack(frame, source, item, lane_step, inner_step, size, count, target, 3 * grain, grain, 1)
    return 0


def into_sums(frame: int, rows: int, columns: int, most: int, count: int, row_panels: int, panels: int, room: int,
              target: int, target_step: int, more: int) -> int:
    """Sums in f32 of `rows` by `columns` of the `most` columns that are packed, whole panels of them, over `count`
    elements; the panels have room for `room`. `more`: to what is there."""
    step = word(frame, 1)
    lanes = word(step, PACKED_LANES)
    grain = word(step, PACKED_GRAIN)
    item = word(step, MATMUL_ITEM)
    set_word(step, MATMUL_ITEM, F32)
    set_word(step, PACKED_C_ITEM, F32)
    set_word(step, MATMUL_LDC, target_step // F32)
    set_word(frame, 2, minimum(parts(columns, 2 * lanes) * 2, parts(most, lanes)) * lanes)
    set_word(frame, 3, parts(rows, grain) * grain)
    set_word(frame, 4, target)
    set_word(frame, 5, more)
    multiply_half(frame, count, row_panels, panels, room)
    set_word(step, MATMUL_ITEM, item)
    return 0


def into_result(frame: int, rows: int, columns: int, count: int, row_panels: int, panels: int, room: int, target: int,
                target_step: int) -> int:
    """The same, rounded."""
    step = word(frame, 1)
    item = word(step, MATMUL_ITEM)
    set_word(step, PACKED_C_ITEM, item)
    set_word(step, MATMUL_LDC, target_step // item)
    set_word(frame, 2, columns)
    set_word(frame, 3, rows)
    set_word(frame, 4, target)
    set_word(frame, 5, 0)
    multiply_half(frame, count, row_panels, panels, room)
    return 0


def multiply_half(frame: int, count: int, row_panels: int, panels: int, room: int) -> int:
    """The product of panels that `frame` is set up for."""
    step = word(frame, 1)
    lanes = word(step, PACKED_LANES)
    set_word(frame, 8, row_panels)
    set_word(frame, 9, panels)
    set_word(frame, 12, parts(parts(room, word(step, PACKED_PER_WORD)), lanes) * lanes)
    set_word(frame, 13, panels)  # nothing to fetch that is not there
    multiply_panels(frame, parts(count, word(step, PACKED_PER_WORD)), 0)
    return 0


HALF_ROUTINES = (half_tile, half_head, half_frame, column_panels, pack_rows, into_sums, into_result, multiply_half)
