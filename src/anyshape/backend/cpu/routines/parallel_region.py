"""A parallel region of several kernels and the product that they follow: one step of the host, for which the threads
are called together once.

A step of a series is a head (op, length of the head, number of its first step, words of what follows) and the steps as
they are: perhaps a product, then kernels. Every thread goes through them and does its part of each; all meet before the
next one begins. A product that the library shares out itself, or that packs its rows over themselves, goes before.
The first kernel whose check fails is the last one that runs: each has a status of its own, in front of its block.

A product may run with the kernel that reads its result for some of its rows after others: such *bands* are a step of
several series.
"""
from __future__ import annotations

from typing import Annotated

from anyshape.backend.cpu.bytecode.format import (
    KERNEL,
    MONOTONIC,
    OVER,
    PARALLEL_WORK,
    PRODUCT,
    CallBlock,
    Functions,
    KernelState,
    KernelStepWords,
    LibraryProduct,
    PackedProduct,
    ProgramHead,
    SeriesStep,
    StepHead,
)
from anyshape.backend.cpu.native.records import (
    Array,
    Inline,
    Struct,
    call_void,
    copy_bytes,
    i64,
    maximum,
    minimum,
    new,
    size_of,
    tail,
)
from anyshape.backend.cpu.routines.blas_gemm import (
    LibraryWork,
    address,
    entry_of,
    matmul_share,
    matmul_threads,
    run_matmul,
)
from anyshape.backend.cpu.routines.packed_gemm import PackedWork, packed_share, packed_threads, run_packed
from anyshape.backend.cpu.routines.packed_gemm_in_place import run_over
from anyshape.backend.cpu.routines.threads import meet, now, parallel_for, share


class SeriesWork(Struct):
    """What the threads of a series share: its kernels, the place of their blocks, and a product in front of them (0:
    none) with the work and the threads that it is shared out to."""

    functions: Functions
    first: KernelStepWords
    end: i64
    blocks: KernelState
    scratch: i64
    stride: i64
    product: StepHead
    shared: i64  # a PackedWork or a LibraryWork
    threads: i64
    block: CallBlock
    alone: Annotated[Array[i64], Inline(1)]


def run_series(block: CallBlock, step: SeriesStep, workspace: int, program: ProgramHead) -> int:
    """The steps of a series, in order."""
    functions = block.functions
    first = KernelStepWords(step + size_of(SeriesStep))
    end = first + 8 * step.words
    product = StepHead(0)
    if first.op != KERNEL:
        product = StepHead(first)
        first = KernelStepWords(following(first))
    one = first
    at = KernelState(workspace)
    team = 1
    while one < end:
        team = maximum(team, kernel_threads(block, one))
        at = kernel_block(block, one, at)
        one = KernelStepWords(following(one))
    data = new(SeriesWork)
    data.functions = functions
    data.first = first
    data.end = end
    data.blocks = KernelState(workspace)
    data.scratch = block.scratch
    data.stride = program.scratch
    data.block = block
    meets = 0 if functions.gomp_parallel == 0 or functions.barrier == 0 else 1
    if product != 0:
        packed = new(PackedWork)
        plain = new(LibraryWork)
        threads = product_threads(block, product, packed, plain) if meets != 0 else 0
        if threads < 2:
            run_product(block, product)
        else:
            data.product = product
            data.shared = packed if product.op == PRODUCT else plain
            data.threads = threads
            team = maximum(team, threads)
    if team < 2 or meets == 0:
        series_alone(data)
    else:
        parallel_for(block, series_part, data, team)
    one = first
    at = KernelState(workspace)
    while one < end and block.status == 0:
        if at.status != 0:
            block.status = at.status
            block.step = one.number
        at = after_block(one, at)
        one = KernelStepWords(following(one))
    return 0


