"""Merges chains of views into one and removes views that show their operand as it is. Nothing is moved.

A reshape of a permute becomes a permute of a reshape: what must be stored is the reshape then, in the order in which
its operand lies. A cast of a permute becomes a permute of a cast where that cast exists: autocast rounds each operand
of a product by itself, also where one is the other transposed. Lookups whose positions are arithmetic on sizes become
views, or read runs of elements (passes/gather_to_view.py).

before:
    graph example(x: f32[b, n, 4])
      a = reshape(x | shape=[b*n, 4])                        f32[b*n, 4]
      c = reshape(a | shape=[b, n, 2, 2])                    f32[b, n, 2, 2]
      d = permute(c | dims=[0, 2, 1, 3])                     f32[b, 2, n, 2]
      e = permute(d | dims=[0, 2, 1, 3])                     f32[b, n, 2, 2]
      f = slice(e | dim=3, start=0, count=2, step=1)         f32[b, n, 2, 2]
      return f
after:
    graph example(x: f32[b, n, 4])
      a = reshape(x | shape=[b*n, 4])      f32[b*n, 4]
      c = reshape(x | shape=[b, n, 2, 2])  f32[b, n, 2, 2]
      d = permute(c | dims=[0, 2, 1, 3])   f32[b, 2, n, 2]
      return c
What is not used any more is left to the pass dce.
"""
from __future__ import annotations

from collections.abc import Callable

from anyshape.base.config import Config
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.passes.gather_to_view import index, take
from anyshape.passes.rewriter import Replay, replay, same_type
from anyshape.sym.expr import Expr, Size
from anyshape.sym.index_arithmetic import groups

Sizes = tuple[Size, ...]
Dims = tuple[int, ...]


def _inner(replay: Replay, node: Node) -> Node | None:
    """The equation below, when it is of the same op."""
    below = replay.producer(node.inputs[0])
    return below if below is not None and below.op == node.op else None


def _reshape(replay: Replay, node: Node) -> Operand | None:
    below = _inner(replay, node)
    if below is not None:
        return replay.op("reshape", below.inputs[0], shape=node.attr("shape"))
    below = replay.producer(node.inputs[0])
    if below is None or below.op != "permute":
        return None
    value = below.inputs[0]
    assert isinstance(value, Value)
    found = reshape_first(value.tensor.shape, _integers(below.attr("dims")), node.output.tensor.shape)
    # a library reads matrices whose rows or columns are contiguous, so one of the last two dims has to be the innermost
    if found is None or len(found[2]) - 1 not in found[2][-2:]:
        return None
    first, shape, last = found
    inside = replay.op("reshape", replay.op("permute", value, dims=first), shape=shape)
    return replay.op("permute", inside, dims=last)


def reshape_first(source: Sizes, dims: Dims, shape: Sizes) -> tuple[Dims, Sizes, Dims] | None:
    """reshape(permute(x | dims) | shape) as permute(reshape(permute(x | first) | inside) | last), for x of the sizes
    `source`: (first, inside, last), where the dims that lie innermost in x, and those that are reshaped with them, come
    last. None where they do so already."""
    if 0 in shape:
        return None
    parts = [group for group in groups(tuple(source[d] for d in dims), shape) if group.source]
    if not all(part.result for part in parts):
        return None
    innermost = max(parts, key=lambda part: dims[part.source[-1]], default=None)
    if innermost is None or innermost is parts[-1]:
        return None
    ordered = [part for part in parts if part is not innermost] + [innermost]
    first = [dims[d] for part in ordered for d in part.source]
    order = [d for part in ordered for d in part.result]
    first += [d for d in range(len(source)) if d not in first]
    order += [d for d in range(len(shape)) if d not in order]
    return tuple(first), tuple(shape[d] for d in order), tuple(order.index(d) for d in range(len(shape)))


def _permute(replay: Replay, node: Node) -> Operand | None:
    source = node.inputs[0]
    assert isinstance(source, Value)
    dims = _integers(node.attr("dims"))
    if dims == tuple(range(len(dims))):
        return source
    below = _inner(replay, node)
    if below is not None:
        first = _integers(below.attr("dims"))
        return replay.op("permute", below.inputs[0], dims=tuple(first[d] for d in dims))
    # where only dims of size 1 change places, the elements keep their order
    moved = [d for d in dims if source.tensor.shape[d] != 1]
    return replay.op("reshape", source, shape=node.output.tensor.shape) if moved == sorted(moved) else None


def _broadcast(replay: Replay, node: Node) -> Operand | None:
    source = node.inputs[0]
    assert isinstance(source, Value)
    below = _inner(replay, node)
    if below is not None:
        return replay.op("broadcast", below.inputs[0], shape=node.attr("shape"))
    new, old = node.output.tensor.shape, source.tensor.shape
    extra = len(new) - len(old)
    if new[extra:] == old and all(size == 1 for size in new[:extra]):
        return replay.op("reshape", source, shape=new)
    return None


def _slice(replay: Replay, node: Node) -> Operand | None:
    dim, start, count, step = (node.attr(name) for name in ("dim", "start", "count", "step"))
    if count == 1 and step != 1:
        return replay.op("slice", node.inputs[0], dim=dim, start=start, count=1, step=1)
    below = _inner(replay, node)
    if below is None or below.attr("dim") != dim:
        return None
    first, stride = below.attr("start"), below.attr("step")
    assert isinstance(start, (int, Expr)) and isinstance(first, (int, Expr))
    assert isinstance(step, int) and isinstance(stride, int)
    return replay.op("slice", below.inputs[0], dim=dim, start=first + start * stride, count=count,
                     step=step * stride)


def _integers(value: Attr) -> tuple[int, ...]:
    assert isinstance(value, tuple)
    return value  # type: ignore[return-value]


# a view whose result has its operand's type shows it as it is, unless it may reorder elements
_RULES: dict[str, tuple[bool, Callable[[Replay, Node], Operand | None]]] = {
    "reshape": (False, _reshape),
    "permute": (True, _permute),
    "broadcast": (False, _broadcast),
    "slice": (False, _slice),
    "index": (True, index),
    "take": (True, take),
}


def _rewrite(replay: Replay, node: Node) -> Operand | None:
    found = _RULES.get(node.op)
    if found is None:
        return None
    reorders, rule = found
    source = node.inputs[0]
    if not reorders and isinstance(source, Value) and same_type(source.type, node.output.type):
        return source
    return rule(replay, node)


def views(graph: Graph, config: Config) -> Graph:
    """The graph with chains of views merged into one, and without views that show their operand as it is."""
    apart = {(node.inputs[0].name, node.attr("dtype")) for node in graph.nodes
             if node.op == "cast" and isinstance(node.inputs[0], Value)}
    made: dict[tuple[str, Attr], Value] = {}  # casts so far: of which value, to which dtype

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        source = node.inputs[0] if node.op == "cast" else None
        if not isinstance(source, Value) or not node.output.name:
            return _rewrite(replay, node)
        below, dtype = replay.producer(source), node.attr("dtype")
        if below is not None and below.op == "permute":
            inner = below.inputs[0]
            assert isinstance(inner, Value)
            if (inner.name, dtype) in apart:
                key = (inner.name, dtype)
                made[key] = made.get(key) or replay.op("cast", inner, dtype=dtype)
                return replay.op("permute", made[key], dims=below.attr("dims"))
        if (source.name, dtype) in made:
            return made[source.name, dtype]
        made[source.name, dtype] = node.output
        return None

    return replay(graph, rewrite)
