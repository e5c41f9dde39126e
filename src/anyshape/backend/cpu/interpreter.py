"""The bytecode interpreter (the host): one native routine that runs any plan, and the few routines it needs. Compiled
once, kept on disk.

A plan at given sizes is a *program*: an array of 64-bit words (backend/cpu/bytecode/format.py), read by `run_plan`.

No step is compiled to code of its own, so a plan costs no compile time beyond its kernels, and a call costs a few
nanoseconds a step. The functions here are translated by backend/cpu/native/compiler.py; addresses of kernels and
library routines come in a table, so that the code holds no address and may be kept on disk.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ATTENTION,
    BANDS,
    BYTE_CONV,
    BYTE_RECURRENCE,
    CALL,
    COPY,
    DIRECT_CONV,
    END,
    GROUPED,
    GROUPED_CONV,
    KERNEL,
    MATMUL,
    MONOTONIC,
    NO_REGIME,
    OVER,
    PARALLEL_WORK,
    PRODUCT,
    RECURRENCE,
    ROUTE_PLAN,
    SEGMENTS,
    SERIES,
    STEP_DONE,
    THREAD_TIME,
    TOPK,
    AttentionStep,
    ByteConvStep,
    ByteRecurrenceStep,
    CallBlock,
    CopyStepWords,
    DirectConvStep,
    Functions,
    GroupedConvStep,
    GroupedStep,
    KernelStepWords,
    LibraryProduct,
    PackedProduct,
    Place,
    ProgramHead,
    RecurrenceStep,
    RoutePlanStep,
    SegmentStep,
    SeriesStep,
    StepHead,
    TopkStep,
)
from anyshape.backend.cpu.native.compiler import translate
from anyshape.backend.cpu.native.records import (
    Array,
    Struct,
    array_at,
    call,
    call_void,
    copy_bytes,
    fill_zero,
    i64,
    maximum,
    minimum,
    new,
    size_of,
    tail,
)
from anyshape.backend.cpu.routines.attention import run_attention
from anyshape.backend.cpu.routines.blas_gemm import address, entry_of, run_copy, run_matmul
from anyshape.backend.cpu.routines.convolution import run_direct_conv, run_grouped_convs
from anyshape.backend.cpu.routines.encoding.fill import fill_template
from anyshape.backend.cpu.routines.grouped_gemm import run_grouped
from anyshape.backend.cpu.routines.offset_assignment import apart, live_peak, neighbours, search
from anyshape.backend.cpu.routines.packed_gemm import run_byte_conv, run_packed
from anyshape.backend.cpu.routines.packed_gemm_in_place import run_over
from anyshape.backend.cpu.routines.parallel_region import following, run_bands, run_series
from anyshape.backend.cpu.routines.recurrence import run_recurrence
from anyshape.backend.cpu.routines.recurrence.quantized import run_byte_recurrence
from anyshape.backend.cpu.routines.route_plan import run_route_plan, run_segments
from anyshape.backend.cpu.routines.threads import look, parallel_for, share
from anyshape.backend.cpu.routines.topk import run_topk
from anyshape.backend.interface import CALLBACK_FAILED, CHECK_FAILED, DONE, NO_MEMORY


class KernelWork(Struct):
    """What the threads of a kernel share: its row blocks, and each thread's scratch, so many bytes apart."""

    kernel: i64
    workspace: i64
    blocks: i64
    scratch: i64
    stride: i64


class Reading(Struct):
    """What the clock said after a step."""

    seconds: i64
    nanoseconds: i64
    number: i64


def run_plan(block: CallBlock) -> int:
    """Runs the program of `block`; DONE, CHECK_FAILED, CALLBACK_FAILED or NO_MEMORY."""
    program = block.program
    if resolve(block, program) != DONE:
        return NO_MEMORY
    look(block)
    workspace = tail(array_at(i64, block), program.workspace)
    step = StepHead(program + 8 * program.first)
    time = read_clock(block, block.times, -1)
    while step.op != END:
        op = step.op
        block.step = step.number
        length = step.length
        if op == KERNEL:
            run_kernel(block, KernelStepWords(step), workspace, program)
        elif op == SERIES:
            run_series(block, SeriesStep(step), workspace, program)
            length += SeriesStep(step).words
        elif op == BANDS:
            run_bands(block, SeriesStep(step), workspace, program)
            length += SeriesStep(step).words
        elif op == MATMUL:
            run_matmul(block, LibraryProduct(step))
        elif op == PRODUCT:
            run_packed(block, PackedProduct(step))
        elif op == ATTENTION:
            run_attention(block, AttentionStep(step))
        elif op == GROUPED:
            run_grouped(block, GroupedStep(step))
        elif op == GROUPED_CONV:
            for _ in range(run_grouped_convs(block, GroupedConvStep(step)) - 1):
                step = StepHead(step + 8 * length)
                length = step.length
        elif op == DIRECT_CONV:
            run_direct_conv(block, DirectConvStep(step))
        elif op == BYTE_CONV:
            run_byte_conv(block, ByteConvStep(step))
        elif op == RECURRENCE:
            run_recurrence(block, RecurrenceStep(step))
        elif op == BYTE_RECURRENCE:
            run_byte_recurrence(block, ByteRecurrenceStep(step))
        elif op == TOPK:
            run_topk(block, TopkStep(step))
        elif op == ROUTE_PLAN:
            run_route_plan(block, RoutePlanStep(step))
        elif op == SEGMENTS:
            run_segments(block, SegmentStep(step))
        elif op == OVER:
            run_over(block, PackedProduct(step))
        elif op == COPY:
            run_copy(block, CopyStepWords(step))
        elif op == CALL:
            call(block.callback, block.state, step.number)
            if block.step != STEP_DONE:
                return CALLBACK_FAILED
        if block.status != 0:
            return CHECK_FAILED
        time = read_clock(block, time, step.number)
        step = StepHead(step + 8 * length)
    return DONE


