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

This is for graphs that no autograd comes after: of StableHLO and ONNX, and of PyTorch without gradients. A program of
PyTorch is looked through before that (frontend/attention_fusion), so that its backward is fused too.

Front ends write dims in many orders, take heads apart and together, and put dims of size 1 between. So it is followed
which axes a dim is made of (passes/score_axes.py), from the first product to the second, and nothing is asked of the
order. Between them may stand scaling, numbers that are added, and masks that fill; they are done to zeros in place of
scores, which makes the mask of the op.

The op has 0 for rows whose keys are all minus infinity, where a softmax has NaN. Where such rows may be, NaN is added
to their masks. A row that is filled with a number everywhere is the mean of the values, in both.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field

from anyshape.base.config import Config
from anyshape.ir.graph import Attr, Graph, Node, Operand, Value, has_effect
from anyshape.ir.op import OPS, row, type_of
from anyshape.passes.causal_mask import Element
from anyshape.passes.rewriter import Replay, replay
from anyshape.passes.score_axes import Axes, Axis, Laid, Unmatched, leaves, placed, shrunk, unrepeated
from anyshape.sym.expr import symbol

_FAR = -1e8  # a number to fill with that no score comes near
_DEEP = -1e30  # one beside which a score is nothing
_HIDES = -2.3819763e38  # what is put in the place of one between them: a deep number that is finite in f32
_LARGEST = {"f16": 65504.0, "bf16": 3.3895313892515355e38, "f32": 3.4028234663852886e38, "f64": math.inf}
_WIDE = {"f16": "f32", "bf16": "f32", "f32": "f32", "f64": "f64"}  # dtype of products -> of scores and masks
_HIDDEN, _NAN = "hidden", "nan"  # rows that are 0
_VIEWS = ("reshape", "permute")


def attention(graph: Graph, config: Config) -> Graph:
    """The graph with the op in the place of attention that is written out."""
    if sum(node.op == "matmul" for node in graph.nodes) < 2 or not any(node.op == "exp" for node in graph.nodes):
        return graph
    readers = _Readers(graph)

    def rewrite(replay: Replay, node: Node) -> Operand | None:
        if node.op != "matmul" or node.attrs:
            return None
        for side in (0, 1):
            try:
                return _written(replay, graph, _found(replay, node, side, readers))
            except Unmatched:
                continue
        return None

    return replay(graph, rewrite)


class _Readers:
    """Who reads a value, of those whose results are needed; None stands for the caller."""

    def __init__(self, graph: Graph) -> None:
        self.of: dict[str, set[str | None]] = {value.name: {None} for value in graph.roots()}
        for node in reversed(graph.nodes):
            if has_effect(node) or any(value.name in self.of for value in node.outputs):
                for value in node.values():
                    self.of.setdefault(value.name, set()).add(node.outputs[0].name if node.outputs else None)


@dataclass(slots=True)
class _Match:
    """Attention: its products, the steps between the first and the softmax, and the axes that dims are made of.

    steps: with the place of the scores among their operands. axes: of scores at each step, before it.
    lead: axes that keys have too; rows: of queries alone. turned: keys are the first product's left operand. side:
    the place of the weights in the second product. zeroed: rows that are 0, those whose keys are all
    masked or those that would be NaN.
    """

    first: Node
    last: Node
    side: int
    axes: Axes
    steps: list[tuple[Node, int]] = field(default_factory=list)
    lead: list[Axis] = field(default_factory=list)
    rows: list[Axis] = field(default_factory=list)
    column: Axis = field(default_factory=lambda: Axis(0))
    turned: bool = False
    zeroed: str = ""


# ---- what is there


def _found(replay: Replay, last: Node, side: int, readers: _Readers) -> _Match:
    weights = last.inputs[side]
    inside: list[Node] = []
    guard = replay.producer(_back(replay, weights, inside))
    total = guard
    if guard is not None and guard.op == "where":
        place = 2 if guard.inputs[1] == 0 else 1
        if guard.inputs[3 - place] != 0:
            raise Unmatched
        inside.append(guard)
        total = replay.producer(_back(replay, guard.inputs[place], inside))
    else:
        guard = None
    if total is None or total.op != "div":
        raise Unmatched
    inside.append(total)
    lifted = _made(replay, total.inputs[0], "exp", inside)
    less = _made(replay, lifted.inputs[0], "sub", inside)
    first, steps = _scores(replay, less.inputs[0], inside)
    if _WIDE.get(first.output.tensor.dtype) is None or first.output.tensor.device != "cpu" or first.attrs:
        raise Unmatched
    axes = Axes(replay, first, {node.output.name: place for node, place in steps})
    found = _Match(first, last, side, axes, steps)
    _softmax(replay, found, total, less, inside)
    if guard is not None:
        axes.places[guard.output.name] = place
        found.zeroed = _empty_rows(replay, found, guard.inputs[0], place == 2, guard.inputs[place],
                                   less.inputs[0], inside)
    _split(found, weights)
    _alone(found, inside, readers)
    _dtypes(found, inside)
    return found


