"""Plans that a person has edited, in place of the computed ones: they are read, verified, and must fit.

    computed                                    edited
      buffer  a: ..  arena @ 0                    buffer  a: ..  arena @ 64*n
      0  kernel k1(x, &a; n)                      0  kernel k2(y, &b; n)
      1  kernel k2(y, &b; n)                      1  kernel k1(x, &a; n)

Inputs, what is known of sizes, what is returned, saved and kept from the tape stay, and every buffer outside the arena:
callers and the other half of a forward and backward pair rely on them. So does what a step calls: kernel or operator,
sizes, types, attributes. The rest is the person's: order, which buffers of the arena there are, how long they live and
where they lie, what lies over what, copies, memory steps and groups. No window may lie outside its buffer: one that no
computed plan has must be proved to lie inside for all sizes. The layout is judged at the hints, at the smallest sizes,
and at others between. Whether it computes the same is for check=2 to say.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from anyshape.base.errors import ParseError, VerifyError
from anyshape.ir.ir_dumps import Edited
from anyshape.ir.types import TensorType, size_of
from anyshape.plan.ir.parse import ParsedPlan, parse_lines
from anyshape.plan.ir.program import (
    Buffer,
    CopyStep,
    KernelStep,
    MemoryStep,
    Plan,
    Step,
    TiledGemmStep,
    Window,
    step_writes,
)
from anyshape.plan.ir.renaming import renamed_step
from anyshape.plan.ir.show import parts_inside
from anyshape.plan.verify import judge, verify
from anyshape.sym.expr import Size, evaluate, symbol
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_at_most

# fields of a plan that an edit leaves
FIXED = ("name", "inputs", "restored", "nonnegative", "again", "chunks", "spent", "whole")
SCALES = (0, 1, 3, 8)  # parts of the way from the smallest sizes to the hints, in quarters, at which a layout is judged


def put_back(computed: Sequence[Plan], edited: Edited, placed: bool) -> tuple[Plan, ...]:
    """The edited plans, to go on with instead of `computed`. placed: their buffers have offsets by now.

    Raises:
        EditError: the text holds no valid plans, or they do not fit; with the file and the line.
    """
    try:
        found = parse_lines(edited.text)
        if len(found) != len(computed):
            raise VerifyError("the edited plan does not fit", why=f"{len(found)} plans stand for {len(computed)}",
                              do="leave each order of steps in its place")
        return tuple(_Fit(old, new, edited.text).run(placed) for old, new in zip(computed, found, strict=True))
    except (ParseError, VerifyError) as error:
        edited.refuse(error)


class _Fit:
    def __init__(self, old: Plan, new: ParsedPlan, text: str) -> None:
        self.old = old
        self.new = new.plan
        self.parsed = new
        self.text = text.split("\n")
        self.buffers = {buffer.name: buffer for buffer in new.plan.buffers}
        self.windows = set(_windows(old))

    def run(self, placed: bool) -> Plan:
        old, new = self.old, self.new
        for name in FIXED:
            if getattr(old, name) != getattr(new, name):
                self.fail(self.parsed.line, f"{name} is another than in the computed plan", "leave it as it was")
        if [[size for size, _ in one] for one in (old.selected, old.divided)] != [
                [size for size, _ in one] for one in (new.selected, new.divided)]:
            self.fail(self.parsed.line, "sizes that may not be 0 are others", "leave them as they were")
        if dataclasses.replace(old.facts, hints=()) != dataclasses.replace(new.facts, hints=()):
            self.fail(self.parsed.line, "what is known of sizes is another", "leave it as it was")
        self.check_buffers()
        for name, word in (("outputs", "out"), ("saved", "saved")):
            if _kinds(old, getattr(old, name)) != _kinds(new, getattr(new, name)):
                self.fail(self.line_of(word), f"what is {'returned' if word == 'out' else word} is of other types, or "
                          "lives elsewhere", "leave it as it was")
        plan = dataclasses.replace(new, steps=tuple(self.steps()), facts=old.facts)
        try:
            verify(plan)
            for values in sizes_between(plan.facts) if placed else ():
                judge(plan, values)
        except VerifyError as error:
            raise VerifyError("the edited plan is wrong", why=error.why, do="correct the plan") from error
        return plan

    def check_buffers(self) -> None:
        """What lies outside of the arena stays, but for how long it is needed."""
        old = {b.name: b for b in self.old.buffers if not b.is_temp}
        own = {b.name: b for b in self.new.buffers if not b.is_temp}
        for name in [*own.keys() - old.keys(), *old.keys() - own.keys()]:
            self.fail(self.parsed.buffers.get(name, self.parsed.line), f"{name} is a buffer outside the arena that is "
                      f"{'new' if name in own else 'missing'}", "leave those buffers as they were")
        places, was = dict(self.new.offsets), dict(self.old.offsets)
        for name, buffer in own.items():
            same = dataclasses.replace(buffer, first=old[name].first, last=old[name].last) == old[name]
            moved = not buffer.is_saved and places.get(name) != was.get(name)
            if not same or moved:
                self.fail(self.parsed.buffers[name], f"{name} is another than in the computed plan",
                          "leave what lies outside the arena as it was")

    def steps(self) -> Iterator[Step]:
        """The steps, each with the origin of the computed one that it is."""
        computed: dict[Step, list[Step]] = {}
        written = {window.buffer for step in self.old.steps for window in step_writes(step)}
        for step, called in _calls(self.old):
            computed.setdefault(called, []).append(step)
        marked = {called for number, (_, called) in enumerate(_calls(self.old)) if number in self.old.optional}
        for number, (step, called) in enumerate(_calls(self.new)):
            line = self.parsed.steps[number]
            for window in parts_inside(step):
                if isinstance(window, Window):
                    self.check_window(window, line)
            for name in {window.buffer for window in step_writes(step)} - written:
                if name in self.buffers and not self.buffers[name].is_allocated:
                    self.fail(line, f"the computed plan does not write {name}", "leave what is given as it is")
            if isinstance(step, CopyStep) and not _alike(step):
                self.fail(line, "a copy is of one dtype and shape", "copy to a window of the same type")
            if called not in computed and not _is_free(step):
                self.fail(line, "no step of the computed plan calls that, with these sizes and types",
                          "leave what a step calls as it was; which buffers it reads and writes is yours")
            if (called in marked) != (number in self.new.optional):
                self.fail(line, "optional steps are marked by ?, and no others", "leave the mark as it was")
            same = computed.get(called, [step])
            own: Step = _with_origin(step, same.pop(0) if len(same) > 1 else same[0])
            yield own

    def check_window(self, window: Window, line: int) -> None:
        """Whether it is one of the computed plan, or lies inside of a buffer that the call makes for sure."""
        buffer = self.buffers.get(window.buffer)
        if (None if buffer is None else _place(buffer), window.type, window.offset) in self.windows:
            return
        why = f"{window.buffer} has no window {window.type} at {window.offset} that is proved to lie inside"
        if buffer is None or not buffer.is_allocated:
            self.fail(line, why, "read and write what is there as the computed plan does")
        strides = window.type.layout()
        last = window.offset
        for size, stride in zip(window.type.shape, strides, strict=True):
            last = last + (size - 1) * stride
        bounds: list[tuple[Size, Size]] = [(0, one) for one in (window.offset, *strides)]
        bounds.append(((last + 1) * size_of(window.type.dtype), buffer.bytes))
        if not all(prove_at_most(self.old.facts, low, high) for low, high in bounds):
            self.fail(line, why, "read and write inside of buffers")

    def line_of(self, word: str) -> int:
        """The line of the plan that begins with a word."""
        lines = range(self.parsed.line, len(self.text) + 1)
        return next((line for line in lines if self.text[line - 1].split()[:1] == [word]), self.parsed.line)

    def fail(self, line: int, why: str, do: str) -> NoReturn:
        raise VerifyError("the edited plan does not fit", where=f"line {line}: {self.text[line - 1]}", why=why, do=do)


def sizes_between(facts: Facts) -> Iterator[dict[str, int]]:
    """Sizes at which a layout is looked at: from the smallest ones over the hints to larger ones, as facts allow."""
    lows = {name: low for name, low, _ in facts.ranges} | {name: 0 for name, _ in facts.hints}
    for scale in SCALES:
        values = {}
        for name in lows:
            low, high = facts.range_of(name)
            value = low + (facts.hint(symbol(name)) - low) * scale // 4
            values[name] = value if high is None else min(value, high)
        if all(evaluate(size, values) >= 0 for size in facts.known) \
                and all(evaluate(size, values) % divisor == 0 for size, divisor in facts.divisible):
            yield values


def _place(buffer: Buffer) -> tuple[str, Size]:
    """What a window may lie in alike: a buffer outside the arena, or one of the arena of that size."""
    return "" if buffer.is_temp else buffer.name, buffer.bytes


def _windows(plan: Plan) -> Iterator[tuple[tuple[str, Size] | None, TensorType, Size]]:
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    for part in parts_inside((plan.steps, plan.outputs, plan.saved)):
        if isinstance(part, Window):
            buffer = buffers.get(part.buffer)
            yield None if buffer is None else _place(buffer), part.type, part.offset


def _kinds(plan: Plan, entries: Sequence[object]) -> list[object]:
    """What callers see of results: where each lives, and as what."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    return [(buffers[entry.buffer].home, entry.type, entry.offset)
            if isinstance(entry, Window) and entry.buffer in buffers else entry for entry in entries]


