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
    BARRIER,
    CLOCK,
    FUNCTIONS,
    GOMP_PARALLEL,
    LOAD,
    LONGEST,
    MONOTONIC,
    PATIENCE,
    REGION_BEGIN,
    REGION_DATA,
    REGION_END,
    REGION_FUNCTIONS,
    REGION_LOST,
    REGION_ROUTINE,
    REGION_WATCHED,
    THREAD_NUMBER,
    THREAD_TIME,
    THREADS,
    TIMES,
    WAITED,
    WATCHED,
    WORTH,
)
from anyshape.backend.cpu.native.compiler import call, call_void, maximum, minimum, set_word, word, words


def now(functions: int, clock: int) -> int:
    """Nanoseconds of a clock; 0 where there is none."""
    time = words(2)
    if word(functions, CLOCK) == 0:
        return 0
    call(word(functions, CLOCK), clock, time)
    return word(time, 0) * 1000000000 + word(time, 1)


def fork(block: int, routine: int | Callable[[int], int], data: int, threads: int) -> int:
    """Runs routine(data) on so many threads at once, and waits for all."""
    functions = word(block, FUNCTIONS)
    load = word(functions, LOAD)
    region = words(7)
    set_word(region, REGION_FUNCTIONS, functions)
    set_word(region, REGION_ROUTINE, routine)  # type: ignore[arg-type]
    set_word(region, REGION_DATA, data)
    set_word(region, REGION_WATCHED, word(load, 1))
    begin = now(functions, MONOTONIC)
    set_word(region, REGION_BEGIN, begin)
    set_word(block, WAITED, 0)
    call_void(word(functions, GOMP_PARALLEL), fork_part, region, threads, 0)
    end = now(functions, MONOTONIC)
    waited = word(block, WAITED) + end - word(region, REGION_END)
    worked = end - begin - waited
    watched = word(load, 1)
    if watched > 0:
        set_word(load, 1, watched - 1)
    if waited > worked + PATIENCE:
        set_word(load, 1, WATCHED)
        if word(region, REGION_WATCHED) != 0 and 2 * word(region, REGION_LOST) > waited:
            set_word(load, 0, end + minimum(WORTH * waited, LONGEST))
            set_word(load, 2, word(load, 2) + 1)
            if word(block, TIMES) == 0:
                set_word(block, THREADS, 1)
    return 0


def fork_part(region: int) -> int:
    """What one thread of a region does."""
    functions = word(region, REGION_FUNCTIONS)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    ran = 0
    watched = word(region, REGION_WATCHED)
    if number != 0 and watched != 0:
        ran = now(functions, THREAD_TIME)
    call_void(word(region, REGION_ROUTINE), word(region, REGION_DATA))
    if number == 0:
        set_word(region, REGION_END, now(functions, MONOTONIC))
    elif watched != 0:
        lost = now(functions, MONOTONIC) - word(region, REGION_BEGIN) - now(functions, THREAD_TIME) + ran
        set_word(region, REGION_LOST, maximum(word(region, REGION_LOST), lost))
    return 0


def look(block: int) -> int:
    """Has a call that begins use one thread while the machine is busy."""
    functions = word(block, FUNCTIONS)
    until = word(word(functions, LOAD), 0)
    if until != 0 and word(block, THREADS) > 1 and word(block, TIMES) == 0:
        if now(functions, MONOTONIC) < until:
            set_word(block, THREADS, 1)
        else:
            set_word(word(functions, LOAD), 0, 0)
    return 0


def meet(block: int, alone: int, number: int, turn: int, begin: int) -> int:
    """All threads of a region that began at `begin` meet, for the time number `turn`, from 1 on. Returns whether the
    first thread goes on without the others from here; address `alone` says from which time on: one that waited in vain
    writes there before it comes to the next one, so all see the same."""
    functions = word(block, FUNCTIONS)
    if number != 0:
        call_void(word(functions, BARRIER))
    else:
        before = now(functions, MONOTONIC)
        call_void(word(functions, BARRIER))
        waited = now(functions, MONOTONIC) - before
        worked = before - begin - word(block, WAITED)
        set_word(block, WAITED, word(block, WAITED) + waited)
        if waited > worked + PATIENCE and word(alone, 0) == 0:
            set_word(alone, 0, turn + 1)
    return word(alone, 0) != 0 and turn >= word(alone, 0)


THREAD_ROUTINES = (now, fork, fork_part, look, meet)