def _back(replay: Replay, operand: Operand, inside: list[Node]) -> Operand:
    """What casts and views show, which are noted."""
    while (node := replay.producer(operand)) is not None and node.op in (*_VIEWS, "cast"):
        inside.append(node)
        operand = node.inputs[0]
    return operand


def _made(replay: Replay, operand: Operand, op: str, inside: list[Node]) -> Node:
    node = replay.producer(_back(replay, operand, inside))
    if node is None or node.op != op:
        raise Unmatched
    inside.append(node)
    return node


def _scores(replay: Replay, operand: Operand, inside: list[Node]) -> tuple[Node, list[tuple[Node, int]]]:
    """The first product, and the steps from it on, in order."""
    node = replay.producer(_back(replay, operand, inside))
    if node is None:
        raise Unmatched
    inside.append(node)
    if node.op == "matmul":
        return node, []
    for place in _STEPS.get(node.op, ()):
        kept = len(inside)
        try:
            first, steps = _scores(replay, node.inputs[place], inside)
        except Unmatched:
            del inside[kept:]
            continue
        return first, [*steps, (node, place)]
    raise Unmatched


# op -> where the scores may stand among its operands
_STEPS: dict[str, tuple[int, ...]] = {"mul": (0, 1), "div": (0,), "add": (0, 1), "sub": (0,), "where": (1, 2)}


def _softmax(replay: Replay, found: _Match, total: Node, less: Node, inside: list[Node]) -> None:
    """What is taken off is the largest score of a row, what is divided by the sum of it, along one axis."""
    axes = found.axes
    scores = axes.of(less.inputs[0])
    top = _spread(replay, less.inputs[1], inside)
    if top.op == "maximum":
        place = next((at for at in (0, 1) if top.inputs[at] == -math.inf), None)
        if place is None:
            raise Unmatched
        inside.append(top)
        axes.places[top.output.name] = 1 - place
        top = _spread(replay, top.inputs[1 - place], inside)
    below = _spread(replay, total.inputs[1], inside)
    if top.op != "amax" or below.op != "sum":
        raise Unmatched
    inside += [top, below]
    for one, other in ((top, less), (below, total)):
        if not _same(replay, _back(replay, one.inputs[0], inside), _back(replay, other.inputs[0], inside), inside):
            raise Unmatched
    along = {axis for operand in (top, below) for axis in axes.reduced(operand)}
    if len(along) != 1:
        raise Unmatched
    found.column, = along
    row = tuple(() if found.column in dim else dim for dim in scores)
    if (found.column,) not in scores or axes.of(less.inputs[1]) != row:
        raise Unmatched
    weights = axes.of(total.inputs[0])
    if axes.of(total.inputs[1]) != tuple(() if found.column in dim else dim for dim in weights):
        raise Unmatched


def _spread(replay: Replay, operand: Operand, inside: list[Node]) -> Node:
    """What makes a number for each row, below views and casts that spread it out."""
    while (node := replay.producer(operand)) is not None and node.op in (*_VIEWS, "cast", "broadcast"):
        inside.append(node)
        operand = node.inputs[0]
    if node is None:
        raise Unmatched
    return node


def _same(replay: Replay, a: Operand, b: Operand, inside: list[Node], depth: int = 12) -> bool:
    """The same value, or equal equations of the same values, as programs have before they are made one; those of `a`
    are noted."""
    if a == b:
        return True
    one, other = replay.producer(a), replay.producer(b)
    if one is None or other is None or not depth or (one.op, one.attrs) != (other.op, other.attrs) \
            or len(one.inputs) != len(other.inputs) or len(one.outputs) != 1 or has_effect(one) or row(one).random:
        return False
    inside.append(one)
    return all(_same(replay, x, y, inside, depth - 1) for x, y in zip(one.inputs, other.inputs, strict=True))


