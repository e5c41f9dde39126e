"""Attention fusion on graphs: attention that a program writes out becomes the op that stores no scores.

before:
    graph example(q: f32[b, 2, n, 8], k: f32[b, 2, m, 8], v: f32[b, 2, m, 8])
      t = permute(k | dims=[0, 1, 3, 2])   f32[b, 2, 8, m]
      s = matmul(q, t)                     f32[b, 2, n, m]
      c = mul(s, 0.5)                      f32[b, 2, n, m]
      h = amax(c | dims=[3], keep=True)    f32[b, 2, n, 1]
      d = sub(c, h)                        f32[b, 2, n, m]
      e = exp(d)                           f32[b, 2, n, m]
      z = sum(e | dims=[3], keep=True)     f32[b, 2, n, 1]
      p = div(e, z)                        f32[b, 2, n, m]
      y = matmul(p, v)                     f32[b, 2, n, 8]
      return y
after:
    graph example(q: f32[b, 2, n, 8], k: f32[b, 2, m, 8], v: f32[b, 2, m, 8])
      t = permute(k | dims=[0, 1, 3, 2])            f32[b, 2, 8, m]
      s = matmul(q, t)                              f32[b, 2, n, m]
      c = mul(s, 0.5)                               f32[b, 2, n, m]
      h = amax(c | dims=[3], keep)                  f32[b, 2, n, 1]
      d = sub(c, h)                                 f32[b, 2, n, m]
      e = exp(d)                                    f32[b, 2, n, m]
      z = sum(e | dims=[3], keep)                   f32[b, 2, n, 1]
      p = div(e, z)                                 f32[b, 2, n, m]
      permute_1 = permute(t | dims=[0, 1, 3, 2])    f32[b, 2, m, 8]
      attention_1, attention_2 = attention(q, permute_1, v | causal=False, scale=0.5)  f32[b, n, 2, 8], f32[b, 2, n]
      y = permute(attention_1 | dims=[0, 2, 1, 3])  f32[b, 2, n, 8]
      return y

Where a graph has the gradients too, as those of JAX have, they become the backward op in the
same way (gradients.py): a graph of gradients alone gets the forward op for the logarithms that the backward op reads.
A program of PyTorch is looked through before its autograd (frontend/attention_fusion): its forward and its backward are
two graphs here, in train steps too, and what the first saves is decided before.

Front ends write dims in many orders, take heads apart and together, and put dims of size 1 between. So it is followed
which axes a dim is made of (score_axes.py), from the first product to the second, and nothing is asked of the
order. Between them may stand scaling, numbers that are added, and masks that fill; they are done to zeros in place of
scores, which makes the mask of the op.

The op has 0 for rows whose keys are all minus infinity, where a softmax has NaN. Where such rows may be, NaN is added
to their masks. A row that is filled with a number everywhere is the mean of the values, in both.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.base.config import Config
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value
from anyshape.ir.op import OPS, type_of
from anyshape.passes.attention.gradients import Gradients, gradients_of, operands
from anyshape.passes.attention.match import (
    DEEP,
    FAR,
    NAN,
    WIDE,
    Match,
    Product,
    Readers,
    Softmaxes,
    alone,
    check_dtypes,
    operands_of,
)
from anyshape.passes.attention.score_axes import (
    Axis,
    Laid,
    Unmatched,
    Written,
    leaves,
    number_of,
    placed,
    shrunk,
    unrepeated,
)
from anyshape.passes.causal_mask import Element
from anyshape.passes.rewriter import Replay, replay, same_type
from anyshape.sym.expr import symbol

_HIDES = -2.3819763e38  # what is put in the place of one between them: a deep number that is finite in f32
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": math.inf}
_VIEWS = ("reshape", "permute")
# rows whose keys are all filled, with a number: their scores have no gradient; with minus infinity: they are NaN, and
# so are the gradients of the values that they read
_STOPPED, _LOST = "stopped", "lost"


def attention(graph: Graph, config: Config) -> Graph:
    """The graph with the op in the place of attention that is written out."""
    if sum(node.op == "matmul" for node in graph.nodes) < 2 or not any(node.op == "exp" for node in graph.nodes):
        return graph
    found = _all(graph)
    if not found:
        return graph

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        one = found.get(node.output.name) if node.op == "matmul" else None
        if one is None:
            return None
        try:
            return one.written(replay, graph, node)
        except Unmatched:
            return None

    return replay(graph, rewrite)


def _all(graph: Graph) -> dict[str, _Fused]:
    """Attention in a graph, by the names of the products that its op stands for."""
    equations, readers = Written(graph), Readers(graph)
    softmaxes = Softmaxes(equations)
    products: dict[int, tuple[Match, list[Product], list[Product]]] = {}
    for node in graph.nodes:
        if node.op != "matmul" or node.attrs or node.output.name not in readers.of:
            continue
        for side in (0, 1):
            try:
                found, above = softmaxes.below(node.inputs[side])
                dims = found.axes.of(node.inputs[side])
                summed = found.column in dims[-1 if side == 0 else -2]
                operands_of(found, dims, node, side, summed)
            except Unmatched:
                continue
            _, results, values = products.setdefault(id(found), (found, [], []))
            (results if summed else values).append(Product(node, side, dims, above))
            break
    made: dict[str, _Fused] = {}
    for found, results, values in products.values():
        try:
            one = _fused(graph, found, results, values, readers)
        except Unmatched:
            continue
        made |= {product.node.output.name: one for product in one.products()}
    return made


def _fused(graph: Graph, found: Match, results: list[Product], values: list[Product], readers: Readers) -> _Fused:
    """One attention.

    Raises:
        Unmatched: others read its scores, or its gradients are no such ones.
    """
    if len(results) > 1 or len(values) > 1:
        raise Unmatched
    depth = Axis(type_of(found.first.inputs[1 if found.turned else 0]).shape[-2 if found.turned else -1])
    one = _Fused(found, results[0] if results else None, None, depth)
    try:
        _check(one, readers)
    except Unmatched:
        if found.zeroed:
            raise
        one.gradients = gradients_of(graph, Written(graph), found, values[0] if values else None, depth)
        _check(one, readers)
    return one


def _check(one: _Fused, readers: Readers) -> None:
    products = one.products()
    if not products:
        raise Unmatched
    inside = [*one.found.inside, *(node for product in products for node in product.inside),
              *(one.gradients.inside if one.gradients is not None else ())]
    alone(inside, [product.node for product in products], readers)
    for product in products:
        check_dtypes(product.node.output.tensor.dtype, inside)


# ---- what is written


@dataclass(slots=True)
class _Operands:
    """The op's operands, and the axes of its dims. rows: what rows without a key need."""

    given: tuple[Value, ...]
    scale: float
    batch: list[Axis]
    groups: list[Axis]
    heads: list[Axis]
    query: Axis
    rows: str
    result: Value
    sums: Value


