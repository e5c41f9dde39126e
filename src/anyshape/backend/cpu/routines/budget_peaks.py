"""Peaks in the budget search (backend/cpu/routines/budget_search.py), as native code: of the arena of a backward in one
piece, or in phases, one piece after another (runtime/specialize/saved_policy.py).

    bytes    _____
            |     |______________     a piece is as large as its fullest step needs; what lies elsewhere comes on top
            |_____|______________|
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.budget_frame import PHASES, UNWORTHY, Frame, Phase, Phases
from anyshape.backend.cpu.native.records import Array, i64, maximum, new


def strips(frame: Frame) -> int:
    """Finds the highest of both curves in the forward, and in the backward between every two turns."""
    arena = frame.arena
    rest = frame.rest
    turns = frame.turn_count
    first = 0
    for k in range(turns + 2):
        end = strip_end(frame, k)
        most = 0
        rest_most = 0
        for i in range(first, end):
            most = maximum(most, arena[i])
            rest_most = maximum(rest_most, rest[i])
        frame.strip_arena[k] = most
        frame.strip_rest[k] = rest_most
        first = end
    return 0


def strip_end(frame: Frame, strip: int) -> int:
    """The step before which a strip ends."""
    if strip == 0:
        return frame.border
    if strip > frame.turn_count:
        return frame.length
    return frame.turns[strip - 1]


def highest(curve: Array[i64], first: int, end: int) -> int:
    """The highest of some strips."""
    most = 0
    for k in range(first, end):
        most = maximum(most, curve[k])
    return most


def highest_at(frame: Frame, first: int, end: int) -> int:
    """The first step of some strips with the most bytes outside the arena."""
    most = highest(frame.strip_rest, first, end)
    strip = first
    while strip < end - 1:
        if frame.strip_rest[strip] == most:
            break
        strip += 1
    start = 0 if strip == 0 else strip_end(frame, strip - 1)
    for i in range(start, strip_end(frame, strip)):
        if frame.rest[i] == most:
            return i
    return start


def standing(frame: Frame) -> int:
    """The most bytes alive at once, of the forward or of the backward; notes which of both it is, the fullest phase of
    the backward, and the steps at which most lies outside the arena."""
    strips(frame)
    forward = frame.kept + frame.scratch + frame.strip_rest[0] + frame.strip_arena[0]
    backward = frame.later_scratch + in_phases(frame)
    frame.at = highest_at(frame, 0, 1)
    frame.is_later = backward >= forward
    return maximum(forward, backward)


def in_phases(frame: Frame) -> int:
    """The most bytes of the backward at once, its arena in up to PHASES pieces one after the other: the fullest phase
    is divided where that relieves it most, again and again."""
    end = frame.turn_count + 2
    room = new(Phases)
    phases = room.phases
    phases[0].first = 1
    phases[0].end = end
    phases[0].bytes = highest(frame.strip_rest, 1, end) + highest(frame.strip_arena, 1, end)
    count = 1
    fullest = 0
    while count < PHASES and frame.phased != 0:
        if divided(frame, phases, fullest, count) == 0:
            break
        count += 1
        fullest = 0
        for k in range(1, count):
            if phases[k].bytes > phases[fullest].bytes:
                fullest = k
    first = phases[fullest].first
    end = phases[fullest].end
    frame.phase_first = strip_end(frame, first - 1)
    frame.phase_end = strip_end(frame, end - 1)
    frame.later_at = highest_at(frame, first, end)
    return phases[fullest].bytes


def divided(frame: Frame, phases: Array[Phase], phase: int, count: int) -> int:
    """Divides one of `count` phases in two where that relieves it most; 0: nowhere is it worth it."""
    arena = frame.strip_arena
    rest = frame.strip_rest
    first = phases[phase].first
    end = phases[phase].end
    bytes_ = phases[phase].bytes
    least = bytes_ - bytes_ // UNWORTHY
    found = 0
    before = 0
    rest_before = 0
    for strip in range(first + 1, end):
        before = maximum(before, arena[strip - 1])
        rest_before = maximum(rest_before, rest[strip - 1])
        one = before + rest_before
        if one >= least:
            break  # it only grows
        other = highest(arena, strip, end) + highest(rest, strip, end)
        if maximum(one, other) < least:
            least = maximum(one, other)
            found = strip
            phases[phase].bytes = one
            phases[count].bytes = other
    if found != 0:
        phases[phase].end = found
        phases[count].first = found
        phases[count].end = end
    return found


def bound(frame: Frame) -> int:
    """What no layout needs less than: a phase of the backward may end at every turn. After `standing`."""
    arena = frame.strip_arena
    rest = frame.strip_rest
    backward = 0
    for k in range(1, frame.turn_count + 2):
        backward = maximum(backward, rest[k] + arena[k])
    forward = rest[0] + arena[0]
    return maximum(forward + frame.kept + frame.scratch, backward + frame.later_scratch)
