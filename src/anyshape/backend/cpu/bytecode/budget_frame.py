"""Frame layout of the native budget search: the records of a greedy search for what to recompute or to offload
(backend/cpu/routines/budget_search.py); runtime/budget/greedy_search.py fills them and says what each field is."""
from __future__ import annotations

from typing import Annotated

from anyshape.backend.cpu.native.records import Array, Inline, Struct, i64

PHASES, UNWORTHY = 4, 100  # one more phase is not worth it that saves less than this part (see
# runtime/specialize/saved_policy.py)

KEPT_THERE, DROPPED, MOVED = range(3)  # states of a value


class Change(Struct):
    """Bytes that are there in steps first..end-1."""

    first: i64
    end: i64
    bytes: i64


class Phase(Struct):
    """A phase of a backward: its first strip of steps, the one after its last, and the bytes that it needs."""

    first: i64
    end: i64
    bytes: i64


class Phases(Struct):
    """Room for all phases."""

    phases: Annotated[Array[Phase], Inline(PHASES)]


class Frame(Struct):
    """The state of a search: numbers, then arrays."""

    length: i64
    border: i64
    names: i64
    segments: i64
    rows: i64
    moving: i64
    lives: i64
    scratch: i64
    later_scratch: i64
    shortest: i64
    shift: i64
    threads: i64
    hidden: i64
    most: i64
    stop: i64
    done: i64
    kept: i64
    picoseconds: i64
    busy: i64
    away: i64
    lowest: i64
    choices: i64
    points: i64
    at: i64
    later_at: i64
    is_later: i64
    life_place: Array[i64]
    life_first: Array[i64]
    life_end: Array[i64]
    life_bytes: Array[i64]
    segment: Array[i64]
    members_from: Array[i64]
    members: Array[i64]
    steps_from: Array[i64]
    made_from: Array[i64]
    made: Array[i64]
    writes_from: Array[i64]
    writes: Array[i64]
    touches_from: Array[i64]
    touches: Array[i64]
    reads_from: Array[i64]
    reads: Array[i64]
    work: Array[i64]
    made_first: Array[i64]
    made_end: Array[i64]
    made_inside: Array[i64]
    made_bytes: Array[i64]
    bytes: Array[i64]
    outside: Array[i64]
    saved_first: Array[i64]
    saved_end: Array[i64]
    leaves: Array[i64]
    leaves_end: Array[i64]
    own_first: Array[i64]
    own_end: Array[i64]
    buffer: Array[i64]
    held_end: Array[i64]
    gone: Array[i64]
    late: Array[i64]
    early: Array[i64]
    left: Array[i64]
    cost: Array[i64]
    copying: Array[i64]
    copy_cost: Array[i64]
    changes_from: Array[i64]
    changes_count: Array[i64]
    changes: Array[Change]
    rests_from: Array[i64]
    rests_count: Array[i64]
    rests: Array[Change]
    kept_change: Array[i64]
    first: Array[i64]
    end: Array[i64]
    top: Array[i64]
    later_first: Array[i64]
    later_end: Array[i64]
    later_top: Array[i64]
    state: Array[i64]
    wanted: Array[i64]
    now: Array[i64]
    read: Array[i64]
    read_now: Array[i64]
    arena: Array[i64]
    rest: Array[i64]
    delta: Array[i64]
    before: Array[i64]
    after: Array[i64]
    turn_count: i64
    turns: Array[i64]
    phased: i64
    phase_first: i64
    phase_end: i64
    strip_arena: Array[i64]
    strip_rest: Array[i64]
    taken: Array[i64]
    point_live: Array[i64]
    point_bound: Array[i64]
    point_choices: Array[i64]
    point_picoseconds: Array[i64]
    point_away: Array[i64]
