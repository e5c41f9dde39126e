"""Bytecode encoder of a plan: the words of its steps, as an expression of the plan's size function
(plan/ir/size_function.py).

    kernel step 0 over b rows of n, its params in slots 1 and 3  -->  [1, 15, 0, 5, 0, 0, 0, 2, 1, 0, 3, 0, ...]

They are the host's program (backend/cpu/interpreter.py) but for its head.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from anyshape.backend.cpu.bytecode import encode_attention as attention
from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.conv_spec import ConvSpec
from anyshape.backend.cpu.bytecode.encode_attention import AttentionSpec
from anyshape.backend.cpu.bytecode.encode_direct_conv import direct_conv_words
from anyshape.backend.cpu.bytecode.encode_gemm import (
    Area,
    Products,
    Shape,
    at_slots,
    copy_words,
    finished,
    joined,
    matmul_words,
    series,
)
from anyshape.backend.cpu.bytecode.encode_grouped_conv import grouped_conv_words
from anyshape.backend.cpu.bytecode.encode_grouped_gemm import GroupedSpec, grouped_words
from anyshape.backend.cpu.bytecode.encode_recurrence import RecurrenceSpec, recurrence_words
from anyshape.backend.cpu.bytecode.encode_routing import RoutingSpec, routing_words
from anyshape.backend.cpu.native.compiler import words_of
from anyshape.base.errors import VerifyError
from anyshape.ir.types import size_of
from anyshape.ops.attention import OPERANDS, wide
from anyshape.ops.convolution import CONVOLUTIONS
from anyshape.ops.matmul import GROUPED
from anyshape.ops.routing import ROUTING
from anyshape.ops.type_rules import ORDERED
from anyshape.plan.ir.launch_groups import kernels_from
from anyshape.plan.ir.program import (
    CopyStep,
    KernelStep,
    LibraryStep,
    Plan,
    Step,
    TiledGemmStep,
)
from anyshape.plan.ir.size_function import PlanFormulas, SizeFunction, size_function

_kernel, _series = host.KernelStep.encoder(), host.SeriesStep.encoder()
_PLACES = host.KernelStep.index("places")
MATMUL_PLACES = (host.MATMUL_A, host.MATMUL_B, host.MATMUL_C, host.MATMUL_BIAS)


@dataclass(frozen=True, slots=True)
class _Spec:
    """What does not depend on sizes in a library or copy step: (slot, bytes per element) per window."""

    number: int
    dtype: str
    places: tuple[tuple[int, int], ...]
    alpha: float = 1.0
    beta: float = 1.0


def _areas(spec: _Spec, windows: tuple[Any, ...]) -> list[Area]:
    return [Area(slot, offset * item, item, shape, strides)
            for (slot, item), (shape, strides, offset) in zip(spec.places, windows, strict=True)]


def _matmul(products: Products, spec: _Spec, windows: tuple[Any, ...]) -> list[int]:
    return _placed(_unplaced(products, spec, windows), spec, windows)


def _unplaced(products: Products, spec: _Spec, windows: tuple[Any, ...]) -> tuple[int, ...] | None:
    """What the words of a product have in common with those of others that have equal windows, in other slots."""
    return _product(products, spec.dtype, spec.alpha, spec.beta, tuple([item for _, item in spec.places]),
                    tuple([(shape, strides) for shape, strides, _ in windows]))


def _placed(words: tuple[int, ...] | None, spec: _Spec, windows: tuple[Any, ...]) -> list[int]:
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, MATMUL_PLACES, spec.number, spec.places, windows)


@lru_cache(maxsize=4096)
def _product(products: Products, dtype: str, alpha: float, beta: float, items: tuple[int, ...],
             types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words of a product of windows at such sizes and strides; slots are positions among the windows. Layers that
    repeat ask for the same ones."""
    a, b, c, *rest = (Area(position, 0, item, *kind) for position, (item, kind) in enumerate(zip(items, types,
                                                                                                  strict=True)))
    words = matmul_words(0, dtype, a, b, c, rest[0] if rest else None, alpha, beta, products)
    return None if words is None else tuple(words)


def _bands(products: Products, rows: int, columns: int, spec: _Spec, windows: tuple[Any, ...], kernel: list[int],
           steps: tuple[int, ...]) -> list[int]:
    """The words of a product and of a flat kernel that reads its result, for so many rows after the others. kernel: its
    words for all of them. steps: per param, how many bytes it goes on from row to row."""
    (shape, strides, first), other, (_, own, start) = windows
    if shape[1] == 0:  # no terms: a sum of nothing, whatever the strides
        strides, other = (1, 1), (other[0], (columns, 1), other[2])
    words: list[int] = []
    for row in range(0, shape[0], rows):
        count = min(rows, shape[0] - row)
        product = _matmul(products, spec, (((count, shape[1]), strides, first + row * strides[0]), other,
                                 ((count, columns), own, start)))
        if product[0] not in (host.MATMUL, host.PRODUCT):
            raise VerifyError(f"step {spec.number} is a product that the host does not have",
                              why=f"{shape} by {other[0]} with strides {strides} and {other[1]}",
                              do="report this as a bug of the compiler")
        one = [*kernel]
        for place, bytes_ in enumerate(steps):
            one[_PLACES + words_of(host.Place) * place + host.Place.index("bytes")] += row * bytes_
        one[-1] = count * columns
        words += finished(product, spec.number, one)
    return [*_series(op=host.BANDS, length=host.SERIES_HEAD, number=spec.number, words=len(words)), *words]