def _calls(plan: Plan) -> list[tuple[Step, Step]]:
    """The steps, each with what it calls: the same without names of buffers and lines of the source."""
    names = {buffer.name: "" for buffer in plan.buffers}
    return [(step, _without_lines(step if isinstance(step, MemoryStep) else renamed_step(step, names)))
            for step in plan.steps]


def _without_lines(step: Any) -> Any:
    if isinstance(step, TiledGemmStep):
        return dataclasses.replace(step, product=_without_lines(step.product), kernel=_without_lines(step.kernel))
    if isinstance(step, KernelStep):
        step = dataclasses.replace(step, checks=tuple((op, operand, "") for op, operand, _ in step.checks))
    return dataclasses.replace(step, where="")


def _is_free(step: Step) -> bool:
    """Whether a step may stand anywhere: a copy, tensors that are taken or dropped."""
    return isinstance(step, CopyStep) or (isinstance(step, MemoryStep) and step.chunk < 0)


def _alike(copy: CopyStep) -> bool:
    source, target = copy.source.type, copy.target.type
    return source.dtype == target.dtype and source.shape == target.shape


def _with_origin(step: Any, computed: Any) -> Any:
    """The step with what is no part of its value from the computed one that it is."""
    if isinstance(step, TiledGemmStep) and isinstance(computed, TiledGemmStep):
        return dataclasses.replace(step, product=_with_origin(step.product, computed.product),
                                   kernel=_with_origin(step.kernel, computed.kernel))
    hidden = {field.name: getattr(computed, field.name) for field in dataclasses.fields(step) if not field.compare}
    return dataclasses.replace(step, **hidden)
