"""Splitting a GEMM chain: two products with a wide value between them, as in the feed-forward part of a transformer,
are done in two halves of that value, which never exists whole.

before:
    graph example(x: f32[n, 64], u: f32[64, 512], b: f32[512], d: f32[512, 64])
      h = matmul(x, u)                          f32[n, 512]
      p = add(h, b)                             f32[n, 512]
      q = tanh(p)                               f32[n, 512]
      y = matmul(q, d)                          f32[n, 64]
      return y
after:
    graph example(x: f32[n, 64], u: f32[64, 512], b: f32[512], d: f32[512, 64])
      h = matmul(x, u)                          f32[n, 512]
      p = add(h, b)                             f32[n, 512]
      q = tanh(p)                               f32[n, 512]
      slice_1 = slice(u | dim=1, start=0, count=256, step=1)  f32[64, 256]
      matmul_1 = matmul(x, slice_1)             f32[n, 256]
      slice_2 = slice(b | dim=0, start=0, count=256, step=1)  f32[256]
      add_1 = add(matmul_1, slice_2)            f32[n, 256]
      tanh_1 = tanh(add_1)                      f32[n, 256]
      slice_3 = slice(d | dim=0, start=0, count=256, step=1)  f32[256, 64]
      matmul_2 = matmul(tanh_1, slice_3)        f32[n, 64]
      slice_4 = slice(u | dim=1, start=256, count=256, step=1)  f32[64, 256]
      matmul_3 = matmul(x, slice_4)             f32[n, 256]
      slice_5 = slice(b | dim=0, start=256, count=256, step=1)  f32[256]
      add_2 = add(matmul_3, slice_5)            f32[n, 256]
      tanh_2 = tanh(add_2)                      f32[n, 256]
      slice_6 = slice(d | dim=0, start=256, count=256, step=1)  f32[256, 64]
      y = matmul_add(tanh_2, slice_6, matmul_2 | alpha=1.0, beta=1.0)  f32[n, 64]
      return y

The second product's sum over the wide value is made in blocks anyway, each added to what is there, so the halves are as
exact as the whole. Where the wide value is kept (for a backward) there is nothing to gain, and it is left.
"""
from __future__ import annotations

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.ir.types import TensorType
from anyshape.passes.dce import dce
from anyshape.passes.rewriter import Replay, replay

WIDER = 4  # times as wide as the result must all that lies between be; halved, it is as little as attention holds there
LEAST_ROWS = 64  # at the hints; with a few, a product reads its weights at the speed of memory, and half rows at half
NARROWEST = 256  # a half that is narrower multiplies more slowly
_DTYPES = ("f32", "f64")  # half precision is rounded once, so its sums are not split


def gemm_chain_split(graph: Graph, config: Config) -> Graph:
    """The graph with two products in a row done in two halves of the wide value between them."""
    live = dce(graph, config)  # what nobody needs any more is no reader
    producers, users = live.producers(), live.users()
    kept = {value.name for value in live.roots()}

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if not _is_product(node) or node.output.name not in producers \
                or graph.facts.hint(node.output.tensor.shape[0]) < LEAST_ROWS:
            return None
        wide = node.inputs[0]
        assert isinstance(wide, Value)
        between = _between(wide, node, producers, users, kept)
        if between is None:
            return None
        total = _width(wide)
        assert isinstance(total, int)
        found: Value | None = None
        for start in (0, total // 2):
            half = _half(replay, between, wide, total, start)
            right = _sliced(replay, node.inputs[1], -2, start, total // 2)
            addend = found if found is not None else node.inputs[2] if node.op == "matmul_add" else None
            if addend is None:
                found = replay.op("matmul", half, right)
            else:
                found = replay.op("matmul_add", half, right, addend, alpha=1.0, beta=1.0)
        return found

    return replay(graph, rewrite)


def _is_product(node: Node) -> bool:
    """A product of two matrices, perhaps with an addend, as `gemm_chain_split` can make one of it."""
    if node.op == "matmul":
        plain = not node.attrs
    else:
        plain = node.op == "matmul_add" and dict(node.attrs) == {"alpha": 1.0, "beta": 1.0}
    return plain and node.output.tensor.dtype in _DTYPES and all(
        isinstance(x, Value) and x.tensor.rank == 2 and x.tensor.dtype == node.output.tensor.dtype
        for x in node.inputs[:2])


def _between(wide: Value, node: Node, producers: dict[str, Node], users: dict[str, list[Node]],
             kept: set[str]) -> list[Node] | None:
    """The equations from products to `wide`, in order, where nothing but they and `node` reads what they make; None
    where some other value as large is among the operands, or it would not pay."""
    total, result = _width(wide), _width(node.output)
    if not isinstance(total, int) or not isinstance(result, int) or total % 32 or total // 2 < NARROWEST:
        return None
    found: dict[str, Node] = {}
    waiting = [wide]
    while waiting:
        value = waiting.pop()
        if value.name in found:
            continue
        made = producers.get(value.name)
        if made is None or value.name in kept or len(made.outputs) != 1 or value.tensor.dtype != wide.tensor.dtype:
            return None
        found[value.name] = made
        if made.op == "matmul":
            if not _is_product(made):
                return None
        elif made.op == "reshape" or row(made).kind == "pointwise":
            for x in made.inputs:
                if not isinstance(x, Value) or not isinstance(x.type, TensorType):
                    continue
                if x.tensor.count == value.tensor.count and _width(x) == total:
                    waiting.append(x)
                elif x.tensor.rank > 1 or _width(x) not in (1, total):
                    return None
        else:
            return None
    inside = {*found, node.output.name}
    if any(made.name not in inside for name in found for user in users.get(name, ()) for made in user.outputs):
        return None
    if node.inputs.count(wide) != 1 or sum(one.op == "matmul" for one in found.values()) * total < WIDER * result:
        return None
    order = {name: position for position, name in enumerate(producers)}
    return [found[name] for name in sorted(found, key=order.__getitem__)]


def _half(replay: Replay, between: list[Node], wide: Value, total: int, start: int) -> Value:
    """The equations again, for half of the columns."""
    env: dict[str, Value] = {}
    for node in between:
        if node.op == "matmul":
            made = replay.op("matmul", node.inputs[0], _sliced(replay, node.inputs[1], -1, start, total // 2))
        elif node.op == "reshape":
            (source,) = node.inputs
            assert isinstance(source, Value)
            made = replay.op("reshape", env[source.name], shape=(*node.output.tensor.shape[:-1], total // 2))
        else:
            inputs = [env.get(x.name) or _sliced(replay, x, -1, start, total // 2) if isinstance(x, Value)
                      and isinstance(x.type, TensorType) else x for x in node.inputs]
            made = replay.op(node.op, *inputs, **dict(node.attrs))
        env[node.output.name] = made
    return env[wide.name]


def _sliced(replay: Replay, operand: Operand, dim: int, start: int, count: int) -> Operand:
    """Part of an operand along a dim, counted from the end; one element or none along it is for all parts."""
    assert isinstance(operand, Value)
    kind = operand.tensor
    if kind.rank == 0 or (kind.rank == 1 and kind.shape[0] == 1):
        return operand
    return replay.op("slice", operand, dim=kind.rank + dim, start=start, count=count, step=1)


def _width(value: Value) -> object:
    return value.tensor.shape[-1] if value.tensor.rank else 1
