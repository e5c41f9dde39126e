"""Data parallelism of a graph: the sizes along which calls may be concatenated and their results split again, because
every row of a result depends on its own row of the inputs alone. Derived from the sharding rules of equations.

    h = matmul(x, w)  x f32[n, 8]  -->  n may be joined: row i of h is made of row i of x
    s = sum(x) over dim 0          -->  it may not: partial sums of ranks would have to be added up

A size that no collective is needed for when a graph is partitioned along it (dist/rules.py) is such a size, if nothing
else in the graph reads it: no position, no number that is computed from it.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from anyshape.dist.placement import Shard
from anyshape.dist.reshape import reshaped
from anyshape.dist.rules import factors
from anyshape.ir.graph import Attr, Graph, Node, Value, has_effect
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Expr, Size, symbol, symbols_of

SHAPES = ("shape", "count")  # attributes that only say how large the result is, which its type says, too


@dataclass(frozen=True, slots=True)
class ParallelSize:
    """A size whose rows are independent.

    symbol: its name. inputs, outputs: by position in the graph, the dim that it is; None: a tensor without it, which is
    the same in all rows. An output's dim may be the size times sizes of other names, its rows then lie in blocks.
    least, most: its range; most is None where it has no end.
    """

    symbol: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    least: int
    most: int | None


def parallel_size(graph: Graph) -> ParallelSize | None:
    """The size along which calls of a graph may be joined, the outermost dim of the first input that has one; None:
    none is proven."""
    if graph.writes or graph.saved or graph.restored:
        return None
    return next(filter(None, (_proven(graph, name) for name in _candidates(graph))), None)


def _candidates(graph: Graph) -> Iterator[str]:
    """Sizes that are a dim of an input, outer dims first."""
    shapes = [value.type.shape for value in graph.inputs if isinstance(value.type, TensorType)]
    found: dict[str, None] = {}
    for dim in range(max(map(len, shapes), default=0)):
        for shape in shapes:
            if dim < len(shape) and isinstance(shape[dim], Expr):
                name, *others = sorted(symbols_of(shape[dim]))
                if not others and shape[dim] == symbol(name):
                    found[name] = None
    yield from found


def _proven(graph: Graph, name: str) -> ParallelSize | None:
    """The size of that name, where its rows are independent."""
    states: dict[str, Shard] = {}
    for value in graph.inputs:
        if not isinstance(value.type, TensorType):
            if value.name == name:
                return None
        elif _mentions(value.type.shape, name) and not _placed(value, name, Shard(_dim(value, name), 1, symbol(name)),
                                                               states, symbol(name)):
            return None
    if not all(_visit(node, name, states) for node in graph.nodes):
        return None
    outputs: list[int | None] = []
    for output in graph.outputs:
        state = states.get(output.name) if isinstance(output, Value) else None
        if (state is not None and state.outer != 1) or (isinstance(output, Expr) and name in symbols_of(output)):
            return None
        outputs.append(None if state is None else state.dim)
    least, most = next(((low, high) for own, low, high in graph.facts.ranges if own == name), (0, None))
    inputs = tuple(states[value.name].dim if value.name in states else None for value in graph.inputs)
    return ParallelSize(name, inputs, tuple(outputs), least, most)


def _visit(node: Node, name: str, states: dict[str, Shard]) -> bool:
    """Whether the rows of an equation's results are made of the same rows of its operands; notes where they lie."""
    if has_effect(node) or row(node).random:
        return False
    if any(isinstance(operand, Expr) and name in symbols_of(operand) for operand in node.inputs):
        return False
    if any(_mentions(value, name) for key, value in node.attrs if key not in SHAPES):
        return False
    given = [states.get(operand.name) if isinstance(operand, Value) else None for operand in node.inputs]
    if not any(given):
        made = [value for value in node.outputs if _mentions(_shape(value), name)]
        return not made or (len(node.outputs) == 1 and node.op in ("full", "broadcast")
                            and _placed(node.output, name, Shard(_dim(node.output, name), 1, symbol(name)), states,
                                        symbol(name)))
    if node.op == "reshape":
        (state,) = given
        assert state is not None
        (source,) = node.values()
        after = reshaped(source.tensor.shape, node.output.tensor.shape, state)
        return after is not None and _placed(node.output, name, after, states, None)
    outer, *others = {state.outer for state in given if state is not None}
    for factor in factors(node):
        if factor.ins == tuple(None if state is None else state.dim for state in given) and not others \
                and all(isinstance(at, int) for at in factor.outs):
            return all(_placed(value, name, Shard(at, outer, symbol(name)), states, None)  # type: ignore[arg-type]
                       for value, at in zip(node.outputs, factor.outs, strict=True))
    return False


def _placed(value: Value, name: str, state: Shard, states: dict[str, Shard], size: Size | None) -> bool:
    """Notes where a value's rows lie, if no other dim of it depends on the size. size: what the dim has to be."""
    shape = _shape(value)
    others = (*shape[:state.dim], *shape[state.dim + 1:])
    if _mentions(others, name) or (size is not None and shape[state.dim] != size):
        return False
    states[value.name] = state
    return True


def _shape(value: Value) -> tuple[Size, ...]:
    return value.type.shape if isinstance(value.type, TensorType) else ()


def _dim(value: Value, name: str) -> int:
    """The first dim that depends on the size."""
    return next(dim for dim, size in enumerate(_shape(value)) if _mentions(size, name))


def _mentions(found: Attr, name: str) -> bool:
    """Whether a size, or one of several, depends on the symbol."""
    if isinstance(found, tuple):
        return any(_mentions(one, name) for one in found)
    return isinstance(found, Expr) and name in symbols_of(found)
