"""A parallel region of several kernels: kernels that follow each other, and the product that they follow, run as one
step of the host: the threads are called together once for all of them.

A step of a series is a head (op, length of the head, number of its first step, words of what follows) and the steps as
they are: perhaps a product, then kernels. Every thread goes through them and does its part of each; all meet before the
next one begins. A product that the library shares out itself, or that packs its rows over themselves, goes before.
The first kernel whose check fails is the last one that runs: each has a status of its own, in front of its block.

A product may run with the kernel that reads its result for some of its rows after others: such *bands* are a step of
several series.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    BARRIER,
    FUNCTIONS,
    GOMP_PARALLEL,
    HEAD_SCRATCH,
    KERNEL,
    MATMUL_THIN,
    MONOTONIC,
    OVER,
    PARALLEL_WORK,
    PRODUCT,
    SCRATCH,
    SERIES_HEAD,
    SERIES_WORDS,
    STATUS,
    STEP,
    TEAM_SIZE,
    THREAD_NUMBER,
    THREADS,
)
from anyshape.backend.cpu.native.compiler import call, call_void, copy_bytes, maximum, minimum, set_word, word, words
from anyshape.backend.cpu.routines.blas_gemm import address, matmul_share, matmul_threads, run_matmul
from anyshape.backend.cpu.routines.packed_gemm import packed_share, packed_threads, run_packed
from anyshape.backend.cpu.routines.packed_gemm_in_place import run_over
from anyshape.backend.cpu.routines.threads import fork, meet, now


def run_series(block: int, step: int, workspace: int, program: int) -> int:
    """The steps of a series, in order."""
    functions = word(block, FUNCTIONS)
    first = step + 8 * SERIES_HEAD
    end = first + 8 * word(step, SERIES_WORDS)
    product = 0
    if word(first, 0) != KERNEL:
        product = first
        first += 8 * word(first, 1)
    one = first
    at = workspace
    team = 1
    while one < end:
        team = maximum(team, kernel_threads(block, one))
        at = kernel_block(block, one, at)
        one += 8 * word(one, 1)
    data = words(12)
    set_word(data, 0, functions)
    set_word(data, 1, first)
    set_word(data, 2, end)
    set_word(data, 3, workspace)
    set_word(data, 4, word(block, SCRATCH))
    set_word(data, 5, word(program, HEAD_SCRATCH))
    set_word(data, 9, block)
    meets = 0 if word(functions, GOMP_PARALLEL) == 0 or word(functions, BARRIER) == 0 else 1
    if product != 0:
        shared = words(7)
        threads = product_threads(block, product, shared) if meets != 0 else 0
        if threads < 2:
            run_product(block, product)
        else:
            set_word(data, 6, product)
            set_word(data, 7, shared)
            set_word(data, 8, threads)
            team = maximum(team, threads)
    if team < 2 or meets == 0:
        series_alone(data)
    else:
        fork(block, series_part, data, team)
    one = first
    at = workspace
    while one < end and word(block, STATUS) == 0:
        if word(at, 0) != 0:
            set_word(block, STATUS, word(at, 0))
            set_word(block, STEP, word(one, 2))
        at = after_block(one, at)
        one += 8 * word(one, 1)
    return 0


def run_bands(block: int, step: int, workspace: int, program: int) -> int:
    """Several series: a product and what reads its result, for a band of its rows each. No kernel of them checks."""
    one = step + 8 * SERIES_HEAD
    end = one + 8 * word(step, SERIES_WORDS)
    while one < end:
        run_series(block, one, workspace, program)
        one += 8 * (SERIES_HEAD + word(one, SERIES_WORDS))
    return 0


def product_threads(block: int, step: int, data: int) -> int:
    """On how many threads the product of a series is shared out, as `data` says; 0 or 1: it goes before."""
    if word(step, 0) == PRODUCT:
        return packed_threads(block, step, data)
    if word(step, 0) != OVER and word(step, MATMUL_THIN) != 0:
        return matmul_threads(block, step, data)
    return 0


def run_product(block: int, step: int) -> int:
    """A product by itself."""
    if word(step, 0) == PRODUCT:
        run_packed(block, step)
    elif word(step, 0) == OVER:
        run_over(block, step)
    else:
        run_matmul(block, step)
    return 0


def kernel_threads(block: int, step: int) -> int:
    """On how many threads a kernel is worth to run; 0 where it has nothing to do."""
    blocks = maximum(word(step, 4), 0)
    return minimum(blocks, maximum(minimum(word(block, THREADS), word(step, 5) // PARALLEL_WORK), 1))


def kernel_block(block: int, step: int, at: int) -> int:
    """Writes what a kernel of a series needs to address `at`: its status, on how many threads it runs, and its block.
    Returns the address behind."""
    set_word(at, 0, 0)
    params = word(step, 7)
    place = step + 72
    for i in range(params):
        set_word(at, 2 + i, at if word(place, 0) == 0 else address(block, place))
        place += 16
    copy_bytes(at + 16 + 8 * params, place, 8 * word(step, 8))
    set_word(at, 1, kernel_threads(block, step))
    return after_block(step, at)


def after_block(step: int, at: int) -> int:
    """The address behind what `kernel_block` writes."""
    return at + 8 * (2 + word(step, 7) + word(step, 8))


def series_alone(data: int) -> int:
    """The kernels of a series on one thread."""
    one = word(data, 1)
    at = word(data, 3)
    while one < word(data, 2):
        if word(one, 4) > 0:
            call_void(word(word(data, 0), word(one, 3)), at + 16, 0, word(one, 4), word(data, 4))
            if word(at, 0) != 0:
                return 0
        at = after_block(one, at)
        one += 8 * word(one, 1)
    return 0


def series_part(data: int) -> int:
    """What one thread of a series does: its share of the product, and an equal part of the row blocks of each kernel
    that is worth it."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    team = call(word(functions, TEAM_SIZE)) & 4294967295
    block = word(data, 9)
    begin = now(functions, MONOTONIC)
    turn = 0
    alone = 0
    product = word(data, 6)
    if product != 0:
        shares = minimum(word(data, 8), team)
        if number < shares and word(product, 0) == PRODUCT:
            packed_share(word(data, 7), number, shares)
        elif number < shares:
            matmul_share(word(data, 7), number, shares)
        turn += 1
        alone = meet(block, data + 80, number, turn, begin)
    scratch = word(data, 4) + number * word(data, 5)
    one = word(data, 1)
    at = word(data, 3)
    while one < word(data, 2):
        if alone != 0 and number != 0:
            return 0
        threads = 1 if alone != 0 else minimum(word(at, 1), team)
        blocks = word(one, 4)
        if number < threads:
            first = blocks * number // threads
            last = blocks * (number + 1) // threads
            if first < last:
                call_void(word(functions, word(one, 3)), at + 16, first, last, scratch)
        status = at
        at = after_block(one, at)
        one += 8 * word(one, 1)
        if one < word(data, 2):
            if alone == 0:
                turn += 1
                alone = meet(block, data + 80, number, turn, begin)
            if word(status, 0) != 0:
                return 0
    return 0


SERIES_ROUTINES = (run_series, run_bands, product_threads, run_product, kernel_threads, kernel_block, after_block,
                   series_alone, series_part)
