"""The plan runner on a stream: a plan at given sizes becomes words that the launch loop (backend/triton/launch_loop.py)
puts on the calling thread's current stream.

A kernel's check writes the status of its run, a word of the device's memory that later kernels look at. Behind each
step that checks something it is copied to a word of the host, which is read when the event behind the run is passed.
"""
from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.backend.cpu.bytecode.format import CALL, END, STEP_DONE
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.machine.torch_libs import library
from anyshape.backend.cpu.native.records import words_of
from anyshape.backend.cpu.plan_runner import with_actions, without
from anyshape.backend.cpu.step_timer import clock_of, durations
from anyshape.backend.interface import CHECK_FAILED, DONE, ISSUED, ObjectCache, PlacedPlan, PythonSteps
from anyshape.backend.triton import launch_loop as loop
from anyshape.backend.triton.driver.driver import DeviceDriver
from anyshape.backend.triton.driver.functions import OUT_OF_MEMORY
from anyshape.backend.triton.kernel import DeviceKernel
from anyshape.backend.triton.launch import LaunchableKernel
from anyshape.backend.triton.plan_encoder import NO_REGIME, PlanEncoder
from anyshape.backend.triton.stream_graphs import StreamGraphs
from anyshape.backend.triton.streams import DeviceStreams
from anyshape.base.align import ALIGNMENT, align
from anyshape.base.errors import DeviceError, VerifyError
from anyshape.plan.ir.program import CopyStep, LibraryStep, Plan
from anyshape.plan.ir.size_function import size_function

_PARAMS, _SCRATCH = loop.LaunchStep.index("params"), loop.LaunchStep.index("scratch")
HEAD = words_of(loop.ProgramHead)
SLOTS = loop.CallBlock.index("slots")
STREAM, STATE, STEP, REACHED, CODE, EVENT, CHECKS, KEPT, TEMP, TIMES = (loop.CallBlock.index(name) for name in (
    "stream", "state", "step", "reached", "code", "event", "checks", "kept", "temp", "times"))
PRODUCTS = ("matmul", "matmul_add")
STATUSES = 64  # that are made at a time
WORD = ctypes.c_int64


class LaunchLoop:
    """The loaded launch loop of a driver, and the calls of Python that it makes. Thread-safe."""

    def __init__(self, driver: DeviceDriver, machine: Machine, cache: ObjectCache | None = None) -> None:
        self.driver = driver
        self.loaded = jit.load(loop.emit_launch_loop(), ("run_on_stream",), machine, cache)
        self.run = ctypes.CFUNCTYPE(WORD, ctypes.c_void_p)(self.loaded.address["run_on_stream"])
        names = [name for name in loop.Functions.fields if name != "clock"]
        self.functions = (WORD * (len(names) + 1))(*(driver.address[name] for name in names), library().clock)
        self.running: dict[int, tuple[PythonSteps, array[int]]] = {}
        self.numbers = itertools.count(1)
        self._callback = ctypes.CFUNCTYPE(WORD, WORD, WORD)(self._step)
        self.callback = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self.free: dict[tuple[int, int], list[StatusWord]] = {}  # by device and number of words
        self.lock = threading.Lock()

    def _step(self, state: int, number: int) -> int:
        steps, block = self.running[state]
        try:
            steps.step(number)
            block[STEP] = STEP_DONE
        except BaseException as error:  # ctypes would print and forget it; the caller of the loop raises it again
            steps.error = error
        return 0

    def status(self, streams: DeviceStreams, words: int) -> StatusWord:
        """The status of a run with so many steps that check something, which is 0."""
        size = 1 << (words - 1).bit_length()
        with self.lock:
            free = self.free.setdefault((streams.device, size), [])
            if not free:
                free += self._statuses(streams, size, free)
            found = free.pop()
        ctypes.memset(found.checks, 0, 8 * size)
        return found

    def _statuses(self, streams: DeviceStreams, size: int, free: list[StatusWord]) -> list[StatusWord]:
        driver, stream = self.driver, streams.current()
        memory = streams.allocate(ALIGNMENT * STATUSES, stream)
        address = memory.data_ptr()
        with driver.current(streams.device):
            host = driver.pinned((ALIGNMENT + 8 * size) * STATUSES)
            ctypes.memset(host, 0, ALIGNMENT * STATUSES)
            driver.call("copy_to_device", address, host, ALIGNMENT * STATUSES, stream)
            driver.call("synchronize_stream", stream)
            host += ALIGNMENT * STATUSES
            return [StatusWord(address + ALIGNMENT * i, host + 8 * size * i, driver.event(), size, memory, free)
                    for i in range(STATUSES)]


