"""Peaks in the budget search: what a climb (backend/cpu/routines/budget_search.py) comes to where it stands, as native
code: the arena of a backward in one piece, or in phases, one piece after another
(runtime/specialize/saved_policy.py).

    bytes    _____
            |     |______________     a piece is as large as its fullest step needs; what lies elsewhere comes on top
            |_____|______________|
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.budget_frame import (
    ARENA,
    AT,
    BORDER,
    IS_LATER,
    KEPT,
    LATER_AT,
    LATER_SCRATCH,
    LENGTH,
    PHASE_END,
    PHASE_FIRST,
    PHASED,
    REST,
    SCRATCH,
    STRIP_ARENA,
    STRIP_REST,
    TURN_COUNT,
    TURNS,
)
from anyshape.backend.cpu.native.compiler import maximum, set_word, word, words

PHASES, UNWORTHY = 4, 100  # one more phase is not worth it that saves less than this part (see
# runtime/specialize/saved_policy.py)


def strips(frame: int) -> int:
    """Finds the highest of both curves in the forward, and in the backward between every two turns."""
    arena = word(frame, ARENA)
    rest = word(frame, REST)
    turns = word(frame, TURN_COUNT)
    first = 0
    for k in range(turns + 2):
        end = strip_end(frame, k)
        most = 0
        rest_most = 0
        for i in range(first, end):
            most = maximum(most, word(arena, i))
            rest_most = maximum(rest_most, word(rest, i))
        set_word(word(frame, STRIP_ARENA), k, most)
        set_word(word(frame, STRIP_REST), k, rest_most)
        first = end
    return 0


def strip_end(frame: int, strip: int) -> int:
    """The step before which a strip ends."""
    if strip == 0:
        return word(frame, BORDER)
    if strip > word(frame, TURN_COUNT):
        return word(frame, LENGTH)
    return word(word(frame, TURNS), strip - 1)


def highest(curve: int, first: int, end: int) -> int:
    """The highest of some strips."""
    most = 0
    for k in range(first, end):
        most = maximum(most, word(curve, k))
    return most


def highest_at(frame: int, first: int, end: int) -> int:
    """The first step of some strips with the most bytes outside the arena."""
    most = highest(word(frame, STRIP_REST), first, end)
    strip = first
    while strip < end - 1:
        if word(word(frame, STRIP_REST), strip) == most:
            break
        strip += 1
    start = 0 if strip == 0 else strip_end(frame, strip - 1)
    for i in range(start, strip_end(frame, strip)):
        if word(word(frame, REST), i) == most:
            return i
    return start


def standing(frame: int) -> int:
    """The most bytes alive at once, of the forward or of the backward; notes which of both it is, the fullest phase of
    the backward, and the steps at which most lies outside the arena."""
    strips(frame)
    forward = word(frame, KEPT) + word(frame, SCRATCH) + word(word(frame, STRIP_REST), 0) + word(
        word(frame, STRIP_ARENA), 0)
    backward = word(frame, LATER_SCRATCH) + in_phases(frame)
    set_word(frame, AT, highest_at(frame, 0, 1))
    set_word(frame, IS_LATER, backward >= forward)
    return maximum(forward, backward)


def in_phases(frame: int) -> int:
    """The most bytes of the backward at once, its arena in up to PHASES pieces one after the other: the fullest phase
    is divided where that relieves it most, again and again."""
    end = word(frame, TURN_COUNT) + 2
    phases = words(12)  # first strip, end, bytes
    set_word(phases, 0, 1)
    set_word(phases, 1, end)
    set_word(phases, 2, highest(word(frame, STRIP_REST), 1, end) + highest(word(frame, STRIP_ARENA), 1, end))
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
    first = word(phases, 3 * fullest)
    end = word(phases, 3 * fullest + 1)
    set_word(frame, PHASE_FIRST, strip_end(frame, first - 1))
    set_word(frame, PHASE_END, strip_end(frame, end - 1))
    set_word(frame, LATER_AT, highest_at(frame, first, end))
    return word(phases, 3 * fullest + 2)


def divided(frame: int, phases: int, phase: int, count: int) -> int:
    """Divides one of `count` phases in two where that relieves it most; 0: nowhere is it worth it."""
    arena = word(frame, STRIP_ARENA)
    rest = word(frame, STRIP_REST)
    first = word(phases, 3 * phase)
    end = word(phases, 3 * phase + 1)
    bytes_ = word(phases, 3 * phase + 2)
    least = bytes_ - bytes_ // UNWORTHY
    found = 0
    before = 0
    rest_before = 0
    for strip in range(first + 1, end):
        before = maximum(before, word(arena, strip - 1))
        rest_before = maximum(rest_before, word(rest, strip - 1))
        one = before + rest_before
        if one >= least:
            break  # it only grows
        other = highest(arena, strip, end) + highest(rest, strip, end)
        if maximum(one, other) < least:
            least = maximum(one, other)
            found = strip
            set_word(phases, 3 * phase + 2, one)
            set_word(phases, 3 * count + 2, other)
    if found != 0:
        set_word(phases, 3 * phase + 1, found)
        set_word(phases, 3 * count, found)
        set_word(phases, 3 * count + 1, end)
    return found


def bound(frame: int) -> int:
    """What no layout needs less than: a phase of the backward may end at every turn. After `standing`."""
    arena = word(frame, STRIP_ARENA)
    rest = word(frame, STRIP_REST)
    backward = 0
    for k in range(1, word(frame, TURN_COUNT) + 2):
        backward = maximum(backward, word(rest, k) + word(arena, k))
    forward = word(rest, 0) + word(arena, 0)
    return maximum(forward + word(frame, KEPT) + word(frame, SCRATCH), backward + word(frame, LATER_SCRATCH))
