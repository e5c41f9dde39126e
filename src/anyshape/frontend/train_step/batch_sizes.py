"""Sizes that the tensors of a batch share: of tokens [b, n] and labels [c, m] whose elements stand beside each other.

    gather(scores: f32[b*n, v], labels: i64[c*m, 1]);  slice(x: f32[c*m, 1] | count=b*n)    -->    c is b, m is n

A trace gives each tensor sizes of its own, and knows of these only that b*n is c*m. Where rows are dealt out over
ranks, that is too little: which rows of the one go with which of the other is not known, and both would be gathered.
So sizes at one place of two tensors are taken as one, where the graph needs that their products are; each call is
checked.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence

from anyshape.ir.graph import Graph, Node
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, Size, substitute, symbol, symbols_of

Pair = frozenset[Size]


def shared_sizes(graph: Graph, data: Sequence[str]) -> dict[str, str]:
    """Symbol -> the symbol that it is equal to.

    Args:
        data: names of the inputs that are the batch.
    """
    within, equal = set[Pair](), set[Pair]()
    for node in graph.nodes:
        (equal if node.op == "slice" else within).update(_pairs(node))
    pairs = [tuple(pair) for pair in within & equal]
    tensors = [v.tensor for v in graph.inputs if v.name in data and isinstance(v.type, TensorType)]
    found: dict[str, str] = {}
    for place, other in enumerate(tensors):
        for first in tensors[:place]:
            names = {str(b): str(a) for a, b in zip(first.shape, other.shape, strict=False)
                     if _is_symbol(a) and _is_symbol(b) and a != b}
            formulas = {name: symbol(one) for name, one in names.items()}
            for p, q in pairs:
                used = _symbols(p) | _symbols(q)
                if substitute(p, formulas) == substitute(q, formulas):
                    found |= {name: one for name, one in names.items() if name in used and name not in found}
    return {name: found.get(one, one) for name, one in found.items()}


def _pairs(node: Node) -> Iterator[Pair]:
    """Sizes that the equation says are at most one another: of an index and its table, of a part and the whole."""
    if node.op == "slice":
        pairs = list(zip(next(node.values()).tensor.shape, node.output.tensor.shape, strict=True))
    elif node.op == "gather":
        pairs = list(zip(*(v.tensor.shape for v in node.values()), strict=True))
    else:
        return
    yield from (frozenset((a, b)) for a, b in pairs if a != b and _symbols(a) and _symbols(b))


def _is_symbol(size: Size) -> bool:
    return isinstance(size, Expr) and str(size) in symbols_of(size)


def _symbols(size: Size) -> set[str]:
    return set(symbols_of(size)) if isinstance(size, Expr) else set()