class StatusWord:
    """The status of a run: a word of the device at `address`, the host's words at `checks`, the event behind it.
    memory: what the word is in; free: where it goes when a run has ended well."""

    __slots__ = ("address", "checks", "event", "free", "memory", "words")

    def __init__(self, address: int, checks: int, event: int, size: int, memory: Any, free: list[StatusWord]) -> None:
        self.address = address
        self.checks = checks
        self.event = event
        self.words = (WORD * size).from_address(checks)
        self.memory = memory
        self.free = free


@dataclass(frozen=True, slots=True, eq=False)
class DevicePayload:
    """A program. words: it; block: what is the same in the blocks of all calls; graphs: of it, or None where there are
    to be none, or Python does a step. See `Payload`."""

    words: array[int]
    block: array[int]
    calls: bool
    actions: int
    scratch: int
    scratch_below: bool = False
    graphs: StreamGraphs | None = None


class Frame:
    """The frame of a call. status: None where the plan has no checks. over: how it ended, at which step, and the value
    of its status, once that is known."""

    __slots__ = ("block", "graphs", "issued", "over", "status")

    def __init__(self, block: array[int], status: StatusWord | None, graphs: StreamGraphs | None = None) -> None:
        self.block = block
        self.graphs = graphs
        self.status = status
        self.issued = False
        self.over = (DONE, -1, 0)

    def close(self) -> None:
        """Nothing reads or writes the status any more."""
        status, self.status, self.issued = self.status, None, False
        if status is not None and self.over[0] == DONE:  # else the word is not 0
            status.free.append(status)  # one step of the interpreter: no lock

    def __del__(self) -> None:
        if not self.issued:
            self.close()


def launches(words: Sequence[int]) -> Iterator[int]:
    """Where the launches of a program begin."""
    at = words[loop.ProgramHead.index("first")]
    while words[at] != END:
        if words[at] == loop.LAUNCH:
            yield at
        at += words[at + 1]


