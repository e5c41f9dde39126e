"""The climb of a ladder (run/climb.py) as native code: what to drop or to move out next, again and again.

    bytes at each step: arena, rest       the rung: the highest arena + the highest rest (+ what the forward keeps)
      1. each choice that is left: how much lower would that be, for how much time?
      2. the best is taken: its changes are added to `arena` and `rest`
      3. its segment is looked at again: what the other choices there add now; tops of what overlaps are found again

The arena of a backward may be in phases (run/keeping.py). Where nothing relieves the whole of it any more, the fullest
phase is relieved.

A choice is a row: value i is dropped (row i), or moved out (row names + i). What it adds is a list of intervals of
steps with bytes, `CHANGES` in the upper block of the arena, `RESTS` elsewhere. All numbers are whole: bytes, steps, and
picoseconds. The functions are translated by backend/native.py; they share one table of words, the frame.
"""
from __future__ import annotations

from anyshape.backend.native import fill_zero, maximum, minimum, set_word, translate, word, words

# the frame: numbers, then addresses of arrays of words; run/climb.py says what each is
(LENGTH, BORDER, NAMES, SEGMENTS, ROWS, MOVING, LIVES, SCRATCH, LATER_SCRATCH, SHORTEST, SHIFT, THREADS, HIDDEN, MOST,
 STOP, DONE, KEPT, PICOSECONDS, BUSY, AWAY, LOWEST, CHOICES, RUNGS, AT, LATER_AT, IS_LATER,
 LIFE_PLACE, LIFE_FIRST, LIFE_END, LIFE_BYTES,
 SEGMENT, MEMBERS_FROM, MEMBERS, STEPS_FROM, MADE_FROM, MADE,
 WRITES_FROM, WRITES, TOUCHES_FROM, TOUCHES, READS_FROM, READS, WORK,
 MADE_FIRST, MADE_END, MADE_INSIDE, MADE_BYTES,
 BYTES, OUTSIDE, SAVED_FIRST, SAVED_END, LEAVES, LEAVES_END, OWN_FIRST, OWN_END, BUFFER, HELD_END, GONE, LATE, EARLY,
 LEFT, COST, COPYING, COPY_COST, CHANGES_FROM, CHANGES_COUNT, CHANGES, RESTS_FROM, RESTS_COUNT, RESTS, KEPT_CHANGE,
 FIRST, END, TOP, LATER_FIRST, LATER_END, LATER_TOP,
 STATE, WANTED, NOW, READ, READ_NOW, ARENA, REST, DELTA, BEFORE, AFTER, REST_AFTER,
 TURN_COUNT, TURNS, PHASED, PHASE_FIRST, PHASE_END,
 TAKEN, RUNG_LIVE, RUNG_BOUND, RUNG_CHOICES, RUNG_PICOSECONDS, RUNG_AWAY) = range(99)
KEPT_THERE, DROPPED, MOVED = range(3)  # states of a value
LOWEST_SCORE = -1
PHASES, UNWORTHY = 4, 100  # one more phase is not worth it that saves less than this part (see run/keeping.py)


def begin(frame: int) -> int:
    """Fills the curves with everything kept, and looks at all choices."""
    length = word(frame, LENGTH)
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    for i in range(word(frame, LIVES)):
        curve = arena if word(word(frame, LIFE_PLACE), i) == 0 else rest
        bytes_ = word(word(frame, LIFE_BYTES), i)
        first = word(word(frame, LIFE_FIRST), i)
        end = word(word(frame, LIFE_END), i)
        if first < end:
            set_word(curve, first, word(curve, first) + bytes_)
            set_word(curve, end, word(curve, end) - bytes_)
    for i in range(1, length):
        set_word(arena, i, word(arena, i) + word(arena, i - 1))
        set_word(rest, i, word(rest, i) + word(rest, i - 1))
    names = word(frame, NAMES)
    for segment in range(word(frame, SEGMENTS)):
        look(frame, segment)
    for row in range(names, word(frame, ROWS)):
        if word(word(frame, SEGMENT), row - names) < 0 and word(word(frame, LEFT), row) != 0:
            look_at(frame, row)
    return 0


