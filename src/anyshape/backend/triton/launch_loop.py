"""The launch loop: one native routine that runs any plan on a stream: kernel launches, copies, and calls of Python,
read from an array of 64-bit words.

    program: head, then steps;  LAUNCH  number  function  grid  threads  shared  places of the params
                                CHECK   number  word            the status by now is sent to a word of the host
                                COPY    number  target  source  bytes
                                CALL    number                  Python does the step, on the same stream
                                END

A param is a slot and bytes: the address of a buffer and an offset, or the slot that is 0 and a number.

A launch costs a few nanoseconds beside the driver's own time. A launch may be followed by another one of the same step,
which runs in its place where a pointer is not aligned as the first one's code needs it.
"""
from __future__ import annotations

from typing import Annotated

from anyshape.backend.cpu.bytecode.format import CALL, END, MONOTONIC, STEP_DONE, Place, StepHead
from anyshape.backend.cpu.interpreter import Reading, lacks_memory, place_buffers
from anyshape.backend.cpu.native.compiler import translate
from anyshape.backend.cpu.native.records import Array, Inline, Nested, Struct, array_at, call, i64, size_of, tail
from anyshape.backend.interface import CALLBACK_FAILED, DONE, NO_MEMORY

LAUNCH, CHECK, COPY = 100, 101, 102
DRIVER_FAILED = 100  # how a run ends, beside the ways that the interface has
ERROR_BITS = 0xFFFFFFFF  # of a result that is an int


class LaunchStep(StepHead):
    """A launch of a kernel."""

    function: i64
    grid_x: i64
    grid_y: i64
    grid_z: i64
    threads: i64
    shared: i64  # bytes of dynamic shared memory
    scratch: i64  # bytes of the call's scratch that it needs
    unaligned: i64  # bits that no pointer may have; where one has, the next step runs in place of this one
    otherwise: i64  # words of that step
    pointers: i64  # how many of the params, the first ones, are addresses of buffers
    params: i64
    places: Annotated[Array[Place], Inline(0)]


class CheckStep(StepHead):
    """A step that may have failed has run."""

    word: i64


class DeviceCopyStep(StepHead):
    """A copy inside the device's memory."""

    target: Nested[Place]
    source: Nested[Place]
    bytes: i64


class Functions(Struct):
    """Addresses of driver functions and of the clock."""

    launch: i64
    copy: i64
    copy_to_host: i64
    record_event: i64
    push_context: i64
    pop_context: i64
    synchronize_stream: i64
    clock: i64


class ProgramHead(Struct):
    """The head of a program."""

    kept: i64  # bytes of the lower block: offsets from here on lie in the upper one
    first: i64  # word of the first step
    workspace: i64  # word of the block where a kernel's params are put together
    params: i64  # the most that a kernel has
    given: i64  # slots of inputs and of saved tensors, which are the first ones
    empty: i64  # how many of these have no elements, and so no address
    placed: i64  # number of pairs that follow: a slot, and its offset
    pairs: Annotated[Array[Place], Inline(0)]


class CallBlock(Struct):
    """The head of a call's block."""

    functions: Functions
    program: ProgramHead
    context: i64
    popped: i64  # where the driver writes the context that it takes off
    stream: i64
    event: i64  # 0, or the event that is recorded at the end
    checks: i64  # address of the host's words for what the status was behind each step that checks something
    callback: i64
    state: i64  # number of the call, given back to the callback
    step: i64  # number of the step that runs; the callback writes STEP_DONE there when it has done one
    reached: i64  # the last step of which something is on the stream; -1: none
    code: i64  # the driver's error
    kept: i64
    temp: i64
    times: i64  # 0, or where the clock is written after each step, when the stream has done it
    slots: Annotated[Array[i64], Inline(0)]  # slot 0 is the status; buffers follow, then a 0, and the scratch


def run_on_stream(block: CallBlock) -> int:
    """Runs the program of `block`: DONE (its work is on the stream), CALLBACK_FAILED, NO_MEMORY or DRIVER_FAILED."""
    program = block.program
    functions = block.functions
    if lacks_memory(block.slots, program.given, program.empty):
        return NO_MEMORY
    place_buffers(block.slots, program.pairs, program.placed, program.kept, block.kept, block.temp)
    block.code = call(functions.push_context, block.context) & ERROR_BITS
    if block.code != 0:
        return DRIVER_FAILED
    result = run_steps(block, program, functions)
    if result == DONE and block.event != 0:
        block.code = call(functions.record_event, block.event, block.stream) & ERROR_BITS
        if block.code != 0:
            result = DRIVER_FAILED
    call(functions.pop_context, block + CallBlock.popped)
    return result


def run_steps(block: CallBlock, program: ProgramHead, functions: Functions) -> int:
    """The steps of a program, with the device's context current."""
    values = tail(array_at(i64, block), program.workspace)
    places = tail(values, program.params)
    for i in range(program.params):
        places[i] = values + 8 * i
    step = StepHead(program + 8 * program.first)
    op = step.op
    time = read_clock(block, functions, block.times, -1)
    while op != END:
        block.step = step.number
        length = step.length
        if op == LAUNCH:
            skipped = launch(block, functions, LaunchStep(step), values, places)
            if block.code != 0:
                return DRIVER_FAILED
            length += skipped
        elif op == CHECK:
            block.code = call(functions.copy_to_host, block.checks + 8 * CheckStep(step).word, block.slots[0], 8,
                              block.stream) & ERROR_BITS
            if block.code != 0:
                return DRIVER_FAILED
        elif op == COPY:
            block.code = copy(block, functions, DeviceCopyStep(step))
            if block.code != 0:
                return DRIVER_FAILED
        elif op == CALL:
            block.reached = step.number
            call(block.callback, block.state, step.number)
            if block.step != STEP_DONE:
                return CALLBACK_FAILED
        block.reached = step.number
        time = read_clock(block, functions, time, step.number)
        step = StepHead(step + 8 * length)
        op = step.op
    return DONE


def launch(block: CallBlock, functions: Functions, step: LaunchStep, values: Array[i64], places: Array[i64]) -> int:
    """One launch; how many words of the step after it are to be left out."""
    bits = 0
    for i in range(step.pointers):
        values[i] = block.slots[step.places[i].slot] + step.places[i].bytes
        bits = bits | values[i]
    if bits & step.unaligned != 0:
        return 0
    for i in range(step.pointers, step.params):
        values[i] = block.slots[step.places[i].slot] + step.places[i].bytes
    block.code = call(functions.launch, step.function, step.grid_x, step.grid_y, step.grid_z, step.threads, 1, 1,
                      step.shared, block.stream, places, 0) & ERROR_BITS
    return step.otherwise


def copy(block: CallBlock, functions: Functions, step: DeviceCopyStep) -> int:
    """One copy; the driver's error."""
    target = block.slots[step.target.slot] + step.target.bytes
    source = block.slots[step.source.slot] + step.source.bytes
    return call(functions.copy, target, source, step.bytes, block.stream) & ERROR_BITS


def read_clock(block: CallBlock, functions: Functions, time: int, number: int) -> int:
    """Writes the time at which the stream has done everything, and the step's number, to address `time`, and returns
    the next address; nothing when it is 0."""
    if time == 0:
        return 0
    call(functions.synchronize_stream, block.stream)
    call(functions.clock, MONOTONIC, time)
    reading = Reading(time)
    reading.number = number
    return time + size_of(Reading)


def emit_launch_loop() -> str:
    """LLVM text of the routine."""
    return translate(run_on_stream)
