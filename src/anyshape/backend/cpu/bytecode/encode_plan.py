"""Bytecode encoder of a plan: the words of its steps, as an expression of the plan's size function
(plan/ir/size_function.py).

    kernel step 0 over b rows of n, its params in slots 1 and 3  -->  [1, 15, 0, 5, 0, 0, 0, 2, 1, 0, 3, 0, ...]

They are the host's program (backend/cpu/interpreter.py) but for its head.
"""
from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode import template
from anyshape.backend.cpu.bytecode.conv_spec import least
from anyshape.backend.cpu.bytecode.plan_template import Fill, PlanTemplate, attention_words, kind_words, product_words
from anyshape.backend.cpu.bytecode.products import (
    PACKED,
    Products,
    bits,
    has,
    native,
)
from anyshape.backend.cpu.bytecode.template import Names, Word
from anyshape.backend.cpu.machine.low_precision import BYTES
from anyshape.backend.cpu.microkernels.tables import direct_conv
from anyshape.backend.cpu.native.records import words_of
from anyshape.base.errors import VerifyError
from anyshape.base.int64_array import int64_array
from anyshape.ir.types import size_of
from anyshape.ops.attention import OPERANDS, roles, wide
from anyshape.ops.matmul import GROUPED, PRODUCTS
from anyshape.ops.recurrence import RECURRENCES
from anyshape.plan.ir.launch_groups import kernels_from
from anyshape.plan.ir.program import (
    CopyStep,
    KernelStep,
    LibraryStep,
    Plan,
    Step,
    TiledGemmStep,
    Window,
)
from anyshape.plan.ir.size_function import PlanFormulas, SizeFunction, size_function

_kernel = host.KernelStepWords.encoder()


def _operands(step: LibraryStep) -> tuple[Window, ...]:
    """The windows of a product: of a, b, the result, and perhaps an addend."""
    return (step.inputs[0], step.inputs[1], step.outputs[0], *step.inputs[2:])


def encode(plan: Plan, kernels: Mapping[str, int], products: Products,
           fill: Fill) -> tuple[SizeFunction, tuple[str, ...]]:
    """The size function of an allocated plan, with the words of its steps, and the dtypes of its products, those of
    attention and of its scores included. Arguments as of `PlanEncoder`."""
    encoder = PlanEncoder(plan, kernels, products, fill)
    return size_function(plan, encoder), encoder.dtypes


