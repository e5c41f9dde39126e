"""The host: one native routine that runs any plan, and the few routines it needs. Compiled once, kept on disk.

A plan at given sizes is a *program*: an array of 64-bit words (backend/host_words.py), read by `run_plan`.

No step is compiled to code of its own, so a plan costs no compile time beyond its kernels, and a call costs a few
nanoseconds a step. The functions here are translated by backend/native.py; addresses of kernels and library routines
come in a table, so that the code holds no address and may be kept on disk.
"""
from __future__ import annotations

from anyshape.backend import host_words
from anyshape.backend.host_attention import ATTENTION_ROUTINES, run_attention
from anyshape.backend.host_grouped import GROUPED_ROUTINES, run_grouped
from anyshape.backend.host_library import LIBRARY_ROUTINES, address, run_copy, run_matmul
from anyshape.backend.host_over import OVER_ROUTINES, run_over
from anyshape.backend.host_packed import PACKED_ROUTINES, run_packed
from anyshape.backend.host_series import SERIES_ROUTINES, run_bands, run_series
from anyshape.backend.host_threads import THREAD_ROUTINES, fork, look
from anyshape.backend.host_words import (
    ATTENTION,
    ATTENTION_SCRATCH,
    BANDS,
    CALL,
    CALLBACK,
    CALLBACK_FAILED,
    CHECK_FAILED,
    CLOCK,
    COPY,
    DONE,
    END,
    FUNCTIONS,
    GOMP_PARALLEL,
    GROUPED,
    GROUPED_SCRATCH,
    HEAD_EMPTY,
    HEAD_FIRST,
    HEAD_GIVEN,
    HEAD_KEPT,
    HEAD_PLACED,
    HEAD_SCRATCH,
    HEAD_WORDS,
    HEAD_WORKSPACE,
    KEPT,
    KERNEL,
    MATMUL,
    MONOTONIC,
    NO_MEMORY,
    OVER,
    PACKED_SCRATCH,
    PARALLEL_WORK,
    PRODUCT,
    PROGRAM,
    SCRATCH,
    SERIES,
    SERIES_WORDS,
    SLOTS,
    STATE,
    STATUS,
    STEP,
    STEP_DONE,
    TEAM_SIZE,
    TEMP,
    THREAD_NUMBER,
    THREAD_TIME,
    THREADS,
    TIMES,
)
from anyshape.backend.native import (
    call,
    call_void,
    copy_bytes,
    fill_zero,
    maximum,
    minimum,
    set_word,
    translate,
    word,
    words,
)


def run_plan(block: int) -> int:
    """Runs the program of `block`; DONE, CHECK_FAILED, CALLBACK_FAILED or NO_MEMORY."""
    program = word(block, PROGRAM)
    if resolve(block, program) != DONE:
        return NO_MEMORY
    look(block)
    workspace = block + 8 * word(program, HEAD_WORKSPACE)
    step = program + 8 * word(program, HEAD_FIRST)
    op = word(step, 0)
    time = read_clock(block, word(block, TIMES), -1)
    while op != END:
        set_word(block, STEP, word(step, 2))
        length = word(step, 1)
        if op == KERNEL:
            run_kernel(block, step, workspace, program)
            if word(block, STATUS) != 0:
                return CHECK_FAILED
        elif op == SERIES:
            run_series(block, step, workspace, program)
            if word(block, STATUS) != 0:
                return CHECK_FAILED
            length += word(step, SERIES_WORDS)
        elif op == BANDS:
            run_bands(block, step, workspace, program)
            length += word(step, SERIES_WORDS)
        elif op == MATMUL:
            run_matmul(block, step)
        elif op == PRODUCT:
            run_packed(block, step)
        elif op == ATTENTION:
            run_attention(block, step)
        elif op == GROUPED:
            run_grouped(block, step)
        elif op == OVER:
            run_over(block, step)
        elif op == COPY:
            run_copy(block, step)
        elif op == CALL:
            call(word(block, CALLBACK), word(block, STATE), word(step, 2))
            if word(block, STEP) != STEP_DONE:
                return CALLBACK_FAILED
        time = read_clock(block, time, word(step, 2))
        step += 8 * length
        op = word(step, 0)
    return DONE


def read_clock(block: int, time: int, number: int) -> int:
    """Writes the time and the step's number to address `time` and returns the next address; nothing when it is 0."""
    if time == 0:
        return 0
    call(word(word(block, FUNCTIONS), CLOCK), THREAD_TIME if word(block, THREADS) == 1 else MONOTONIC, time)
    set_word(time, 2, number)
    return time + 24


