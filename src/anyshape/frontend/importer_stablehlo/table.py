"""The table of translations, one row per StableHLO operation, and what a translation may ask for.

A translation is `row(c)`: it reads operands and attributes of the call `c`, appends equations by the op table, and
returns an operand, or a tuple of them. Where it cannot carry a case it raises Decline.

Whole numbers without sign that kernels lack are held in wider ones: u16 in i32, u32 in i64. u64 is held in i64 as its
bits. Their operations wrap as the dtype says.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from anyshape.frontend.aten.table import Decline, Translator
from anyshape.frontend.importer.untraced_extern import extern_call, translated
from anyshape.frontend.importer_stablehlo.module import Block, Operation
from anyshape.frontend.symbols.known import Comparison, Known, Unknown
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType, kind_of
from anyshape.sym.expr import Expr, Size
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_equal

Row = Callable[["Call"], Any]
ROWS: dict[str, Row] = {}
HELD = {"u16": "i32", "u32": "i64", "u64": "i64"}
MASKS = {"u16": 0xFFFF, "u32": 0xFFFFFFFF}
COMPLEX = ("c64", "c128")


def translates(*names: str) -> Callable[[Row], Row]:
    """Makes the function the translation of these operations of the dialect stablehlo, or of the one named."""
    def add(row: Row) -> Row:
        for name in names:
            ROWS[name if "." in name else f"stablehlo.{name}"] = row
        return row
    return add


def held(dtype: str) -> str:
    """The dtype of the IR that holds one of a module."""
    return HELD.get(dtype, dtype)


def bounds(dtype: str, given: str) -> tuple[int, int, float]:
    """The lowest and the highest whole number of a module's dtype, and the largest float of another dtype, of 32 or 64
    bits, that is not above it."""
    bits = int(dtype[1:])
    low, high = (0, (1 << bits) - 1) if dtype[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    nearest = np.dtype(given.replace("f", "float")).type(high)
    return low, high, float(nearest if int(nearest) <= high else np.nextafter(nearest, nearest.dtype.type(0)))


class Equal(Exception):
    """The walk has to start again with one symbol replaced."""

    def __init__(self, a: Size, b: Size) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


class Host(Protocol):
    """What a walk gives to translations."""

    t: Translator
    facts: Facts

    def constant(self, array: np.ndarray, dtype: str) -> Value:
        """A constant of the program."""

    def note(self, target: str, why: str) -> None:
        """Something that PyTorch does."""

    def must(self, a: Size, b: Size) -> None:
        """Two sizes have to be equal in a call, which nothing shows when compiling."""

    def body(self, name: str) -> Block:
        """Of a function of the module."""

    def call(self, name: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What a function of the module gives."""

    def run(self, block: Block, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What a block gives for its arguments."""


class Call:
    """One operation, as its translation sees it. inputs: its operands, Values and Knowns."""

    def __init__(self, operation: Operation, inputs: Sequence[Any], walk: Host) -> None:
        self.operation = operation
        self.inputs = list(inputs)
        self.walk = walk
        self.t = walk.t
        self.op = walk.t.op

    @property
    def name(self) -> str:
        """Without its dialect."""
        return self.operation.name.split(".", 1)[1]

    @property
    def dtype(self) -> str:
        """Of the first result, in the module."""
        return self.operation.gives[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first result, which is known."""
        found = self.operation.gives[0].static
        if found is None:
            raise Decline("the shape of its result is not given")
        return found

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.operation.attributes.get(name, default)

    def given(self, place: int) -> str:
        """The dtype of an operand, in the module."""
        return self.operation.takes[place].dtype

    def sizes_of(self, place: int) -> tuple[Size, ...]:
        """The shape of an operand."""
        found = self.inputs[place]
        return found.shape if isinstance(found, Known) else found.tensor.shape

    # ---- tensors

    def value(self, place: int) -> Value:
        """An operand as a tensor of the program."""
        return self.tensor(self.inputs[place])

    def values(self) -> list[Value]:
        """All operands, as tensors."""
        return [self.tensor(one) for one in self.inputs]

    def tensor(self, operand: Any) -> Value:
        """As a tensor of the program."""
        if isinstance(operand, Value):
            return operand
        if not isinstance(operand, Known):
            raise Decline("an operand is no tensor of a program")
        return self._from_known(operand)

    def _from_known(self, one: Known) -> Value:
        dtype = held(one.dtype)
        items = one.items()
        if one.array.dtype == object:
            parts = [self._item(item, dtype) for item in items]
            if not parts:
                return self.t.full(0, one.shape, dtype)
            if len(parts) == 1:
                return self.t.reshape(parts[0], one.shape)
            return self.t.reshape(self.op("concat", *parts, dim=0), one.shape)
        array = one.array
        if one.dtype in HELD:
            array = array.astype(np.int32 if dtype == "i32" else np.int64)
        if one.dtype not in COMPLEX and array.size:
            first = array.reshape(-1)[0]
            if array.size == 1 or (bool((array == first).all()) and (
                    first != 0 or kind_of(dtype) != "float" or len({*np.signbit(array).reshape(-1).tolist()}) == 1)):
                return self.t.full(float(first) if kind_of(dtype) == "float" else first.item(), one.shape, dtype)
        return self.walk.constant(array, dtype)

    def _item(self, item: Any, dtype: str) -> Value:
        if isinstance(item, Comparison):
            a, b = (self.t.full(x, (1,), "i64") for x in (item.a, item.b))
            return self.op(item.way.lower(), a, b)
        return self.t.full(item, (1,), dtype)

    def same(self, values: Sequence[Value]) -> list[Value]:
        """Tensors of one shape, with their sizes written alike; numbers of a body that runs on tensors become such.

        Raises:
            Equal: nothing shows that two sizes are equal, which the operation says.
        """
        shape = max(values, key=lambda one: one.tensor.rank).tensor.shape
        return [self.t.broadcast(self.t.reshape(one, (1,) * len(shape)), shape)
                if not one.tensor.rank else self.shaped(one, shape) for one in values]

    def shaped(self, value: Value, shape: Sequence[Size]) -> Value:
        """A tensor that has this shape, written so; see `same`."""
        for dim, (have, want) in enumerate(zip(value.tensor.shape, shape, strict=True)):
            if have == want:
                continue
            if isinstance(have, int) and isinstance(want, int):
                raise Decline(f"sizes {have} and {want} meet")
            if not prove_equal(self.walk.facts, have, want):
                raise Equal(have, want)
            value = self.t.window(value, dim, 0, want)
        return value

    def wrapped(self, value: Value, dtype: str | None = None) -> Value:
        """Whole numbers without sign, brought back into their range."""
        mask = MASKS.get(self.dtype if dtype is None else dtype)
        return value if mask is None else self.op("bit_and", value, mask)

    # ---- numbers

    def sizes(self, place: int) -> tuple[Size, ...]:
        """The elements of an operand as sizes.

        Raises:
            Decline: the program computes them.
        """
        found = self.inputs[place]
        if not isinstance(found, Known):
            raise Decline("a size is computed from data")
        items = found.items()
        if any(not isinstance(item, (int, Expr)) for item in items):
            raise Decline("a size is no whole number")
        return tuple(items)

    def operand(self, place: int) -> Any:
        """An operand; a known number of rank 0 as that."""
        found = self.inputs[place]
        if isinstance(found, Known) and found.shape == () and found.array.dtype != object:
            return found.items()[0]
        return self.tensor(found)

    # ---- others

    def type(self, shape: Sequence[Size], dtype: str | None = None) -> TensorType:
        """A dense type; of the first result's dtype when left out."""
        return TensorType(held(self.dtype if dtype is None else dtype), tuple(shape))

    def aten(self, target: Any, *arguments: Any, types: Any, **keywords: Any) -> Any:
        """What an operator of ATen gives: by its translation, or by PyTorch."""
        found, why = translated(self.t, target, arguments, keywords, types)
        return found if not why else self.extern(str(target), *arguments, types=types, why=why, **keywords)

    def parts(self, x: Value) -> tuple[Value, Value]:
        """The real and the imaginary part of complex numbers."""
        kind = self.type(x.tensor.shape, "f32" if x.tensor.dtype == "c64" else "f64")
        return (self.extern("aten.real.default", x, types=kind), self.extern("aten.imag.default", x, types=kind))

    def of_parts(self, real: Value, imaginary: Value) -> Value:
        """Complex numbers of both parts."""
        kind = self.type(real.tensor.shape, "c64" if real.tensor.dtype == "f32" else "c128")
        return self.extern("aten.complex.default", real, imaginary, types=kind)  # type: ignore[no-any-return]

    def by_parts(self, work: Callable[..., Value], *values: Any) -> Value:
        """What moves or adds complex numbers, done to their real parts and to their imaginary ones."""
        pairs = [self.parts(one) if isinstance(one, Value) else (complex(one).real, complex(one).imag)
                 for one in values]
        return self.of_parts(work(*(one for one, _ in pairs)), work(*(one for _, one in pairs)))

    def extern(self, target: str, *arguments: Any, types: Any, why: str = "our op table has no such operator",
               **keywords: Any) -> Any:
        """A step by PyTorch; see ops/extern.py."""
        results = extern_call(self.t.builder, target, arguments, keywords, types, lambda one: one)
        self.walk.note(target, why)
        return results


def numbers(operand: Any) -> np.ndarray:
    """The array of a Known without formulas.

    Raises:
        Unknown: it has some, or is none.
    """
    if not isinstance(operand, Known) or operand.array.dtype == object:
        raise Unknown
    return operand.array
