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
from anyshape.backend.cpu.native.records import Array, copy_bytes, fill_zero, i64, maximum, minimum, tail


def search(count: int, fixed: int, columns: Array[i64], wall: int, bound: int, good: int, top: int, room: Array[i64],
           starts: Array[i64], near: Array[i64], repairs: int) -> int:
    """The lowest top that a search finds, or `top` if none is below it. The first word of `room` (1 + 9 * count words)
    says whether there is a layout, the next `count` words are its offsets. `columns`: bytes, first and last steps and
    offsets of all; the first `fixed` have their places. `good`: a top that is not improved. `repairs`: 0 for the greedy
    searches; else the rest, which goes on with the `top` and the `room` that they left. The rest is as for `place`."""
    if repairs == 0:
        room[0] = 0
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


def live_peak(count: int, columns: Array[i64], steps: int, changes: Array[i64]) -> int:
    """The largest sum of bytes that are live at one of the points 0 .. steps. columns: bytes, first and last steps.
    changes: `steps + 2` words of 0, which are written."""
    for i in range(count):
        first = columns[count + i]
        last = columns[2 * count + i]
        if first <= last:
            changes[first] += columns[i]
            changes[minimum(last, steps) + 1] -= columns[i]
    live = 0
    most = 0
    for at in range(steps + 1):
        live += changes[at]
        most = maximum(most, live)
    return most


def apart(count: int, starts: Array[i64], sizes: Array[i64], which: Array[i64], alive: int, pairs: Array[i64],
          kept: int) -> int:
    """The judge of layouts at given sizes (plan/layout_judge.py), which calls nothing that assigns offsets. 1 where
    `count` buffers lie apart, else 0: each at a multiple of 64 from 0 on and below 2^62, across no border at `kept`,
    and no two that are alive together share a byte. Buffer i begins at `starts[i]` and has `sizes[which[i]]` bytes,
    below 2^62; `pairs`: `alive` buffers, then for each one the other that is alive with it."""
    for i in range(count):
        start = starts[i]
        if start < 0 or start >= 4611686018427387904:
            return 0
        if start != (start & -64):
            return 0
        if start < kept and kept < start + sizes[which[i]]:
            return 0
    for k in range(alive):
        one = pairs[k]
        other = pairs[alive + k]
        end = minimum(starts[one] + sizes[which[one]], starts[other] + sizes[which[other]])
        if maximum(starts[one], starts[other]) < end:
            return 0
    return 1


def attempt(count: int, fixed: int, columns: Array[i64], wall: int, lowest: int, ceiling: int, top: int,
            room: Array[i64], starts: Array[i64], near: Array[i64]) -> int:
    """The top of a layout in the order that `room` has; its offsets are kept if it is below `top`."""
    offsets = tail(room, 1 + 2 * count)
    copy_bytes(offsets, tail(columns, 3 * count), 8 * count)
    found = place(count, fixed, tail(room, 1 + count), columns, tail(columns, count), tail(columns, 2 * count), offsets,
                  tail(room, 1 + 3 * count), wall, lowest, ceiling, starts, near)
    if found < top:
        room[0] = 1
        copy_bytes(tail(room, 1), offsets, 8 * count)
    return found


