"""Judged specialisations: records of a plan that came from a file, each checked by the plan's verifier before it is
used.

    layout of the buffers    plan/layout_judge.py: nothing alive shares a byte, all lies in the arena
    windows                  inside their buffers; an input's inside what the caller brought
    bytes                    below 2^62, in Python's numbers, before they become words of 64 bits
"""
from __future__ import annotations

from typing import Any

from anyshape.base.errors import InputError, VerifyError
from anyshape.ir.types import TensorType, size_of
from anyshape.plan.ir.program import KernelStep, Plan, Window, touched
from anyshape.plan.layout_judge import LayoutJudge
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.runtime.specialize.shape_binding import renamed
from anyshape.runtime.specialize.specialization import Specialization, Specializer
from anyshape.sym.expr import Size, evaluate, symbols_of
from anyshape.sym.python_codegen import function_of

MOST_BYTES = 1 << 62


class Judged(Specializer):
    """A specializer whose records are judged. Layers that repeat have equal formulas, which are looked at once.

    Raises:
        VerifyError: a step touches a buffer that is not there.
    """

    def __init__(self, plan: Plan, *arguments: Any, **given: Any) -> None:
        super().__init__(plan, *arguments, **given)
        sizes = {buffer.name: buffer.bytes for buffer in plan.buffers}
        self.judge = LayoutJudge(plan)
        self.bytes = {bytes_: name for name, bytes_ in reversed(sizes.items())}
        found: dict[tuple[Size, TensorType, Size], tuple[int, Window]] = {}
        for number, step in enumerate(plan.steps):
            for window in touched(step):
                if window.buffer in sizes:
                    found.setdefault((sizes[window.buffer], window.type, window.offset), (number, window))
                elif not isinstance(step, KernelStep):
                    raise VerifyError(f"step {number} of {plan.name} touches {window.buffer}, which is not there")
        self.windows = tuple(found.values())
        # of each window: bytes of its buffer, offset, sizes, strides
        self.window_sizes = function_of([size for bytes_, type_, offset in found for size in
                                         (bytes_, offset, *type_.shape, *type_.layout())], f"windows of {plan.name}")

    def make(self, values: dict[str, int], policy: SavePolicy = SAVE_ALL) -> Specialization:
        """See `Specializer`.

        Raises:
            InputError: a value would have 2^62 bytes or more. VerifyError: the plan is wrong at these sizes.
        """
        self._check_facts(values)
        self._check_bytes(values)
        try:
            record = super().make(values, policy)
        except (OverflowError, ZeroDivisionError) as error:
            raise InputError(f"{self.plan.name} does not take these sizes", why=str(error),
                             do="call it with other sizes") from error
        self._check_windows(record.values)
        self.judge.check(values, record.offsets, None, record.kept)
        return record

    def _check_facts(self, values: dict[str, int]) -> None:
        """Whether what the compiler took for granted holds: a file may say anything of its sizes."""
        facts = self.plan.facts
        conditions = [(f"{size} >= 0", size, 0) for size in facts.known]
        conditions += [(f"{divisor} divides {size}", size, divisor) for size, divisor in facts.divisible]
        for words, size, divisor in conditions:
            if symbols_of(size) <= values.keys():
                found = evaluate(size, values)
                if found % divisor if divisor else found < 0:
                    raise InputError(f"{self.plan.name} does not take these sizes",
                                     why=f"it was compiled for {renamed(words, self.names)}",
                                     do="call it with such sizes, or compile it for others")

    def _check_bytes(self, values: dict[str, int]) -> None:
        for formula, name in self.bytes.items():
            if symbols_of(formula) <= values.keys():
                bytes_ = evaluate(formula, values)
                if not 0 <= bytes_ < MOST_BYTES:
                    raise InputError(f"{self.plan.name} does not take these sizes",
                                     why=f"the value {name} would have {bytes_} bytes",
                                     do="call it with smaller sizes")

    def _check_windows(self, values: dict[str, int]) -> None:
        """Whether what steps touch lies inside of the buffers."""
        numbers = self.window_sizes(values)
        at = 0
        for number, window in self.windows:
            bytes_, begin, rank = numbers[at], numbers[at + 1], len(window.type.shape)
            shape, strides = numbers[at + 2:at + 2 + rank], numbers[at + 2 + rank:at + 2 + 2 * rank]
            at += 2 + 2 * rank
            if 0 in shape:
                continue
            last = begin
            for n, step in zip(shape, strides, strict=True):
                if (reach := (n - 1) * step) < 0:
                    begin += reach
                else:
                    last += reach
            item = size_of(window.type.dtype)
            if not 0 <= begin * item <= (last + 1) * item <= bytes_:
                raise VerifyError(f"step {number} of {self.plan.name} touches bytes {begin * item} to "
                                  f"{(last + 1) * item} of {window.buffer}, which has {bytes_}",
                                  where=getattr(self.plan.steps[number], "where", ""), do="save the program again")
