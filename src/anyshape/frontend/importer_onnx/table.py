"""The table of translations, one row per ONNX operator, and what a translation may ask for.

A translation is `row(c)`: it reads operands and attributes of the call `c`, appends equations by the op table, and
returns an operand, or a tuple of them. Where it cannot carry a case it raises Decline: the importer tries the body that
ONNX gives to a composed operator, then the host's function of that name.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anyshape.base.errors import InputError, VerifyError
from anyshape.frontend.aten.table import Decline, Translator, is_float
from anyshape.frontend.importer.untraced_extern import extern_call, translated
from anyshape.frontend.importer_onnx.model import MICROSOFT as MICROSOFT
from anyshape.frontend.importer_onnx.model import OnnxGraph, OnnxNode
from anyshape.frontend.symbols.known import Known, Ratio, known
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype
from anyshape.ir.graph import Attr, Value
from anyshape.ir.types import TensorType
from anyshape.ops.pointwise import POINTWISE
from anyshape.sym.expr import Expr, Size, symbols_of
from anyshape.torch_compat.dtypes import TORCH_DTYPES

Row = Callable[["Call"], Any]
ROWS: dict[tuple[str, str], Row] = {}


def translates(*names: str, domain: str = "") -> Callable[[Row], Row]:
    """Makes the function the translation of these operators."""
    def add(row: Row) -> Row:
        for name in names:
            ROWS[domain, name] = row
        return row
    return add


Split = Callable[[OnnxNode, str], "tuple[OnnxNode, ...] | None"]
APART: dict[tuple[str, str], Split] = {}


def stands_for_others(*names: str, domain: str) -> Callable[[Split], Split]:
    """Makes the function what takes these operators apart where their translation declines: the node, and what names
    inside begin with -> the nodes that it stands for, None where it does not."""
    def add(split: Split) -> Split:
        for name in names:
            APART[domain, name] = split
        return split
    return add


_WIDER = {"int4": "i8", "uint4": "u8", "int2": "i8", "uint2": "u8", "float8": "f32", "float4": "f32"}


# whole numbers that no kernel computes on -> those of as many bits with a sign
_SIGNED = {"u16": "i16", "u32": "i32", "u64": "i64"}


def moves(*places: int) -> Callable[[Row], Row]:
    """Makes the translation of an operator that only moves elements do so with those that no kernel computes on, as the
    same bits with a sign. places: of the operands whose elements are moved; none: all."""
    def wrap(row: Row) -> Row:
        def moved(c: Call) -> Any:
            taken = [place for place in places or range(len(c.inputs)) if c.has(place)]
            dtype = c.dtype(taken[0]) if taken else ""
            if dtype not in _SIGNED:
                return row(c)
            for place in taken:
                c.inputs[place] = c.bits(c.at(place), _SIGNED[dtype])
            return c.bits(row(c), dtype)
        return moved
    return wrap


class NeedsSize(Exception):
    """A translation needs the elements of an operand as sizes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class NeedsNumber(NeedsSize):
    """A translation needs the elements of an operand as numbers."""