def climb(frame: int) -> int:
    """Climbs until a rung may need at most STOP bytes, or none is left (DONE)."""
    while word(frame, DONE) == 0:
        live = standing(frame)
        if live < word(frame, LOWEST):
            rung = word(frame, RUNGS)
            set_word(frame, LOWEST, live)
            least = bound(frame)
            set_word(word(frame, RUNG_LIVE), rung, live)
            set_word(word(frame, RUNG_BOUND), rung, least)
            set_word(word(frame, RUNG_CHOICES), rung, word(frame, CHOICES))
            set_word(word(frame, RUNG_PICOSECONDS), rung, word(frame, PICOSECONDS))
            set_word(word(frame, RUNG_AWAY), rung, word(frame, AWAY))
            set_word(frame, RUNGS, rung + 1)
            if least <= word(frame, STOP):
                return 0
        row = chosen(frame)
        if row >= 0:
            take(frame, row)
        elif word(frame, PHASED) == 0:
            set_word(frame, PHASED, 1)
            set_word(frame, LOWEST, minimum(word(frame, LOWEST), standing(frame)))
        else:
            set_word(frame, DONE, 1)
    return 0


def highest(curve: int, first: int, end: int) -> int:
    """The first step with the most bytes."""
    at = first
    most = word(curve, first)
    for i in range(first, end):
        bytes_ = word(curve, i)
        if bytes_ > most:
            most = bytes_
            at = i
    return at


def standing(frame: int) -> int:
    """The most bytes alive at once, of the forward or of the backward; notes which of both it is, the fullest phase of
    the backward, and the steps at which most lies outside the arena."""
    border = word(frame, BORDER)
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    at = highest(rest, 0, border)
    forward = word(frame, KEPT) + word(frame, SCRATCH) + word(rest, at) + word(arena, highest(arena, 0, border))
    backward = word(frame, LATER_SCRATCH) + in_phases(frame)
    set_word(frame, AT, at)
    set_word(frame, LATER_AT, highest(rest, word(frame, PHASE_FIRST), word(frame, PHASE_END)))
    set_word(frame, IS_LATER, backward >= forward)
    return maximum(forward, backward)


def in_phases(frame: int) -> int:
    """The most bytes of the backward at once, its arena in up to PHASES pieces one after the other: the fullest phase
    is divided where that relieves it most, again and again."""
    border = word(frame, BORDER)
    length = word(frame, LENGTH)
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    phases = words(12)  # first step, end, bytes
    set_word(phases, 0, border)
    set_word(phases, 1, length)
    set_word(phases, 2, word(rest, highest(rest, border, length)) + word(arena, highest(arena, border, length)))
    count = 1
    fullest = 0
    while count < PHASES and word(frame, PHASED) != 0:
        if divided(frame, phases, fullest, count) == 0:
            break
        count += 1
        fullest = 0
        for k in range(1, count):
            if word(phases, 3 * k + 2) > word(phases, 3 * fullest + 2):
                fullest = k
    set_word(frame, PHASE_FIRST, word(phases, 3 * fullest))
    set_word(frame, PHASE_END, word(phases, 3 * fullest + 1))
    return word(phases, 3 * fullest + 2)


def divided(frame: int, phases: int, phase: int, count: int) -> int:
    """Divides one of `count` phases in two where that relieves it most; 0: nowhere is it worth it."""
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    first = word(phases, 3 * phase)
    end = word(phases, 3 * phase + 1)
    bytes_ = word(phases, 3 * phase + 2)
    # the highest from each step on
    after = word(frame, AFTER)
    rest_after = word(frame, REST_AFTER)
    set_word(after, end, 0)
    set_word(rest_after, end, 0)
    for k in range(end - first):
        i = end - 1 - k
        set_word(after, i, maximum(word(after, i + 1), word(arena, i)))
        set_word(rest_after, i, maximum(word(rest_after, i + 1), word(rest, i)))
    least = bytes_ - bytes_ // UNWORTHY
    found = 0
    before = 0
    rest_before = 0
    i = first
    for k in range(word(frame, TURN_COUNT)):
        turn = word(word(frame, TURNS), k)
        if turn > first and turn < end:
            while i < turn:
                before = maximum(before, word(arena, i))
                rest_before = maximum(rest_before, word(rest, i))
                i += 1
            one = before + rest_before
            other = word(after, turn) + word(rest_after, turn)
            if maximum(one, other) < least:
                least = maximum(one, other)
                found = turn
                set_word(phases, 3 * phase + 2, one)
                set_word(phases, 3 * count + 2, other)
    if found != 0:
        set_word(phases, 3 * phase + 1, found)
        set_word(phases, 3 * count, found)
        set_word(phases, 3 * count + 1, end)
    return found