@dataclass(slots=True)
class _Fused:
    """An attention whose op stands for its products, once it is written."""

    found: Match
    result: Product | None
    gradients: Gradients | None
    depth: Axis
    forward: _Operands | None = None
    backward: tuple[Value, ...] = ()

    def products(self) -> list[Product]:
        own = [] if self.result is None else [self.result]
        return own + (self.gradients.products() if self.gradients is not None else [])

    def written(self, replay: Replay, graph: Graph, node: Node) -> Operand:
        """What stands for one of the products.

        Raises:
            Unmatched: it stays as it is.
        """
        product = next(one for one in self.products() if one.node.output.name == node.output.name)
        forward = self.forward or _forward(replay, graph, self)
        if product is self.result:
            backward, made = self.backward, _result(replay, self, forward)
        else:
            backward = self.backward or _backward(replay, self, forward)
            made = _gradient(replay, self, forward, backward, product)
        value = placed(replay, made, product.result(self.depth))
        if not same_type(value.type, node.output.type):
            raise Unmatched
        self.forward, self.backward = forward, backward
        return value


def _forward(replay: Replay, graph: Graph, one: _Fused) -> _Operands:
    """The forward op. Where gradients are asked for, its operands are those of the products as they are."""
    found, depth, trained = one.found, one.depth, one.gradients is not None
    kind, column = one.products()[0].node.output.tensor.dtype, found.column
    asked, keys = (Laid(_now(replay, x.value), x.dims) for x in operands(found, depth))
    if one.gradients is not None:
        values = one.gradients.values
    else:
        assert one.result is not None
        values = Laid(_now(replay, one.result.other), one.result.around(depth))
    by = more = 1.0
    if not trained:
        (below, by), (under, more) = _unscaled(replay, asked.value), _unscaled(replay, keys.value)
        asked, keys = Laid(_now(replay, below), asked.dims), Laid(_now(replay, under), keys.dims)
    asked, kept, given = (Laid(_in_dtype(replay, _now(replay, x.value), kind), x.dims) for x in (asked, keys, values))
    if not trained:
        kept, given = unrepeated(replay, kept), unrepeated(replay, given)
    own = leaves(axis for x in (kept, given) for dim in x.dims for axis in dim)
    lead = leaves(found.lead)
    shared = [axis for place, axis in enumerate(lead) if not place or axis in own]  # keys are repeated along others
    # a leading axis that is alone is heads where it is a number, as theirs mostly is
    single = len(shared) == 1 and (len(lead) > 1 or not isinstance(shared[0].size, int))
    apart = len(shared) if single else max(len(shared) - 1, 0)
    batch, groups = shared[:apart], shared[apart:]
    query = _query(found)
    heads = [*groups, *(axis for axis in (*lead, *leaves(found.rows)) if axis not in shared and axis is not query)]
    scale, mask, rows = _mask(replay, graph, found, [batch, heads, [query], [column]], trained)
    q = placed(replay, asked, [batch, heads, [query], [depth]])
    if rows == _STOPPED:
        assert mask is not None
        q = replay.op("where", _dead(replay, mask), 0.0, q)
    given_ = (q, placed(replay, kept, [batch, groups, [column], [depth]]),
              placed(replay, given, [batch, groups, [column], [depth]]), *(() if mask is None else (mask,)))
    attrs: dict[str, Attr] = {"causal": False, "scale": scale * by * more}
    result, sums = replay.multi("attention", given_, tuple(attrs.items()), OPS["attention"].infer(given_, attrs))
    return _Operands(given_, scale * by * more, batch, groups, heads, query, rows, result, sums)


