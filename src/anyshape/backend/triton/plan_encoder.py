"""The encoder of a plan for the launch loop: an expression of the plan's size function that gives the words of its
steps at given sizes."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyshape.backend.cpu.bytecode.format import CALL, STEP_WORDS
from anyshape.backend.triton.kernel import DeviceKernel
from anyshape.backend.triton.launch import (
    LaunchableKernel,
    Slots,
    alignments_of,
    check_words,
    compile_ahead,
    copy_words,
    launch_words,
    one_run,
)
from anyshape.base.errors import DeviceError, VerifyError
from anyshape.ir.types import size_of
from anyshape.plan.ir.program import CopyStep, KernelStep, Plan, Step, TiledGemmStep
from anyshape.plan.ir.size_function import STATUS_BUFFER, PlanFormulas

NO_REGIME = -1  # in place of an op, with the step's number


@dataclass(frozen=True, slots=True)
class _Spec:
    """What does not depend on sizes in a kernel or copy step. aligned: by pointer, whether its memory begins at a
    multiple of 16 (`aligned`). check: the word for its status; -1: it checks nothing."""

    number: int
    slots: tuple[int, ...]
    kernels: tuple[LaunchableKernel, ...] = ()
    aligned: tuple[bool, ...] = ()
    item: int = 0
    check: int = -1


@dataclass(frozen=True, slots=True)
class _Launching:
    """A kernel step at given sizes. offsets: bytes, of its windows."""

    spec: _Spec
    offsets: Sequence[int]
    sizes: Sequence[int]

    @property
    def alignments(self) -> Sequence[int]:
        """That its addresses may have."""
        return alignments_of(self.spec.aligned, self.offsets)


def aligned(plan: Plan) -> frozenset[str]:
    """The buffers whose memory begins at a multiple of 16: what is allocated for a call, but by PyTorch's operators, of
    which some return a part of a tensor."""
    placed = {name for name, _ in plan.offsets}
    return frozenset({STATUS_BUFFER} | placed | {b.name for b in plan.buffers if b.in_arena or b.is_output})


class PlanEncoder:
    """Writes the expression that gives the words of a plan's steps at given sizes.

    Args:
        kernels: by name.
        handle: of loaded code.
    """

    def __init__(self, plan: Plan, kernels: Mapping[str, LaunchableKernel],
                 handle: Callable[[DeviceKernel], int]) -> None:
        self.plan = plan
        self.kernels = kernels
        self.handle = handle
        self.specs: list[_Spec] = []
        self.aligned = aligned(plan)
        self.checks: list[int] = []  # the steps that check something
        self.slots = Slots(0, 0, 0)

    def expression(self, formulas: PlanFormulas) -> tuple[str, Mapping[str, Any]]:
        """See `Encoder` of plan/ir/size_function.py."""
        self.slots = Slots(formulas.slots[STATUS_BUFFER], len(formulas.slots), len(formulas.slots) + 1)
        parts = [self._step(formulas, number, step) for number, step in enumerate(self.plan.steps)]
        names: dict[str, Callable[..., Any]] = {"launch": _Launching, "copy": self._copy}
        text = "".join(f"{part}, " for part in parts)
        return f"words(({text}))", {**names, "words": self._words, "specs": self.specs}

    def _step(self, formulas: PlanFormulas, number: int, step: Step) -> str:
        if isinstance(step, KernelStep):
            return self._kernel(formulas, number, step)
        if isinstance(step, CopyStep) and step.source.type.dtype == step.target.type.dtype:
            slots = formulas.slots[step.source.buffer], formulas.slots[step.target.buffer]
            spec = self._spec(_Spec(number, slots, item=size_of(step.source.type.dtype)))
            return f"copy({spec}, {formulas.types((step.source, step.target))})"
        if isinstance(step, TiledGemmStep):
            raise VerifyError(f"step {number} of {self.plan.name} is a product in bands", where=step.where,
                              why="targets with streams do products as a whole",
                              do="report this plan: a bug of AnyShape")
        return f"({CALL}, {STEP_WORDS}, {number})"

    def _kernel(self, formulas: PlanFormulas, number: int, step: KernelStep) -> str:
        choices = []
        for regime in step.regimes:
            windows = (*step.params, *step.handed) if regime.then else step.params
            if any(window.buffer == STATUS_BUFFER for window in windows) and number not in self.checks:
                self.checks.append(number)
            missing = [name for name in regime.kernels if name not in self.kernels]
            if missing:
                raise VerifyError(f"plan {self.plan.name} needs the kernel {missing[0]}", where=step.where,
                                  why="it was not built", do="report this plan: a bug of AnyShape")
            spec = self._spec(_Spec(number, tuple(formulas.slots[window.buffer] for window in windows),
                                    tuple(self.kernels[name] for name in regime.kernels),
                                    aligned=tuple(window.buffer in self.aligned for window in windows),
                                    check=self.checks.index(number) if number in self.checks else -1))
            offsets = formulas.tuple_of(window.offset * size_of(window.type.dtype) for window in windows)
            text = f"launch({spec}, {offsets}, {formulas.tuple_of(regime.sizes)})"
            test = " and ".join(f"{formulas.number(condition)} >= 0" for condition in regime.conditions)
            choices.append((test, text))
        chain = "".join(f"{text} if {test or 'True'} else " for test, text in choices)
        return f"({chain}({NO_REGIME}, {number}))"

    def _spec(self, spec: _Spec) -> str:
        self.specs.append(spec)
        return f"specs[{len(self.specs) - 1}]"

    def _words(self, parts: Sequence[_Launching | Sequence[int]]) -> list[int]:
        """The words of all steps. Machine code that is missing is made at once.

        Raises:
            DeviceError: Triton or the driver refuses some of it.
        """
        compile_ahead([(part.spec.kernels, part.sizes, part.alignments) for part in parts
                       if isinstance(part, _Launching)], bool(self.checks))
        return [word for part in parts for word in (self._launches(part) if isinstance(part, _Launching) else part)]

    def _launches(self, part: _Launching) -> list[int]:
        spec = part.spec
        places = list(zip(spec.slots, part.offsets, strict=True))
        try:
            words = [word for kernel in spec.kernels
                     for word in launch_words(spec.number, kernel, places, part.sizes, self.slots, self.handle,
                                              part.alignments, bool(self.checks))]
        except DeviceError as error:
            raise error.within(self.plan.steps[spec.number].where) from error
        return words if spec.check < 0 or not words else [*words, *check_words(spec.number, spec.check)]

    def _copy(self, spec: _Spec, windows: tuple[Any, ...]) -> list[int]:
        (shape, strides, offset), (_, others, start) = windows
        if 0 in shape:
            return []
        if not one_run(shape, strides, others):
            return [CALL, STEP_WORDS, spec.number]
        bytes_ = spec.item
        for n in shape:
            bytes_ *= n
        return copy_words(spec.number, (spec.slots[1], start * spec.item), (spec.slots[0], offset * spec.item), bytes_)
