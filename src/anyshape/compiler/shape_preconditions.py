"""Shape preconditions: what must hold of its sizes for a graph to mean what eager PyTorch computes.

A trace that does not single out the sizes 0 and 1 takes the general way: x[-1:] is one element from n - 1, also of
nothing. Where eager would have gone another way, a size inside the graph comes out below 0, or a slice reads outside.
"""
from __future__ import annotations

import math
from collections.abc import Iterator

from anyshape.ir.graph import Graph, Node, Value
from anyshape.ir.op import type_of
from anyshape.ir.types import kind_of
from anyshape.ops.pointwise import POINTWISE
from anyshape.ops.type_rules import dims_attr, int_attr
from anyshape.ops.view import slice_parts
from anyshape.sym.expr import Call, Expr, Size, maximum, minimum
from anyshape.sym.prover import prove_nonnegative

MOST = 2**63 - 1  # of an int64
LARGE = 2**24  # a factor from which on a product with a size may leave 64 bits
MOST_SIZES = 4  # that are multiplied in the number of elements of a usual tensor


def uncertain_sizes(graph: Graph) -> tuple[Size, ...]:
    """Sizes that must be at least 0 and that the facts do not show to be."""
    found: dict[Size, None] = {}
    for node in graph.nodes:
        for value in node.outputs:
            found.update(dict.fromkeys(value.tensor.shape))
        if node.op in ("slice", "overwrite"):
            found.update(dict.fromkeys(_inside(node)))
        numbers = (*node.inputs, *(value for _, value in node.attrs),
                   *(size for value in node.outputs for size in value.tensor.shape))
        found.update(dict.fromkeys(_in_64_bits(graph, size) for size in numbers if isinstance(size, Expr)))
    for size in list(found):
        found.update(dict.fromkeys(_under_roots(size)))
    return tuple(size for size in found if isinstance(size, Expr) and not prove_nonnegative(graph.facts, size))


def selected_sizes(graph: Graph) -> tuple[tuple[Size, str], ...]:
    """What is below 0 where an index selects an element of a dim that has none, and the user's line; of what the facts
    do not rule out. No index is right there, and there is no memory from which one could read."""
    found: dict[Size, str] = {}
    for node in graph.nodes:
        if node.op in ("take", "gather", "index"):
            dims = dims_attr(node) if node.op == "index" else (int_attr(node, "dim"),)
            count = math.prod(node.output.tensor.shape)
            for size in (type_of(node.inputs[0]).shape[dim] for dim in dims):
                if not prove_nonnegative(graph.facts, size - 1):
                    found.setdefault(maximum(size, 1 - count) - 1, node.where)
    return tuple(found.items())


def divided_sizes(graph: Graph) -> tuple[tuple[Size, str], ...]:
    """What is below 0 where whole numbers are divided by a number or a size that is 0, and the user's line; of what the
    facts do not rule out."""
    found: dict[Size, str] = {}
    for node in graph.nodes:
        if node.op in POINTWISE and POINTWISE[node.op].divides and not isinstance(node.inputs[-1], Value):
            kind, by = node.output.tensor, node.inputs[-1]
            if kind_of(kind.dtype) == "float" or not isinstance(by, (int, Expr)):
                continue
            size = by if prove_nonnegative(graph.facts, by) else by * by
            if not prove_nonnegative(graph.facts, size - 1):
                found.setdefault(maximum(size, 1 - kind.count) - 1, node.where)
    return tuple(found.items())


def _in_64_bits(graph: Graph, number: Expr) -> Size:
    """Below 0 where a number made of sizes is no int64, as the kernels compute it. Only of numbers that may be that
    large though memory holds tensors of these sizes: with a large factor, or of many sizes."""
    if all(abs(factor) < LARGE and sum(power for _, power in mono) <= MOST_SIZES for mono, factor in number.terms):
        return 0
    least: Size = 0
    for end in (MOST - number, number + MOST + 1):
        if not prove_nonnegative(graph.facts, end):
            least = minimum(least, maximum(end, -1))  # between -1 and 0: a formula's value is an int64 too
    return least


def _under_roots(size: Size) -> Iterator[Size]:
    """The sizes whose square root is a part of this one."""
    for mono, _ in size.terms if isinstance(size, Expr) else ():
        for atom, _ in mono:
            if isinstance(atom, Call):
                yield from atom.args if atom.op == "root" else ()
                for argument in atom.args:
                    yield from _under_roots(argument)


def _inside(node: Node) -> tuple[Size, ...]:
    """At least 0 where a slice stays inside of its operand; one of no elements may start right behind the end."""
    operand, part = node.inputs[0], node.inputs[1] if node.op == "overwrite" else node.output
    assert isinstance(operand, Value) and isinstance(part, Value)
    dim, start, step = slice_parts(node)
    last = start + step * (part.tensor.shape[dim] - 1)
    lowest, highest = (start, last) if step > 0 else (last, start)
    return lowest, operand.tensor.shape[dim] - 1 - highest
