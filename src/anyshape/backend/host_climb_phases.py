"""What a climb (backend/host_climb.py) comes to where it stands, as native code: the arena of a backward in one piece,
or in phases, one piece after another (run/keeping.py).

    bytes    _____
            |     |______________     a piece is as large as its fullest step needs; what lies elsewhere comes on top
            |_____|______________|
"""
from __future__ import annotations

from anyshape.backend.host_climb_words import (
    AFTER,
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
    REST_AFTER,
    SCRATCH,
    TURN_COUNT,
    TURNS,
)
from anyshape.backend.native import maximum, set_word, word, words

PHASES, UNWORTHY = 4, 100  # one more phase is not worth it that saves less than this part (see run/keeping.py)


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
