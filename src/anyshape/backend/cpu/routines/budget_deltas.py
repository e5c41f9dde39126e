"""Delta evaluation in the budget search: what each choice of a climb (backend/cpu/routines/budget_search.py) adds where
it stands, as native code: bytes at steps of the arena and elsewhere, its top there, and what it costs. What one
choice adds depends on what was taken in its segment."""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.budget_frame import (
    ARENA,
    BORDER,
    BUFFER,
    BYTES,
    CHANGES,
    CHANGES_COUNT,
    CHANGES_FROM,
    COST,
    DELTA,
    DROPPED,
    EARLY,
    END,
    FIRST,
    GONE,
    HELD_END,
    KEPT_CHANGE,
    KEPT_THERE,
    LATE,
    LATER_END,
    LATER_FIRST,
    LATER_TOP,
    LEAVES,
    LEAVES_END,
    LEFT,
    LENGTH,
    MADE,
    MADE_BYTES,
    MADE_END,
    MADE_FIRST,
    MADE_FROM,
    MADE_INSIDE,
    MEMBERS,
    MEMBERS_FROM,
    MOVED,
    MOVING,
    NAMES,
    NOW,
    OUTSIDE,
    OWN_END,
    OWN_FIRST,
    READ,
    READ_NOW,
    READS,
    READS_FROM,
    RESTS,
    RESTS_COUNT,
    RESTS_FROM,
    SAVED_END,
    SAVED_FIRST,
    SEGMENT,
    STATE,
    STEPS_FROM,
    TOP,
    TOUCHES,
    TOUCHES_FROM,
    WANTED,
    WORK,
    WRITES,
    WRITES_FROM,
)
from anyshape.backend.cpu.native.compiler import fill_zero, maximum, minimum, set_word, word


def changed(frame: int, row: int, at: int) -> int:
    """Bytes that a choice adds outside the arena at a step."""
    found = 0
    change = word(frame, RESTS) + 24 * word(word(frame, RESTS_FROM), row)
    for _ in range(word(word(frame, RESTS_COUNT), row)):
        if word(change, 0) <= at and at < word(change, 1):
            found += word(change, 2)
        change += 24
    return found


def left_behind(frame: int, row: int, at: int, later: int) -> int:
    """Bytes of a value itself that a choice takes away at a step."""
    names = word(frame, NAMES)
    i = row if row < names else row - names
    if word(word(frame, STATE), i) != KEPT_THERE or word(word(frame, LEAVES_END), i) <= at:
        return 0
    if later == 0 and word(word(frame, OUTSIDE), i) != 0 and word(word(frame, LEAVES), i) > at:
        return 0
    return word(word(frame, BYTES), i)


def add_all(curve: int, change: int, count: int) -> int:
    """Adds intervals to a curve."""
    for _ in range(count):
        for i in range(word(change, 0), word(change, 1)):
            set_word(curve, i, word(curve, i) + word(change, 2))
        change += 24
    return 0


def score_segment(frame: int, segment: int) -> int:
    """What each choice that is left in a segment adds."""
    now = segment_cost(frame, segment)
    first = word(word(frame, MADE_FROM), segment)
    for k in range(first, word(word(frame, MADE_FROM), segment + 1)):
        made = word(word(frame, MADE), k)
        set_word(word(frame, NOW), made, word(word(frame, WANTED), made))
    members = word(frame, MEMBERS)
    begin_ = word(word(frame, MEMBERS_FROM), segment)
    end = word(word(frame, MEMBERS_FROM), segment + 1)
    for k in range(begin_, end):
        i = word(members, k)
        set_word(word(frame, READ_NOW), i, word(word(frame, READ), i))
    for k in range(begin_, end):
        i = word(members, k)
        if word(word(frame, LEFT), i) != 0:
            score_move(frame, segment, i, i, DROPPED, now)
        if word(frame, MOVING) != 0:
            if word(word(frame, LEFT), word(frame, NAMES) + i) != 0:
                score_move(frame, segment, word(frame, NAMES) + i, i, MOVED, now)
    return 0


