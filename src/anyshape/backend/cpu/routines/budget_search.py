"""The greedy budget search (runtime/budget/greedy_search.py) as native code: what to drop or to
move out next, again and again.

    bytes at each step: arena, rest       the point: the highest arena + the highest rest (+ what the forward keeps)
      1. each choice that is left: how much lower would that be, for how much time?
      2. the best is taken: its changes are added to `arena` and `rest`
      3. its segment is looked at again: what the other choices there add now; tops of what overlaps are found again

The arena of a backward may be in phases (runtime/specialize/saved_policy.py). Where nothing relieves the whole of it
any more, the fullest phase is relieved.

A choice is a row: value i is dropped (row i), or moved out (row names + i). What it adds is a list of intervals of
steps with bytes, `changes` in the upper block of the arena, `rests` elsewhere. All numbers are whole: bytes, steps, and
picoseconds. The functions are translated by backend/cpu/native/compiler.py; they share one table of words, the frame.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.budget_frame import DROPPED, MOVED, Frame
from anyshape.backend.cpu.native.compiler import translate
from anyshape.backend.cpu.native.records import maximum, minimum, tail
from anyshape.backend.cpu.routines.budget_deltas import (
    add_all,
    changed,
    left_behind,
    look_at,
    peak_per_row,
    score_segment,
    top_between,
)
from anyshape.backend.cpu.routines.budget_peaks import bound, standing

LOWEST_SCORE = -1


def begin(frame: Frame) -> int:
    """Fills the curves with everything kept, and looks at all choices."""
    length = frame.length
    arena = frame.arena
    rest = frame.rest
    for i in range(frame.lives):
        curve = arena if frame.life_place[i] == 0 else rest
        bytes_ = frame.life_bytes[i]
        first = frame.life_first[i]
        end = frame.life_end[i]
        if first < end:
            curve[first] += bytes_
            curve[end] -= bytes_
    for i in range(1, length):
        arena[i] += arena[i - 1]
        rest[i] += rest[i - 1]
    names = frame.names
    for segment in range(frame.segments):
        score_segment(frame, segment)
    for row in range(names, frame.rows):
        if frame.segment[row - names] < 0 and frame.left[row] != 0:
            look_at(frame, row)
    return 0


def advance(frame: Frame) -> int:
    """Searches until a point may need at most STOP bytes, or none is left (DONE)."""
    while frame.done == 0:
        live = standing(frame)
        if live < frame.lowest:
            point = frame.points
            frame.lowest = live
            least = bound(frame)
            frame.point_live[point] = live
            frame.point_bound[point] = least
            frame.point_choices[point] = frame.choices
            frame.point_picoseconds[point] = frame.picoseconds
            frame.point_away[point] = frame.away
            frame.points = point + 1
            if least <= frame.stop:
                return 0
        row = chosen(frame)
        if row >= 0:
            take(frame, row)
        elif frame.phased == 0:
            frame.phased = 1
            frame.lowest = minimum(frame.lowest, standing(frame))
        else:
            frame.done = 1
    return 0


def chosen(frame: Frame) -> int:
    """The row that relieves the fullest step and costs the least time for its bytes; -1: none is left that does."""
    arena = frame.arena
    later = frame.is_later
    first = frame.phase_first if later else 0
    end = frame.phase_end if later else frame.border
    at = frame.later_at if later else frame.at
    # the highest before each step, and from each step on
    before = frame.before
    after = frame.after
    before[first] = 0
    after[end] = 0
    for i in range(first, end):
        before[i + 1] = maximum(before[i], arena[i])
    for k in range(end - first):
        i = end - 1 - k
        after[i] = maximum(after[i + 1], arena[i])
    top = before[end]
    most = LOWEST_SCORE
    best = -1
    share_most = LOWEST_SCORE
    share_best = -1
    firsts = frame.later_first if later else frame.first
    ends = frame.later_end if later else frame.end
    tops = frame.later_top if later else frame.top
    left = frame.left
    for row in range(frame.rows):
        if left[row] == 0:
            continue
        if too_much(frame, row):
            continue
        inner = top
        start = maximum(firsts[row], first)
        until = minimum(ends[row], end)
        if start < until:
            inner = tops[row]
            if start > firsts[row] or until < ends[row]:
                inner = top_between(frame, row, start, until)
            inner = maximum(maximum(before[start], after[until]), inner)
        gain = top - inner - changed(frame, row, at) - (0 if later else frame.kept_change[row])
        share = left_behind(frame, row, at, later) if most < 0 else 0
        if gain > 0 or share > 0:
            cost = maximum(price(frame, row), frame.shortest)
            if gain > 0:
                score = (gain << frame.shift) // cost
                if score > most:
                    most = score
                    best = row
            elif share > 0:
                # none helps by itself: what the first takes to be computed again serves the next ones
                score = (share << frame.shift) // cost
                if score > share_most:
                    share_most = score
                    share_best = row
    return share_best if best < 0 else best


def too_much(frame: Frame, row: int) -> int:
    """Whether the store has no place for it."""
    names = frame.names
    if row < names or frame.most == 0:
        return 0
    return frame.away + frame.bytes[row - names] > frame.most


def price(frame: Frame, row: int) -> int:
    """Picoseconds: beside what is computed meanwhile, so much copying costs nobody's time."""
    cost = frame.cost[row]
    if row < frame.names:
        return cost
    idle = frame.busy - frame.hidden
    waiting = maximum(idle + frame.copying[row], 0) - maximum(idle, 0)
    return cost + frame.copy_cost[row] + waiting * frame.threads


def take(frame: Frame, row: int) -> int:
    """Takes a choice, and looks what it changes for the others."""
    names = frame.names
    i = row if row < names else row - names
    arena = frame.arena
    rest = frame.rest
    add_all(arena, tail(frame.changes, frame.changes_from[row]),
            frame.changes_count[row])
    add_all(rest, tail(frame.rests, frame.rests_from[row]), frame.rests_count[row])
    frame.kept += frame.kept_change[row]
    frame.picoseconds += price(frame, row)
    frame.left[row] = 0
    frame.taken[frame.choices] = row
    frame.choices += 1
    if row < names:
        frame.state[i] = DROPPED
    else:
        frame.state[i] = MOVED
        frame.busy += frame.copying[row]
        frame.away += frame.bytes[i]
        if i < names:  # what is moved out is not computed again
            frame.left[i] = 0
    first = frame.first[row]
    end = frame.end[row]
    later_first = frame.later_first[row]
    later_end = frame.later_end[row]
    segment = frame.segment[i]
    if segment >= 0:
        score_segment(frame, segment)
    for other in range(frame.rows):
        if frame.left[other] != 0:
            meets = frame.first[other] < end and first < frame.end[other]
            meets_later = frame.later_first[other] < later_end and later_first < frame.later_end[other]
            if meets or meets_later:
                peak_per_row(frame, other)
    return 0


def emit_search() -> str:
    """LLVM text of the routines; `begin` and `advance` are called from outside."""
    return translate(begin, advance)
