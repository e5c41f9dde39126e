"""What the rows share: adding a row, reading operands and attributes in a type rule, broadcasting, scalar registers.

A type rule is `rule(name, inputs, attrs) -> types`. The row's signature is checked first, so that a rule finds the
number of operands and the attributes that it names.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from anyshape.base.errors import VerifyError
from anyshape.ir.graph import Attr, Node, Operand, Value
from anyshape.ir.op import Arithmetic, Body, Index, Op, define
from anyshape.ir.types import DTYPES, NATIVE, TensorType, kind_of
from anyshape.sym.expr import Expr, Size

Inputs = tuple[Operand, ...]
Attrs = dict[str, Attr]
Types = tuple[TensorType, ...]
Rule = Callable[[str, Inputs, Attrs], Types]


def fail(name: str, why: str, do: str = "") -> NoReturn:
    """Raise the VerifyError of a type rule."""
    raise VerifyError(f"{name} does not fit its operands and attributes", why=why, do=do)


def add_row(name: str, kind: str, signature: str, rule: Rule, *, optional: tuple[str, ...] = (),
            **fields: Any) -> Op:
    """Define a row whose `infer` checks the signature ("x, y | dim"; "x, ..." is one or more) before `rule`.

    `optional` attributes may be given but do not stand in the signature; `fields` are fields of `Op`.
    """
    left, _, right = signature.partition("|")
    operands = [word.strip() for word in left.split(",") if word.strip()]
    names = frozenset(word.strip() for word in right.split(",") if word.strip())
    open_ended = operands[-1:] == ["..."]
    count = len(operands) - open_ended
    infer = partial(_infer, name, signature, count, open_ended, names, frozenset(optional), rule)
    return define(Op(name, kind, signature, infer, **fields))


def _infer(name: str, signature: str, count: int, open_ended: bool, names: frozenset[str], optional: frozenset[str],
           rule: Rule, inputs: Inputs, attrs: Attrs) -> Types:
    if len(inputs) < count or (len(inputs) > count and not open_ended):
        fail(name, f"{len(inputs)} operands were given", f"give the operands of {name}({signature})")
    missing = sorted(names - attrs.keys())
    unknown = sorted(attrs.keys() - names - optional)
    if missing or unknown:
        facts = [f"attribute {word} is missing" for word in missing] + [f"attribute {w} is unknown" for w in unknown]
        fail(name, "; ".join(facts), f"give the attributes of {name}({signature})")
    return rule(name, inputs, attrs)


# ---- operands and attributes of a type rule


def tensor(name: str, inputs: Inputs, position: int) -> TensorType:
    """The type of operand `position`, which must be a tensor value."""
    operand = inputs[position]
    if not isinstance(operand, Value) or not isinstance(operand.type, TensorType):
        fail(name, f"operand {position} is {operand}, not a tensor", "make it a tensor with full")
    return operand.type


def indices(name: str, inputs: Inputs, position: int) -> TensorType:
    """The type of operand `position`, which must be a tensor of indices, i64."""
    kind = tensor(name, inputs, position)
    if kind.dtype != "i64":
        fail(name, f"operand {position} is {kind.dtype}, and indices are i64", "insert a cast")
    return kind


def native(name: str, dtype: str) -> None:
    """Kernels must know the dtype."""
    if dtype not in NATIVE:
        fail(name, f"dtype {dtype} has no kernels", "call the op of PyTorch with extern")


def same_device(name: str, types: Sequence[TensorType]) -> str:
    """The one device of all operands."""
    for kind in types[1:]:
        if kind.device != types[0].device:
            fail(name, f"operands are on {types[0].device} and {kind.device}")
    return types[0].device


ORDERED = ("gathered", "scattered")  # optional attributes of what goes through its rows in an order, an operand


def ordered_rows(name: str, attrs: Attrs, x: TensorType, more: list[TensorType]) -> tuple[Size, list[TensorType]]:
    """How many rows there are of x, and the operands behind the order, if there is one (ops/matmul.py)."""
    if not any(attrs.get(key) for key in ORDERED):
        return x.shape[0], more
    if not more or more[0].dtype != "i64" or more[0].rank != 1:
        fail(name, f"{', '.join(map(str, more[:1])) or 'nothing'} is no order of rows", "give i64 of rank 1")
    if not attrs.get("gathered") and more[0].shape != x.shape[:1]:
        fail(name, f"{more[0]} is no order of {x.shape[0]} rows")
    return more[0].shape[0], more[1:]


def dtype_of(name: str, attrs: Attrs) -> str:
    """The attribute `dtype`, a dtype that kernels know."""
    dtype = attrs["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(name, f"{dtype!r} is no dtype")
    native(name, dtype)
    return dtype


def device_of(attrs: Attrs) -> str:
    """The optional attribute `device`; cpu."""
    return str(attrs.get("device", "cpu"))


def is_size(value: object) -> bool:
    """An int or an Expr; a bool is none."""
    return isinstance(value, (int, Expr)) and not isinstance(value, bool)


def sizes(name: str, attrs: Attrs, key: str, negative: bool = False) -> tuple[Size, ...]:
    """A tuple of sizes, not below 0 unless `negative`."""
    value = attrs[key]
    if not isinstance(value, tuple) or not all(is_size(item) for item in value):
        fail(name, f"{key} is {value!r}, not a tuple of sizes")
    if not negative:
        for item in value:
            if isinstance(item, int) and item < 0:
                fail(name, f"{key} holds {item}, a negative size")
    return value  # type: ignore[return-value]


def size(name: str, attrs: Attrs, key: str) -> Size:
    """One size, not below 0."""
    return sizes(name, {key: (attrs[key],)}, key)[0]


def dim(name: str, attrs: Attrs, rank: int) -> int:
    """The attribute `dim`, in [0, rank)."""
    return dims_in(name, (attrs["dim"],), rank)[0]


def dims_in(name: str, value: Attr, rank: int) -> tuple[int, ...]:
    """A tuple of distinct dims in [0, rank)."""
    if not isinstance(value, tuple):
        fail(name, f"dims is {value!r}, not a tuple")
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < rank:
            fail(name, f"there is no dim {item} in rank {rank}", "count dims from 0 at the left")
    if len(set(value)) != len(value):
        fail(name, f"dims {value} name a dim twice")
    return value  # type: ignore[return-value]


# ---- attributes of a checked node, for bodies


def int_attr(node: Node, name: str) -> int:
    """A whole number."""
    value = node.attr(name)
    assert isinstance(value, int), value
    return value


def size_attr(node: Node, name: str) -> Size:
    """A size."""
    value = node.attr(name)
    assert isinstance(value, (int, Expr)), value
    return value


def sizes_attr(node: Node, name: str) -> tuple[Size, ...]:
    """A tuple of sizes."""
    value = node.attr(name)
    assert isinstance(value, tuple), value
    return value  # type: ignore[return-value]


def dims_attr(node: Node) -> tuple[int, ...]:
    """The attribute `dims`."""
    value = node.attr("dims")
    assert isinstance(value, tuple), value
    return value  # type: ignore[return-value]


# ---- broadcasting


def broadcast_shapes(name: str, shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The common shape: ranks aligned at the right, a literal 1 stretches, other dims must be equal sizes."""
    rank = max(len(shape) for shape in shapes)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for position, item in enumerate(shape, rank - len(shape)):
            found = result[position]
            if item == 1 or item == found:
                continue
            if found != 1:
                texts = ", ".join("[" + ", ".join(map(str, s)) + "]" for s in shapes)
                fail(name, f"shapes {texts} do not broadcast: {found} is not {item} in dim {position}",
                     "only a literal 1 stretches; broadcast the operand first")
            result[position] = item
    return tuple(result)


