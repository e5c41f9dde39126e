"""Dimension tracking: which dims (axes) of a product the dims of what is made of it are, through views that take dims
apart, put them together, and exchange them.

    s = matmul(q, k)                             f32[b, 6*n, m]     ((B), (R), (C))
    r = reshape(s | shape=[b, n, 6, m])          f32[b, n, 6, m]    ((B), (N), (G), (C)): R is N and G
    p = permute(r | dims=[2, 0, 1, 3])           f32[6, b, n, m]    ((G), (B), (N), (C))

A dim of size 1, and one along which a value was broadcast, has no axis.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row, type_of
from anyshape.passes.rewriter import Replay
from anyshape.sym.expr import Size, product
from anyshape.sym.index_arithmetic import groups

_DEEPEST = 12  # equations that a mask is made again from


class Unmatched(Exception):
    """It is not what is looked for."""


def number_of(operand: Operand) -> float:
    """An operand that is a number; Unmatched: it is none."""
    if isinstance(operand, bool) or not isinstance(operand, (int, float)):
        raise Unmatched
    return float(operand)


@dataclass(slots=True, eq=False)
class Axis:
    """An axis; `parts`, from the outermost on, once it was taken apart."""

    size: Size
    parts: list[Axis] = field(default_factory=list)

    def leaves(self) -> list[Axis]:
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]


Dims = tuple[tuple[Axis, ...], ...]


class Equations(Protocol):
    """Equations that are there: of a graph, or of one that is being written."""

    def producer(self, operand: Operand) -> Node | None:
        """The equation that defines an operand; None for inputs and for what is no value."""


class Written:
    """The equations of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._made = graph.producers()

    def producer(self, operand: Operand) -> Node | None:
        return self._made.get(operand.name) if isinstance(operand, Value) else None


@dataclass(frozen=True, slots=True)
class Laid:
    """A value, and the axes of its dims, from the outermost on."""

    value: Value
    dims: Dims


class Axes:
    """The axes of values that are made of `first`. places: of the operand that is made of it, by result. made: values
    further on, whose operands are all asked of which are made of it."""

    def __init__(self, graph: Equations, first: Node, places: dict[str, int]) -> None:
        self.graph = graph
        self.places = places
        self.made: frozenset[str] = frozenset()
        self._found: dict[str, Dims] = {
            first.output.name: tuple(() if size == 1 else (Axis(size),) for size in first.output.tensor.shape)}

    def of(self, operand: Operand) -> Dims:
        """The axes of each dim, as far as they have been taken apart by now.

        Raises:
            Unmatched: it is not made of the product by views, pointwise steps and reductions, or its dims are no axes.
        """
        return tuple(tuple(leaves(dim)) for dim in self._of(operand))

    def reduced(self, node: Node) -> tuple[Axis, ...]:
        """The axes along which a reduction goes."""
        dims, along = self.of(node.inputs[0]), node.attr("dims")
        assert isinstance(along, tuple)
        return tuple(axis for dim in along if isinstance(dim, int) for axis in dims[dim])

    def _of(self, operand: Operand) -> Dims:
        node = self.graph.producer(operand)
        if node is None or not isinstance(operand, Value):
            raise Unmatched
        if operand.name not in self._found:
            self._found[operand.name] = self._made(node)
        return self._found[operand.name]

    def _made(self, node: Node) -> Dims:
        if node.output.name in self.made and row(node).kind == "pointwise":
            return self._joined(node)
        source = node.inputs[self.places.get(node.output.name, 0)]
        dims, before, after = self.of(source), type_of(source).shape, node.output.tensor.shape
        if node.op == "reshape":
            return _reshaped(dims, before, after)
        if node.op == "permute":
            return tuple(dims[d] for d in _whole(node, "dims"))
        if node.op == "broadcast":
            return (*((),) * (len(after) - len(before)), *dims)
        if row(node).kind == "reduce":
            along = _whole(node, "dims")
            return tuple(() if d in along else dim for d, dim in enumerate(dims) if node.attr("keep") or d not in along)
        if row(node).kind != "pointwise" or after != before:
            raise Unmatched
        return dims

    def _joined(self, node: Node) -> Dims:
        """Each dim has the axes that it has in one of the operands."""
        shape = node.output.tensor.shape
        found: list[tuple[Axis, ...]] = [()] * len(shape)
        for one in node.inputs:
            if isinstance(one, Value) and one.name in self.made:
                dims = self._of(one)
                found[len(shape) - len(dims):] = [
                    have or more for have, more in zip(found[len(shape) - len(dims):], dims, strict=True)]
        return tuple(found)


def _whole(node: Node, name: str) -> tuple[int, ...]:
    value = node.attr(name)
    assert isinstance(value, tuple)
    return value  # type: ignore[return-value]


def _reshaped(dims: Dims, before: tuple[Size, ...], after: tuple[Size, ...]) -> Dims:
    if 0 in before:
        raise Unmatched
    found: list[tuple[Axis, ...]] = [()] * len(after)
    for group in groups(before, after):
        if len(group.source) == len(group.result) == 1:
            found[group.result[0]] = dims[group.source[0]]
            continue
        if not all(dims[d] for d in group.source):
            raise Unmatched  # a broadcast dim with others
        parts, result = [axis for d in group.source for axis in dims[d]], list(group.result)
        while result:
            if len(parts) == 1 and len(result) > 1:
                parts[0].parts = [Axis(after[d]) for d in result]
                for d, part in zip(result, parts[0].parts, strict=True):
                    found[d] = (part,)
                break
            count = len(parts) if len(result) == 1 else next(
                (n for n in range(1, len(parts)) if product(one.size for one in parts[:n]) == after[result[0]]), 0)
            if not count:
                raise Unmatched
            found[result.pop(0)] = tuple(parts[:count])
            del parts[:count]
    return tuple(found)


