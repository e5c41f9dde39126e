"""Offset assignment of buffers at given sizes, in the native subset: greedy searches, each in another order.

    best fit by size, by area, by the power of two of the area; by birth; first fit by birth, by size
    then the same starts again and again, with what lies at the top placed first

After Minimalloc's and TFLite's greedy planners. The first layout that is good enough is taken.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    BY_AREA,
    BY_BIRTH,
    BY_POWER,
    BY_POWER_BETWEEN,
    BY_SIZE,
    CROWDED,
    MOST_REPAIRED,
    REPAIRS,
    SHORT,
)
from anyshape.backend.cpu.native.compiler import copy_bytes, fill_zero, maximum, minimum, set_word, word


def search(count: int, fixed: int, columns: int, wall: int, bound: int, good: int, top: int, room: int, starts: int,
           near: int) -> int:
    """The lowest top that a search finds, or `top` if none is below it. The first word of `room` (1 + 9 * count words)
    says whether there is a layout, the next `count` words are its offsets. `columns`: bytes, first and last steps and
    offsets of all; the first `fixed` have their places. `good`: a top that is not improved. The rest is as for
    `place`."""
    set_word(room, 0, 0)
    for way in range(7):
        kind = BY_SIZE
        ceiling = 0
        if way == 1:
            kind = BY_AREA
        elif way == 2:
            kind = BY_POWER
            ceiling = bound // 64 * 64
        elif way == 3:
            kind = BY_POWER_BETWEEN
            ceiling = bound // 64 * 64
        elif way < 6 and way > 3:
            kind = BY_BIRTH
        sort(count, fixed, columns, kind, room)
        top = minimum(top, attempt(count, fixed, columns, wall, way >= 5, ceiling, top, room, starts, near))
        if top <= good:
            return top
    for start in range(4):
        kind = BY_SIZE
        if start == 2:
            kind = BY_AREA
        if start == 3:
            kind = BY_BIRTH
        sort(count, fixed, columns, kind, room)
        for _ in range(minimum(REPAIRS, MOST_REPAIRED // (4 * maximum(count, 1)))):
            found = attempt(count, fixed, columns, wall, start == 1 or start == 3, 0, top, room, starts, near)
            top = minimum(top, found)
            if top <= good:
                return top
            if raised(count, fixed, columns, found, room) == 0:
                break
    return top


def attempt(count: int, fixed: int, columns: int, wall: int, lowest: int, ceiling: int, top: int, room: int,
            starts: int, near: int) -> int:
    """The top of a layout in the order that `room` has; its offsets are kept if it is below `top`."""
    offsets = room + 8 + 16 * count
    copy_bytes(offsets, columns + 24 * count, 8 * count)
    found = place(count, fixed, room + 8 + 8 * count, columns, columns + 8 * count, columns + 16 * count, offsets,
                  room + 8 + 24 * count, wall, lowest, ceiling, starts, near)
    if found < top:
        set_word(room, 0, 1)
        copy_bytes(room + 8, offsets, 8 * count)
    return found


def sort(count: int, fixed: int, columns: int, kind: int, room: int) -> int:
    """Writes an order of the buffers that have no place yet, behind those that have one."""
    order = room + 8 + 8 * count
    keys = room + 8 + 40 * count
    longest = 0
    for i in range(fixed, count):
        lasting = word(columns, 2 * count + i) - word(columns, count + i)
        longest = maximum(longest, maximum(lasting, 0 - lasting))
    for i in range(count):
        size = word(columns, i)
        first = word(columns, count + i)
        lasting = word(columns, 2 * count + i) - first
        area = size * (lasting + 1)
        set_word(order, i, i)
        set_word(keys, count + i, 0)
        set_word(keys, 2 * count + i, 0)
        if kind == BY_SIZE:
            set_word(keys, i, 0 - size * (2 * longest + 1) - lasting)
        elif kind == BY_AREA:
            set_word(keys, i, 0 - area)
        elif kind == BY_BIRTH:
            set_word(keys, i, first)
            set_word(keys, count + i, 0 - size)
        else:  # so that one layer's values come after those of the layer before
            if kind == BY_POWER_BETWEEN:
                area = (3 * area + 1) // 2
            area = maximum(area, 0 - area)
            power = 0
            while area > 0:
                power += 1
                area = area >> 1
            set_word(keys, i, 0 - power)
            set_word(keys, count + i, first)
            set_word(keys, 2 * count + i, 0 - size)
    gap = count - fixed if count - fixed > SHORT else 2
    while gap > 1:
        gap = maximum(gap * 4 // 9, 1)
        for i in range(fixed + gap, count):
            item = word(order, i)
            slot = i
            while slot >= fixed + gap:
                other = word(order, slot - gap)
                if comes_first(keys, count, other, item) != 0:
                    break
                set_word(order, slot, other)
                slot -= gap
            set_word(order, slot, item)
    return 0


def comes_first(keys: int, count: int, one: int, other: int) -> int:
    """Whether `one` comes before `other`: by three keys, then by number."""
    for key in range(3):
        if word(keys, key * count + one) != word(keys, key * count + other):
            return word(keys, key * count + one) < word(keys, key * count + other)
    return one < other


def raised(count: int, fixed: int, columns: int, top: int, room: int) -> int:
    """Moves what reaches the top to the front of the order; 0 where that changes nothing."""
    order = room + 8 + 8 * count
    offsets = room + 8 + 16 * count
    others = room + 8 + 64 * count
    at = fixed
    rest = 0
    changed = 0
    for i in range(fixed, count):
        item = word(order, i)
        if word(offsets, item) + word(columns, item) >= top:
            if at != i:
                changed = 1
            set_word(order, at, item)
            at += 1
        else:
            set_word(others, rest, item)
            rest += 1
    copy_bytes(order + 8 * at, others, 8 * rest)
    return changed


def place(count: int, fixed: int, order: int, sizes: int, firsts: int, lasts: int, offsets: int, placed: int,
          wall: int, lowest: int, ceiling: int, starts: int, near: int) -> int:
    """Places buffers one after another in `order`, each into the smallest gap that fits (best fit), or, if `lowest` is
    not 0, into the lowest one (first fit); returns the top.

    What fits between the others and `ceiling` hangs from there: so two that are alive together for a moment only, as
    one layer's result and the next one's, lie at opposite ends, and each leaves all the rest in one piece.

    All arguments but count, fixed (that many of `order` have offsets already), wall, lowest and ceiling are addresses
    of `count` words each. No buffer crosses `wall`. `placed` is room for the list of buffers by offset, and as much
    again. `starts`, `near`: which buffers are alive with each, as `neighbours` lists them, or 0: all are looked at.
    """
    top = wall
    turns = placed + 8 * count  # by buffer, 1 + its position in `order`, once it is placed
    if near != 0:
        fill_zero(turns, 8 * count)
    for position in range(count):
        item = word(order, position)
        used = position
        if position >= fixed:
            if near != 0:
                used = gathered(near + 8 * word(starts, item), word(starts, item + 1) - word(starts, item), offsets,
                                placed, turns)
            set_word(offsets, item, best_gap(item, used, sizes, firsts, lasts, offsets, placed, wall, lowest, ceiling))
        at = word(offsets, item)
        top = maximum(top, at + word(sizes, item))
        if near != 0:
            set_word(turns, item, position + 1)
            continue
        slot = position
        while slot > 0:
            before = word(placed, slot - 1)
            if word(offsets, before) <= at:
                break
            set_word(placed, slot, before)
            slot -= 1
        set_word(placed, slot, item)
    return top


def gathered(near: int, count: int, offsets: int, placed: int, turns: int) -> int:
    """Lists those of `count` buffers that have a place, by offset and then as they got it; returns how many. (Shell's
    sort, of short lists an insertion sort.)"""
    used = 0
    for i in range(count):
        item = word(near, i)
        if word(turns, item) != 0:
            set_word(placed, used, item)
            used += 1
    gap = used if used > SHORT else 2
    while gap > 1:
        gap = maximum(gap * 4 // 9, 1)
        for i in range(gap, used):
            item = word(placed, i)
            at = word(offsets, item)
            slot = i
            while slot >= gap:
                before = word(placed, slot - gap)
                other = word(offsets, before)
                if other < at:
                    break
                if other == at and word(turns, before) < word(turns, item):
                    break
                set_word(placed, slot, before)
                slot -= gap
            set_word(placed, slot, item)
    return used


def neighbours(count: int, fixed: int, order: int, firsts: int, lasts: int, starts: int, near: int) -> int:
    """Which buffers are alive together; nobody asks for the lists of the first `fixed`. `order`: by first step. Without
    `near`: fills `starts` (count + 1 words) with where the list of each begins, and returns how many entries there are,
    0 where looking at all buffers takes less than such lists. Then, with `near`: fills them in."""
    if near == 0:
        fill_zero(starts, 8 * (count + 1))
    for i in range(count):
        item = word(order, i)
        first = word(firsts, item)
        last = word(lasts, item)
        for k in range(i + 1, count):
            other = word(order, k)
            if word(firsts, other) > last:
                break
            if word(lasts, other) < first:
                continue
            if item >= fixed:
                at = word(starts, item)
                if near != 0:
                    set_word(near, at, other)
                set_word(starts, item, at + 1)
            if other >= fixed:
                at = word(starts, other)
                if near != 0:
                    set_word(near, at, item)
                set_word(starts, other, at + 1)
    if near == 0:
        total = 0
        for i in range(count):
            found = word(starts, i)
            set_word(starts, i, total)
            total += found
        set_word(starts, count, total)
        return total if CROWDED * total < count * count else 0
    for k in range(count):
        i = count - k
        set_word(starts, i, word(starts, i - 1))
    set_word(starts, 0, 0)
    return 0


def best_gap(item: int, used: int, sizes: int, firsts: int, lasts: int, offsets: int, placed: int,
             wall: int, lowest: int, ceiling: int) -> int:
    """The offset of the smallest, or lowest, gap that holds `item` among the placed buffers alive with it, else the
    top. In the last gap before `ceiling` it lies at the upper end."""
    size = word(sizes, item)
    first = word(firsts, item)
    last = word(lasts, item)
    cursor = 0
    best = -1
    smallest = 4611686018427387904
    crossed = 0
    for i in range(used):
        other = word(placed, i)
        if word(firsts, other) > last or word(lasts, other) < first:
            continue
        start = word(offsets, other)
        if crossed == 0 and start >= wall:
            gap = wall - cursor
            if gap >= size and gap < smallest:
                best = cursor
                smallest = gap if lowest == 0 else 0
            cursor = maximum(cursor, wall)
            crossed = 1
        gap = start - cursor
        if gap >= size and gap < smallest:
            best = cursor
            smallest = gap if lowest == 0 else 0
        cursor = maximum(cursor, (start + word(sizes, other) + 63) & -64)
    if crossed == 0:
        gap = wall - cursor
        if gap >= size and gap < smallest:
            best = cursor
            smallest = gap
        cursor = maximum(cursor, wall)
    gap = ceiling - cursor
    if gap >= size and gap < smallest and cursor > wall:
        return ceiling - size
    return cursor if best < 0 else best


PLACE_ROUTINES = (search, attempt, sort, comes_first, raised, place, gathered, neighbours, best_gap)