class StreamRunner:
    """Makes words of a plan at given sizes, and issues them on the current stream. Threads may share one.

    Args:
        plan: allocated. kernels: what its regimes name, in any order.
        graphs_after: calls before there is a graph (backend/triton/stream_graphs.py); 0: there is none.
    """

    on_host = False

    def __init__(self, plan: Plan, kernels: Sequence[LaunchableKernel], streams: DeviceStreams,
                 loop_: LaunchLoop, graphs_after: int = 0) -> None:
        self.graphs_after = graphs_after
        self.plan = plan
        self.kernels = tuple(kernels)
        self.streams = streams
        self.loop = loop_
        self.titles: dict[int, str] = {}  # of versions of kernels, by the handle of their code
        encoder = PlanEncoder(plan, {kernel.name: kernel for kernel in kernels}, self._handle)
        self.sizes = size_function(plan, encoder)
        self.checks = encoder.checks
        self.scratch = SLOTS + encoder.slots.scratch
        self.workspace = self.scratch + 1
        placed = set(self.sizes.placed)
        brought = sum((b.is_parameter or b.is_output) and b.name not in placed for b in plan.buffers)
        self.put = struct.Struct(f"{brought}q").pack_into

    def specialize(self, placement: PlacedPlan) -> DevicePayload:
        """See `PlanRunner`."""
        steps = placement.encoded
        if placement.skipped:
            steps = without(steps, placement.skipped)
        if placement.actions:
            steps = with_actions(steps, placement.actions, len(self.plan.steps))
        params, scratch, called = self._look(steps)
        first = HEAD + len(placement.offsets)
        words = array("q", [placement.kept, first, self.workspace, params, placement.given, placement.empty,
                            len(placement.offsets) // 2, *placement.offsets, *steps, END])
        block = array("q", bytes(8 * (self.workspace + 2 * params)))
        for name, value in (("functions", ctypes.addressof(self.loop.functions)), ("callback", self.loop.callback),
                            ("program", words.buffer_info()[0]), ("reached", -1),
                            ("context", self.loop.driver.context(self.streams.device))):
            block[loop.CallBlock.index(name)] = value
        graphs = None
        if self.graphs_after and all(map(self._may_be_captured, called)):
            graphs = StreamGraphs(self.streams, self.graphs_after, bool(called), self.plan.name)
        return DevicePayload(words, block, bool(called), len(placement.actions), scratch, graphs=graphs)

    def _may_be_captured(self, number: int) -> bool:
        """Whether what Python does in a step is work on the stream, on memory that the call has anyway."""
        if number >= len(self.plan.steps):
            return False
        step = self.plan.steps[number]
        return isinstance(step, CopyStep) or (isinstance(step, LibraryStep) and step.op in PRODUCTS)

    def _look(self, steps: Sequence[int]) -> tuple[int, int, list[int]]:
        """The most params of a launch, the most bytes of scratch, and the steps that Python does."""
        at = params = scratch = 0
        called: list[int] = []
        while at < len(steps):
            if steps[at] == NO_REGIME:
                step = self.plan.steps[steps[at + 1]]
                raise VerifyError(f"no version of a kernel of {self.plan.name} fits these sizes", where=step.where,
                                  why="each has a condition that does not hold",
                                  do="report this plan: a bug of AnyShape")
            if steps[at] == loop.LAUNCH:
                params = max(params, steps[at + _PARAMS])
                scratch = max(scratch, steps[at + _SCRATCH])
            if steps[at] == CALL:
                called.append(steps[at + 2])
            at += steps[at + 1]
        return params, align(scratch), called

    def _handle(self, code: DeviceKernel) -> int:
        """Of loaded code.

        Raises:
            DeviceError: the driver does not load it.
        """
        try:
            handle = self.loop.driver.function(code.image, code.entry, code.shared, self.streams.device)
        except DeviceError as error:
            why = f"{error.where}: {error.why}"
            raise DeviceError(f"the driver does not load kernel {code.name} ({code.version.title})", why=why,
                              do=f"install a driver that is as new as Triton: the code is for {code.architecture}"
                              if error.code != OUT_OF_MEMORY else error.do) from error
        self.titles[handle] = code.version.title
        return handle

    def scratch_of_steps(self, payload: DevicePayload) -> Mapping[int, int]:
        """See `PlanRunner`."""
        found: dict[int, int] = {}
        words = payload.words
        for at in launches(words):
            if words[at + _SCRATCH]:
                number = words[at + loop.LaunchStep.index("number")]
                found[number] = max(found.get(number, 0), words[at + _SCRATCH])
        return found

    def versions(self, payload: DevicePayload) -> Mapping[int, tuple[str, ...]]:
        """See `PlanRunner`."""
        found: dict[int, tuple[str, ...]] = {}
        for at in launches(payload.words):
            number, handle = (payload.words[at + loop.LaunchStep.index(name)] for name in ("number", "function"))
            found[number] = *found.get(number, ()), self.titles[handle]
        return found

    def frame(self, payload: DevicePayload, addresses: Sequence[int], lower: int, upper: int, scratch: int,
              threads: int) -> Frame:
        """See `PlanRunner`."""
        block = payload.block[:]
        block[KEPT] = lower
        block[TEMP] = upper
        self.put(block, 8 * (SLOTS + 1), *addresses)
        block[self.scratch] = scratch
        if not self.checks:
            return Frame(block, None, payload.graphs)
        status = self.loop.status(self.streams, len(self.checks))
        block[SLOTS], block[CHECKS], block[EVENT] = status.address, status.checks, status.event
        return Frame(block, status, payload.graphs)

    def bind(self, frame: Frame, slot: int, address: int) -> None:
        """See `PlanRunner`."""
        frame.block[SLOTS + slot] = address

    def run(self, frame: Frame, steps: PythonSteps | None = None) -> int:
        """See `PlanRunner`.

        Raises:
            DeviceError: the driver refused a step, which it names.
        """
        block, native = frame.block, self.loop
        if frame.graphs is not None and not block[TIMES] and self._run_graph(frame, frame.graphs, steps):
            return DONE if frame.status is None else ISSUED
        block[STREAM] = self.streams.current()
        frame.issued = True
        code = self._issue(block, steps)
        if code == loop.DRIVER_FAILED:
            step = self.plan.steps[block[STEP]]
            error = native.driver.error(block[CODE], step.where)
            error.add_note(f"in step {block[STEP]} of {self.plan.name}")
            error.reached = block[REACHED]
            raise error
        if code != DONE or frame.status is None:
            return code
        return ISSUED

    def _issue(self, block: array[int], steps: PythonSteps | None) -> int:
        """The native loop over a block."""
        native, number = self.loop, 0
        if steps is not None:
            number = block[STATE] = next(native.numbers)
            native.running[number] = steps, block
        try:
            return int(native.run(block.buffer_info()[0]))
        finally:
            if number:
                native.running.pop(number, None)

    def _run_graph(self, frame: Frame, graphs: StreamGraphs, steps: PythonSteps | None) -> bool:
        """Whether a graph does the call's work; its event is recorded behind it."""
        block, driver, stream = frame.block, self.loop.driver, self.streams.current()
        event = block[EVENT]

        def issue(side: int) -> bool:
            block[STREAM], block[EVENT] = side, 0
            if steps is None:
                return self._issue(block, None) == DONE
            with self.streams.captured(side):
                return self._issue(block, steps) == DONE

        graph = graphs.find(block.tobytes(), issue)
        block[EVENT] = event
        if graph is None:
            block[REACHED] = -1
            if steps is not None:
                steps.error = None  # of a capture that failed: nothing has run
            return False
        frame.issued = True
        graph.launch(stream)
        if event:
            with driver.current(self.streams.device):
                driver.call("record_event", event, stream)
        return True

    def ended(self, frame: Frame, wait: bool) -> int:
        """See `PlanRunner`."""
        status = frame.status
        if status is None:
            return frame.over[0]
        if wait:
            self.loop.driver.call("synchronize_event", status.event)
        elif not self.loop.driver.passed(status.event):
            return ISSUED
        failed = ((CHECK_FAILED, step, word) for step, word in zip(self.checks, status.words, strict=False) if word)
        frame.over = next(failed, (DONE, -1, 0))
        frame.close()
        return frame.over[0]

    def timed(self, payload: DevicePayload, frame: Frame,
              steps: PythonSteps | None = None) -> tuple[int, list[tuple[int, float]]]:
        """See `PlanRunner`. Each step is waited for."""
        clock = clock_of(self.plan, payload.actions)
        frame.block[TIMES] = clock.buffer_info()[0]
        return self.run(frame, steps), durations(clock, len(self.plan.steps))

    def failure(self, frame: Frame) -> tuple[int, int]:
        """See `PlanRunner`: of several checks that failed, the first one's."""
        return frame.over[1:] if frame.over[0] == CHECK_FAILED else (frame.block[STEP], 0)
