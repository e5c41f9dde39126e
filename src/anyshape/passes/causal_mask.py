"""Causal-mask detection: masks of attention that hide the future are found, so that what they hide is not computed.

before:
    graph example(q: f32[b, 2, n, 8], k: f32[b, 2, n, 8], v: f32[b, 2, n, 8])
      i = iota(| count=n, start=0, step=1, dtype="i64")  i64[n]
      c = reshape(i | shape=[n, 1])                      i64[n, 1]
      s = le(i, c)                                       bool[n, n]
      z = full(0.0 | shape=[], dtype="f32")              f32[]
      m = where(s, z, -inf)                          f32[n, n]
      w = reshape(m | shape=[1, 1, n, n])                f32[1, 1, n, n]
      y, l = attention(q, k, v, w | causal=False, scale=0.5)  f32[b, n, 2, 8], f32[b, 2, n]
      return y
after:
    graph example(q: f32[b, 2, n, 8], k: f32[b, 2, n, 8], v: f32[b, 2, n, 8])
      i = iota(| count=n, start=0, step=1, dtype="i64")  i64[n]
      c = reshape(i | shape=[n, 1])                      i64[n, 1]
      s = le(i, c)                                       bool[n, n]
      z = full(0.0 | shape=[], dtype="f32")              f32[]
      m = where(s, z, -inf)                              f32[n, n]
      w = reshape(m | shape=[1, 1, n, n])                f32[1, 1, n, n]
      y, l = attention(q, k, v | causal=True, scale=0.5)  f32[b, n, 2, 8], f32[b, 2, n]
      return y

One element of the mask is worked out on sizes, by the bodies of the rows that it is made of (ir/op.py): at row i and
column i + 1 + e, where i and e may be anything, it must be minus infinity. A mask that is 0 everywhere else is dropped,
otherwise it is added to what is left. A number below -1e30 counts as minus infinity where the mask is dropped, as every
row then sees itself.

What is hidden is not read either: a NaN among later keys, which PyTorch's sums hand on, stays out of earlier rows.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import Index, row
from anyshape.sym.expr import Expr, Size, symbol
from anyshape.sym.facts import Facts
from anyshape.sym.prover import prove_equal, prove_nonnegative

_OPERANDS = {"attention": 3, "attention_backward": 6}  # before the mask
_INFINITE = -1e30
_KINDS = frozenset(("pointwise", "view", "index"))
_WIDE = ("i64", "i32", "bool")  # dtypes that hold what is computed on sizes, and comparisons of them
_MOST = 2000  # equations looked at for one element
Known = Any  # an int or Expr, a bool, a float; None: not known


def causal_mask(graph: Graph, config: Config) -> Graph:
    """The graph with attention marked as causal where its mask hides the future."""
    if not any(node.op in _OPERANDS for node in graph.nodes):
        return graph
    producers = graph.producers()
    found: dict[str, tuple[bool, bool]] = {}
    nodes = []
    for node in graph.nodes:
        count = _OPERANDS.get(node.op, len(node.inputs))
        if len(node.inputs) > count and not node.attr("causal"):
            mask = node.inputs[count]
            assert isinstance(mask, Value)
            if mask.name not in found:
                found[mask.name] = _kind(mask, producers, graph.facts)
            hides, only = found[mask.name]
            if hides:
                attrs = tuple((key, True if key == "causal" else value) for key, value in node.attrs)
                node = Node(node.op, node.inputs[:count] if only else node.inputs, attrs, node.outputs, node.where)
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes)) if any(found_ for found_, _ in found.values()) else graph


def _kind(mask: Value, producers: Mapping[str, Node], facts: Facts) -> tuple[bool, bool]:
    """Whether a mask hides the future, and whether that is all it does."""
    if 1 in mask.tensor.shape[2:]:
        return False, False
    batch, head, least, more = (symbol(f"mask {part}") for part in ("batch", "head", "least", "more"))
    front = tuple(0 if size == 1 else index for size, index in zip(mask.tensor.shape, (batch, head), strict=False))
    later = Element(producers, facts).at(mask, (*front, least, least + more + 1))
    earlier = Element(producers, facts).at(mask, (*front, least + more, least))
    only = type(earlier) is float and earlier == 0
    hides = type(later) is float and (later == -float("inf") or (only and later <= _INFINITE))
    return hides, hides and only


class Element:
    """Evaluates one element by the bodies of rows: the protocol `Body` over what is known of numbers."""

    def __init__(self, producers: Mapping[str, Node], facts: Facts) -> None:
        self.producers = producers
        self.facts = facts
        self.memo: dict[tuple[str, Index], Known] = {}

    def at(self, operand: Operand, index: Index) -> Known:
        try:
            return self.read(operand, index)
        except _Unknown:
            return None

    # the protocol

    def read(self, operand: Operand, index: Index) -> Known:
        if not isinstance(operand, Value):
            return operand
        node = self.producers.get(operand.name)
        if node is None:
            return None
        body = row(node).body
        if body is None or row(node).kind not in _KINDS or row(node).random:
            return None
        key = operand.name, index
        if key not in self.memo:
            if len(self.memo) > _MOST:
                raise _Unknown
            self.memo[key] = None
            self.memo[key] = body(self, node, index)
        return self.memo[key]

    def read_where(self, mask: Known, operand: Operand, index: Index, other: Known) -> Known:
        if mask is None:
            return None
        return self.read(operand, index) if mask else other

    def apply(self, op: str, *args: Known, dtype: str) -> Known:
        if op == "cast":
            return _cast(args[0], dtype)
        if any(map(_whole, args)) and dtype not in _WIDE:
            return None  # it may not be that number any more
        function = _KNOWN.get(op)
        return None if function is None else function(self, *args)

    def constant(self, value: Known, dtype: str) -> Known:
        return value

    def index(self, size: Size) -> Known:
        return size

    def as_index(self, register: Known) -> Size:
        if not _whole(register):
            raise _Unknown
        return register  # type: ignore[no-any-return]

    def checked_index(self, register: Known, size: Size, wrap: bool) -> Size:
        raise _Unknown

    def check(self, holds: Known, code: int) -> None:
        """Nothing is known of a call that fails."""

    # what is known of results

    def least(self, a: Known, b: Known, gap: int) -> bool | None:
        """Whether a + gap <= b."""
        return prove_nonnegative(self.facts, b - a - gap) if _whole(a) and _whole(b) else None

    def both(self, a: Known, b: Known) -> Known:
        if a is False or b is False:
            return False
        return True if a is True and b is True else None

    def either(self, a: Known, b: Known) -> Known:
        if a is True or b is True:
            return True
        return False if a is False and b is False else None

    def equal(self, a: Known, b: Known) -> Known:
        if _whole(a) and _whole(b):
            return prove_equal(self.facts, a, b)
        return a == b if type(a) is type(b) and isinstance(a, bool | float) else None

    def choose(self, condition: Known, a: Known, b: Known) -> Known:
        if condition is None:
            return a if type(a) is type(b) and a == b else None
        return a if condition else b


def _invert(_: Element, a: Known) -> Known:
    return not a if isinstance(a, bool) else None


def _whole(register: Known) -> bool:
    return isinstance(register, int | Expr) and not isinstance(register, bool)


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[..., Known]:
    return lambda _, a, b: function(a, b) if _whole(a) and _whole(b) else None


def _sum(a: Known, b: Known) -> Known:
    """Of whole numbers, and of others where nothing is rounded."""
    if type(a) is type(b) is float:
        return a + b if 0 in (a, b) or math.isinf(a) or math.isinf(b) else None
    return a + b if _whole(a) and _whole(b) else None


def _cast(a: Known, dtype: str) -> Known:
    if dtype == "bool" and type(a) in (int, float):
        return a != 0
    if _whole(a):
        return a if dtype in _WIDE and dtype != "bool" else None
    if isinstance(a, bool):
        return a if dtype == "bool" else int(a) if dtype in _WIDE else float(a)
    return a if dtype.startswith(("f", "bf")) else None


# operations of the loop language (kernel/loop_ir/program.py) that are followed
_KNOWN: dict[str, Callable[..., Known]] = {
    "le": lambda e, a, b: e.least(a, b, 0),
    "lt": lambda e, a, b: e.least(a, b, 1),
    "ge": lambda e, a, b: e.least(b, a, 0),
    "gt": lambda e, a, b: e.least(b, a, 1),
    "eq": Element.equal,
    "ne": lambda e, a, b: _invert(e, e.equal(a, b)),
    "and": Element.both,
    "or": Element.either,
    "not": _invert,
    "where": Element.choose,
    "add": lambda e, a, b: _sum(a, b),
    "sub": _arithmetic(lambda a, b: a - b),
}


class _Unknown(Exception):
    """The element cannot be followed."""