_AnySpec = _Spec | AttentionSpec | GroupedSpec | ConvSpec | RoutingSpec | RecurrenceSpec


def _copy(spec: _Spec, windows: tuple[Any, ...]) -> list[int]:
    source, target = _areas(spec, windows)
    return copy_words(spec.number, source, target)


def encode(plan: Plan, kernels: Mapping[str, int], products: Products) -> tuple[SizeFunction, tuple[str, ...]]:
    """The size function of an allocated plan, with the words of its steps, and the dtypes of its products, those of
    attention and of its scores included. Arguments as of `PlanEncoder`."""
    encoder = PlanEncoder(plan, kernels, products)
    return size_function(plan, encoder), encoder.dtypes


class PlanEncoder:
    """Prints the words of a plan's steps.

    Args:
        kernels: name -> its entry in the table of functions.
        products: which our routines do, and on which machine (backend/cpu/bytecode/encode_gemm.py).
    """

    def __init__(self, plan: Plan, kernels: Mapping[str, int], products: Products) -> None:
        self.plan = plan
        self.kernels = kernels
        self.products = products
        self.specs: list[_AnySpec] = []
        self.wide: list[str] = []  # dtypes of attention's scores

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the products that were printed."""
        found = (spec.dtype for spec in self.specs if not isinstance(spec, RoutingSpec) and spec.dtype)
        return tuple(dict.fromkeys((*found, *self.wide)))

    def expression(self, formulas: PlanFormulas) -> tuple[str, Mapping[str, Any]]:
        """A list of words, and what its expression calls."""
        self.formulas = formulas
        self.slots = formulas.slots
        text = "[" + ", ".join(filter(None, self.steps())) + "]"
        products, machine = self.products, self.products.machine
        return text, {"product": partial(_unplaced, products), "matmul": _placed,
                      "scores": partial(attention.unplaced, products), "attention": attention.placed,
                      "grouped": partial(grouped_words, products), "routing": routing_words,
                      "recurrence": partial(recurrence_words, machine),
                      "grouped_conv": partial(grouped_conv_words, machine),
                      "direct_conv": partial(direct_conv_words, machine), "copy": _copy,
                      "bands": partial(_bands, products), "joined": joined, "series": series, "finished": finished,
                      "specs": self.specs}

    def steps(self) -> list[str]:
        """The words of all steps; those of a run are joined."""
        parts = [self.step(number, step) for number, step in enumerate(self.plan.steps)]
        for first, last in reversed(self.plan.together):
            middle = kernels_from(self.plan.steps, first, last)
            kernels = ", ".join(parts[middle:last + 1])
            products = parts[first:middle]
            if len(products) > 1:
                products = [f"*joined([{', '.join(f'[{part}]' for part in products)}])"]
            if not products:
                joint = f"*series({first}, [{kernels}])"
            else:
                joint = f"*finished([{products[0]}], {middle}, [{kernels}])" if kernels else products[0]
            parts[first:last + 1] = [joint]
        return parts

    def step(self, number: int, step: Step) -> str:
        """The words of a step."""
        if isinstance(step, KernelStep):
            return self.kernel(number, step)
        if isinstance(step, CopyStep):
            item = size_of(step.source.type.dtype)
            if step.source.type.dtype != step.target.type.dtype:
                return f"{host.CALL}, {host.STEP_WORDS}, {number}"
            places = ((self.slots[step.source.buffer], item), (self.slots[step.target.buffer], item))
            return f"*copy({self.spec(_Spec(number, '', places))}, {self.formulas.types((step.source, step.target))})"
        if isinstance(step, LibraryStep):
            return self.library(number, step)
        if isinstance(step, TiledGemmStep):
            return self.bands(number, step)
        return f"{host.CALL}, {host.STEP_WORDS}, {number}"

    def spec(self, spec: _AnySpec) -> str:
        self.specs.append(spec)
        return f"specs[{len(self.specs) - 1}]"

    def library(self, number: int, step: LibraryStep) -> str:
        if step.op in OPERANDS:
            return self.attention(number, step)
        if step.op in GROUPED:
            windows = (*step.inputs, *step.outputs)
            places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
            spec = GroupedSpec(number, step.op, windows[0].type.dtype, places)
            return f"*grouped({self.spec(spec)}, {self.formulas.types(windows)})"
        if step.op in CONVOLUTIONS:
            windows = (*step.inputs, *step.outputs)
            places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
            attrs: dict[str, Any] = dict(step.attrs)
            settings = tuple(attrs[name] for name in ("stride", "padding", "dilation"))
            optional = (bool(attrs.get(name)) for name in ("added", "relu", "scaled", "shifted", *ORDERED))
            name = self.spec(ConvSpec(number, windows[0].type.dtype, places, settings, *optional))
            return f"*{step.op}({name}, {self.formulas.types(windows)})"
        if step.op in ROUTING:
            windows = (*step.inputs, *step.outputs)
            places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
            spec_name = self.spec(RoutingSpec(number, step.op, windows[0].type.dtype, places))
            return f"*routing({spec_name}, {self.formulas.types(windows)})"
        if step.op == "recurrence":
            windows = (*step.inputs, *step.outputs)
            places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
            attrs = dict(step.attrs)
            named = self.spec(RecurrenceSpec(number, attrs["cell"], attrs["reverse"], places))
            return f"*recurrence({named}, {self.formulas.types(windows)})"
        if step.op not in ("matmul", "matmul_add"):
            raise VerifyError(f"plan {self.plan.name} calls the library routine {step.op}", where=step.where,
                              why="the host knows products, attention, routing and recurrences only",
                              do="make it an extern step")
        spec_name, types = self.product(number, step)
        common = self.specs[-1]
        assert isinstance(common, _Spec)
        key = common.dtype, common.alpha, common.beta, tuple(item for _, item in common.places), types
        return f"*matmul({self.formulas.local(key, f'product({spec_name}, {types})')}, {spec_name}, {types})"

    def product(self, number: int, step: LibraryStep) -> tuple[str, str]:
        """What the words of a product are made of: the spec, and the types of the windows."""
        attrs = dict(step.attrs)
        windows = (step.inputs[0], step.inputs[1], step.outputs[0], *step.inputs[2:])
        places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
        alpha, beta = (float(attrs.get(name, 1)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
        return self.spec(_Spec(number, step.dtype, places, alpha, beta)), self.formulas.types(windows)

    def bands(self, number: int, step: TiledGemmStep) -> str:
        """The words of a product and a kernel, and what is added to those of the kernel from band to band."""
        kernel, columns = step.kernel, step.band.type.shape[1]
        assert isinstance(columns, int)
        steps = [columns * size_of(window.type.dtype) if place in kernel.along and place != step.result else 0
                 for place, window in enumerate(kernel.params)]
        spec, windows = self.product(number, step.product)
        return (f"*bands({step.rows}, {columns}, {spec}, {windows}, "
                f"[{self.kernel(number, kernel)}], {tuple(steps)})")

    def attention(self, number: int, step: LibraryStep) -> str:
        attrs: dict[str, Any] = dict(step.attrs)
        windows = (*step.inputs, *step.outputs)
        dtype = windows[0].type.dtype
        places = tuple((self.slots[w.buffer], size_of(w.type.dtype)) for w in windows)
        self.wide.append(wide(dtype))
        spec = AttentionSpec(number, step.op, dtype, attrs["causal"], attrs["scale"], places)
        name, types = self.spec(spec), self.formulas.types(windows)
        common = self.formulas.local((spec.op, dtype, spec.causal, spec.scale, types), f"scores({name}, {types})")
        return f"*attention({common}, {name}, {types})"

    def kernel(self, number: int, step: KernelStep) -> str:
        choices = []
        for regime in step.regimes:
            params = []
            for window in (*step.params, *step.handed) if regime.then else step.params:
                item = size_of(window.type.dtype)
                params += [str(self.slots[window.buffer]), self.formulas.number(window.offset * item)]
            sizes = [self.formulas.number(size) for size in regime.sizes]
            length = words_of(host.KernelStep) + len(params) + len(sizes)
            every = []
            for kernel in regime.kernels:
                if kernel not in self.kernels:
                    raise VerifyError(f"plan {self.plan.name} needs the kernel {kernel}", where=step.where,
                                      why="it was not built", do="report this plan: a bug of AnyShape")
                words = _kernel(op=host.KERNEL, length=length, number=number, function=self.kernels[kernel], blocks=0,
                                work=0, scratch=0, params=len(params) // 2, sizes=len(sizes),
                                places=[*params, *sizes])
                every.append(", ".join(map(str, words)))
            text = ", ".join(every)
            test = " and ".join(f"{self.formulas.number(condition)} >= 0" for condition in regime.conditions)
            choices.append((test, text))
        if len(choices) == 1 and not choices[0][0]:
            return choices[0][1]
        chain = " else ".join(f"({text}) if {test or 'True'}" for test, text in choices)
        return f"*({chain} else ({host.NO_REGIME}, {number}))"
