"""Delta evaluation in the budget search (backend/cpu/routines/budget_search.py), as native code: the bytes that each
choice adds at steps of the arena and elsewhere, its top there, and what it costs. What one choice adds depends on what
was taken in its segment."""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.budget_frame import DROPPED, KEPT_THERE, MOVED, Change, Frame
from anyshape.backend.cpu.native.records import Array, fill_zero, i64, maximum, minimum, tail


def changed(frame: Frame, row: int, at: int) -> int:
    """Bytes that a choice adds outside the arena at a step."""
    found = 0
    rests = tail(frame.rests, frame.rests_from[row])
    for k in range(frame.rests_count[row]):
        change = rests[k]
        if change.first <= at and at < change.end:
            found += change.bytes
    return found


def left_behind(frame: Frame, row: int, at: int, later: int) -> int:
    """Bytes of a value itself that a choice takes away at a step."""
    names = frame.names
    i = row if row < names else row - names
    if frame.state[i] != KEPT_THERE or frame.leaves_end[i] <= at:
        return 0
    if later == 0 and frame.outside[i] != 0 and frame.leaves[i] > at:
        return 0
    return frame.bytes[i]


def add_all(curve: Array[i64], changes: Array[Change], count: int) -> int:
    """Adds intervals to a curve."""
    for k in range(count):
        change = changes[k]
        for i in range(change.first, change.end):
            curve[i] += change.bytes
    return 0


def score_segment(frame: Frame, segment: int) -> int:
    """What each choice that is left in a segment adds."""
    now = segment_cost(frame, segment)
    first = frame.made_from[segment]
    for k in range(first, frame.made_from[segment + 1]):
        made = frame.made[k]
        frame.now[made] = frame.wanted[made]
    members = frame.members
    begin_ = frame.members_from[segment]
    end = frame.members_from[segment + 1]
    for k in range(begin_, end):
        i = members[k]
        frame.read_now[i] = frame.read[i]
    for k in range(begin_, end):
        i = members[k]
        if frame.left[i] != 0:
            score_move(frame, segment, i, i, DROPPED, now)
        if frame.moving != 0:
            if frame.left[frame.names + i] != 0:
                score_move(frame, segment, frame.names + i, i, MOVED, now)
    return 0


def score_move(frame: Frame, segment: int, row: int, i: int, state: int, now: int) -> int:
    """What a choice adds in a segment whose steps cost `now`, as they run without it."""
    states = frame.state
    old = states[i]
    states[i] = state
    frame.cost[row] = segment_cost(frame, segment) - now
    states[i] = old
    frame.changes_count[row] = 0
    frame.rests_count[row] = 0
    for k in range(frame.made_from[segment], frame.made_from[segment + 1]):
        made = frame.made[k]
        more = frame.wanted[made] - frame.now[made]
        if more != 0:
            inside = frame.made_inside[made]
            add_interval(frame, row, inside, frame.made_first[made], frame.made_end[made],
                 more * frame.made_bytes[made])
    for k in range(frame.members_from[segment], frame.members_from[segment + 1]):
        other = frame.members[k]
        if states[other] == MOVED and frame.read[other] != frame.read_now[other]:
            add_fetch(frame, row, other, frame.read_now[other], -1)
            add_fetch(frame, row, other, frame.read[other], 1)
    add_free(frame, row, i, old, state)
    return peak_per_row(frame, row)


def look_at(frame: Frame, row: int) -> int:
    """What moving a value adds that nothing computes again."""
    i = row - frame.names
    frame.changes_count[row] = 0
    frame.rests_count[row] = 0
    add_free(frame, row, i, KEPT_THERE, MOVED)
    return peak_per_row(frame, row)


def add_free(frame: Frame, row: int, i: int, old: int, state: int) -> int:
    """Notes that a value goes from one state to another."""
    bytes_ = frame.bytes[i]
    outside = frame.outside[i]
    frame.kept_change[row] = 0
    if old == KEPT_THERE:
        add_interval(frame, row, 0, frame.leaves[i], frame.leaves_end[i], -bytes_)
        if outside == 0:
            frame.kept_change[row] = -bytes_
    elif outside == 0:
        add_interval(frame, row, 1, frame.saved_first[i], frame.saved_end[i], -bytes_)
        add_interval(frame, row, 1, frame.own_first[i], frame.own_end[i], -bytes_)
    if outside == 0:
        until = frame.saved_end[i] if state == DROPPED else frame.gone[i] + 1
        add_interval(frame, row, 1, frame.saved_first[i], until, bytes_)
        if state == DROPPED:
            add_interval(frame, row, 1, frame.own_first[i], frame.own_end[i], bytes_)
        else:
            add_fetch(frame, row, i, frame.read[i] if frame.segment[i] >= 0 else 0, 1)
    return 0


