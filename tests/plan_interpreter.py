"""A second runner of plans, in plain Python: one step after another, kernels by the CPU, everything else by PyTorch.
It shows that nothing outside of the backend interface depends on how the CPU runs a plan."""
from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyshape.backend import targets
from anyshape.backend.interface import CALLBACK_FAILED, CHECK_FAILED, DONE, NO_MEMORY, PlacedPlan, PythonSteps
from anyshape.base.errors import VerifyError
from anyshape.ir.types import size_of
from anyshape.plan.ir.program import KernelStep, Plan, Regime, Step, TiledGemmStep, Window, parts_of
from anyshape.plan.ir.size_function import PlanFormulas, size_function
from anyshape.sym.expr import evaluate
from anyshape.torch_compat.dtypes import TORCH_DTYPES

BLOCK = ctypes.c_void_p
RUN = ctypes.CFUNCTYPE(None, BLOCK, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
ASK = ctypes.CFUNCTYPE(ctypes.c_int64, BLOCK)


@dataclass(frozen=True, eq=False)
class Payload:
    placement: PlacedPlan
    regimes: Mapping[int, Regime]  # by the id of its step
    scratches: Mapping[int, int]
    scratch: int
    calls: bool = True
    scratch_below: bool = False


@dataclass(eq=False)
class Frame:
    payload: Payload
    addresses: dict[int, int]
    scratch: int
    status: Any
    step: int = -1
    over: bool = True  # False: it is on a stream


class Runner:
    """Runs a plan step by step."""

    on_host = True

    def __init__(self, plan: Plan, kernels: Sequence[Any]) -> None:
        self.plan = plan
        self.kernels = {kernel.name: kernel for kernel in kernels}
        self.sizes = size_function(plan, self)

    def expression(self, formulas: PlanFormulas) -> tuple[str, Mapping[str, Any]]:
        for step in self.plan.steps:  # every size that a step needs
            for part in parts_of(step):
                if isinstance(part, KernelStep):
                    formulas.tuple_of(size for one in part.regimes for size in (*one.conditions, *one.sizes))
        return "None", {}

    def specialize(self, placement: PlacedPlan) -> Payload:
        regimes, scratches = {}, {}
        for number, step in enumerate(self.plan.steps):
            for part in parts_of(step):
                if isinstance(part, KernelStep):
                    regime = next((one for one in part.regimes if all(
                        evaluate(size, placement.values) >= 0 for size in one.conditions)), None)
                    if regime is None:
                        raise VerifyError(f"no version of a kernel of {self.plan.name} fits these sizes")
                    regimes[id(part)] = regime
                    blocks = [self._block(part, regime, placement.values, {}) for _ in regime.kernels]
                    scratches[number] = max(ASK(self.kernels[name].scratch)(ctypes.addressof(block))
                                            for name, block in zip(regime.kernels, blocks, strict=True))
        return Payload(placement, regimes, scratches, -(-max(scratches.values(), default=0) // 64) * 64)

    def versions(self, payload: Payload) -> Mapping[int, tuple[str, ...]]:
        return {}

    def scratch_of_steps(self, payload: Payload) -> Mapping[int, int]:
        return payload.scratches

    def frame(self, payload: Payload, addresses: Sequence[int], lower: int, upper: int, scratch: int,
              threads: int) -> Frame:
        placement = payload.placement
        found = dict(enumerate(addresses, 1))
        for slot, byte in zip(placement.offsets[::2], placement.offsets[1::2], strict=True):
            found[slot] = (lower if byte < placement.kept else upper - placement.kept) + byte
        status = (ctypes.c_int64 * 1)()
        return Frame(payload, found | {0: ctypes.addressof(status)}, scratch, status)

    def bind(self, frame: Frame, slot: int, address: int) -> None:
        frame.addresses[slot] = address

    def run(self, frame: Frame, steps: PythonSteps | None = None) -> int:
        return self.timed(frame.payload, frame, steps)[0]

    def timed(self, payload: Payload, frame: Frame, steps: PythonSteps | None = None) -> tuple[int, list[Any]]:
        placement, count = payload.placement, len(self.plan.steps)
        times: list[tuple[int, float]] = []
        if sum(not frame.addresses[slot] for slot in range(1, placement.given + 1)) > placement.empty:
            return NO_MEMORY, times
        done = 0
        try:
            for number, step in enumerate([*self.plan.steps, None]):
                while done < len(placement.actions) and placement.actions[done] <= number:
                    self._by_python(steps, count + done)
                    done += 1
                if step is None or number in placement.skipped:
                    continue
                frame.step, before = number, time.perf_counter()
                self._step(frame, number, step, steps)
                if frame.status[0]:
                    return CHECK_FAILED, times
                times.append((number, time.perf_counter() - before))
        except BaseException as error:
            assert steps is not None
            steps.error = error
            return CALLBACK_FAILED, times
        return DONE, times

    def ended(self, frame: Frame, wait: bool) -> int:
        return CHECK_FAILED if frame.status[0] else DONE

    def failure(self, frame: Frame) -> tuple[int, int]:
        return frame.step, frame.status[0]

    def _by_python(self, steps: PythonSteps | None, number: int) -> None:
        assert steps is not None
        steps.step(number)

    def _step(self, frame: Frame, number: int, step: Step, steps: PythonSteps | None) -> None:
        if isinstance(step, KernelStep):
            self._kernel(frame, step)
        elif isinstance(step, TiledGemmStep):
            self._tiled(frame, step)
        else:
            self._by_python(steps, number)

    def _kernel(self, frame: Frame, step: KernelStep, skip: int = 0, points: int = -1, band: str = "") -> None:
        """A kernel; of a flat one `points` from the one numbered `skip` on, with `band` holding these alone."""
        regime = frame.payload.regimes[id(step)]
        for name in regime.kernels:
            block = self._block(step, regime, frame.payload.placement.values, frame.addresses)
            if points >= 0:
                block[len(block) - 1] = points
                for place in set(step.along) - {i for i in step.along if step.params[i].buffer == band}:
                    block[place] += skip * size_of(step.params[place].type.dtype)
            kernel, address = self.kernels[name], ctypes.addressof(block)
            RUN(kernel.run)(address, 0, ASK(kernel.blocks)(address), frame.scratch)

    def _block(self, step: KernelStep, regime: Regime, values: Mapping[str, int], addresses: Mapping[int, int]) -> Any:
        windows = (*step.params, *step.handed) if regime.then else step.params
        words = [addresses.get(self.sizes.slots[w.buffer], 0) + evaluate(w.offset, values) * size_of(w.type.dtype)
                 for w in windows]
        words += [evaluate(size, values) for size in regime.sizes]
        return (ctypes.c_int64 * len(words))(*words)

    def _tiled(self, frame: Frame, step: TiledGemmStep) -> None:
        left, right, *_ = (self._tensor(frame, window) for window in step.product.inputs)
        attrs = dict(step.product.attrs)
        columns = right.shape[1]
        for row in range(0, left.shape[0], step.rows):
            some = left[row:row + step.rows]
            band = self._tensor(frame, step.band)[:len(some)]
            if "rounded" in attrs:
                some, right = (x.to(TORCH_DTYPES[str(attrs["rounded"])]) for x in (some, right))
            band.copy_(torch.matmul(some, right) * attrs.get("alpha", 1))  # type: ignore[operator]
            self._kernel(frame, step.kernel, row * columns, len(some) * columns, step.band.buffer)

    def _tensor(self, frame: Frame, window: Window) -> torch.Tensor:
        values = frame.payload.placement.values
        shape, strides = ([evaluate(size, values) for size in sizes]
                          for sizes in (window.type.shape, window.type.layout()))
        dtype = TORCH_DTYPES[window.type.dtype]
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        last = evaluate(window.offset, values) + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        address = frame.addresses[self.sizes.slots[window.buffer]]
        memory = (ctypes.c_char * (last * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides, evaluate(window.offset, values))


class Target:
    """The CPU, but for its runner."""

    def __init__(self, cpu: Any) -> None:
        self.cpu = cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cpu, name)

    def runner(self, plan: Plan, kernels: Sequence[Any]) -> Runner:
        return Runner(plan, kernels)


def target_of(cache: Any, products: str) -> Target:
    return Target(targets._module(targets.TARGETS["cpu"]).target_of(cache, products))