def broadcast_index(shape: tuple[Size, ...], index: Index) -> Index:
    """The index into an operand of `shape` that belongs to `index` into the result of broadcasting."""
    tail = index[len(index) - len(shape):]
    return tuple(0 if item == 1 else position for item, position in zip(shape, tail, strict=True))


# ---- scalars


def check_scalar(name: str, operand: Operand | Attr, dtype: str) -> None:
    """A literal or size that stands for an element of `dtype` must have its kind."""
    if not isinstance(operand, (bool, int, float, Expr)):
        fail(name, f"operand {operand} is not a number or a size")
    kind = kind_of(dtype)
    if isinstance(operand, float) and kind != "float":
        fail(name, f"the literal {operand} cannot stand for {dtype}", "cast the other operands to a float dtype")
    if kind == "bool" and not isinstance(operand, bool):
        fail(name, f"the number {operand} cannot stand for bool", "write a bool literal or cast the other operands")


def scalar(body: Body[Any], operand: Operand | Attr, dtype: str) -> Any:
    """A literal or size as a register of `dtype`."""
    if isinstance(operand, Expr):
        register = body.index(operand)
        return register if dtype == "i64" else body.apply("cast", register, dtype=dtype)
    assert isinstance(operand, (bool, int, float)), operand
    return constant(body, operand, dtype)


def constant(body: Arithmetic[Any], operand: float | int | bool, dtype: str) -> Any:
    """A literal as a register of `dtype`."""
    kind = kind_of(dtype)
    return body.constant(float(operand) if kind == "float" else bool(operand) if kind == "bool" else int(operand),
                         dtype)


def within(body: Body[Any], position: Size, low: Size | None, high: Size | None) -> Any:
    """The mask `low <= position < high`; None for an end that need not be tested; None when there is no test."""
    register = body.index(position)
    mask = None
    if low is not None:
        mask = body.apply("ge", register, body.index(low), dtype="bool")
    if high is not None:
        below = body.apply("lt", register, body.index(high), dtype="bool")
        mask = below if mask is None else body.apply("and", mask, below, dtype="bool")
    return mask