def _empty_rows(replay: Replay, found: _Match, condition: Operand, holds: bool, weights: Operand, scores: Operand,
                inside: list[Node]) -> str:
    """What a condition says of each row: that its scores, or all that is added to them, are minus infinity; or that its
    weights are NaN.

    Raises:
        Unmatched: it says something else.
    """
    between: list[Node] = []
    equal = most = _spread(replay, condition, between)
    if holds and equal.op == "isnan" and _same(replay, equal.inputs[0], weights, between):
        inside += [*between, equal]
        return _NAN
    if most.op == "all":
        equal = _spread(replay, most.inputs[0], between)
    elif equal.op == "eq":
        most = _spread(replay, equal.inputs[0], between)
    if not holds or equal.op != "eq" or equal.inputs[1] != -math.inf or most.op not in ("all", "amax"):
        raise Unmatched
    what = most.inputs[0] if most.op == "amax" else equal.inputs[0]
    assert isinstance(what, Value) and isinstance(condition, Value)
    if most.attr("dims") != (what.tensor.rank - 1,) or condition.tensor.shape != (*what.tensor.shape[:-1], 1) \
            or any(node.op == "permute" for node in between) or found.axes.of(scores)[-1] != (found.column,):
        raise Unmatched
    inside += [*between, equal, most]
    terms = [node.inputs[1 - place] for node, place in found.steps if node.op == "add"]
    whole = [scores] if any(node.op != "mul" for node, _ in found.steps) else []
    kept = [node for node, _ in found.steps if node.op not in ("mul", "div")]
    for one in [*whole, *(terms if len(kept) == 1 else [])]:
        noted: list[Node] = []
        if _same(replay, _back(replay, what, noted), _back(replay, one, noted), noted):
            inside += noted
            return _HIDDEN
    raise Unmatched


def _split(found: _Match, weights: Operand) -> None:
    """Which axes keys have, which queries alone; the second product takes those and no others."""
    axes, first, last = found.axes, found.first, found.last
    dims = axes.of(weights)  # which may take axes apart
    lead, (above, across) = axes.of(first.output)[:-2], axes.of(first.output)[-2:]
    found.turned = found.column in above
    if (above if found.turned else across) != (found.column,):
        raise Unmatched
    found.lead, found.rows = [axis for dim in lead for axis in dim], list(across if found.turned else above)
    shared, pair = dims[:-2], dims[-2:]
    summed, kept = pair if found.side else pair[::-1]
    if summed != (found.column,) or {axis for dim in shared for axis in dim} != set(found.lead) \
            or set(kept) != set(found.rows) or not found.rows:
        raise Unmatched
    depth = type_of(first.inputs[1 if found.turned else 0]).shape[-2 if found.turned else -1]
    if depth != type_of(last.inputs[1 - found.side]).shape[-2 if found.side else -1]:
        raise Unmatched


def _alone(found: _Match, inside: list[Node], readers: _Readers) -> None:
    """Nobody else reads what would not be there any more."""
    names: set[str | None] = {found.last.output.name, *(node.output.name for node in inside)}
    if any(not readers.of.get(node.output.name, set()) <= names for node in inside):
        raise Unmatched


def _dtypes(found: _Match, inside: list[Node]) -> None:
    """Steps are in the dtype of the products, or in a wider one."""
    kind = found.last.output.tensor.dtype
    allowed = (kind, _WIDE.get(kind), "bool")
    if any(node.output.tensor.dtype not in allowed for node in inside):
        raise Unmatched


# ---- what is written