def _now(replay: Replay, operand: Operand) -> Value:
    value = replay.now(operand)
    if not isinstance(value, Value) or (replay.producer(value) is None and all(
            value.name != one.name for one in replay.graph.inputs)):
        raise Unmatched  # it comes later
    return value


def _dead(replay: Replay, mask: Value) -> Value:
    """Rows whose keys are all filled."""
    return replay.op("le", replay.op("amax", mask, dims=(3,), keep=True), DEEP)


def _lost(replay: Replay, mask: Value) -> Value:
    """0 for each row, NaN for one whose keys are all minus infinity."""
    return replay.op("mul", replay.op("amax", mask, dims=(3,), keep=True), 0.0)


def _result(replay: Replay, one: _Fused, forward: _Operands) -> Laid:
    batch, heads, query, result = forward.batch, forward.heads, forward.query, forward.result
    if one.found.zeroed == NAN:
        lost = placed(replay, Laid(replay.op("isnan", forward.sums), (tuple(batch), tuple(heads), (query,))),
                      [batch, [query], heads, []])
        result = replay.op("where", lost, 0.0, result)
    elif forward.rows == _LOST:
        lost = replay.op("permute", _lost(replay, forward.given[3]), dims=(0, 2, 1, 3))
        result = _added(replay, result, lost)
    return Laid(result, (tuple(batch), (query,), tuple(heads), (one.depth,)))


def _added(replay: Replay, x: Value, lost: Value) -> Value:
    return replay.op("add", x, lost if lost.tensor.dtype == x.tensor.dtype else replay.op(
        "cast", lost, dtype=x.tensor.dtype))


def _backward(replay: Replay, one: _Fused, forward: _Operands) -> tuple[Value, ...]:
    """The backward op."""
    assert one.gradients is not None
    kind, given = forward.result.tensor.dtype, one.gradients.gradient
    wide = WIDE[kind]
    gradient = placed(replay, Laid(_in_dtype(replay, _now(replay, given.value), kind), given.dims),
                      [forward.batch, forward.heads, [forward.query], [one.depth]])
    result = replay.op("permute", forward.result, dims=(0, 2, 1, 3))
    pair = [x if kind == wide else replay.op("cast", x, dtype=wide) for x in (gradient, result)]
    products = replay.op("sum", replay.op("mul", *pair), dims=(3,), keep=False)
    operands = gradient, *forward.given[:3], forward.sums, products, *forward.given[3:]
    attrs: dict[str, Attr] = {"causal": False, "scale": forward.scale}
    return replay.multi("attention_backward", operands, tuple(attrs.items()),
                        OPS["attention_backward"].infer(operands, attrs))


