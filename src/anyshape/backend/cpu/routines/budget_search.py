"""The greedy budget search: the climb of a ladder (runtime/budget/greedy_search.py) as native code: what to drop or to
move out next, again and again.

    bytes at each step: arena, rest       the rung: the highest arena + the highest rest (+ what the forward keeps)
      1. each choice that is left: how much lower would that be, for how much time?
      2. the best is taken: its changes are added to `arena` and `rest`
      3. its segment is looked at again: what the other choices there add now; tops of what overlaps are found again

The arena of a backward may be in phases (runtime/specialize/saved_policy.py). Where nothing relieves the whole of it
any more, the fullest phase is relieved.

A choice is a row: value i is dropped (row i), or moved out (row names + i). What it adds is a list of intervals of
steps with bytes, `CHANGES` in the upper block of the arena, `RESTS` elsewhere. All numbers are whole: bytes, steps, and
picoseconds. The functions are translated by backend/cpu/native/compiler.py; they share one table of words, the frame.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode import budget_frame
from anyshape.backend.cpu.bytecode.budget_frame import (
    AFTER,
    ARENA,
    AT,
    AWAY,
    BEFORE,
    BORDER,
    BUSY,
    BYTES,
    CHANGES,
    CHANGES_COUNT,
    CHANGES_FROM,
    CHOICES,
    COPY_COST,
    COPYING,
    COST,
    DONE,
    DROPPED,
    END,
    FIRST,
    HIDDEN,
    IS_LATER,
    KEPT,
    KEPT_CHANGE,
    LATER_AT,
    LATER_END,
    LATER_FIRST,
    LATER_TOP,
    LEFT,
    LENGTH,
    LIFE_BYTES,
    LIFE_END,
    LIFE_FIRST,
    LIFE_PLACE,
    LIVES,
    LOWEST,
    MOST,
    MOVED,
    NAMES,
    PHASE_END,
    PHASE_FIRST,
    PHASED,
    PICOSECONDS,
    REST,
    RESTS,
    RESTS_COUNT,
    RESTS_FROM,
    ROWS,
    RUNG_AWAY,
    RUNG_BOUND,
    RUNG_CHOICES,
    RUNG_LIVE,
    RUNG_PICOSECONDS,
    RUNGS,
    SEGMENT,
    SEGMENTS,
    SHIFT,
    SHORTEST,
    STATE,
    STOP,
    TAKEN,
    THREADS,
    TOP,
)
from anyshape.backend.cpu.native.compiler import maximum, minimum, set_word, translate, word
from anyshape.backend.cpu.routines import budget_deltas, budget_peaks
from anyshape.backend.cpu.routines.budget_deltas import (
    add_all,
    add_fetch,
    add_free,
    add_interval,
    changed,
    left_behind,
    look_at,
    peak_per_row,
    score_move,
    score_segment,
    segment_cost,
    top_between,
    top_of,
)
from anyshape.backend.cpu.routines.budget_peaks import (
    bound,
    divided,
    highest,
    highest_at,
    in_phases,
    standing,
    strip_end,
    strips,
)

LOWEST_SCORE = -1


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
        score_segment(frame, segment)
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
        score_segment(frame, segment)
    for other in range(word(frame, ROWS)):
        if word(word(frame, LEFT), other) != 0:
            meets = word(word(frame, FIRST), other) < end and first < word(word(frame, END), other)
            meets_later = word(word(frame, LATER_FIRST), other) < later_end and later_first < word(
                word(frame, LATER_END), other)
            if meets or meets_later:
                peak_per_row(frame, other)
    return 0


ROUTINES = (begin, climb, strips, strip_end, highest, highest_at, standing, in_phases, divided, bound, chosen,
            too_much, price, changed, left_behind, take, add_all, score_segment, score_move, look_at, add_free,
            add_fetch, add_interval, segment_cost, peak_per_row,
            top_of, top_between)


def emit_climb() -> str:
    """LLVM text of the routines; `begin` and `climb` are called from outside."""
    constants = {**vars(budget_frame), **vars(budget_peaks), **vars(budget_deltas), **globals()}
    return translate(ROUTINES, {name: value for name, value in constants.items() if isinstance(value, int)})
