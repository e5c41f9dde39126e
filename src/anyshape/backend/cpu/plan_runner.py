"""The plan runner of the CPU: a plan at given sizes becomes a program of words (backend/cpu/bytecode/format.py) that
one native routine runs (backend/cpu/interpreter.py)."""
from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.encode_plan import encode
from anyshape.backend.cpu.bytecode.products import Products, may_pack_over
from anyshape.backend.cpu.native_routines import WORD, NativeRoutines
from anyshape.backend.cpu.step_timer import clock_of, durations
from anyshape.backend.interface import CHECK_FAILED, DONE, PlacedPlan, PythonSteps
from anyshape.backend.loaded_code import LoadedKernel
from anyshape.base.errors import VerifyError
from anyshape.base.int64_array import int64_array
from anyshape.plan.ir.program import KernelStep, Plan, parts_of

FIRST = 8 * (host.SLOTS + 1)  # byte of a call's block where the addresses of buffers begin


@dataclass(frozen=True, slots=True, eq=False)
class CpuPayload:
    """A program. words: it, at `address`. block: what is the same in the blocks of all calls. See `Payload`."""

    words: array[int]
    address: int
    block: array[int]
    scratch: int
    calls: bool
    scratch_below: bool
    actions: int


class CpuPlanRunner:
    """Makes words of a plan at given sizes, and runs them by one native call. Threads may share one.

    Args:
        plan: allocated. kernels: what its regimes name, in any order.
        products: which our routines do (backend/cpu/autotune.py).
    """

    on_host = True

    def __init__(self, plan: Plan, kernels: Sequence[LoadedKernel], native: NativeRoutines, products: Products) -> None:
        self.plan = plan
        self.kernels = tuple(kernels)
        self.native = native
        entries = {kernel.name: host.KERNELS + 4 * i for i, kernel in enumerate(kernels)}
        self.sizes, dtypes = encode(plan, entries, products, native.fill)
        self.functions = native.functions(kernels, dtypes)
        slots = self.sizes.slots
        self.workspace = host.SLOTS + len(slots)
        # words of the kernel blocks that there are at a time, at most
        blocks = [sum(_block_words(part) for part in parts_of(step) if isinstance(part, KernelStep))
                  for step in plan.steps]
        series = [sum(blocks[first:last + 1]) for first, last in plan.together]
        self.workspace_words = max([*blocks, *series], default=0)
        # by slot, the last step that reads a temporary value
        self.lasts = {slots[b.name]: b.last for b in plan.buffers if b.is_temp}
        placed = set(self.sizes.placed)
        brought = sum((b.is_parameter or b.is_output) and b.name not in placed for b in plan.buffers)
        self.put = struct.Struct(f"{brought}q").pack_into

    def specialize(self, placement: PlacedPlan) -> CpuPayload:
        """See `PlanRunner`."""
        steps = placement.encoded
        if placement.skipped or placement.actions:
            some = without(steps[:-1], placement.skipped)
            steps = int64_array([*with_actions(some, placement.actions, len(self.plan.steps)), host.END])
        first = host.HEAD_WORDS + len(placement.offsets)
        words = int64_array((placement.kept, 0, first, self.workspace, placement.given, placement.empty,
                             len(placement.offsets) // 2, *placement.offsets))
        words += steps
        address = words.buffer_info()[0]
        room = (WORD * max(self.workspace_words, 1))()
        calls = self.native.measure(address, ctypes.addressof(self.functions), ctypes.addressof(room))
        if calls < 0:
            raise VerifyError(f"no version of a kernel of {self.plan.name} fits these sizes",
                              where=self.plan.steps[-2 - calls].where,
                              why="each has a condition that does not hold", do="report this plan: a bug of AnyShape")
        below = placement.reused_until >= 0 and self._scratch_ends(words, placement.reused_until)
        block = array("q", bytes(8 * (self.workspace + self.workspace_words)))
        block[host.CALLBACK] = self.native.callback
        block[host.FUNCTIONS] = ctypes.addressof(self.functions)
        block[host.PROGRAM] = address
        return CpuPayload(words, address, block, words[host.HEAD_SCRATCH], calls > 0, below, len(placement.actions))

    def scratch_of_steps(self, payload: CpuPayload) -> Mapping[int, int]:
        """See `PlanRunner`."""
        found: dict[int, int] = {}
        words = payload.words
        at = words[host.HEAD_FIRST]
        while words[at] != host.END:
            place = host.THREADS_SCRATCH.get(words[at])
            if place is not None:
                number = words[at + 2]
                found[number] = max(found.get(number, 0), words[at + place])
            at += words[at + 1]
        return found

    def frame(self, payload: CpuPayload, addresses: Sequence[int], lower: int, upper: int, scratch: int,
              threads: int) -> array[int]:
        """See `PlanRunner`."""
        block = payload.block[:]
        block[host.KEPT] = lower
        block[host.TEMP] = upper
        block[host.SCRATCH] = scratch
        block[host.THREADS] = threads
        self.put(block, FIRST, *addresses)
        return block

    def bind(self, frame: array[int], slot: int, address: int) -> None:
        """See `PlanRunner`."""
        frame[host.SLOTS + slot] = address

    def run(self, frame: array[int], steps: PythonSteps | None = None) -> int:
        """See `PlanRunner`."""
        native = self.native
        if steps is None:
            return native.run_plan(frame.buffer_info()[0])  # type: ignore[no-any-return]
        number = frame[host.STATE] = next(native.numbers)
        native.running[number] = steps, frame
        try:
            return native.run_plan(frame.buffer_info()[0])  # type: ignore[no-any-return]
        finally:
            native.running.pop(number, None)

    def versions(self, payload: CpuPayload) -> Mapping[int, tuple[str, ...]]:
        """See `PlanRunner`: each regime has one."""
        return {}

    def timed(self, payload: CpuPayload, frame: array[int],
              steps: PythonSteps | None = None) -> tuple[int, list[tuple[int, float]]]:
        """See `PlanRunner`."""
        clock = clock_of(self.plan, payload.actions)
        frame[host.TIMES] = clock.buffer_info()[0]
        return self.run(frame, steps), durations(clock, len(self.plan.steps))

    def ended(self, frame: array[int], wait: bool) -> int:
        """See `PlanRunner`. No run outlasts `run`."""
        return CHECK_FAILED if frame[host.STATUS] else DONE

    def failure(self, frame: array[int]) -> tuple[int, int]:
        """See `PlanRunner`."""
        return frame[host.STEP], frame[host.STATUS]

    def _scratch_ends(self, words: array[int], until: int) -> bool:
        """Whether no step from `until` on takes scratch: products there pack their rows over themselves if they can."""
        products = []
        at = words[host.HEAD_FIRST]
        while words[at] != host.END:
            needs = host.THREADS_SCRATCH.get(words[at])
            if words[at + 2] >= until and needs is not None and words[at + needs] > 0:
                if not self._dies(words, at):
                    return False
                products.append(at)
            at += words[at + 1]
        for at in products:
            words[at] = host.OVER
        return True

    def _dies(self, words: array[int], at: int) -> bool:
        """Whether the step is a product that may pack its rows over themselves: nobody reads them later."""
        return words[at] == host.PRODUCT and may_pack_over(words, at) and self.lasts.get(
            words[at + host.MATMUL_B]) == words[at + 2]


def _block_words(step: KernelStep) -> int:
    """The words of the blocks of a step's kernels, with what stands in front of them in a series."""
    return max(len(one.kernels) * (host.SERIES_MORE + len(step.params) + len(step.handed) + len(one.sizes))
               for one in step.regimes)


def without(steps: Sequence[int], left_out: frozenset[int]) -> list[int]:
    """The words of the steps but for some."""
    words: list[int] = []
    at = 0
    while at < len(steps):
        if steps[at + 2] not in left_out:
            words += steps[at:at + steps[at + 1]]
        at += steps[at + 1]
    return words


def with_actions(steps: Sequence[int], found: Sequence[int], number: int) -> list[int]:
    """The words of the steps with calls of Python before some of them, which are numbered from `number` on."""
    words: list[int] = []
    at = done = 0
    while at < len(steps):
        while done < len(found) and found[done] <= steps[at + 2]:
            words += [host.CALL, host.STEP_WORDS, number + done]
            done += 1
        length = steps[at + 1] + (steps[at + host.SERIES_WORDS] if steps[at] == host.SERIES else 0)
        words += steps[at:at + length]
        at += length
    for k in range(done, len(found)):
        words += [host.CALL, host.STEP_WORDS, number + k]
    return words
