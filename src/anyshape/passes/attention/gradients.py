"""The backward of attention that is written out: the products that make them of the gradient of its result.

    P = E / Z            the weights: exponentials, and their sum along keys
    dV = Pᵀ dO           G = dO Vᵀ
    dS = P * (G - sum(P * G))                          --> dQ = dS K, dK = dSᵀ Q

Programs write dS in many ways: E * (G/Z - sum(E*G)/Z²) is one of JAX's. So it is known by its value: equations over E
and G are worked out as sums of powers of E, G, Z and D = sum(E*G), and dS is E*G/Z - E*D/Z², times what scaling adds.
A mask that fills is in it again, with 0 in place of its number.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row, type_of
from anyshape.passes.attention.match import Match, Product, operands_of, same, turned
from anyshape.passes.attention.score_axes import (
    Axis,
    Dims,
    Equations,
    Laid,
    Unmatched,
    leaves,
    number_of,
    rooted,
    through,
)

_MOST = 6  # terms of a sum that are followed
Powers = tuple[int, int, int, int]  # of E, G, Z and D
Sum = dict[Powers, float]
_ONE: Powers = (0, 0, 0, 0)
_FIRST, _SECOND = (1, 1, -1, 0), (1, 0, -2, 1)  # of dS, whose numbers are 1 and -1


@dataclass(slots=True)
class Gradients:
    """Products that make gradients. outer: G, of the gradient of the result, `gradient`, and of the values, `values`.
    inside: equations that nobody else reads."""

    outer: Node
    gradient: Laid
    values: Laid
    of_query: Product | None = None
    of_key: Product | None = None
    of_value: Product | None = None
    inside: list[Node] = field(default_factory=list)

    def products(self) -> list[Product]:
        return [one for one in (self.of_value, self.of_key, self.of_query) if one is not None]


def gradients_of(graph: Graph, equations: Equations, found: Match, of_value: Product | None, depth: Axis) -> Gradients:
    """The gradients that a graph makes of a softmax. depth: the axis along the size of a head.

    Raises:
        Unmatched: there are none, or they are not those of attention.
    """
    factor, fills = 1.0, []
    for node, place in found.steps:
        other = node.inputs[1 - place] if node.op in ("mul", "div") else None
        if node.op == "where":
            fills.append((node, place))
        elif isinstance(other, float):
            factor = factor * other if node.op == "mul" else factor / other
        elif node.op in ("mul", "div"):
            raise Unmatched
    products = _readers(graph, found)
    sums = _Sums(equations, found, fills)
    found.axes.made = products.made
    of_query = of_key = None
    for node, side in products.of:
        dims = found.axes.of(node.inputs[side])
        sums.check(node.inputs[side], dims, factor)
        summed = found.column in dims[-1 if side == 0 else -2]
        operands_of(found, dims, node, side, summed)
        one = Product(node, side, dims)
        if summed and of_query is None:
            of_query = one
        elif not summed and of_key is None:
            of_key = one
        else:
            raise Unmatched
    if sums.outer is None:
        raise Unmatched
    outer, dims = sums.outer, tuple(tuple(leaves(dim)) for dim in sums.dims)
    made = Gradients(outer, *_outer(found, outer, dims, depth), of_query, of_key, of_value, sums.inside)
    queries, keys = operands(found, depth)
    for product, wanted in ((of_query, keys), (of_key, queries), (of_value, made.gradient)):
        if product is not None and not _equal(equations, Laid(_value(product.other), product.around(depth)), wanted):
            raise Unmatched
    return made


def operands(found: Match, depth: Axis) -> tuple[Laid, Laid]:
    """Queries and keys, as the first product has them."""
    dims = found.axes.of(found.first.output)
    rows, columns = turned((dims[-2], dims[-1]), found.turned)
    queries, keys = (_value(one) for one in found.first.inputs[::-1 if found.turned else 1])
    return (Laid(queries, (*dims[:-2], *turned((rows, (depth,)), found.turned))),
            Laid(keys, (*dims[:-2], *turned(((depth,), columns), found.turned))))


@dataclass(slots=True)
class _Products:
    """Products with an operand that is made of exponentials otherwise than as weights, and all that is made of them."""

    made: frozenset[str]
    of: list[tuple[Node, int]]


def _readers(graph: Graph, found: Match) -> _Products:
    users = graph.users()
    weights = {node.output.name for node in found.inside}
    made, pending, of = {found.lifted.name}, [found.lifted.name], list[tuple[Node, int]]()
    plain = {found.lifted.name}  # what the weights are, by views, casts and a division
    while pending:
        name = pending.pop()
        for node in users.get(name, ()):
            if len(node.outputs) != 1 or node.output.name in made:
                continue
            if node.op == "matmul":
                continue
            if row(node).kind in ("pointwise", "reduce") or node.op in ("reshape", "permute", "broadcast"):
                made.add(node.output.name)
                pending.append(node.output.name)
    for node in graph.nodes:
        if (node.op == "div" and node.output.name in weights and node.output.name in made) or (
                node.op in ("reshape", "permute", "cast") and _name(node.inputs[0]) in plain - {found.lifted.name}):
            plain.add(node.output.name)
        if node.op == "matmul" and not node.attrs:
            of += [(node, side) for side, one in enumerate(node.inputs) if _name(one) in made - plain]
    return _Products(frozenset(made), of)


def _name(operand: Operand) -> str:
    return operand.name if isinstance(operand, Value) else ""


def _value(operand: Operand) -> Value:
    if not isinstance(operand, Value):
        raise Unmatched
    return operand


def _outer(found: Match, outer: Node, dims: Dims, depth: Axis) -> tuple[Laid, Laid]:
    """The gradient of the result, and the values, of which G is the product."""
    lead, pair = dims[:-2], dims[-2:]
    swapped = pair[0] == (found.column,)
    rows = pair[1] if swapped else pair[0]
    if pair[0 if swapped else 1] != (found.column,) or set(rows) != set(found.rows) \
            or {axis for dim in lead for axis in dim} != set(found.lead):
        raise Unmatched
    left, right = (_value(one) for one in outer.inputs)
    if left.tensor.shape[-1] != depth.size:
        raise Unmatched
    one, other = Laid(left, (*lead, pair[0], (depth,))), Laid(right, (*lead, (depth,), pair[1]))
    return (other, one) if swapped else (one, other)


def _equal(graph: Equations, a: Laid, b: Laid) -> bool:
    a, b = rooted(graph, a), rooted(graph, b)
    return a.dims == b.dims and same(graph, a.value, b.value, [])


class _Sums:
    """Values of equations as sums of powers. outer: the product G, whose axes are `dims`."""

    def __init__(self, graph: Equations, found: Match, fills: Iterable[tuple[Node, int]]) -> None:
        self.graph = graph
        self.found = found
        self.fills = list(fills)
        self.outer: Node | None = None
        self.dims: Dims = ()
        self.inside: list[Node] = []
        self._known: dict[str, tuple[Dims, Sum, frozenset[str]]] = {}

    def check(self, operand: Operand, dims: Dims, factor: float) -> None:
        """Sees that an operand is dS times a number, with every mask that fills.

        Raises:
            Unmatched: it is something else.
        """
        found, filled = self.of(operand, dims)
        wanted = {_FIRST: factor, _SECOND: -factor}
        if set(found) != set(wanted) or len(filled) != len(self.fills) or not all(
                math.isclose(number, wanted[one], rel_tol=1e-6) for one, number in found.items()):
            raise Unmatched

    def of(self, operand: Operand, dims: Dims) -> tuple[Sum, frozenset[str]]:
        """An operand whose dims have these axes, and the masks that are in it."""
        if not isinstance(operand, Value):
            return {_ONE: number_of(operand)}, frozenset()
        shape = operand.tensor.shape
        dims = tuple(() if size == 1 else tuple(leaves(dim)) for size, dim in
                     zip(shape, dims[len(dims) - len(shape):], strict=True))
        if operand.name not in self._known:
            self._known[operand.name] = dims, *self._of(operand, dims)
        known, found, filled = self._known[operand.name]
        if tuple(tuple(leaves(dim)) for dim in known) != dims:
            raise Unmatched
        return found, filled

    def _of(self, value: Value, dims: Dims) -> tuple[Sum, frozenset[str]]:
        if value.name == self.found.lifted.name:
            if self.found.axes.of(value) != dims:
                raise Unmatched
            return {(1, 0, 0, 0): 1.0}, frozenset()
        node = self.graph.producer(value)
        if node is None or len(node.outputs) != 1:
            raise Unmatched
        self.inside.append(node)
        if node.op == "matmul":
            if node.attrs or self.outer not in (None, node):
                raise Unmatched
            self.outer, self.dims = node, dims
            return {(0, 1, 0, 0): 1.0}, frozenset()
        if node.op == "sum":
            return self._summed(node, dims)
        if node.op == "full":
            return {_ONE: number_of(node.inputs[0])}, frozenset()
        below = through(self.graph, Laid(value, dims))
        if below is not None:
            return self.of(below[1].value, below[1].dims)
        if node.op == "where":
            return self._filled(node, dims)
        return self._pointwise(node, dims)

    def _pointwise(self, node: Node, dims: Dims) -> tuple[Sum, frozenset[str]]:
        rule = _RULES.get(node.op)
        if rule is None:
            raise Unmatched
        given = [self.of(one, dims) for one in node.inputs]
        masks = [filled for _, filled in given]
        if node.op in ("add", "sub") and masks[0] != masks[1]:
            raise Unmatched
        return rule(*(found for found, _ in given)), frozenset().union(*masks)

    def _summed(self, node: Node, dims: Dims) -> tuple[Sum, frozenset[str]]:
        """Along keys: of E, which is Z, or of E*G, which is D."""
        along, rest = node.attr("dims"), list(dims)
        shape = type_of(node.inputs[0]).shape
        if not isinstance(along, tuple) or len(along) != 1:
            raise Unmatched
        at = along[0]
        if not isinstance(at, int) or shape[at] != self.found.column.size:
            raise Unmatched
        if node.attr("keep"):
            rest.pop(at)
        rest.insert(at, (self.found.column,))
        found, filled = self.of(node.inputs[0], tuple(rest))
        made: Sum = {}
        for (e, g, z, d), number in found.items():
            if (e, g) not in ((1, 0), (1, 1)):
                raise Unmatched
            made[(0, 0, z + 1 - g, d + g)] = number
        if filled or len(made) != len(found):
            raise Unmatched
        return made, frozenset()

    def _filled(self, node: Node, dims: Dims) -> tuple[Sum, frozenset[str]]:
        for step, place in self.fills:
            if node.inputs[3 - place] == 0 and self.found.axes.of(step.output) == dims \
                    and same(self.graph, node.inputs[0], step.inputs[0], []):
                found, filled = self.of(node.inputs[place], dims)
                return found, filled | {step.output.name}
        raise Unmatched


def _times(a: Sum, b: Sum) -> Sum:
    made: Sum = {}
    for one, x in a.items():
        for other, y in b.items():
            key = tuple(n + m for n, m in zip(one, other, strict=True))
            made[key] = made.get(key, 0.0) + x * y  # type: ignore[index, arg-type]
    return _few(made)


def _plus(a: Sum, b: Sum, sign: float) -> Sum:
    return _few({key: a.get(key, 0.0) + sign * b.get(key, 0.0) for key in {**a, **b}})


def _inverse(a: Sum) -> Sum:
    if len(a) != 1:
        raise Unmatched
    (powers, number), = a.items()
    if not number:
        raise Unmatched
    return {tuple(-n for n in powers): 1 / number}  # type: ignore[dict-item]


def _few(a: Sum) -> Sum:
    if len(a) > _MOST:
        raise Unmatched
    return {key: number for key, number in a.items() if number}


_RULES: dict[str, Callable[..., Sum]] = {
    "mul": _times, "div": lambda a, b: _times(a, _inverse(b)), "add": lambda a, b: _plus(a, b, 1.0),
    "sub": lambda a, b: _plus(a, b, -1.0), "neg": lambda a: _times(a, {_ONE: -1.0}), "reciprocal": _inverse}
