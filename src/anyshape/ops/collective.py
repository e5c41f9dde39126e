"""Collectives of the ranks along one axis of a mesh, in SPMD form: every rank's graph has the same equation.

    all_reduce(x, ... | axis, combine)                  what the ranks' x come to, on every rank
    all_gather(x, ... | axis, parts)                    the whole, on every rank, of what each has a part of
    reduce_scatter(x, ... | axis, parts)                of what the ranks' x add up to, each rank's own part
    all_to_all(x | axis, parts, into)                   from parts along one dim to parts along another

With several operands it is the same number of collectives, which travel as one message (XLA's variadic all-reduce).
`parts` says for each operand how a dim of the whole is dealt out: (dim, outer, n, inner, count), where the dim is
outer * n * inner and this rank has `count` of the n (dist/placement.py: Shard). `axis` is the name of an axis of the
mesh, and ranks of one group differ along it alone.
"""
from __future__ import annotations

from dataclasses import dataclass

from anyshape.ir.graph import Node
from anyshape.ir.types import TensorType
from anyshape.ops.type_rules import Attrs, Inputs, Types, add_row, fail, is_size, tensor
from anyshape.sym.expr import Size

RINGS = ("ring_attention", "ring_attention_backward")  # ops/attention.py
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *RINGS)
COMBINES = ("add", "mul", "maximum", "minimum", "or", "and")


@dataclass(frozen=True, slots=True)
class Parts:
    """How a dim is dealt out: it is outer * n * inner elements, and this rank has `count` of the n."""

    dim: int
    outer: Size
    n: Size
    inner: Size
    count: Size

    def attr(self) -> tuple[Size, ...]:
        """As an attribute."""
        return self.dim, self.outer, self.n, self.inner, self.count

    def whole(self, shape: tuple[Size, ...]) -> tuple[Size, ...]:
        """The shape of the whole of what has `shape` here."""
        return (*shape[:self.dim], self.outer * self.n * self.inner, *shape[self.dim + 1:])

    def local(self, shape: tuple[Size, ...]) -> tuple[Size, ...]:
        """The shape of this rank's part of what has `shape`."""
        return (*shape[:self.dim], self.outer * self.count * self.inner, *shape[self.dim + 1:])


def parts_of(node: Node, name: str = "parts") -> tuple[Parts, ...]:
    """The attribute, for each operand."""
    value = node.attr(name)
    assert isinstance(value, tuple), value
    return tuple(Parts(*entry) for entry in value)  # type: ignore[misc]


def _parts(name: str, attrs: Attrs, key: str, types: list[TensorType]) -> list[Parts]:
    value = attrs[key]
    if not isinstance(value, tuple) or len(value) != len(types):
        fail(name, f"{key} is {value!r}, not one entry for each of {len(types)} operands")
    found = []
    for entry, kind in zip(value, types, strict=True):
        if not isinstance(entry, tuple) or len(entry) != 5 or not all(map(is_size, entry)) \
                or not isinstance(entry[0], int) or not 0 <= entry[0] < kind.rank:
            fail(name, f"{key} has {entry!r} for {kind}", "give (dim, outer, n, inner, count)")
        found.append(Parts(*entry))  # type: ignore[arg-type]
    return found


def _operands(name: str, inputs: Inputs, attrs: Attrs) -> list[TensorType]:
    if not isinstance(attrs["axis"], str) or not str(attrs["axis"]).isidentifier():
        fail(name, f"axis is {attrs['axis']!r}", "give the name of an axis of the mesh")
    found = [tensor(name, inputs, position) for position in range(len(inputs))]
    if len({kind.dtype for kind in found}) != 1:
        fail(name, "operands of one message have one dtype", "make it several")
    return found


def _infer_all_reduce(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    if attrs["combine"] not in COMBINES:
        fail(name, f"combine is {attrs['combine']!r}", f"give one of {', '.join(COMBINES)}")
    return tuple(kind.dense() for kind in _operands(name, inputs, attrs))


def _with_shape(kind: TensorType, shape: tuple[Size, ...]) -> TensorType:
    return TensorType(kind.dtype, shape, None, kind.device)


def _infer_all_gather(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    kinds = _operands(name, inputs, attrs)
    found = _parts(name, attrs, "parts", kinds)
    for one, kind in zip(found, kinds, strict=True):
        if one.local(kind.shape) != kind.shape:
            fail(name, f"{kind} has not {one.outer * one.count * one.inner} elements along dim {one.dim}")
    return tuple(_with_shape(kind, one.whole(kind.shape)) for one, kind in zip(found, kinds, strict=True))


def _infer_reduce_scatter(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    kinds = _operands(name, inputs, attrs)
    found = _parts(name, attrs, "parts", kinds)
    for one, kind in zip(found, kinds, strict=True):
        if one.whole(kind.shape) != kind.shape:
            fail(name, f"{kind} has not {one.outer * one.n * one.inner} elements along dim {one.dim}")
    return tuple(_with_shape(kind, one.local(kind.shape)) for one, kind in zip(found, kinds, strict=True))


def _infer_all_to_all(name: str, inputs: Inputs, attrs: Attrs) -> Types:
    (whole,) = _infer_all_gather(name, inputs[:1], {"axis": attrs["axis"], "parts": attrs["parts"]})
    (into,) = _parts(name, attrs, "into", [whole])
    if into.whole(whole.shape) != whole.shape:
        fail(name, f"{whole} has not {into.outer * into.n * into.inner} elements along dim {into.dim}")
    return (_with_shape(whole, into.local(whole.shape)),)


add_row("all_reduce", "extern", "x, ... | axis, combine", _infer_all_reduce)
add_row("all_gather", "extern", "x, ... | axis, parts", _infer_all_gather)
add_row("reduce_scatter", "extern", "x, ... | axis, parts", _infer_reduce_scatter)
add_row("all_to_all", "extern", "x | axis, parts, into", _infer_all_to_all)