def sort(count: int, fixed: int, columns: Array[i64], kind: int, room: Array[i64]) -> int:
    """Writes an order of the buffers that have no place yet, behind those that have one."""
    order = tail(room, 1 + count)
    keys = tail(room, 1 + 5 * count)
    longest = 0
    for i in range(fixed, count):
        lasting = columns[2 * count + i] - columns[count + i]
        longest = maximum(longest, maximum(lasting, 0 - lasting))
    for i in range(count):
        size = columns[i]
        first = columns[count + i]
        lasting = columns[2 * count + i] - first
        area = size * (lasting + 1)
        order[i] = i
        keys[count + i] = 0
        keys[2 * count + i] = 0
        if kind == BY_SIZE:
            keys[i] = 0 - size * (2 * longest + 1) - lasting
        elif kind == BY_AREA:
            keys[i] = 0 - area
        elif kind == BY_BIRTH:
            keys[i] = first
            keys[count + i] = 0 - size
        else:  # so that one layer's values come after those of the layer before
            if kind == BY_POWER_BETWEEN:
                area = (3 * area + 1) // 2
            area = maximum(area, 0 - area)
            power = 0
            while area > 0:
                power += 1
                area = area >> 1
            keys[i] = 0 - power
            keys[count + i] = first
            keys[2 * count + i] = 0 - size
    gap = count - fixed if count - fixed > SHORT else 2
    while gap > 1:
        gap = maximum(gap * 4 // 9, 1)
        for i in range(fixed + gap, count):
            item = order[i]
            slot = i
            while slot >= fixed + gap:
                other = order[slot - gap]
                if comes_first(keys, count, other, item) != 0:
                    break
                order[slot] = other
                slot -= gap
            order[slot] = item
    return 0


def comes_first(keys: Array[i64], count: int, one: int, other: int) -> int:
    """Whether `one` comes before `other`: by three keys, then by number."""
    for key in range(3):
        if keys[key * count + one] != keys[key * count + other]:
            return keys[key * count + one] < keys[key * count + other]
    return one < other


def raised(count: int, fixed: int, columns: Array[i64], top: int, room: Array[i64]) -> int:
    """Moves what reaches the top to the front of the order; 0 where that changes nothing."""
    order = tail(room, 1 + count)
    offsets = tail(room, 1 + 2 * count)
    others = tail(room, 1 + 8 * count)
    at = fixed
    rest = 0
    changed = 0
    for i in range(fixed, count):
        item = order[i]
        if offsets[item] + columns[item] >= top:
            if at != i:
                changed = 1
            order[at] = item
            at += 1
        else:
            others[rest] = item
            rest += 1
    copy_bytes(tail(order, at), others, 8 * rest)
    return changed


def place(count: int, fixed: int, order: Array[i64], sizes: Array[i64], firsts: Array[i64], lasts: Array[i64],
          offsets: Array[i64], placed: Array[i64], wall: int, lowest: int, ceiling: int, starts: Array[i64],
          near: Array[i64]) -> int:
    """Places buffers one after another in `order`, each into the smallest gap that fits (best fit), or, if `lowest` is
    not 0, into the lowest one (first fit); returns the top.

    What fits between the others and `ceiling` hangs from there: so two that are alive together for a moment only, as
    one layer's result and the next one's, lie at opposite ends, and each leaves all the rest in one piece.

    All arguments but count, fixed (that many of `order` have offsets already), wall, lowest and ceiling are addresses
    of `count` words each. No buffer crosses `wall`. `placed` is room for the list of buffers by offset, and as much
    again. `starts`, `near`: which buffers are alive with each, as `neighbours` lists them, or 0: all are looked at.
    """
    top = wall
    turns = tail(placed, count)  # by buffer, 1 + its position in `order`, once it is placed
    if near != 0:
        fill_zero(turns, 8 * count)
    for position in range(count):
        item = order[position]
        used = position
        if position >= fixed:
            if near != 0:
                used = gathered(tail(near, starts[item]), starts[item + 1] - starts[item], offsets,
                                placed, turns)
            offsets[item] = best_gap(item, used, sizes, firsts, lasts, offsets, placed, wall, lowest, ceiling)
        at = offsets[item]
        top = maximum(top, at + sizes[item])
        if near != 0:
            turns[item] = position + 1
            continue
        slot = position
        while slot > 0:
            before = placed[slot - 1]
            if offsets[before] <= at:
                break
            placed[slot] = before
            slot -= 1
        placed[slot] = item
    return top


def gathered(near: Array[i64], count: int, offsets: Array[i64], placed: Array[i64], turns: Array[i64]) -> int:
    """Lists those of `count` buffers that have a place, by offset and then as they got it; returns how many. (Shell's
    sort, of short lists an insertion sort.)"""
    used = 0
    for i in range(count):
        item = near[i]
        if turns[item] != 0:
            placed[used] = item
            used += 1
    gap = used if used > SHORT else 2
    while gap > 1:
        gap = maximum(gap * 4 // 9, 1)
        for i in range(gap, used):
            item = placed[i]
            at = offsets[item]
            slot = i
            while slot >= gap:
                before = placed[slot - gap]
                other = offsets[before]
                if other < at:
                    break
                if other == at and turns[before] < turns[item]:
                    break
                placed[slot] = before
                slot -= gap
            placed[slot] = item
    return used


def neighbours(count: int, fixed: int, order: Array[i64], firsts: Array[i64], lasts: Array[i64], starts: Array[i64],
               near: Array[i64]) -> int:
    """Which buffers are alive together; nobody asks for the lists of the first `fixed`. `order`: by first step. Without
    `near`: fills `starts` (count + 1 words) with where the list of each begins, and returns how many entries there are,
    0 where looking at all buffers takes less than such lists. Then, with `near`: fills them in."""
    if near == 0:
        fill_zero(starts, 8 * (count + 1))
    for i in range(count):
        item = order[i]
        first = firsts[item]
        last = lasts[item]
        for k in range(i + 1, count):
            other = order[k]
            if firsts[other] > last:
                break
            if lasts[other] < first:
                continue
            if item >= fixed:
                at = starts[item]
                if near != 0:
                    near[at] = other
                starts[item] = at + 1
            if other >= fixed:
                at = starts[other]
                if near != 0:
                    near[at] = item
                starts[other] = at + 1
    if near == 0:
        total = 0
        for i in range(count):
            found = starts[i]
            starts[i] = total
            total += found
        starts[count] = total
        return total if CROWDED * total < count * count else 0
    for k in range(count):
        i = count - k
        starts[i] = starts[i - 1]
    starts[0] = 0
    return 0


def best_gap(item: int, used: int, sizes: Array[i64], firsts: Array[i64], lasts: Array[i64], offsets: Array[i64],
             placed: Array[i64], wall: int, lowest: int, ceiling: int) -> int:
    """The offset of the smallest, or lowest, gap that holds `item` among the placed buffers alive with it, else the
    top. In the last gap before `ceiling` it lies at the upper end."""
    size = sizes[item]
    first = firsts[item]
    last = lasts[item]
    cursor = 0
    best = -1
    smallest = 4611686018427387904
    crossed = 0
    for i in range(used):
        other = placed[i]
        if firsts[other] > last or lasts[other] < first:
            continue
        start = offsets[other]
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
        cursor = maximum(cursor, (start + sizes[other] + 63) & -64)
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