class NeedsFixed(Exception):
    """A translation needs a size as a number: the program is one for that number."""

    def __init__(self, size: Expr) -> None:
        super().__init__(str(size))
        self.names = tuple(sorted(symbols_of(size)))


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of sizes (lt, le, gt, ge, eq), which a call decides."""

    name: str
    a: Size
    b: Size

    def __str__(self) -> str:
        sign = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}[self.name]
        return f"{self.a} {sign} {self.b}"


class NeedsDecision(Exception):
    """An If goes by a comparison of sizes: there is a program for either answer."""

    def __init__(self, condition: Condition) -> None:
        super().__init__(str(condition))
        self.condition = condition


class Opaque:
    """What a program cannot hold: a list of tensors, text, a dtype that torch lacks; it is there when the call runs."""

    def __init__(self, name: str) -> None:
        self.name = name


class Call:
    """One node, as its translation sees it.

    t: the builder with its helpers, shared with the translations of ATen. inputs: operands by position, None where one
    is left out. constant: makes a constant of the program. assume: takes a size to be at least 0, which a call is
    checked for. presume: the same, but calls in which it is below 0 get a program of their own. ask: notes that the
    result is a comparison of sizes.
    """

    def __init__(self, node: OnnxNode, inputs: Sequence[Any], t: Translator,
                 constant: Callable[[np.ndarray, str], Value], note: Callable[[str, str], None],
                 assume: Callable[[Size], None], presume: Callable[[Size], None],
                 ask: Callable[[Condition], None]) -> None:
        self.node = node
        self.inputs = list(inputs)
        self.t = t
        self.constant = constant
        self._note = note
        self.assume = assume
        self.presume = presume
        self.ask = ask

    def op(self, row: str, *operands: Any, **attrs: Attr) -> Value:
        """Appends an equation with one result. Raises Mismatch where dims meet that may differ."""
        if row in POINTWISE or row == "where":
            self.t.check_broadcast(operands)
        elif row == "index":
            self.t.check_broadcast(operands[1:])
        return self.t.op(row, *operands, **attrs)

    @property
    def name(self) -> str:
        """Of the operator."""
        return self.node.op

    @property
    def version(self) -> int:
        """Of the operator set."""
        return self.node.version

    @property
    def outputs(self) -> int:
        """How many results are asked for."""
        return max((place + 1 for place, name in enumerate(self.node.outputs) if name), default=0)

    def wants(self, place: int) -> bool:
        """Whether a result is asked for."""
        return place < len(self.node.outputs) and bool(self.node.outputs[place])

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        found = self.node.attributes.get(name, default)
        assert not isinstance(found, OnnxGraph), name
        return found

    def has(self, place: int) -> bool:
        """Whether an operand is given."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def at(self, place: int) -> Any:
        """The operand, None where it is left out."""
        return self.inputs[place] if place < len(self.inputs) else None

    # ---- tensors

    def tensor(self, operand: Any) -> Value:
        """An operand as a tensor of the program."""
        if isinstance(operand, Known):
            return self._from_known(operand)
        if isinstance(operand, Value):
            return operand
        if operand is None:
            raise Decline("an operand is left out")
        raise Decline("an operand is no tensor of a program")

    def value(self, place: int) -> Value:
        """An operand as a tensor of the program."""
        return self.tensor(self.at(place))

    def numbers_of(self, place: int) -> Value:
        """An operand as a tensor of the program; numbers of a constant that torch has no dtype for by a wider one:
        whole ones of less than 8 bits by i8 or u8, floats of 8 bits or less by f32."""
        found = self.at(place)
        if isinstance(found, Known) and (wider := _WIDER.get(found.dtype.split("_")[0])):
            found = known(found.array.astype(numpy_dtype(wider)), wider)
        return self.tensor(found)

    def values(self) -> list[Value]:
        """All operands."""
        return [self.tensor(one) for one in self.inputs]

    def operand(self, place: int) -> Any:
        """An operand; a known number or size of rank 0 as that."""
        found = self.at(place)
        if isinstance(found, Known) and found.shape == () and found.dtype != "string":
            item = found.items()[0]
            if isinstance(item, (bool, int, float)) or (isinstance(item, Expr) and not is_float(found.dtype)):
                return item
        return self.tensor(found)

    def kind(self, place: int) -> TensorType:
        """The type of an operand."""
        found = self.at(place)
        return TensorType(found.dtype, found.shape) if isinstance(found, Known) else self.tensor(found).tensor

    def dtype(self, place: int = 0) -> str:
        """The dtype of an operand."""
        return self.kind(place).dtype

    def rank(self, place: int = 0) -> int:
        """The rank of an operand."""
        return self.kind(place).rank

    def _from_known(self, one: Known) -> Value:
        if one.symbolic:
            items = one.items()
            if one.dtype == "bool" or not items:
                raise Decline("a condition of sizes as a tensor")
            if is_float(one.dtype):
                floats = [self._float(item, one.dtype) for item in items]
                return self.t.reshape(self.op("concat", *floats, dim=0) if len(floats) > 1 else floats[0], one.shape)
            if len(set(items)) == 1:
                return self.t.full(items[0], one.shape, one.dtype)
            parts = [self.t.full(item, (1,), one.dtype) for item in items]
            return self.t.reshape(self.op("concat", *parts, dim=0), one.shape)
        if one.dtype == "string":
            raise Decline("text")
        if one.dtype.split("_")[0] in _WIDER:
            raise Decline(f"numbers of {one.dtype}")
        if one.array.size and one.array.size <= 1 and one.dtype not in ("u16", "u32", "u64", "c64", "c128"):
            return self.t.full(one.array.reshape(-1)[0].item() if one.dtype != "bf16"
                               else float(one.array.reshape(-1)[0]), one.shape, one.dtype)
        return self.constant(one.array, one.dtype)

    def _float(self, item: Any, dtype: str) -> Value:
        """A float of sizes, as a line of one element."""
        if not isinstance(item, (Expr, Ratio)):
            return self.t.full(float(item), (1,), dtype)
        over = self.t.cast(self.t.full(item if isinstance(item, Expr) else item.over, (1,), "i64"), dtype)
        return over if isinstance(item, Expr) else self.op("div", over, float(item.under))

    # ---- numbers

    def sizes(self, place: int, limit: int = 1 << 62) -> tuple[Size, ...]:
        """The elements of an operand as sizes, below a limit."""
        found = self.at(place)
        if isinstance(found, Known):
            if any(isinstance(item, Ratio) for item in found.items()):
                raise NeedsNumber(self.node.inputs[place])
            items = [item if isinstance(item, Expr) else int(item) for item in found.items()]
            if any(isinstance(item, int) and abs(item) >= limit for item in items):
                raise VerifyError(f"{self.node} has a size that is too large", why=f"sizes are below {limit}")
            return tuple(items)
        raise NeedsSize(self.node.inputs[place])

    def numbers(self, place: int) -> list[Any]:
        """The elements of an operand as Python numbers."""
        found = self.at(place)
        if isinstance(found, Known) and not found.symbolic:
            return [float(item) if found.dtype == "bf16" else item for item in found.items()]
        if isinstance(found, Known) and not is_float(found.dtype):
            raise Decline("a number made of sizes")
        raise NeedsNumber(self.node.inputs[place])

    def ints(self, place: int, name: str = "", default: Any = None) -> Any:
        """Whole numbers from an operand or an attribute, as operator sets differ; the default where there are none."""
        if self.has(place):
            return tuple(int(item) for item in self.numbers(place))
        found = self.attr(name) if name else None
        return default if found is None else found

    def fixed(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        """Sizes as numbers; a program is made for each that comes."""
        for size in sizes:
            if isinstance(size, Expr):
                raise NeedsFixed(size)
        return tuple(sizes)  # type: ignore[arg-type]

    def axis(self, default: int = -1, rank: int | None = None, name: str = "axis") -> int:
        """The attribute `axis`, counted from the left."""
        return self.dim(self.attr(name, default), self.rank() if rank is None else rank)

    def dim(self, axis: int, rank: int) -> int:
        """An axis counted from the left.

        Raises:
            InputError: there is none.
        """
        if not -max(rank, 1) <= axis < max(rank, 1):
            raise InputError(f"{self.node} names the axis {axis}", where=str(self.node), do="check the model",
                             why=f"its operand has rank {rank}")
        return axis % rank if rank else 0

    # ---- other operators

    def aten(self, target: Any, *arguments: Any, types: Any, why: str = "", **keywords: Any) -> Any:
        """What an operator of ATen gives: by its translation, or by PyTorch.

        Args:
            types: of the results, one or a tuple.
            why: no translation is tried, for this reason.
        """
        if not why:
            found, why = translated(self.t, target, arguments, keywords, types)
            if not why:
                return found
        return self.extern(str(target), *arguments, types=types, why=why, **keywords)

    def extern(self, target: str, *arguments: Any, types: Any, why: str = "our op table has no such operator",
               effect: bool = False, **keywords: Any) -> Any:
        """A step by PyTorch; see ops/extern.py."""
        results = extern_call(self.t.builder, target, arguments, keywords, types,
                              lambda one: self.tensor(one) if isinstance(one, Known) else one, effect)
        self._note(target, why)
        return results

    def bits(self, operand: Any, dtype: str) -> Any:
        """An operand's bits as elements of another dtype of their size."""
        if isinstance(operand, Known) and not operand.symbolic:
            return known(operand.array.view(numpy_dtype(dtype)), dtype)
        x = self.tensor(operand)
        return self.extern("onnx.bits", x, TORCH_DTYPES[dtype], types=TensorType(dtype, x.tensor.shape))

    def type(self, shape: Sequence[Size], dtype: str | None = None) -> TensorType:
        """A dense type; of the first operand's dtype when left out."""
        return TensorType(self.dtype() if dtype is None else dtype, tuple(shape))


def number(array: Any, dtype: str) -> Known:
    """A known tensor of rank 0."""
    return known(np.asarray(array), dtype)