def _written(replay: Replay, graph: Graph, found: _Match) -> Operand:
    """The op, and its result with the dims of the second product."""
    first, last, column, kind = found.first, found.last, found.column, found.last.output.tensor.dtype
    (queries, by), (keys, more) = (_unscaled(replay, one) for one in first.inputs[::-1 if found.turned else 1])
    dims, weights = found.axes.of(first.output), found.axes.of(last.inputs[found.side])
    depth = Axis(type_of(queries).shape[-2 if found.turned else -1])
    rows, columns = dims[-2:][::-1] if found.turned else dims[-2:]
    # each operand's dims as the products have them
    asked = Laid(_in_dtype(replay, queries, kind), (*dims[:-2], *_turned((rows, (depth,)), found.turned)))
    kept, given = (unrepeated(replay, Laid(_in_dtype(replay, operand, kind), have)) for operand, have in (
        (keys, (*dims[:-2], *_turned(((depth,), columns), found.turned))),
        (last.inputs[1 - found.side], (*weights[:-2], *_turned((columns, (depth,)), found.side == 1)))))
    own = leaves(axis for one in (kept, given) for dim in one.dims for axis in dim)
    lead = leaves(found.lead)
    shared = [axis for place, axis in enumerate(lead) if not place or axis in own]  # keys are repeated along others
    # a leading axis that is alone is heads where it is a number, as theirs mostly is
    alone = len(shared) == 1 and (len(lead) > 1 or not isinstance(shared[0].size, int))
    apart = len(shared) if alone else max(len(shared) - 1, 0)
    batch, groups = shared[:apart], shared[apart:]
    query = _query(found)
    heads = [*groups, *(axis for axis in (*lead, *leaves(found.rows)) if axis not in shared and axis is not query)]
    scale, mask = _mask(replay, graph, found, [batch, heads, [query], [column]])
    operands = (placed(replay, asked, [batch, heads, [query], [depth]]),
                placed(replay, kept, [batch, groups, [column], [depth]]),
                placed(replay, given, [batch, groups, [column], [depth]]), *(() if mask is None else (mask,)))
    attrs: dict[str, Attr] = {"causal": False, "scale": scale * by * more}
    result, sums = replay.multi("attention", operands, tuple(attrs.items()), OPS["attention"].infer(operands, attrs))
    if found.zeroed == _NAN:
        lost = placed(replay, Laid(replay.op("isnan", sums), (tuple(batch), tuple(heads), (query,))),
                      [batch, [query], heads, []])
        result = replay.op("where", lost, 0.0, result)
    return placed(replay, Laid(result, (tuple(batch), (query,), tuple(heads), (depth,))),
                  [*weights[:-2], *_turned((weights[-1 if found.side else -2], (depth,)), found.side == 1)])


def _turned(pair: tuple[tuple[Axis, ...], tuple[Axis, ...]], on: bool) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    return pair[::-1] if on else pair


def _query(found: _Match) -> Axis:
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


def _mask(replay: Replay, graph: Graph, found: _Match,
          order: list[list[Axis]]) -> tuple[float, Value | None]:
    """What scores are multiplied with, and what is added to them: the steps, done to zeros."""
    wide = _WIDE[found.last.output.tensor.dtype]
    fills, adds = _fills(found), any(node.op in ("add", "sub") for node, _ in found.steps)
    deep = all(value <= _DEEP for value in fills)
    mask = _Mask(replay, found, order, wide, None if deep else _HIDES)
    bias = mask.run()
    if bias is None or (fills and deep and not adds and -math.inf not in fills):
        return mask.scale, bias
    if _sees_first(replay, graph, bias):
        if not deep:  # the numbers of the program, among which may be others
            mask = _Mask(replay, found, order, wide, None)
            bias = mask.run()
        return mask.scale, bias
    if not deep and (adds or -math.inf in fills):
        raise Unmatched  # which of them is the larger counts where a row has no key
    if found.zeroed or (not adds and -math.inf not in fills) or _finite(replay, bias):
        return mask.scale, bias
    top = replay.op("amax", bias, dims=(3,), keep=True)
    return mask.scale, replay.op("add", bias, replay.op("mul", top, 0.0))


def _fills(found: _Match) -> list[float]:
    """What is put in the place of scores, as it is at the softmax.

    Raises:
        Unmatched: scores may come near, or masked scores change in another way than by a factor.
    """
    fills: list[float] = []
    for node, place in found.steps:
        kind = node.output.tensor.dtype
        if node.op == "where":
            fills.append(_number(node.inputs[3 - place]))
        elif node.op in ("mul", "div"):
            number = _number(node.inputs[1 - place])
            by = number if node.op == "mul" else 1 / number if number else 0.0
            if not 0 < by < math.inf:
                raise Unmatched
            if any(value > _DEEP for value in fills):
                raise Unmatched
            fills = [value * by if abs(value * by) <= _LARGEST[kind] else -math.inf for value in fills]
        if any(not value <= max(_FAR, -_LARGEST[kind]) for value in fills):
            raise Unmatched
    return fills


def _number(operand: Operand) -> float:
    if isinstance(operand, bool) or not isinstance(operand, (int, float)):
        raise Unmatched
    return float(operand)


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

    def __init__(self, replay: Replay, found: _Match, order: list[list[Axis]], wide: str, hides: float | None) -> None:
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
                number = _number(node.inputs[1 - place])
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
        number = _number(node.inputs[3 - place])
        if self.hides is not None and number > -math.inf:
            number = self.hides
        chosen = self.term(node, place, node.inputs[0])
        below: Operand = bias if bias is not None else self.replay.op("full", 0.0, shape=(), dtype=self.wide)
        pair = (below, number) if place == 1 else (number, below)
        return self.replay.op("where", chosen, *pair)

    def term(self, node: Node, place: int, operand: Operand) -> Value:
        """An operand of a step, as small as it is, with the dims of the op's mask."""
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

