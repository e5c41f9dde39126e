"""Threads of the host, in the native subset: a parallel region (fork and join), barriers, and how busy the machine is.

On a machine whose cores other processes use, a thread of a team may not run when it should: the others wait for it at
every join and barrier, for a time slice of the scheduler each. So a region is timed: how long its first thread worked
and how long it waited. Where it waited longer than it worked, the next regions are *watched*: the other threads compare
the time that passes with the processor time that they get, so that a share which merely is the larger one does not
count. A region in which waiting was in vain makes the process go on with one thread, for WORTH times as long as was
lost, and then try again. What is computed does not depend on the number of threads.
"""
from __future__ import annotations

from collections.abc import Callable

from anyshape.backend.cpu.bytecode.format import (
    LONGEST,
    MONOTONIC,
    PATIENCE,
    THREAD_TIME,
    WATCHED,
    WORTH,
    CallBlock,
    Functions,
)
from anyshape.backend.cpu.native.records import (
    Array,
    Struct,
    address_of,
    call,
    call_void,
    i64,
    maximum,
    minimum,
    new,
    words,
)


class Region(Struct):
    """A parallel region: what runs, when it began, when the first thread had done its share, whether it is watched, and
    the nanoseconds in which a thread did not run."""

    functions: Functions
    routine: i64
    data: i64
    begin: i64
    end: i64
    watched: i64
    lost: i64


def low32(value: int) -> int:
    """What a C function that returns an `int` >= 0 left in a register of 64 bits."""
    return value & 4294967295


def share(size: int, thread: int, team: int) -> int:
    """Where the equal part of a thread begins; the next one's begins where it ends."""
    return size * thread // team


def now(functions: Functions, clock: int) -> int:
    """Nanoseconds of a clock; 0 where there is none."""
    time = words(2)
    if functions.clock == 0:
        return 0
    call(functions.clock, clock, time)
    return time[0] * 1000000000 + time[1]


def parallel_for(block: CallBlock, routine: int | Callable[..., int], data: int, threads: int) -> int:
    """Runs routine(data, thread, team) on so many threads at once, and waits for all; a team of one is the caller."""
    functions = block.functions
    if threads < 2 or functions.gomp_parallel == 0:
        call_void(routine, data, 0, 1)
        return 0
    load = functions.load
    region = new(Region)
    region.functions = functions
    region.routine = address_of(routine)
    region.data = data
    region.watched = load.watched
    begin = now(functions, MONOTONIC)
    region.begin = begin
    block.waited = 0
    call_void(functions.gomp_parallel, fork_part, region, threads, 0)
    end = now(functions, MONOTONIC)
    waited = block.waited + end - region.end
    worked = end - begin - waited
    watched = load.watched
    if watched > 0:
        load.watched = watched - 1
    if waited > worked + PATIENCE:
        load.watched = WATCHED
        if region.watched != 0 and 2 * region.lost > waited:
            load.until = end + minimum(WORTH * waited, LONGEST)
            load.alone += 1
            if block.times == 0:  # a run that is timed keeps to the clock that it began with
                block.threads = 1
    return 0


def fork_part(region: Region) -> int:
    """What one thread of a region does."""
    functions = region.functions
    number = low32(call(functions.thread_number))
    ran = 0
    watched = region.watched
    if number != 0 and watched != 0:
        ran = now(functions, THREAD_TIME)
    call_void(region.routine, region.data, number, low32(call(functions.team_size)))
    if number == 0:
        region.end = now(functions, MONOTONIC)
    elif watched != 0:
        lost = now(functions, MONOTONIC) - region.begin - now(functions, THREAD_TIME) + ran
        region.lost = maximum(region.lost, lost)
    return 0


def look(block: CallBlock) -> int:
    """Has a call that begins use one thread while the machine is busy."""
    functions = block.functions
    until = functions.load.until
    if until != 0 and block.threads > 1:
        if now(functions, MONOTONIC) < until:
            block.threads = 1
        else:
            functions.load.until = 0
    return 0


def meet(block: CallBlock, alone: Array[i64], number: int, turn: int, begin: int) -> int:
    """All threads of a region that began at `begin` meet, for the time number `turn`, from 1 on. Returns whether the
    first thread goes on without the others from here; address `alone` says from which time on: one that waited in vain
    writes there before it comes to the next one, so all see the same."""
    functions = block.functions
    if number != 0:
        call_void(functions.barrier)
    else:
        before = now(functions, MONOTONIC)
        call_void(functions.barrier)
        waited = now(functions, MONOTONIC) - before
        worked = before - begin - block.waited
        block.waited += waited
        if waited > worked + PATIENCE and alone[0] == 0:
            alone[0] = turn + 1
    return alone[0] != 0 and turn >= alone[0]