def run_bands(block: CallBlock, step: SeriesStep, workspace: int, program: ProgramHead) -> int:
    """Several series: a product and what reads its result, for a band of its rows each. No kernel of them checks."""
    one = SeriesStep(step + size_of(SeriesStep))
    end = one + 8 * step.words
    while one < end:
        run_series(block, one, workspace, program)
        one = SeriesStep(one + size_of(SeriesStep) + 8 * one.words)
    return 0


def product_threads(block: CallBlock, step: StepHead, packed: PackedWork, plain: LibraryWork) -> int:
    """On how many threads the product of a series is shared out, as its work says; 0 or 1: it goes before."""
    if step.op == PRODUCT:
        return packed_threads(block, PackedProduct(step), packed)
    if step.op != OVER and LibraryProduct(step).thin.function != 0:
        return matmul_threads(block, LibraryProduct(step), plain)
    return 0


def run_product(block: CallBlock, step: StepHead) -> int:
    """A product by itself."""
    if step.op == PRODUCT:
        run_packed(block, PackedProduct(step))
    elif step.op == OVER:
        run_over(block, PackedProduct(step))
    else:
        run_matmul(block, LibraryProduct(step))
    return 0


def kernel_threads(block: CallBlock, step: KernelStepWords) -> int:
    """On how many threads a kernel is worth to run; 0 where it has nothing to do."""
    blocks = maximum(step.blocks, 0)
    return minimum(blocks, maximum(minimum(block.threads, step.work // PARALLEL_WORK), 1))


def kernel_block(block: CallBlock, step: KernelStepWords, at: KernelState) -> KernelState:
    """Writes what a kernel of a series needs to address `at`: its status, on how many threads it runs, and its block.
    Returns the address behind."""
    at.status = 0
    params = step.params
    for i in range(params):
        at.block[i] = at if step.places[i].slot == 0 else address(block, step.places[i])
    copy_bytes(tail(at.block, params), tail(step.places, params), 8 * step.sizes)
    at.threads = kernel_threads(block, step)
    return after_block(step, at)


def after_block(step: KernelStepWords, at: KernelState) -> KernelState:
    """The address behind what `kernel_block` writes."""
    return KernelState(tail(at.block, step.params + step.sizes))


def following(step: StepHead) -> int:
    """The address of the next step."""
    return step + 8 * step.length


def series_alone(data: SeriesWork) -> int:
    """The kernels of a series on one thread."""
    one = data.first
    at = data.blocks
    while one < data.end:
        if one.blocks > 0:
            call_void(entry_of(data.functions, one.function)[0], at.block, 0, one.blocks, data.scratch)
            if at.status != 0:
                return 0
        at = after_block(one, at)
        one = KernelStepWords(following(one))
    return 0


def series_part(data: SeriesWork, number: int, team: int) -> int:
    """What one thread of a series does: its share of the product, and an equal part of the row blocks of each kernel
    that is worth it."""
    functions = data.functions
    block = data.block
    begin = now(functions, MONOTONIC)
    turn = 0
    alone = 0
    product = data.product
    if product != 0:
        shares = minimum(data.threads, team)
        if number < shares and product.op == PRODUCT:
            packed_share(PackedWork(data.shared), number, shares)
        elif number < shares:
            matmul_share(LibraryWork(data.shared), number, shares)
        turn += 1
        alone = meet(block, data.alone, number, turn, begin)
    scratch = data.scratch + number * data.stride
    one = data.first
    at = data.blocks
    while one < data.end:
        if alone != 0 and number != 0:
            return 0
        threads = 1 if alone != 0 else minimum(at.threads, team)
        blocks = one.blocks
        if number < threads:
            first = share(blocks, number, threads)
            last = share(blocks, number + 1, threads)
            if first < last:
                call_void(entry_of(functions, one.function)[0], at.block, first, last, scratch)
        status = at
        at = after_block(one, at)
        one = KernelStepWords(following(one))
        if one < data.end:
            if alone == 0:
                turn += 1
                alone = meet(block, data.alone, number, turn, begin)
            if status.status != 0:
                return 0
    return 0
