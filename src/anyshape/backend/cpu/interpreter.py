"""The bytecode interpreter: the host: one native routine that runs any plan, and the few routines it needs. Compiled
once, kept on disk.

A plan at given sizes is a *program*: an array of 64-bit words (backend/cpu/bytecode/format.py), read by `run_plan`.

No step is compiled to code of its own, so a plan costs no compile time beyond its kernels, and a call costs a few
nanoseconds a step. The functions here are translated by backend/cpu/native/compiler.py; addresses of kernels and
library routines come in a table, so that the code holds no address and may be kept on disk.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode import format
from anyshape.backend.cpu.bytecode.format import (
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
from anyshape.backend.cpu.native.compiler import (
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
from anyshape.backend.cpu.routines.attention import ATTENTION_ROUTINES, run_attention
from anyshape.backend.cpu.routines.blas_gemm import LIBRARY_ROUTINES, address, run_copy, run_matmul
from anyshape.backend.cpu.routines.grouped_gemm import GROUPED_ROUTINES, run_grouped
from anyshape.backend.cpu.routines.offset_assignment import PLACE_ROUTINES
from anyshape.backend.cpu.routines.packed_gemm import PACKED_ROUTINES, run_packed
from anyshape.backend.cpu.routines.packed_gemm_in_place import OVER_ROUTINES, run_over
from anyshape.backend.cpu.routines.parallel_region import SERIES_ROUTINES, run_bands, run_series
from anyshape.backend.cpu.routines.threads import THREAD_ROUTINES, fork, look


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


ROUTINES = (run_plan, read_clock, resolve, run_kernel, kernel_part, measure, *PLACE_ROUTINES,
            *THREAD_ROUTINES, *SERIES_ROUTINES, *LIBRARY_ROUTINES, *PACKED_ROUTINES, *OVER_ROUTINES, *GROUPED_ROUTINES,
            *ATTENTION_ROUTINES)


def emit_host() -> str:
    """LLVM text of the host's routines; `run_plan`, `measure`, `search` and `neighbours` are called from outside."""
    constants = {name: value for name, value in {**vars(format), **globals()}.items() if isinstance(value, int)}
    return translate(ROUTINES, constants)