def score_move(frame: int, segment: int, row: int, i: int, state: int, now: int) -> int:
    """What a choice adds in a segment whose steps cost `now`, as they run without it."""
    states = word(frame, STATE)
    old = word(states, i)
    set_word(states, i, state)
    set_word(word(frame, COST), row, segment_cost(frame, segment) - now)
    set_word(states, i, old)
    set_word(word(frame, CHANGES_COUNT), row, 0)
    set_word(word(frame, RESTS_COUNT), row, 0)
    for k in range(word(word(frame, MADE_FROM), segment), word(word(frame, MADE_FROM), segment + 1)):
        made = word(word(frame, MADE), k)
        more = word(word(frame, WANTED), made) - word(word(frame, NOW), made)
        if more != 0:
            inside = word(word(frame, MADE_INSIDE), made)
            add_interval(frame, row, inside, word(word(frame, MADE_FIRST), made), word(word(frame, MADE_END), made),
                 more * word(word(frame, MADE_BYTES), made))
    for k in range(word(word(frame, MEMBERS_FROM), segment), word(word(frame, MEMBERS_FROM), segment + 1)):
        other = word(word(frame, MEMBERS), k)
        if word(states, other) == MOVED and word(word(frame, READ), other) != word(word(frame, READ_NOW), other):
            add_fetch(frame, row, other, word(word(frame, READ_NOW), other), -1)
            add_fetch(frame, row, other, word(word(frame, READ), other), 1)
    add_free(frame, row, i, old, state)
    return peak_per_row(frame, row)


def look_at(frame: int, row: int) -> int:
    """What moving a value adds that nothing computes again."""
    i = row - word(frame, NAMES)
    set_word(word(frame, CHANGES_COUNT), row, 0)
    set_word(word(frame, RESTS_COUNT), row, 0)
    add_free(frame, row, i, KEPT_THERE, MOVED)
    return peak_per_row(frame, row)


def add_free(frame: int, row: int, i: int, old: int, state: int) -> int:
    """Notes that a value goes from one state to another."""
    bytes_ = word(word(frame, BYTES), i)
    outside = word(word(frame, OUTSIDE), i)
    set_word(word(frame, KEPT_CHANGE), row, 0)
    if old == KEPT_THERE:
        add_interval(frame, row, 0, word(word(frame, LEAVES), i), word(word(frame, LEAVES_END), i), -bytes_)
        if outside == 0:
            set_word(word(frame, KEPT_CHANGE), row, -bytes_)
    elif outside == 0:
        add_interval(frame, row, 1, word(word(frame, SAVED_FIRST), i), word(word(frame, SAVED_END), i), -bytes_)
        add_interval(frame, row, 1, word(word(frame, OWN_FIRST), i), word(word(frame, OWN_END), i), -bytes_)
    if outside == 0:
        until = word(word(frame, SAVED_END), i) if state == DROPPED else word(word(frame, GONE), i) + 1
        add_interval(frame, row, 1, word(word(frame, SAVED_FIRST), i), until, bytes_)
        if state == DROPPED:
            add_interval(frame, row, 1, word(word(frame, OWN_FIRST), i), word(word(frame, OWN_END), i), bytes_)
        else:
            add_fetch(frame, row, i, word(word(frame, READ), i) if word(word(frame, SEGMENT), i) >= 0 else 0, 1)
    return 0


def add_fetch(frame: int, row: int, i: int, read: int, sign: int) -> int:
    """Notes that a value that is moved out is there again, by a step that runs again if one reads it."""
    back = word(word(frame, EARLY if read else LATE), i)
    return add_interval(frame, row, 1, word(frame, BORDER) + back, word(word(frame, HELD_END), i),
                sign * word(word(frame, BYTES), i))


