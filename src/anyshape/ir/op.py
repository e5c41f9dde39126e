"""What one op is: a row. Everything the compiler asks about an op is a field of its row, never its name."""
from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from anyshape.ir.graph import Attr, Node, Operand, Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size

Index = tuple[Size, ...]
Register = TypeVar("Register")
Strided = Callable[[tuple[Size, ...], tuple[Size, ...], Size, Node], tuple[tuple[Size, ...], Size] | None]
Infer = Callable[[tuple[Operand, ...], dict[str, Attr]], tuple[TensorType, ...]]


class Arithmetic(Protocol[Register]):
    """What computes without reading: the scalar instructions."""

    def apply(self, op: str, *args: Register, dtype: str) -> Register:
        """A scalar instruction (a name of ir/scalar.py) with result type `dtype`."""

    def constant(self, value: float | int | bool, dtype: str) -> Register:
        """A literal."""


class Body(Arithmetic[Register], Protocol[Register]):
    """What an op's loop body may ask for: one element of the result is described by calls on this protocol.

    Indices are sizes over loop variables; a register may stand in an index through `as_index`.
    """

    def read(self, operand: Operand, index: Index) -> Register:
        """The element of `operand` at `index` (one size per dimension); a scalar operand ignores the index."""

    def read_where(self, mask: Register, operand: Operand, index: Index, other: float | int | bool) -> Register:
        """The element where `mask` holds, `other` elsewhere; nothing is read where the mask is false."""

    def index(self, size: Size) -> Register:
        """A size over loop variables as an i64 register."""

    def as_index(self, register: Register) -> Size:
        """An i64 register as a size, to be used in an index."""

    def checked_index(self, register: Register, size: Size, wrap: bool) -> Size:
        """An i64 register as an index into `size` elements: with `wrap` negative ones count from the end; out of range
        sets the kernel's status, which raises IndexError in the caller, and reads element 0 or the last one instead."""

    def check(self, holds: Register, code: int) -> None:
        """Where the bool register is false, the kernel's status becomes `code` (INDEX, DIVISOR): the call fails."""


@dataclass(frozen=True, slots=True)
class Op:
    """One row.

    name: the word in the text form.
    kind: pointwise (result element i from operand elements i), reduce, view (an index map, no arithmetic), index
        (other index maps: gather, concat, pad, iota), scatter (the first operand with elements of the second written
        into it), scan (`combine` over the elements up to each), library (a native library call), extern (run by
        PyTorch).
    signature: operand and attribute names as text, e.g. "x, y | dim, keep".
    infer: result types from operands and attributes; raises VerifyError when they do not fit.
    body: one element of the result (pointwise, view, index), see `Body`.
    combine: the scalar operation of a reduction (add, mul, maximum, minimum, or, and), or of a scatter; "" when
        it is none.
    strided: view ops: (source sizes, source strides, offset, node) -> (strides, offset) of the result as a strided
        window of the operand's storage, or None when it is none.
    cost: scalar operations per result element, a rough weight for the fusion score.
    into: scatter ops: where the element of the second operand at an index goes in the result, and a bool register:
        whether it goes anywhere (None: it does).
    checks: the body checks what data give, indices or divisors: a kernel with it may fail.
    stored: the result lies in memory; it is never computed again where it is read.
    meeting: scatter ops: the dims of the second operand along which elements may go to one place; in all others they
        go where no other goes.
    torch: name of the torch function that the reference interpreter calls; "" when
        runtime/torch_ops/reference_interpreter.py has its own line, or takes the body of a pointwise op.
    scalars: pointwise ops: the scalar instructions of the body. commutes: the two operands may change places.
    """

    name: str
    kind: str
    signature: str
    infer: Infer
    body: Callable[[Body, Node, Index], object] | None = None
    combine: str = ""
    strided: Strided | None = None
    cost: int = 1
    torch: str = ""
    random: bool = False
    into: Callable[[Body, Node, Index], tuple[Index, object]] | None = None
    meeting: Callable[[Node], tuple[int, ...]] | None = None
    checks: bool = False
    stored: bool = False
    scalars: frozenset[str] = frozenset()
    commutes: bool = False


# what was wrong, as a status: an index out of range, a whole number divided by 0, a choice of no branch, a sequence
# that is longer than there are times
INDEX, DIVISOR, ROUTE, LENGTH = 1, 2, 3, 4

OPS: dict[str, Op] = {}


def define(op: Op) -> Op:
    """Add a row to the table; a second row of the same name is a bug."""
    assert op.name not in OPS, op.name
    OPS[op.name] = op
    return op


def row(node: Node) -> Op:
    """The row of a node's op."""
    return OPS[node.op]


def checks_of(nodes: Iterable[Node]) -> tuple[tuple[str, str, str], ...]:
    """(op, operand that is checked, source line) of those nodes that check their data."""
    return tuple((node.op, getattr(node.inputs[-1], "name", ""), node.where) for node in nodes if row(node).checks)


def type_of(operand: Operand) -> TensorType:
    """The tensor type of an operand that is a value."""
    assert isinstance(operand, Value), operand
    return operand.tensor


def base_of(value: Value, producers: Mapping[str, Node], stored: Container[str] = ()) -> Value:
    """The value whose memory this one shows. stored: names of views that have memory of their own, as one has that no
    strides can express."""
    node = producers.get(value.name)
    while (node is not None and value.name not in stored
           and row(node).kind == "view" and row(node).strided is not None):
        value = next(node.values())
        node = producers.get(value.name)
    return value