class PlanEncoder:
    """Makes the template of a plan's words (backend/cpu/bytecode/template.py).

    Args:
        kernels: name -> its entry in the table of functions.
        products: which our routines do, and on which machine (backend/cpu/bytecode/products.py).
        fill: fills it (backend/cpu/native_routines.py).
    """

    def __init__(self, plan: Plan, kernels: Mapping[str, int], products: Products, fill: Fill) -> None:
        self.plan = plan
        self.kernels = kernels
        self.products = products
        self.fill = fill
        self.encoders: list[Callable[[tuple[Any, ...]], list[int]]] = []  # of steps that Python encodes
        self.dtypes_found: list[str] = []
        self.wide: list[str] = []  # dtypes of attention's scores
        self.names = Names()
        self.kinds: dict[str, array[int]] = {}
        self.capacity = 1
        self.given: list[str] = []  # words that Python encodes at each new shape
        self.more: list[str] = []  # how many words other steps have, where that depends on sizes

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the products that were printed."""
        return tuple(dict.fromkeys((*self.dtypes_found, *self.wide)))

    def expression(self, formulas: PlanFormulas) -> tuple[str, Mapping[str, Any]]:
        """An array of words, and what its expression calls."""
        self.formulas = formulas
        self.slots = formulas.slots
        pieces = self.steps()
        found = PlanTemplate(int64_array([word for piece in pieces for word in piece]), len(pieces), self.capacity,
                             self.kinds, self.products, self.fill)
        values = "".join(f"{name}, " for name in self.names.index)
        more = " + ".join([*(f"{name}n" for name in self.given), *self.more]) or "0"
        return f"template(({values}), {more})", {
            "template": found, "int64_array": int64_array, "bits": bits, "encoders": self.encoders}

    def steps(self) -> list[list[int]]:
        """The pieces of all steps; those of a run are one."""
        parts = [self.step(number, step) for number, step in enumerate(self.plan.steps)]
        for first, last in reversed(self.plan.together):
            middle = kernels_from(self.plan.steps, first, last)
            kernels = parts[middle:last + 1]
            products = parts[first:middle]
            if len(products) > 1:
                products = [self.piece(template.JOINED, [len(products), *itertools.chain(*products)])]
            if kernels:
                number = middle if products else first
                joint = self.piece(template.FINISHED, [number, len(products), len(kernels),
                                                       *itertools.chain(*products, *kernels)])
                self.capacity += host.SERIES_HEAD
            else:
                joint = products[0]
            parts[first:last + 1] = [joint]
        return parts

    def piece(self, kind: int, body: Sequence[Word]) -> list[int]:
        """A piece. body: its words, see `template.piece`."""
        return template.piece(self.names, kind, body)

    def words(self, body: Sequence[Word]) -> list[int]:
        """A piece of words that depend on nothing but values."""
        self.capacity += len(body)
        return self.piece(template.WORDS, body)

    def encoded(self, text: str) -> list[int]:
        """A piece of words that Python encodes; text: an expression of a list."""
        name = f"g{len(self.given)}"
        self.given.append(name)
        self.formulas.lines += [f"    {name} = int64_array({text})", f"    {name}a, {name}n = {name}.buffer_info()"]
        return self.piece(template.GIVEN, [f"{name}a", f"{name}n"])

    def filled(self, kind: int, body: Sequence[Word]) -> list[int]:
        """A piece whose sizes say what its words are."""
        self.capacity += template.most_words(kind, body)
        return self.piece(kind, body)

    def call(self, number: int) -> list[int]:
        """A step that PyTorch does."""
        return self.words([host.CALL, host.STEP_WORDS, number])

    def step(self, number: int, step: Step) -> list[int]:
        """The piece of a step."""
        if isinstance(step, KernelStep):
            return self.kernel(number, step)
        if isinstance(step, CopyStep):
            if step.source.type.dtype != step.target.type.dtype:
                return self.call(number)
            if len(step.source.type.shape) > template.MOST_DIMS:
                return self.call(number)
            return self.filled(template.COPY, [number, *self.window(step.source), *self.window(step.target)])
        if isinstance(step, LibraryStep):
            return self.library(number, step)
        if isinstance(step, TiledGemmStep):
            return self.bands(number, step)
        return self.call(number)

    def library(self, number: int, step: LibraryStep) -> list[int]:
        if step.op in OPERANDS:
            return self.attention(number, step)
        if step.op in PRODUCTS:
            return self.product(number, step)
        if step.op in GROUPED:
            return self.grouped(number, step)
        if step.op == "direct_conv":
            return self.direct_conv(number, step)
        if step.op == "conv_bytes":
            return self.byte_conv(number, step)
        if step.op in RECURRENCES:
            return self.recurrence(number, step)
        from anyshape.backend.cpu.bytecode.encode_at_sizes import encoded_step  # most programs have no such step
        windows = (*step.inputs, *step.outputs)
        places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
        found = encoded_step(number, step, places, self.products.machine)
        if found is not None:
            self.encoders.append(found.words)
            if found.dtype:
                self.dtypes_found.append(found.dtype)
            return self.encoded(f"encoders[{len(self.encoders) - 1}]({self.formulas.types(windows)})")
        raise VerifyError(f"plan {self.plan.name} calls the library routine {step.op}", where=step.where,
                          why="the host knows products, attention, routing and recurrences only",
                          do="make it an extern step")

    def product(self, number: int, step: LibraryStep) -> list[int]:
        """A product: how its words follow from sizes is said by backend/cpu/routines/encoding/product.py."""
        windows, dtype = _operands(step), step.dtype
        self.dtypes_found.append(dtype)
        if any(len(window.type.shape) > template.MOST_DIMS for window in windows) or not has(dtype, self.products):
            return self.call(number)
        return self.filled(template.PRODUCT, self.product_body(number, step))

    def product_body(self, number: int, step: LibraryStep) -> list[Word]:
        """The words of a `template.ProductPiece`."""
        windows, attrs = _operands(step), dict(step.attrs)
        alpha, beta = (float(attrs.get(name, 1)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
        addend = len(windows) > 3 and beta != 0
        body = product_words(self.kind(step.dtype), number, step.dtype, alpha, beta, addend, "columns" in attrs)
        for window in windows if addend else windows[:3]:
            body += self.window(window)
        return body

    def grouped(self, number: int, step: LibraryStep) -> list[int]:
        """Products of groups of rows: backend/cpu/routines/encoding/grouped.py."""
        windows = (*step.inputs, *step.outputs)
        dtype = windows[0].type.dtype
        self.dtypes_found.append(dtype)
        if not native(dtype, self.products.machine, self.products.blas):
            return self.call(number)
        return self.filled(template.GROUPED, [
            self.kind(dtype), number, int(step.op == "grouped_inner"), int(len(windows) > 4),
            *itertools.chain(*map(self.window, windows))])

    def window(self, window: Window) -> list[Word]:
        """The words of a `template.WindowWords`."""
        type_, number = window.type, self.formulas.number
        return template.window_words(self.slots[window.buffer], size_of(type_.dtype), number(window.offset),
                                     [*map(number, type_.shape)], [*map(number, type_.layout())])

    def kind(self, dtype: str) -> int:
        """The address of what is known of products of a dtype."""
        if dtype not in self.kinds:
            self.kinds[dtype] = kind_words(len(self.kinds), dtype, self.products)
        return self.kinds[dtype].buffer_info()[0]

    def bands(self, number: int, step: TiledGemmStep) -> list[int]:
        """A product and a kernel in bands of rows: backend/cpu/routines/encoding/bands.py."""
        kernel, columns, product = step.kernel, step.band.type.shape[1], step.product
        assert isinstance(columns, int)
        steps = [columns * size_of(window.type.dtype) if place in kernel.along and place != step.result else 0
                 for place, window in enumerate(kernel.params)]
        self.dtypes_found.append(product.dtype)
        body = self.product_body(number, product)
        before, self.capacity = self.capacity, 0
        version = self.kernel(number, kernel)
        longest, self.capacity = self.capacity, before + host.SERIES_HEAD + self.capacity
        assert longest <= template.MOST_KERNEL
        each = host.SERIES_HEAD + template.most_words(template.PRODUCT, body) + longest
        rows = self.formulas.number(product.outputs[0].type.shape[0])
        self.more.append(f"-(-{rows} // {step.rows}) * {each}")
        return self.piece(template.BANDS, [number, step.rows, columns, len(steps), *steps,
                                           *self.piece(template.PRODUCT, body), *version])

    def attention(self, number: int, step: LibraryStep) -> list[int]:
        attrs: dict[str, Any] = dict(step.attrs)
        windows = (*step.inputs, *step.outputs)
        dtype, depth = windows[0].type.dtype, self.formulas.number(windows[0].type.shape[3])
        self.wide.append(wide(dtype))
        self.dtypes_found.append(dtype)
        if not native(dtype, self.products.machine, self.products.blas):
            return self.call(number)
        code, factor = "d" if dtype == "f64" else "f", attrs["scale"]
        scale: Word
        if factor is None and depth.isidentifier():
            key = "scale", depth, code
            scale = self.formulas.local(key, f"bits({depth}**-0.5 if {depth} > 0 else 0.0, '{code}')")
        elif factor is None:
            scale = bits(int(depth)**-0.5 if int(depth) > 0 else 0.0, code)
        else:
            scale = bits(factor, code)
        there = dict(zip(roles(step.op, len(windows)), windows, strict=True))
        return self.filled(template.ATTENTION, [
            *attention_words(self.kind(dtype), number, step.op, dtype, bool(attrs["causal"]), scale, there),
            *itertools.chain(*(self.window(there[role]) for role in host.OPERANDS if role in there))])

    def direct_conv(self, number: int, step: LibraryStep) -> list[int]:
        windows, attrs, machine = (*step.inputs, *step.outputs), dict(step.attrs), self.products.machine
        optional = [bool(attrs.get(name)) for name in ("scaled", "shifted", "added")]
        present = [len(windows) - 3 > sum(optional), *optional]
        settings: Any = [attrs[name] for name in ("stride", "padding", "dilation")]
        self.dtypes_found.append(windows[0].type.dtype)
        return self.filled(template.DIRECT_CONV, [
            number, len(windows), *map(int, present), least(bool(attrs.get("relu"))), *itertools.chain(*settings),
            machine.lanes, direct_conv.grain(machine), PACKED["f32"] + host.PACKED_TURN,
            *itertools.chain(*map(self.window, windows))])

    def byte_conv(self, number: int, step: LibraryStep) -> list[int]:
        attrs: dict[str, Any] = dict(step.attrs)
        self.dtypes_found.append(BYTES)
        return self.filled(template.BYTE_CONV, [
            self.kind(BYTES), number, *attrs["kernel"], *attrs["stride"], *attrs["dilation"],
            *itertools.chain(*map(self.window, (*step.inputs, *step.outputs)))])

    def recurrence(self, number: int, step: LibraryStep) -> list[int]:
        from anyshape.backend.cpu.bytecode.encode_recurrence import FAMILIES, recurrence_words  # few programs have any
        self.dtypes_found.append(FAMILIES[step.op])
        words = recurrence_words(self.products.machine, number, step, self.slots, self.formulas.number)
        # nothing is to be done without rows
        return self.versions(number, [([self.formulas.number(step.inputs[0].type.shape[1] - 1)], words), ([], [])])

    def kernel(self, number: int, step: KernelStep) -> list[int]:
        """The piece of a kernel step."""
        return self.versions(number, self.regimes(number, step))

    def versions(self, number: int, regimes: Sequence[tuple[list[str], Sequence[Word]]]) -> list[int]:
        """The piece of a step of which there are versions: conditions that are to be at least 0, and words."""
        if len(regimes) == 1 and not regimes[0][0]:
            return self.words(regimes[0][1])
        body: list[Word] = []
        count = most = 0
        for conditions, words in regimes:
            named = [name for name in conditions if name.isidentifier()]
            if any(int(name) < 0 for name in conditions if name not in named):
                continue  # a number, below 0 at all sizes
            body += [len(named), *(self.names.of(name) for name in named), *self.piece(template.WORDS, words)]
            count, most = count + 1, max(most, len(words))
        self.capacity += max(most, host.NO_REGIME_WORDS)
        return self.piece(template.REGIMES, [number, count, *body])

    def regimes(self, number: int, step: KernelStep) -> list[tuple[list[str], list[Word]]]:
        """The versions of a kernel step."""
        choices: list[tuple[list[str], list[Word]]] = []
        for regime in step.regimes:
            params: list[Word] = []
            for window in (*step.params, *step.handed) if regime.then else step.params:
                item = size_of(window.type.dtype)
                params += [self.slots[window.buffer], self.formulas.number(window.offset * item)]
            sizes = [self.formulas.number(size) for size in regime.sizes]
            length = words_of(host.KernelStepWords) + len(params) + len(sizes)
            every: list[Word] = []
            for kernel in regime.kernels:
                if kernel not in self.kernels:
                    raise VerifyError(f"plan {self.plan.name} needs the kernel {kernel}", where=step.where,
                                      why="it was not built", do="report this plan: a bug of AnyShape")
                every += _kernel(op=host.KERNEL, length=length, number=number, function=self.kernels[kernel], blocks=0,
                                 work=0, scratch=0, params=len(params) // 2, sizes=len(sizes),
                                 places=[*params, *sizes])
            choices.append(([self.formulas.number(condition) for condition in regime.conditions], every))
        return choices