def bound(frame: int) -> int:
    """What no layout needs less than: a phase of the backward may end at every turn."""
    border = word(frame, BORDER)
    length = word(frame, LENGTH)
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    forward = word(rest, highest(rest, 0, border)) + word(arena, highest(arena, 0, border))
    backward = 0
    first = border
    for k in range(word(frame, TURN_COUNT) + 1):
        end = length
        if k < word(frame, TURN_COUNT):
            end = word(word(frame, TURNS), k)
        if first < end:
            here = word(rest, highest(rest, first, end)) + word(arena, highest(arena, first, end))
            backward = maximum(backward, here)
        first = end
    return maximum(forward + word(frame, KEPT) + word(frame, SCRATCH), backward + word(frame, LATER_SCRATCH))


def chosen(frame: int) -> int:
    """The row that relieves the fullest step and costs the least time for its bytes; -1: none is left that does."""
    arena = word(frame, ARENA)
    later = word(frame, IS_LATER)
    first = word(frame, PHASE_FIRST) if later else 0
    end = word(frame, PHASE_END) if later else word(frame, BORDER)
    at = word(frame, LATER_AT if later else AT)
    # the highest before each step, and from each step on
    before = word(frame, BEFORE)
    after = word(frame, AFTER)
    set_word(before, first, 0)
    set_word(after, end, 0)
    for i in range(first, end):
        set_word(before, i + 1, maximum(word(before, i), word(arena, i)))
    for k in range(end - first):
        i = end - 1 - k
        set_word(after, i, maximum(word(after, i + 1), word(arena, i)))
    top = word(before, end)
    most = LOWEST_SCORE
    best = -1
    share_most = LOWEST_SCORE
    share_best = -1
    firsts = word(frame, LATER_FIRST if later else FIRST)
    ends = word(frame, LATER_END if later else END)
    tops = word(frame, LATER_TOP if later else TOP)
    left = word(frame, LEFT)
    for row in range(word(frame, ROWS)):
        if word(left, row) == 0:
            continue
        if too_much(frame, row):
            continue
        inner = top
        start = maximum(word(firsts, row), first)
        until = minimum(word(ends, row), end)
        if start < until:
            inner = word(tops, row)
            if start > word(firsts, row) or until < word(ends, row):
                inner = top_between(frame, row, start, until)
            inner = maximum(maximum(word(before, start), word(after, until)), inner)
        gain = top - inner - changed(frame, row, at) - (0 if later else word(word(frame, KEPT_CHANGE), row))
        share = left_behind(frame, row, at, later) if most < 0 else 0
        if gain > 0 or share > 0:
            cost = maximum(price(frame, row), word(frame, SHORTEST))
            if gain > 0:
                score = (gain << word(frame, SHIFT)) // cost
                if score > most:
                    most = score
                    best = row
            elif share > 0:
                # none helps by itself: what the first takes to be computed again serves the next ones
                score = (share << word(frame, SHIFT)) // cost
                if score > share_most:
                    share_most = score
                    share_best = row
    return share_best if best < 0 else best


def too_much(frame: int, row: int) -> int:
    """Whether the store has no place for it."""
    names = word(frame, NAMES)
    if row < names or word(frame, MOST) == 0:
        return 0
    return word(frame, AWAY) + word(word(frame, BYTES), row - names) > word(frame, MOST)


def price(frame: int, row: int) -> int:
    """Picoseconds: beside what is computed meanwhile, so much copying costs nobody's time."""
    cost = word(word(frame, COST), row)
    if row < word(frame, NAMES):
        return cost
    idle = word(frame, BUSY) - word(frame, HIDDEN)
    waiting = maximum(idle + word(word(frame, COPYING), row), 0) - maximum(idle, 0)
    return cost + word(word(frame, COPY_COST), row) + waiting * word(frame, THREADS)


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