def leaves(axes: Iterable[Axis]) -> list[Axis]:
    """The axes that these were taken apart into."""
    return [leaf for axis in axes for leaf in axis.leaves()]


def through(graph: Equations, x: Laid) -> tuple[Node, Laid] | None:
    """The view or cast that shows `x`, and what it shows; None where there is none."""
    node = graph.producer(x.value)
    if node is None or not isinstance(source := node.inputs[0] if node.inputs else None, Value):
        return None
    dims = tuple(tuple(leaves(dim)) for dim in x.dims)
    if node.op == "cast":
        return node, Laid(source, dims)
    if node.op == "permute":
        order = _whole(node, "dims")
        return node, Laid(source, tuple(dims[order.index(d)] for d in range(len(order))))
    if node.op == "reshape":
        try:
            return node, Laid(source, _reshaped(dims, x.value.tensor.shape, source.tensor.shape))
        except Unmatched:
            return None
    if node.op != "broadcast":
        return None
    kept = dims[len(dims) - source.tensor.rank:]
    return node, Laid(source, tuple(() if size == 1 else dim
                                    for size, dim in zip(source.tensor.shape, kept, strict=True)))


def unrepeated(graph: Equations, x: Laid) -> Laid:
    """What views have repeated to make `x`, which lacks those axes; `x` where they repeat nothing."""
    best = x
    while (step := through(graph, x)) is not None and step[0].op != "cast":
        node, x = step
        if node.op == "broadcast":
            best = x
    return best


def rooted(graph: Equations, x: Laid) -> Laid:
    """What `x` is a view of."""
    while (step := through(graph, x)) is not None and step[0].op != "cast":
        x = step[1]
    return Laid(x.value, tuple(tuple(leaves(dim)) for dim in x.dims))


def placed(replay: Replay, x: Laid, order: Sequence[Sequence[Axis]]) -> Value:
    """`x` with a dim for each group of axes; one that has none of them is of size 1 there.

    Raises:
        Unmatched: it has other axes.
    """
    order, dims = [leaves(group) for group in order], [leaves(dim) for dim in x.dims]
    if all(dim in order for dim in dims if len(dim) > 1):  # dims that stay whole
        whole = [(dim, [Axis(product(axis.size for axis in dim))]) for dim in dims if len(dim) > 1]
        if whole:
            put = lambda group: next((one for dim, one in whole if dim == group), group)  # noqa: E731
            return placed(replay, Laid(x.value, tuple(tuple(put(dim)) for dim in dims)), [put(one) for one in order])
    have, wanted = leaves(axis for dim in x.dims for axis in dim), [axis for group in order for axis in group]
    if not set(have) <= set(wanted) or len(set(have)) != len(have):
        raise Unmatched
    value = _shaped(replay, x.value, [axis.size for axis in have])
    turned = tuple(have.index(axis) for axis in wanted if axis in have)
    if turned != tuple(range(len(turned))):
        value = replay.op("permute", value, dims=turned)
    if any(0 < sum(axis in have for axis in group) < len(group) for group in order):
        value = _shaped(replay, value, [axis.size if axis in have else 1 for axis in wanted])
        value = replay.op("broadcast", value, shape=tuple(
            axis.size if any(one in have for one in group) else 1 for group in order for axis in group))
    return _shaped(replay, value, [
        product(axis.size for axis in group) if any(axis in have for axis in group) else 1 for group in order])


def _shaped(replay: Replay, x: Value, shape: Sequence[Size]) -> Value:
    return x if x.tensor.shape == tuple(shape) else replay.op("reshape", x, shape=tuple(shape))


def shrunk(replay: Replay, x: Value, depth: int = _DEEPEST) -> Value:
    """`x` of size 1 in dims along which it is the same everywhere, as its equations say; `x` where there are none."""
    node, shape = replay.producer(x), x.tensor.shape
    if node is None or not depth or len(node.outputs) != 1 or row(node).random:
        return x
    kind = row(node).kind
    if node.op not in ("broadcast", "reshape", "permute") and kind != "pointwise":
        return x
    inner = [shrunk(replay, one, depth - 1) if isinstance(one, Value) else one for one in node.inputs]
    if node.op == "broadcast":
        assert isinstance(inner[0], Value)
        return _shaped(replay, inner[0], (*(1,) * (len(shape) - inner[0].tensor.rank), *inner[0].tensor.shape))
    if all(a is b for a, b in zip(inner, node.inputs, strict=True)):
        return x
    if node.op == "reshape":
        before, small = type_of(node.inputs[0]).shape, type_of(inner[0]).shape
        kept = [size for size, old in zip(small, before, strict=True) if old != 1]
        if [size for size in before if size != 1] != [size for size in shape if size != 1]:
            return x
        return replay.op("reshape", inner[0], shape=tuple(1 if size == 1 else kept.pop(0) for size in shape))
    found = replay.op(node.op, *inner, **dict(node.attrs))
    found = _shaped(replay, found, (*(1,) * (len(shape) - found.tensor.rank), *found.tensor.shape))
    return x if found.tensor.shape == shape else found
