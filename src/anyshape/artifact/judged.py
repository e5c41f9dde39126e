"""Judged specialisations: records of a plan that came from a file, each checked by the plan's verifier before it is
used.

    layout of the buffers    plan/layout_judge.py: nothing alive shares a byte, all lies in the arena
    windows                  inside their buffers; an input's inside what the caller brought
    bytes                    below 2^62, in Python's numbers, before they become words of 64 bits
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyshape.base.errors import InputError, VerifyError
from anyshape.ir.types import TensorType, size_of
from anyshape.plan.ir.program import ExternStep, KernelStep, Plan, Window, touched
from anyshape.plan.layout_judge import LayoutJudge
from anyshape.runtime.specialize.saved_policy import SAVE_ALL, SavePolicy
from anyshape.runtime.specialize.shape_binding import renamed
from anyshape.runtime.specialize.specialization import Specialization, Specializer
from anyshape.sym.expr import Atom, Size, evaluate, maximum, minimum, product, symbols_of
from anyshape.sym.python_codegen import SizesFunction

MOST_BYTES = 1 << 62


class Judged(Specializer):
    """A specializer whose records are judged. Layers that repeat have equal formulas, which are looked at once; what
    holds at all sizes is looked at when the plan is loaded.

    Raises:
        VerifyError: a step touches a buffer that is not there.
    """

    def __init__(self, plan: Plan, *arguments: Any, **given: Any) -> None:
        super().__init__(plan, *arguments, **given)
        self.useless = set()  # no limit predicts what a call takes
        sizes = {buffer.name: buffer.bytes for buffer in plan.buffers}
        self.judge = LayoutJudge(plan)
        names = {bytes_: name for name, bytes_ in reversed(sizes.items())}
        memory = sizes | _allocated(plan)
        found: dict[tuple[Size, TensorType, Size], tuple[int, Window]] = {}
        for number, step in enumerate(plan.steps):
            for window in touched(step):
                if window.buffer in sizes:
                    found.setdefault((memory[window.buffer], window.type, window.offset), (number, window))
                elif not isinstance(step, KernelStep):
                    raise VerifyError(f"step {number} of {plan.name} touches {window.buffer}, which is not there")
        # what may depend on sizes that only the program's run says is looked at where they are known
        known = set(self.layout.symbols)
        natural = {name for name, low, _ in plan.facts.ranges if low >= 0} & known
        open_ = {key: one for key, one in found.items() if not is_inside(*key, natural)}
        self.windows = tuple(open_.values())
        late = [size for size in names if not symbols_of(size) <= known]
        self.late_bytes = {size: names[size] for size in late}
        self.bytes = {size: names[size] for size in dict.fromkeys((*self.judge.sizes, *names)) if size not in late}
        self.is_whole = not late  # the first of the bytes are the judge's sizes
        self.byte_sizes = SizesFunction(self.bytes, f"bytes of {plan.name}")
        # of each window: bytes of its buffer, offset, sizes, strides
        self.window_sizes = SizesFunction([size for bytes_, type_, offset in open_ for size in
                                         (bytes_, offset, *type_.shape, *type_.layout())], f"windows of {plan.name}")

    def make(self, values: dict[str, int], policy: SavePolicy = SAVE_ALL) -> Specialization:
        """See `Specializer`.

        Raises:
            InputError: a value would have 2^62 bytes or more. VerifyError: the plan is wrong at these sizes.
        """
        self._check_facts(values)
        bytes_ = self._check_bytes(values)
        try:
            record = super().make(values, policy)
        except (OverflowError, ZeroDivisionError) as error:
            raise InputError(f"{self.plan.name} does not take these sizes", why=str(error),
                             do="call it with other sizes") from error
        if self.windows:
            self._check_windows(record.values)
        judge = self.judge
        if not (self.is_whole and judge.is_right(bytes_[:len(judge.sizes)], record.offsets, record.kept,
                                                  self.host.apart)):
            judge.check(values, record.offsets, None, record.kept)
        return record

    def _check_facts(self, values: dict[str, int]) -> None:
        """Whether what the compiler took for granted holds: a file may say anything of its sizes."""
        facts = self.plan.facts
        conditions = [(f"{size} >= 0", size, 0) for size in facts.known]
        conditions += [(f"{divisor} divides {size}", size, divisor) for size, divisor in facts.divisible]
        for words, size, divisor in conditions:
            if symbols_of(size) <= values.keys():
                try:
                    found = evaluate(size, values)
                except ZeroDivisionError:
                    found = -1
                if found % divisor if divisor else found < 0:
                    raise InputError(f"{self.plan.name} does not take these sizes",
                                     why=f"it was compiled for {renamed(words, self.names)}",
                                     do="call it with such sizes, or compile it for others")

    def _check_bytes(self, values: dict[str, int]) -> tuple[int, ...]:
        """The bytes of values, which are numbers that native code may compute with."""
        try:
            found = self.byte_sizes(values)
        except KeyError:  # `make` says which size is missing
            return ()
        late = [(name, evaluate(size, values)) for size, name in self.late_bytes.items()
                if symbols_of(size) <= values.keys()]
        if min(found, default=0) < 0 or max(found, default=0) >= MOST_BYTES or late:
            for name, bytes_ in (*zip(self.bytes.values(), found, strict=True), *late):
                if not 0 <= bytes_ < MOST_BYTES:
                    raise InputError(f"{self.plan.name} does not take these sizes",
                                     why=f"the value {name} would have {bytes_} bytes",
                                     do="call it with smaller sizes")
        return found

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


def _allocated(plan: Plan) -> dict[str, Size]:
    """Bytes of buffers that are allocated with strides: results of the call (`Specializer._allocation`) and of
    operators."""
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    found = {}
    for index, entry in enumerate(plan.outputs):
        own = buffers.get(entry.buffer) if isinstance(entry, Window) else None
        if isinstance(entry, Window) and own is not None and own.is_output and own.index == index \
                and entry.offset == 0 and entry.type.strides is not None:
            found[own.name] = maximum(own.bytes, _memory(entry.type))
    for step in plan.steps:
        for window in step.outputs if isinstance(step, ExternStep) else ():
            own = buffers.get(window.buffer) if window is not None else None
            if window is not None and own is not None and own.is_external and window.type.strides is not None:
                found[own.name] = _memory(window.type)
    return found


def _memory(kind: TensorType) -> Size:
    """Bytes from the first element of a type to behind its last one: more than those of its elements where there are
    gaps between them, fewer where they overlap."""
    reach = 1 + sum((n - 1) * step for n, step in zip(kind.shape, kind.layout(), strict=True))
    return reach * size_of(kind.dtype) * product([minimum(1, n) for n in kind.shape])


def is_inside(bytes_: Size, type_: TensorType, offset: Size, natural: set[str]) -> bool:
    """Whether a window lies inside of its buffer at all sizes: it is the buffer, with its dims in some order; or all of
    it are numbers. natural: symbols that are never below 0."""
    strides = type_.layout()
    numbers = [n for n in (*type_.shape, *strides, bytes_, offset) if isinstance(n, int)]
    if len(numbers) < 2 * type_.rank + 2:
        return offset == 0 and type_.bytes == bytes_ and all(_is_natural(n, natural) for n in type_.shape) \
            and _is_dense(type_.shape, strides)
    shape, steps, (whole, begin) = numbers[:type_.rank], numbers[type_.rank:-2], numbers[-2:]
    if 0 in shape:
        return True
    reaches = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    end = begin + sum(max(one, 0) for one in reaches) + 1
    begin += sum(min(one, 0) for one in reaches)
    item = size_of(type_.dtype)
    return min(shape, default=0) >= 0 and 0 <= begin * item <= end * item <= whole


def _is_natural(size: Size, natural: set[str]) -> bool:
    """Whether a size is never below 0, by its form: sums, products and quotients of what never is."""
    return size >= 0 if isinstance(size, int) else all(
        count >= 0 and all(_is_natural_atom(atom, natural) for atom, _ in powers) for powers, count in size.terms)


def _is_natural_atom(atom: Atom, natural: set[str]) -> bool:
    if isinstance(atom, str):
        return atom in natural
    return atom.op == "floordiv" and isinstance(atom.args[1], int) and atom.args[1] > 0 \
        and _is_natural(atom.args[0], natural)


def _is_dense(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Whether strides are those of a dense tensor with its dims in some order; in a dim of size 1 there is no step."""
    rest = [one for one in zip(shape, strides, strict=True) if one[0] != 1]
    step: Size = 1
    while rest:
        place = next((i for i, one in enumerate(rest) if one[1] == step), None)
        if place is None:
            return False
        step = step * rest.pop(place)[0]
    return True