def take(frame: int, row: int) -> int:
    """Takes a choice, and looks what it changes for the others."""
    names = word(frame, NAMES)
    i = row if row < names else row - names
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    add_all(arena, word(frame, CHANGES) + 24 * word(word(frame, CHANGES_FROM), row),
            word(word(frame, CHANGES_COUNT), row))
    add_all(rest, word(frame, RESTS) + 24 * word(word(frame, RESTS_FROM), row), word(word(frame, RESTS_COUNT), row))
    set_word(frame, KEPT, word(frame, KEPT) + word(word(frame, KEPT_CHANGE), row))
    set_word(frame, PICOSECONDS, word(frame, PICOSECONDS) + price(frame, row))
    set_word(word(frame, LEFT), row, 0)
    set_word(word(frame, TAKEN), word(frame, CHOICES), row)
    set_word(frame, CHOICES, word(frame, CHOICES) + 1)
    if row < names:
        set_word(word(frame, STATE), i, DROPPED)
    else:
        set_word(word(frame, STATE), i, MOVED)
        set_word(frame, BUSY, word(frame, BUSY) + word(word(frame, COPYING), row))
        set_word(frame, AWAY, word(frame, AWAY) + word(word(frame, BYTES), i))
        if i < names:  # what is moved out is not computed again
            set_word(word(frame, LEFT), i, 0)
    first = word(word(frame, FIRST), row)
    end = word(word(frame, END), row)
    later_first = word(word(frame, LATER_FIRST), row)
    later_end = word(word(frame, LATER_END), row)
    segment = word(word(frame, SEGMENT), i)
    if segment >= 0:
        look(frame, segment)
    for other in range(word(frame, ROWS)):
        if word(word(frame, LEFT), other) != 0:
            meets = word(word(frame, FIRST), other) < end and first < word(word(frame, END), other)
            meets_later = word(word(frame, LATER_FIRST), other) < later_end and later_first < word(
                word(frame, LATER_END), other)
            if meets or meets_later:
                tops(frame, other)
    return 0


def add_all(curve: int, change: int, count: int) -> int:
    """Adds intervals to a curve."""
    for _ in range(count):
        for i in range(word(change, 0), word(change, 1)):
            set_word(curve, i, word(curve, i) + word(change, 2))
        change += 24
    return 0


def look(frame: int, segment: int) -> int:
    """What each choice that is left in a segment adds."""
    now = run(frame, segment)
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
            compare(frame, segment, i, i, DROPPED, now)
        if word(frame, MOVING) != 0:
            if word(word(frame, LEFT), word(frame, NAMES) + i) != 0:
                compare(frame, segment, word(frame, NAMES) + i, i, MOVED, now)
    return 0


def compare(frame: int, segment: int, row: int, i: int, state: int, now: int) -> int:
    """What a choice adds in a segment whose steps cost `now`, as they run without it."""
    states = word(frame, STATE)
    old = word(states, i)
    set_word(states, i, state)
    set_word(word(frame, COST), row, run(frame, segment) - now)
    set_word(states, i, old)
    set_word(word(frame, CHANGES_COUNT), row, 0)
    set_word(word(frame, RESTS_COUNT), row, 0)
    for k in range(word(word(frame, MADE_FROM), segment), word(word(frame, MADE_FROM), segment + 1)):
        made = word(word(frame, MADE), k)
        more = word(word(frame, WANTED), made) - word(word(frame, NOW), made)
        if more != 0:
            inside = word(word(frame, MADE_INSIDE), made)
            note(frame, row, inside, word(word(frame, MADE_FIRST), made), word(word(frame, MADE_END), made),
                 more * word(word(frame, MADE_BYTES), made))
    for k in range(word(word(frame, MEMBERS_FROM), segment), word(word(frame, MEMBERS_FROM), segment + 1)):
        other = word(word(frame, MEMBERS), k)
        if word(states, other) == MOVED and word(word(frame, READ), other) != word(word(frame, READ_NOW), other):
            bring(frame, row, other, word(word(frame, READ_NOW), other), -1)
            bring(frame, row, other, word(word(frame, READ), other), 1)
    leave(frame, row, i, old, state)
    return tops(frame, row)