def _gradient(replay: Replay, one: _Fused, forward: _Operands, backward: Sequence[Value], product: Product) -> Laid:
    """What the backward op has for a product."""
    assert one.gradients is not None
    batch, groups, heads, column = forward.batch, forward.groups, forward.heads, one.found.column
    of_query, of_key, of_value = backward
    if product is one.gradients.of_query:
        if forward.rows == _STOPPED:
            of_query = replay.op("where", replay.op("permute", _dead(replay, forward.given[3]), dims=(0, 2, 1, 3)),
                                 0.0, of_query)
        return Laid(of_query, (tuple(batch), (forward.query,), tuple(heads), (one.depth,)))
    if product is one.gradients.of_value and forward.rows == _LOST:
        lost = _lost(replay, forward.given[3])
        if lost.tensor.shape[1] != 1 and groups != heads:
            raise Unmatched
        lost = replay.op("permute", replay.op("sum", lost, dims=(2,), keep=True), dims=(0, 2, 1, 3))
        of_value = _added(replay, of_value, lost)
    return Laid(of_value if product is one.gradients.of_value else of_key,
                (tuple(batch), (column,), tuple(groups), (one.depth,)))


def _query(found: Match) -> Axis:
    """The axis of queries; heads that share keys are others."""
    size = found.column.size
    return max(leaves(found.rows), key=lambda axis: (axis.size == size, not isinstance(axis.size, int),
                                             axis.size if isinstance(axis.size, int) else 0))


def _unscaled(replay: Replay, operand: Operand) -> tuple[Operand, float]:
    """Queries or keys before they were multiplied with a number, and the number."""
    node = replay.producer(operand)
    if node is not None and node.op in _VIEWS:
        below, by = _unscaled(replay, node.inputs[0])
        return (operand, 1.0) if by == 1.0 else (replay.op(node.op, below, **dict(node.attrs)), by)
    if node is None or node.op not in ("mul", "div") or node.output.tensor.dtype not in ("f32", "f64"):
        return operand, 1.0
    for x, number in (node.inputs, node.inputs[::-1])[:2 if node.op == "mul" else 1]:
        if isinstance(number, float) and 0 < number < math.inf and isinstance(x, Value) \
                and x.tensor.shape == node.output.tensor.shape:
            below, by = _unscaled(replay, x)
            return below, by * number if node.op == "mul" else by / number
    return operand, 1.0


def _in_dtype(replay: Replay, operand: Operand, dtype: str) -> Value:
    """The operand in this dtype, which it was cast from."""
    assert isinstance(operand, Value)
    if operand.tensor.dtype == dtype:
        return operand
    node = replay.producer(operand)
    if node is not None and node.op == "cast":
        below = node.inputs[0]
        if isinstance(below, Value) and below.tensor.dtype == dtype:
            return below
    if node is None or node.op not in _VIEWS:
        raise Unmatched
    return replay.op(node.op, _in_dtype(replay, node.inputs[0], dtype), **dict(node.attrs))


def _mask(replay: Replay, graph: Graph, found: Match, order: list[list[Axis]],
          trained: bool) -> tuple[float, Value | None, str]:
    """What scores are multiplied with, what is added to them: the steps, done to zeros; and what rows need whose keys
    may all be masked, where gradients are asked for: `_STOPPED` or `_LOST`."""
    wide = WIDE[found.first.output.tensor.dtype]
    fills, adds = _fills(found), any(node.op in ("add", "sub") for node, _ in found.steps)
    deep = all(value <= DEEP for value in fills)
    mask = _Mask(replay, found, order, wide, None if deep else _HIDES)
    bias = mask.run()
    if bias is None or (fills and deep and not adds and -math.inf not in fills and not trained):
        return mask.scale, bias, ""
    if _sees_first(replay, graph, bias):
        if not deep:  # the numbers of the program, among which may be others
            mask = _Mask(replay, found, order, wide, None)
            bias = mask.run()
        return mask.scale, bias, ""
    if not deep and (adds or -math.inf in fills):
        raise Unmatched  # which of them is the larger counts where a row has no key
    if trained and fills:
        if adds or (-math.inf in fills and any(value > -math.inf for value in fills)):
            raise Unmatched  # the gradient of what they mask is not the same
        return mask.scale, bias, _LOST if -math.inf in fills else _STOPPED
    if found.zeroed or (not adds and -math.inf not in fills) or _finite(replay, bias):
        return mask.scale, bias, ""
    top = replay.op("amax", bias, dims=(3,), keep=True)
    return mask.scale, replay.op("add", bias, replay.op("mul", top, 0.0)), ""