def read_clock(block: CallBlock, time: int, number: int) -> int:
    """Writes the time and the step's number to address `time` and returns the next address; nothing when it is 0."""
    if time == 0:
        return 0
    call(block.functions.clock, THREAD_TIME if block.threads == 1 else MONOTONIC, time)
    reading = Reading(time)
    reading.number = number
    return time + size_of(Reading)


def resolve(block: CallBlock, program: ProgramHead) -> int:
    """Writes the addresses of the status and of the arena's buffers into their slots; DONE or NO_MEMORY."""
    block.slots[0] = block
    if lacks_memory(block.slots, program.given, program.empty):
        return NO_MEMORY
    return place_buffers(block.slots, program.pairs, program.placed, program.kept, block.kept, block.temp)


def lacks_memory(slots: Array[i64], given: int, empty: int) -> bool:
    """Whether an input has elements and no address. given: slots of inputs, behind that of the status; empty: how many
    of them have no elements."""
    missing = 0
    for slot in range(given):
        if slots[1 + slot] == 0:
            missing += 1
    return missing > empty


def place_buffers(slots: Array[i64], pairs: Array[Place], placed: int, kept_bytes: int, kept: int, temp: int) -> int:
    """Writes the addresses of the arena's buffers into their slots; DONE. Offsets from `kept_bytes` on lie in the
    block at `temp`, the others in that at `kept`."""
    temporary = temp - kept_bytes
    for k in range(placed):
        pair = pairs[k]
        offset = pair.bytes
        slots[pair.slot] = (kept if offset < kept_bytes else temporary) + offset
    return DONE


def run_kernel(block: CallBlock, step: KernelStepWords, workspace: Array[i64], program: ProgramHead) -> int:
    """One fused kernel, over all its row blocks, on as many threads as its work is worth."""
    blocks = step.blocks
    if blocks <= 0:
        return 0
    params = step.params
    sizes = step.sizes
    for i in range(params):
        workspace[i] = address(block, step.places[i])
    copy_bytes(tail(workspace, params), tail(step.places, params), 8 * sizes)
    kernel = entry_of(block.functions, step.function)[0]
    scratch = block.scratch
    threads = minimum(minimum(block.threads, blocks), step.work // PARALLEL_WORK)
    if threads < 2 or block.functions.gomp_parallel == 0:
        call_void(kernel, workspace, 0, blocks, scratch)
        return 0
    data = new(KernelWork)
    data.kernel = kernel
    data.workspace = workspace
    data.blocks = blocks
    data.scratch = scratch
    data.stride = program.scratch
    return parallel_for(block, kernel_share, data, threads)


def kernel_share(data: KernelWork, number: int, team: int) -> int:
    """What one thread of a kernel does: an equal part of the row blocks."""
    begin = share(data.blocks, number, team)
    end = share(data.blocks, number + 1, team)
    if begin < end:
        call_void(data.kernel, data.workspace, begin, end, data.scratch + number * data.stride)
    return 0


def measure(program: ProgramHead, functions: Functions, workspace: Array[i64]) -> int:
    """Asks every kernel of a new program for its row blocks, work and scratch. Returns how many steps PyTorch does;
    where no version of a kernel fits, -2 minus the number of its step."""
    scratch = 0
    calls = 0
    step = KernelStepWords(program + 8 * program.first)
    op = step.op
    while op != END:
        if op == KERNEL:
            params = step.params
            fill_zero(workspace, 8 * params)
            copy_bytes(tail(workspace, params), tail(step.places, params), 8 * step.sizes)
            entry = entry_of(functions, step.function)
            step.blocks = call(entry[1], workspace)
            step.scratch = call(entry[2], workspace)
            step.work = call(entry[3], workspace)
            scratch = maximum(scratch, step.scratch)
        elif op == PRODUCT:
            scratch = maximum(scratch, PackedProduct(step).scratch)
        elif op == GROUPED:
            scratch = maximum(scratch, GroupedStep(step).scratch)
        elif op == GROUPED_CONV:
            scratch = maximum(scratch, GroupedConvStep(step).scratch)
        elif op == DIRECT_CONV:
            scratch = maximum(scratch, DirectConvStep(step).scratch)
        elif op == BYTE_CONV:
            scratch = maximum(scratch, ByteConvStep(step).scratch)
        elif op == ATTENTION:
            scratch = maximum(scratch, AttentionStep(step).scratch)
        elif op == CALL:
            calls += 1
        elif op == NO_REGIME:
            return -2 - step.length
        step = KernelStepWords(following(step))
        op = step.op
    program.scratch = (scratch + 63) & -64
    return calls


def emit_host() -> str:
    """LLVM text of the host's routines, which are called from outside."""
    return translate(run_plan, measure, search, neighbours, live_peak, apart, fill_template)