def look_at(frame: int, row: int) -> int:
    """What moving a value adds that nothing computes again."""
    i = row - word(frame, NAMES)
    set_word(word(frame, CHANGES_COUNT), row, 0)
    set_word(word(frame, RESTS_COUNT), row, 0)
    leave(frame, row, i, KEPT_THERE, MOVED)
    return tops(frame, row)


def leave(frame: int, row: int, i: int, old: int, state: int) -> int:
    """Notes that a value goes from one state to another."""
    bytes_ = word(word(frame, BYTES), i)
    outside = word(word(frame, OUTSIDE), i)
    set_word(word(frame, KEPT_CHANGE), row, 0)
    if old == KEPT_THERE:
        note(frame, row, 0, word(word(frame, LEAVES), i), word(word(frame, LEAVES_END), i), -bytes_)
        if outside == 0:
            set_word(word(frame, KEPT_CHANGE), row, -bytes_)
    elif outside == 0:
        note(frame, row, 1, word(word(frame, SAVED_FIRST), i), word(word(frame, SAVED_END), i), -bytes_)
        note(frame, row, 1, word(word(frame, OWN_FIRST), i), word(word(frame, OWN_END), i), -bytes_)
    if outside == 0:
        until = word(word(frame, SAVED_END), i) if state == DROPPED else word(word(frame, GONE), i) + 1
        note(frame, row, 1, word(word(frame, SAVED_FIRST), i), until, bytes_)
        if state == DROPPED:
            note(frame, row, 1, word(word(frame, OWN_FIRST), i), word(word(frame, OWN_END), i), bytes_)
        else:
            bring(frame, row, i, word(word(frame, READ), i) if word(word(frame, SEGMENT), i) >= 0 else 0, 1)
    return 0


def bring(frame: int, row: int, i: int, read: int, sign: int) -> int:
    """Notes that a value that is moved out is there again, by a step that runs again if one reads it."""
    back = word(word(frame, EARLY if read else LATE), i)
    return note(frame, row, 1, word(frame, BORDER) + back, word(word(frame, HELD_END), i),
                sign * word(word(frame, BYTES), i))


def note(frame: int, row: int, inside: int, first: int, end: int, bytes_: int) -> int:
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


def run(frame: int, segment: int) -> int:
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


def tops(frame: int, row: int) -> int:
    """The steps at which a choice changes the arena, and its top there, in the forward and in the backward."""
    border = word(frame, BORDER)
    top_of(frame, row, 0, border, word(frame, FIRST), word(frame, END), word(frame, TOP))
    return top_of(frame, row, border, word(frame, LENGTH), word(frame, LATER_FIRST), word(frame, LATER_END),
                  word(frame, LATER_TOP))


def top_of(frame: int, row: int, begin_: int, until: int, firsts: int, ends: int, found: int) -> int:
    """The same in the steps from `begin_` to `until`."""
    arena = word(frame, ARENA)
    delta = word(frame, DELTA)
    first = until
    end = begin_
    change = word(frame, CHANGES) + 24 * word(word(frame, CHANGES_FROM), row)
    for _ in range(word(word(frame, CHANGES_COUNT), row)):
        start = word(change, 0)
        if start >= begin_ and start < until:
            set_word(delta, start, word(delta, start) + word(change, 2))
            set_word(delta, word(change, 1), word(delta, word(change, 1)) - word(change, 2))
            first = minimum(first, start)
            end = maximum(end, word(change, 1))
        change += 24
    first = minimum(first, end)
    most = 0
    more = 0
    for i in range(first, end):
        more += word(delta, i)
        most = maximum(most, word(arena, i) + more)
    fill_zero(delta + 8 * first, 8 * (end - first + 1))
    set_word(firsts, row, first)
    set_word(ends, row, end)
    set_word(found, row, most)
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


ROUTINES = (begin, climb, highest, standing, in_phases, divided, bound, chosen, too_much, price, changed, left_behind,
            take, add_all, look, compare, look_at, leave, bring, note, run, tops, top_of,
            top_between)


def emit_climb() -> str:
    """LLVM text of the routines; `begin` and `climb` are called from outside."""
    return translate(ROUTINES, {name: value for name, value in globals().items() if isinstance(value, int)})