def add_fetch(frame: Frame, row: int, i: int, read: int, sign: int) -> int:
    """Notes that a value that is moved out is there again, by a step that runs again if one reads it."""
    back = frame.early[i] if read else frame.late[i]
    return add_interval(frame, row, 1, frame.border + back, frame.held_end[i], sign * frame.bytes[i])


def add_interval(frame: Frame, row: int, inside: int, first: int, end: int, bytes_: int) -> int:
    """Notes bytes that a choice adds at some steps."""
    if first >= end or bytes_ == 0:
        return 0
    counts = frame.changes_count if inside else frame.rests_count
    start = frame.changes_from[row] if inside else frame.rests_from[row]
    change = (frame.changes if inside else frame.rests)[start + counts[row]]
    change.first = first
    change.end = end
    change.bytes = bytes_
    counts[row] += 1
    return 0


def segment_cost(frame: Frame, segment: int) -> int:
    """Finds what a segment's dropped values take to be computed again: the temporary values that are WANTED, whose
    steps READ a value that is moved; returns what these steps cost."""
    wanted = frame.wanted
    for k in range(frame.made_from[segment], frame.made_from[segment + 1]):
        wanted[frame.made[k]] = 0
    for k in range(frame.members_from[segment], frame.members_from[segment + 1]):
        i = frame.members[k]
        wanted[frame.buffer[i]] = frame.state[i] == DROPPED
        frame.read[i] = 0
    cost = 0
    first = frame.steps_from[segment]
    end = frame.steps_from[segment + 1]
    for k in range(end - first):
        step = end - 1 - k
        runs = 0
        for j in range(frame.writes_from[step], frame.writes_from[step + 1]):
            runs = maximum(runs, wanted[frame.writes[j]])
        if runs:
            cost += frame.work[step]
            for j in range(frame.touches_from[step], frame.touches_from[step + 1]):
                wanted[frame.touches[j]] = 1
            for j in range(frame.reads_from[step], frame.reads_from[step + 1]):
                frame.read[frame.reads[j]] = 1
    return cost


def peak_per_row(frame: Frame, row: int) -> int:
    """The steps at which a choice changes the arena, and its top there, in the forward and in the backward."""
    border = frame.border
    top_of(frame, row, 0, border, frame.first, frame.end, frame.top)
    return top_of(frame, row, border, frame.length, frame.later_first, frame.later_end,
                  frame.later_top)


def top_of(frame: Frame, row: int, begin_: int, until: int, firsts: Array[i64], ends: Array[i64],
           found: Array[i64]) -> int:
    """The same in the steps from `begin_` to `until`."""
    first = until
    end = begin_
    changes = tail(frame.changes, frame.changes_from[row])
    for k in range(frame.changes_count[row]):
        change = changes[k]
        start = change.first
        if start >= begin_ and start < until:
            first = minimum(first, start)
            end = maximum(end, change.end)
    first = minimum(first, end)
    firsts[row] = first
    ends[row] = end
    found[row] = top_between(frame, row, first, end)
    return 0


def top_between(frame: Frame, row: int, first: int, end: int) -> int:
    """The top of the arena with a choice, of some steps."""
    arena = frame.arena
    delta = frame.delta
    changes = tail(frame.changes, frame.changes_from[row])
    for k in range(frame.changes_count[row]):
        change = changes[k]
        start = maximum(change.first, first)
        until = minimum(change.end, end)
        if start < until:
            delta[start] += change.bytes
            delta[until] -= change.bytes
    most = 0
    more = 0
    for i in range(first, end):
        more += delta[i]
        most = maximum(most, arena[i] + more)
    fill_zero(tail(delta, first), 8 * (end - first + 1))
    return most
