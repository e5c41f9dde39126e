"""A target behind the fake driver (tests/fake_driver.py): real plans, the real launch loop, streams, arena and status;
the CPU's kernels in place of a GPU's."""
from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.backend import targets
from anyshape.backend.cpu.bytecode.format import STEP_DONE
from anyshape.backend.cpu.llvm.jit import LoadedKernel
from anyshape.backend.interface import ISSUED
from anyshape.backend.triton.driver.driver import DeviceDriver
from anyshape.backend.triton.kernel import I64, NULL, POINTER, STATUS, DeviceKernel, KernelVersion
from anyshape.backend.triton.runner import STEP, LaunchLoop, StreamRunner
from anyshape.backend.triton.streams import DeviceStreams
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.ops.attention import OPERANDS
from anyshape.plan.ir.program import CopyStep, LibraryStep, Step, Window
from anyshape.runtime.call.call_frame import CallFrame
from fake_driver import FakeDriver, FakeMemory
from plan_interpreter import ASK, RUN

VERSION = KernelVersion("host", "host", (), (), 1, 4)


class HostKernel:
    """A kernel of the CPU, which the fake driver calls."""

    def __init__(self, kernel: LoadedKernel, program: LoopProgram, driver: FakeDriver) -> None:
        self.name = kernel.name
        self.sizes = tuple(program.sizes)
        self.kernel = kernel
        self.params = len(program.params)
        self.driver = driver
        kinds = (*[POINTER] * self.params, STATUS, *[I64] * len(self.sizes), NULL, NULL)
        self.made = [self._code(kinds, False), self._code(kinds, True)]

    def _code(self, kinds: tuple[str, ...], guarded: bool) -> DeviceKernel:
        entry = f"{self.name}_guarded" if guarded else self.name
        image = self.driver.register(entry, self.guarded if guarded else self.body, kinds)
        version = dataclasses.replace(VERSION, guarded=guarded)
        return DeviceKernel(self.name, entry, version, kinds, 128, 0, "fake", image, "")

    def codes(self, sizes: Sequence[int], alignments: Sequence[int], guarded: bool) -> Sequence[DeviceKernel]:
        return [self.made[guarded]]

    def guarded(self, grid: tuple[int, int, int], values: list[int]) -> None:
        status = values[self.params]
        assert status, f"{self.name} reads a status that the run has not"
        if ctypes.c_int64.from_address(status).value == 0:
            self.body(grid, values)

    def body(self, grid: tuple[int, int, int], values: list[int]) -> None:
        words = [*values[:self.params], *values[self.params + 1:-2]]
        block = (ctypes.c_int64 * len(words))(*words)
        address = ctypes.addressof(block)
        scratch = (ctypes.c_uint8 * (ASK(self.kernel.scratch)(address) + 64))()
        first = ctypes.addressof(scratch)
        RUN(self.kernel.run)(address, 0, ASK(self.kernel.blocks)(address), first + -first % 64)


class Later(CallFrame):
    """A step of a call that is done later, on memory that it does not hold."""

    __slots__ = ("known",)

    def __init__(self, call: CallFrame, number: int) -> None:
        self.shared, self.record, self.runner = call.shared, call.record, call.runner
        step, views = call.shared.plan.steps[number], call.record.windows[number]
        windows = (step.source, step.target) if isinstance(step, CopyStep) else (*step.inputs, *step.outputs)
        self.known = {pair: unowned(call.tensor(*pair)) for pair in zip(windows, views, strict=True)}

    @staticmethod
    def may(step: Step) -> bool:
        return isinstance(step, CopyStep) or (isinstance(step, LibraryStep) and step.op in (
            "matmul", "matmul_add", *OPERANDS))

    def tensor(self, window: Window, view: Any) -> torch.Tensor:
        return self.known[window, view]


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, as one of the CPU, over memory that others hold."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (span * tensor.itemsize)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Loop(LaunchLoop):
    """Products, attention and copies by PyTorch are put off as launches are. Other steps of PyTorch work on host memory
    at once: what is before them on their stream has to be done."""

    def __init__(self, driver: DeviceDriver, machine: Any, cache: Any, fake: FakeDriver) -> None:
        super().__init__(driver, machine, cache)
        self.fake = fake
        self.made: list[Any] = []

    def _step(self, state: int, number: int) -> int:
        call: Any = self.running[state][0]
        block = self.running[state][1]
        steps = call.shared.plan.steps
        if number < len(steps) and Later.may(steps[number]):
            later = Later(call, number)
            self.fake.issue(self.fake.stream, lambda: later.step(number))
            block[STEP] = STEP_DONE
            return 0
        if number < len(steps):
            self.fake.synchronize_stream(self.fake.stream)
        result = super()._step(state, number)
        self.made += call.externs.values()
        return result


class Runner(StreamRunner):
    """What PyTorch makes goes in the order of the stream, as a device's allocator has it."""

    loop: Loop

    def run(self, frame: Any, steps: Any = None) -> int:
        fake = self.loop.fake
        try:
            code = super().run(frame, steps)
        finally:  # also of a run that failed: what it had issued is on memory that is given back now
            fake.issue(fake.stream, list(self.loop.made).clear)
            self.loop.made.clear()
            if fake.reads:
                fake.synchronize_stream(fake.stream)
        return self.ended(frame, True) if fake.reads and code == ISSUED else code


class Target:
    """The CPU as a device with a driver and streams."""

    graphs_after = 0

    def __init__(self, cpu: Any, fake: FakeDriver) -> None:
        self.cpu = cpu
        self.fake = fake
        self.driver = DeviceDriver("cuda", fake.addresses, fake)
        self.memory = FakeMemory(fake)
        self.streams = DeviceStreams(self.driver, 0, self.memory)
        self.loop = Loop(self.driver, cpu.machine, cpu.native.cache, fake)
        self.hardware = dataclasses.replace(cpu.hardware, band_bytes=0)
        self.programs: dict[str, LoopProgram] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cpu, name)

    def allocator(self) -> Callable[..., Any]:
        return self.memory.empty

    def emit(self, program: LoopProgram) -> str:
        self.programs[program.name] = program
        text: str = self.cpu.emit(program)
        return text

    def build(self, texts: Sequence[str]) -> list[HostKernel]:
        return [HostKernel(kernel, self.programs[kernel.name], self.fake) for kernel in self.cpu.build(texts)]

    def runner(self, plan: Any, kernels: Sequence[Any]) -> StreamRunner:
        return Runner(plan, kernels, self.streams, self.loop, self.graphs_after)


DEVICE: list[FakeDriver] = []  # that of programs compiled now
_targets: dict[FakeDriver, Target] = {}


def target_of(cache: Any, products: str) -> Target:
    fake = DEVICE[0]
    if fake not in _targets:
        _targets[fake] = Target(targets._module(targets.TARGETS["cpu"]).target_of(cache, products), fake)
    return _targets[fake]