def resolve(block: int, program: int) -> int:
    """Writes the addresses of the arena's buffers into their slots.

    NO_MEMORY if an input has elements and no address.
    """
    missing = 0
    for slot in range(word(program, HEAD_GIVEN)):
        if word(block, SLOTS + 1 + slot) == 0:
            missing += 1
    if missing > word(program, HEAD_EMPTY):
        return NO_MEMORY
    kept_bytes = word(program, HEAD_KEPT)
    kept = word(block, KEPT)
    temporary = word(block, TEMP) - kept_bytes
    set_word(block, SLOTS, block)
    pair = program + 8 * HEAD_WORDS
    for _ in range(word(program, HEAD_PLACED)):
        offset = word(pair, 1)
        set_word(block, SLOTS + word(pair, 0), (kept if offset < kept_bytes else temporary) + offset)
        pair += 16
    return DONE


def run_kernel(block: int, step: int, workspace: int, program: int) -> int:
    """One fused kernel, over all its row blocks, on as many threads as its work is worth."""
    blocks = word(step, 4)
    if blocks <= 0:
        return 0
    params = word(step, 7)
    sizes = word(step, 8)
    place = step + 72
    for i in range(params):
        set_word(workspace, i, address(block, place))
        place += 16
    copy_bytes(workspace + 8 * params, place, 8 * sizes)
    functions = word(block, FUNCTIONS)
    kernel = word(functions, word(step, 3))
    scratch = word(block, SCRATCH)
    threads = minimum(minimum(word(block, THREADS), blocks), word(step, 5) // PARALLEL_WORK)
    if threads < 2 or word(functions, GOMP_PARALLEL) == 0:
        call_void(kernel, workspace, 0, blocks, scratch)
        return 0
    data = words(6)
    set_word(data, 0, functions)
    set_word(data, 1, kernel)
    set_word(data, 2, workspace)
    set_word(data, 3, blocks)
    set_word(data, 4, scratch)
    set_word(data, 5, word(program, HEAD_SCRATCH))
    fork(block, kernel_part, data, threads)
    return 0


def kernel_part(data: int) -> int:
    """What one thread of a kernel does: an equal part of the row blocks."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    team = call(word(functions, TEAM_SIZE)) & 4294967295
    blocks = word(data, 3)
    begin = blocks * number // team
    end = blocks * (number + 1) // team
    if begin < end:
        call_void(word(data, 1), word(data, 2), begin, end, word(data, 4) + number * word(data, 5))
    return 0


def measure(program: int, functions: int, workspace: int) -> int:
    """Asks every kernel of a new program for its row blocks, work and scratch; returns the words of all steps."""
    scratch = 0
    step = program + 8 * word(program, HEAD_FIRST)
    op = word(step, 0)
    while op != END:
        if op == KERNEL:
            params = word(step, 7)
            fill_zero(workspace, 8 * params)
            copy_bytes(workspace + 8 * params, step + 72 + 16 * params, 8 * word(step, 8))
            entry = functions + 8 * word(step, 3)
            set_word(step, 4, call(word(entry, 1), workspace))
            set_word(step, 6, call(word(entry, 2), workspace))
            set_word(step, 5, call(word(entry, 3), workspace))
            scratch = maximum(scratch, word(step, 6))
        elif op == PRODUCT:
            scratch = maximum(scratch, word(step, PACKED_SCRATCH))
        elif op == GROUPED:
            scratch = maximum(scratch, word(step, GROUPED_SCRATCH))
        elif op == ATTENTION:
            scratch = maximum(scratch, word(step, ATTENTION_SCRATCH))
        step += 8 * word(step, 1)
        op = word(step, 0)
    set_word(program, HEAD_SCRATCH, (scratch + 63) & -64)
    return 0

SHORT = 32  # lists up to here are sorted in one go
CROWDED = 4  # where a buffer is alive with more than this part of all, looking at all of them takes no longer


def place(count: int, fixed: int, order: int, sizes: int, firsts: int, lasts: int, offsets: int, placed: int,
          wall: int, lowest: int, ceiling: int, starts: int, near: int) -> int:
    """Places buffers one after another in `order`, each into the smallest gap that fits (best fit), or, if `lowest` is
    not 0, into the lowest one (first fit); returns the top.

    What fits between the others and `ceiling` hangs from there: so two that are alive together for a moment only, as
    one layer's result and the next one's, lie at opposite ends, and each leaves all the rest in one piece.

    All arguments but count, fixed (that many of `order` have offsets already), wall, lowest and ceiling are addresses
    of `count` words each. No buffer crosses `wall`. `placed` is room for the list of buffers by offset, and as much
    again. `starts`, `near`: which buffers are alive with each, as `neighbours` lists them, or 0: all are looked at.
    """
    top = wall
    turns = placed + 8 * count  # by buffer, 1 + its position in `order`, once it is placed
    if near != 0:
        fill_zero(turns, 8 * count)
    for position in range(count):
        item = word(order, position)
        used = position
        if position >= fixed:
            if near != 0:
                used = gathered(near + 8 * word(starts, item), word(starts, item + 1) - word(starts, item), offsets,
                                placed, turns)
            set_word(offsets, item, best_gap(item, used, sizes, firsts, lasts, offsets, placed, wall, lowest, ceiling))
        at = word(offsets, item)
        top = maximum(top, at + word(sizes, item))
        if near != 0:
            set_word(turns, item, position + 1)
            continue
        slot = position
        while slot > 0:
            before = word(placed, slot - 1)
            if word(offsets, before) <= at:
                break
            set_word(placed, slot, before)
            slot -= 1
        set_word(placed, slot, item)
    return top


def gathered(near: int, count: int, offsets: int, placed: int, turns: int) -> int:
    """Lists those of `count` buffers that have a place, by offset and then as they got it; returns how many. (Shell's
    sort, of short lists an insertion sort.)"""
    used = 0
    for i in range(count):
        item = word(near, i)
        if word(turns, item) != 0:
            set_word(placed, used, item)
            used += 1
    gap = used if used > SHORT else 2
    while gap > 1:
        gap = maximum(gap * 4 // 9, 1)
        for i in range(gap, used):
            item = word(placed, i)
            at = word(offsets, item)
            slot = i
            while slot >= gap:
                before = word(placed, slot - gap)
                other = word(offsets, before)
                if other < at:
                    break
                if other == at and word(turns, before) < word(turns, item):
                    break
                set_word(placed, slot, before)
                slot -= gap
            set_word(placed, slot, item)
    return used


def neighbours(count: int, fixed: int, order: int, firsts: int, lasts: int, starts: int, near: int) -> int:
    """Which buffers are alive together; nobody asks for the lists of the first `fixed`. `order`: by first step. Without
    `near`: fills `starts` (count + 1 words) with where the list of each begins, and returns how many entries there are,
    0 where looking at all buffers takes less than such lists. Then, with `near`: fills them in."""
    if near == 0:
        fill_zero(starts, 8 * (count + 1))
    for i in range(count):
        item = word(order, i)
        first = word(firsts, item)
        last = word(lasts, item)
        for k in range(i + 1, count):
            other = word(order, k)
            if word(firsts, other) > last:
                break
            if word(lasts, other) < first:
                continue
            if item >= fixed:
                at = word(starts, item)
                if near != 0:
                    set_word(near, at, other)
                set_word(starts, item, at + 1)
            if other >= fixed:
                at = word(starts, other)
                if near != 0:
                    set_word(near, at, item)
                set_word(starts, other, at + 1)
    if near == 0:
        total = 0
        for i in range(count):
            found = word(starts, i)
            set_word(starts, i, total)
            total += found
        set_word(starts, count, total)
        return total if CROWDED * total < count * count else 0
    for k in range(count):
        i = count - k
        set_word(starts, i, word(starts, i - 1))
    set_word(starts, 0, 0)
    return 0


def best_gap(item: int, used: int, sizes: int, firsts: int, lasts: int, offsets: int, placed: int,
             wall: int, lowest: int, ceiling: int) -> int:
    """The offset of the smallest, or lowest, gap that holds `item` among the placed buffers alive with it, else the
    top. In the last gap before `ceiling` it lies at the upper end."""
    size = word(sizes, item)
    first = word(firsts, item)
    last = word(lasts, item)
    cursor = 0
    best = -1
    smallest = 4611686018427387904
    crossed = 0
    for i in range(used):
        other = word(placed, i)
        if word(firsts, other) > last or word(lasts, other) < first:
            continue
        start = word(offsets, other)
        if crossed == 0 and start >= wall:
            gap = wall - cursor
            if gap >= size and gap < smallest:
                best = cursor
                smallest = gap if lowest == 0 else 0
            cursor = maximum(cursor, wall)
            crossed = 1
        gap = start - cursor
        if gap >= size and gap < smallest:
            best = cursor
            smallest = gap if lowest == 0 else 0
        cursor = maximum(cursor, (start + word(sizes, other) + 63) & -64)
    if crossed == 0:
        gap = wall - cursor
        if gap >= size and gap < smallest:
            best = cursor
            smallest = gap
        cursor = maximum(cursor, wall)
    gap = ceiling - cursor
    if gap >= size and gap < smallest and cursor > wall:
        return ceiling - size
    return cursor if best < 0 else best


ROUTINES = (run_plan, read_clock, resolve, run_kernel, kernel_part, measure, place, gathered, neighbours, best_gap,
            *THREAD_ROUTINES, *SERIES_ROUTINES, *LIBRARY_ROUTINES, *PACKED_ROUTINES, *OVER_ROUTINES, *GROUPED_ROUTINES,
            *ATTENTION_ROUTINES)


def emit_host() -> str:
    """LLVM text of the host's routines; `run_plan`, `measure` and `place` are called from outside."""
    constants = {name: value for name, value in {**vars(host_words), **globals()}.items() if isinstance(value, int)}
    return translate(ROUTINES, constants)