def _fills(found: Match) -> list[float]:
    """What is put in the place of scores, as it is at the softmax.

    Raises:
        Unmatched: scores may come near, or masked scores change in another way than by a factor.
    """
    fills: list[float] = []
    for node, place in found.steps:
        kind = node.output.tensor.dtype
        if node.op == "where":
            fills.append(number_of(node.inputs[3 - place]))
        elif node.op in ("mul", "div"):
            number = number_of(node.inputs[1 - place])
            by = number if node.op == "mul" else 1 / number if number else 0.0
            if not 0 < by < math.inf:
                raise Unmatched
            if any(value > DEEP for value in fills):
                raise Unmatched
            fills = [value * by if abs(value * by) <= _LARGEST[kind] else -math.inf for value in fills]
        if any(not value <= max(FAR, -_LARGEST[kind]) for value in fills):
            raise Unmatched
    return fills


def _sees_first(replay: Replay, graph: Graph, bias: Value) -> bool:
    """Whether every row sees its first key, whatever the sizes."""
    front = [0 if size == 1 else symbol(f"mask {part}")
             for size, part in zip(bias.tensor.shape[:3], ("batch", "head", "row"), strict=True)]
    first = Element(replay.made, graph.facts).at(bias, (*front, 0))
    return type(first) is float and math.isfinite(first)


def _finite(replay: Replay, operand: Operand) -> bool:
    """Whether it is chosen from numbers that are finite."""
    if not isinstance(operand, Value):
        return isinstance(operand, (int, float)) and math.isfinite(operand)
    node = replay.producer(operand)
    if node is None or node.op not in ("where", "full", *_VIEWS, "broadcast"):
        return False
    return all(_finite(replay, one) for one in (node.inputs[1:] if node.op == "where" else node.inputs[:1]))


class _Mask:
    """The steps between the first product and the softmax, done to zeros. hides: what is filled in place of numbers."""

    def __init__(self, replay: Replay, found: Match, order: list[list[Axis]], wide: str, hides: float | None) -> None:
        self.replay = replay
        self.found = found
        self.order = order
        self.wide = wide
        self.hides = hides
        self.scale = 1.0

    def run(self) -> Value | None:
        bias: Value | None = None
        for node, place in self.found.steps:
            if node.op in ("mul", "div"):
                number = number_of(node.inputs[1 - place])
                self.scale = self.scale * number if node.op == "mul" else self.scale / number
                bias = None if bias is None else self.replay.op(node.op, bias, number)
            elif node.op == "where":
                bias = self.filled(node, place, bias)
            else:
                term = self.term(node, place, node.inputs[1 - place])
                if bias is None:
                    bias = term if node.op == "add" else self.replay.op("neg", term)
                else:
                    bias = self.replay.op(node.op, bias, term)
        return bias

    def filled(self, node: Node, place: int, bias: Value | None) -> Value:
        number = number_of(node.inputs[3 - place])
        if self.hides is not None and number > -math.inf:
            number = self.hides
        chosen = self.term(node, place, node.inputs[0])
        below: Operand = bias if bias is not None else self.replay.op("full", 0.0, shape=(), dtype=self.wide)
        pair = (below, number) if place == 1 else (number, below)
        return self.replay.op("where", chosen, *pair)

    def term(self, node: Node, place: int, operand: Operand) -> Value:
        """An operand of a step, as small as it is, with the dims of the op's mask."""
        operand = self.replay.now(operand)
        if not isinstance(operand, Value):
            raise Unmatched
        scores = node.inputs[place]
        shape = type_of(scores).shape
        if node.output.tensor.shape != shape or operand.tensor.rank > len(shape):
            raise Unmatched
        small = shrunk(self.replay, operand)
        dims = self.found.axes.of(scores)[len(shape) - small.tensor.rank:]
        kinds = tuple(() if size == 1 else dim for size, dim in zip(small.tensor.shape, dims, strict=True))
        x = placed(self.replay, Laid(small, kinds), self.order)
        return x if x.tensor.dtype in ("bool", self.wide) else self.replay.op("cast", x, dtype=self.wide)