def add_interval(frame: int, row: int, inside: int, first: int, end: int, bytes_: int) -> int:
    """Notes bytes that a choice adds at some steps."""
    if first >= end or bytes_ == 0:
        return 0
    counts = word(frame, CHANGES_COUNT if inside else RESTS_COUNT)
    start = word(word(frame, CHANGES_FROM if inside else RESTS_FROM), row)
    change = word(frame, CHANGES if inside else RESTS) + 24 * (start + word(counts, row))
    set_word(change, 0, first)
    set_word(change, 1, end)
    set_word(change, 2, bytes_)
    set_word(counts, row, word(counts, row) + 1)
    return 0


def segment_cost(frame: int, segment: int) -> int:
    """Finds what a segment's dropped values take to be computed again: the temporary values that are WANTED, whose
    steps READ a value that is moved; returns what these steps cost."""
    wanted = word(frame, WANTED)
    for k in range(word(word(frame, MADE_FROM), segment), word(word(frame, MADE_FROM), segment + 1)):
        set_word(wanted, word(word(frame, MADE), k), 0)
    for k in range(word(word(frame, MEMBERS_FROM), segment), word(word(frame, MEMBERS_FROM), segment + 1)):
        i = word(word(frame, MEMBERS), k)
        set_word(wanted, word(word(frame, BUFFER), i), word(word(frame, STATE), i) == DROPPED)
        set_word(word(frame, READ), i, 0)
    cost = 0
    first = word(word(frame, STEPS_FROM), segment)
    end = word(word(frame, STEPS_FROM), segment + 1)
    for k in range(end - first):
        step = end - 1 - k
        runs = 0
        for j in range(word(word(frame, WRITES_FROM), step), word(word(frame, WRITES_FROM), step + 1)):
            runs = maximum(runs, word(wanted, word(word(frame, WRITES), j)))
        if runs:
            cost += word(word(frame, WORK), step)
            for j in range(word(word(frame, TOUCHES_FROM), step), word(word(frame, TOUCHES_FROM), step + 1)):
                set_word(wanted, word(word(frame, TOUCHES), j), 1)
            for j in range(word(word(frame, READS_FROM), step), word(word(frame, READS_FROM), step + 1)):
                set_word(word(frame, READ), word(word(frame, READS), j), 1)
    return cost


def peak_per_row(frame: int, row: int) -> int:
    """The steps at which a choice changes the arena, and its top there, in the forward and in the backward."""
    border = word(frame, BORDER)
    top_of(frame, row, 0, border, word(frame, FIRST), word(frame, END), word(frame, TOP))
    return top_of(frame, row, border, word(frame, LENGTH), word(frame, LATER_FIRST), word(frame, LATER_END),
                  word(frame, LATER_TOP))


def top_of(frame: int, row: int, begin_: int, until: int, firsts: int, ends: int, found: int) -> int:
    """The same in the steps from `begin_` to `until`."""
    first = until
    end = begin_
    change = word(frame, CHANGES) + 24 * word(word(frame, CHANGES_FROM), row)
    for _ in range(word(word(frame, CHANGES_COUNT), row)):
        start = word(change, 0)
        if start >= begin_ and start < until:
            first = minimum(first, start)
            end = maximum(end, word(change, 1))
        change += 24
    first = minimum(first, end)
    set_word(firsts, row, first)
    set_word(ends, row, end)
    set_word(found, row, top_between(frame, row, first, end))
    return 0


def top_between(frame: int, row: int, first: int, end: int) -> int:
    """The top of the arena with a choice, of some steps."""
    arena = word(frame, ARENA)
    delta = word(frame, DELTA)
    change = word(frame, CHANGES) + 24 * word(word(frame, CHANGES_FROM), row)
    for _ in range(word(word(frame, CHANGES_COUNT), row)):
        start = maximum(word(change, 0), first)
        until = minimum(word(change, 1), end)
        if start < until:
            set_word(delta, start, word(delta, start) + word(change, 2))
            set_word(delta, until, word(delta, until) - word(change, 2))
        change += 24
    most = 0
    more = 0
    for i in range(first, end):
        more += word(delta, i)
        most = maximum(most, word(arena, i) + more)
    fill_zero(delta + 8 * first, 8 * (end - first + 1))
    return most
