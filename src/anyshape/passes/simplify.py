"""Algebraic simplification: removes arithmetic that changes nothing, and writes the rest in its plainest form. No
number changes, bit for bit, but for the sign of a NaN; that is why x + 0 stays for floats (-0.0 + 0 is 0.0) and x *
0 is no 0.

before:
    graph example(x: f32[b, n], y: f32[b, n])
      a = mul(x, 1.0)                f32[b, n]
      c = cast(a | dtype="f32")      f32[b, n]
      d = neg(y)                     f32[b, n]
      e = add(c, d)                  f32[b, n]
      f = div(e, 4.0)                f32[b, n]
      return f
after:
    graph example(x: f32[b, n], y: f32[b, n])
      d = neg(y)        f32[b, n]
      e = sub(x, y)     f32[b, n]
      f = mul(e, 0.25)  f32[b, n]
      return f
What is not used any more is left to the pass dce.
"""
from __future__ import annotations

import math
from collections.abc import Callable

from anyshape.base.config import Config
from anyshape.ir.graph import Graph, Node, Operand, Value
from anyshape.ir.op import row
from anyshape.ir.rewrite_rules import Condition, Function, build, holds, match, table
from anyshape.ir.types import TensorType, kind_of
from anyshape.passes.rewriter import Replay, replay, same_type

RULES = table("""
    add(x, -0.0)                -> x
    add(x, 0)                   -> x                    if integer(x)
    sub(x, 0)                   -> x
    mul(x, 1)                   -> x
    mul(x, -1)                  -> neg(x)
    div(x, 1)                   -> x
    div(x, c)                   -> mul(x, inverse(c))   if power_of_two(c)
    div(1, x)                   -> reciprocal(x)
    floor_div(x, 1)             -> x                    if integer(x)
    trunc_div(x, 1)             -> x                    if integer(x)
    add(add(x, c), d)           -> add(x, total(c, d))  if wide_integer(x) and small(c) and small(d)
    mul(mul(x, c), d)           -> mul(x, times(c, d))  if wide_integer(x) and small(c) and small(d)

    pow(x, 1)                   -> x
    pow(x, 2)                   -> mul(x, x)
    pow(x, -1)                  -> reciprocal(x)        if float(x)

    neg(neg(x))                 -> x
    abs(neg(x))                 -> abs(x)               if signed(x)
    abs(abs(x))                 -> abs(x)
    add(x, neg(y))              -> sub(x, y)
    sub(x, neg(y))              -> add(x, y)
    mul(neg(x), neg(y))         -> mul(x, y)
    floor(floor(x))             -> floor(x)
    ceil(ceil(x))               -> ceil(x)
    trunc(trunc(x))             -> trunc(x)
    round(round(x))             -> round(x)
    maximum(x, x)               -> x
    minimum(x, x)               -> x

    bit_not(bit_not(x))         -> x
    bit_not(eq(x, y))           -> ne(x, y)
    bit_not(ne(x, y))           -> eq(x, y)
    bit_not(lt(x, y))           -> ge(x, y)             if integer(x)
    bit_not(le(x, y))           -> gt(x, y)             if integer(x)
    bit_not(gt(x, y))           -> le(x, y)             if integer(x)
    bit_not(ge(x, y))           -> lt(x, y)             if integer(x)
    bit_and(x, x)               -> x
    bit_or(x, x)                -> x
    bit_and(x, True)            -> x                    if boolean(x)
    bit_or(x, False)            -> x
    bit_xor(x, False)           -> x
    bit_xor(x, True)            -> bit_not(x)           if boolean(x)
    bit_or(x, 0)                -> x
    bit_xor(x, 0)               -> x
    bit_and(x, -1)              -> x
    shift_left(x, 0)            -> x
    shift_right(x, 0)           -> x
    eq(x, True)                 -> x                    if boolean(x)
    ne(x, False)                -> x                    if boolean(x)
    eq(x, False)                -> bit_not(x)           if boolean(x)
    ne(x, True)                 -> bit_not(x)           if boolean(x)

    where(True, x, y)           -> x
    where(False, x, y)          -> y
    where(x, y, y)              -> y
    where(bit_not(x), y, z)     -> where(x, z, y)
""")


def _dtype(operand: Operand) -> str:
    return operand.type.dtype if isinstance(operand, Value) and isinstance(operand.type, TensorType) else ""


def _is_kind(*kinds: str) -> Condition:
    return lambda operand: _dtype(operand) != "" and kind_of(_dtype(operand)) in kinds


def _power_of_two(operand: Operand) -> bool:
    if isinstance(operand, (Value, bool)) or not isinstance(operand, (int, float)):
        return False
    value = float(operand)
    if value == 0 or not math.isfinite(value):
        return False
    fraction, exponent = math.frexp(value)
    return abs(fraction) == 0.5 and abs(exponent) <= 100  # the inverse is an ordinary f32


CONDITIONS: dict[str, Condition] = {
    "integer": _is_kind("int", "uint"),
    "wide_integer": lambda operand: _dtype(operand) in ("i32", "i64"),
    "signed": _is_kind("float", "int"),
    "float": _is_kind("float"),
    "boolean": _is_kind("bool"),
    "power_of_two": _power_of_two,
    "small": lambda operand: isinstance(operand, int) and abs(operand) < 1 << 15,
}

FUNCTIONS: dict[str, Function] = {
    "inverse": lambda c: 1.0 / c,
    "total": lambda c, d: c + d,
    "times": lambda c, d: c * d,
}

# dtype -> the dtypes that hold each of its values exactly
_EXACT: dict[str, frozenset[str]] = {
    "bool": frozenset(("u8", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")),
    "u8": frozenset(("i16", "i32", "i64", "f16", "bf16", "f32", "f64")),
    "i8": frozenset(("i16", "i32", "i64", "f16", "bf16", "f32", "f64")),
    "i16": frozenset(("i32", "i64", "f32", "f64")),
    "i32": frozenset(("i64", "f64")),
    "f16": frozenset(("f32", "f64")),
    "bf16": frozenset(("f32", "f64")),
    "f32": frozenset(("f64",)),
}


def exactly_holds(wide: str, narrow: str) -> bool:
    """Does dtype `wide` hold every value of dtype `narrow`?"""
    return wide == narrow or wide in _EXACT.get(narrow, ())


def _cast(replay: Replay, node: Node) -> Operand | None:
    source = node.inputs[0]
    target = node.output.tensor.dtype
    if _dtype(source) == target:
        return source
    inner = replay.producer(source)
    if inner is None or inner.op != node.op:
        return None
    first, middle = _dtype(inner.inputs[0]), _dtype(source)
    if not exactly_holds(middle, first):
        return None
    if kind_of(middle) == "float" and kind_of(first) != "float" and kind_of(target) in ("int", "uint") \
            and not exactly_holds(target, first):
        return None  # a float out of the integer's range has no defined result
    return inner.inputs[0] if first == target else replay.op("cast", inner.inputs[0], dtype=target)


def _store(replay: Replay, node: Node) -> Operand | None:
    """store(cast(x)) --> store(x); or x, where it lies in memory as it is."""
    source, target = node.inputs[0], node.output.tensor.dtype
    inner = replay.producer(source)
    if inner is not None and inner.op == "cast" and _dtype(inner.inputs[0]) == target and exactly_holds(
            _dtype(source), target):
        source = inner.inputs[0]
        inner = replay.producer(source)
    if _dtype(source) == target and inner is not None and row(inner).kind in ("library", "extern"):
        return source
    return None if source == node.inputs[0] else replay.op("store", source, dtype=target)


def _concat(replay: Replay, node: Node) -> Operand | None:
    if len(node.inputs) == 1:
        return node.inputs[0]
    dim = node.attr("dim")
    assert isinstance(dim, int)
    kept = tuple(x for x in node.inputs if not (isinstance(x, Value) and x.tensor.shape[dim] == 0))
    return replay.op("concat", *kept, dim=dim) if 0 < len(kept) < len(node.inputs) else None


def _flip(replay: Replay, node: Node) -> Operand | None:
    dims = node.attr("dims")
    assert isinstance(dims, tuple)
    kept = tuple(d for d in dims if node.output.tensor.shape[d] != 1)  # type: ignore[index]
    if not kept:
        return node.inputs[0]
    if kept != dims:
        return replay.op("flip", node.inputs[0], dims=kept)
    inner = replay.producer(node.inputs[0])
    if inner is not None and inner.op == node.op and set(inner.attr("dims")) == set(dims):  # type: ignore[arg-type]
        return inner.inputs[0]
    return None


def _pad(replay: Replay, node: Node) -> Operand | None:
    low, high = node.attr("low"), node.attr("high")
    assert isinstance(low, tuple) and isinstance(high, tuple)
    return node.inputs[0] if all(size == 0 for size in low + high) else None


def _reduce(replay: Replay, node: Node) -> Operand | None:
    """A reduction over one element each; the initial 0 of a sum of floats turns -0.0 into 0.0, as in PyTorch."""
    source = node.inputs[0]
    dims = node.attr("dims")
    assert isinstance(source, Value) and isinstance(dims, tuple)
    if any(source.tensor.shape[d] != 1 for d in dims):  # type: ignore[index]
        return None
    if row(node).combine == "add" and kind_of(source.tensor.dtype) == "float":
        added = replay.op("add", source, 0.0)
        assert isinstance(added, Value)
        source = added
    return source if node.attr("keep") else replay.op("reshape", source, shape=node.output.tensor.shape)


_BY_OP: dict[str, Callable[[Replay, Node], Operand | None]] = {
    "cast": _cast, "store": _store, "concat": _concat, "flip": _flip, "pad": _pad,
    **dict.fromkeys(("sum", "prod", "amax", "amin", "any", "all"), _reduce),
}  # fmt: skip


def _rewrite(replay: Replay, node: Node) -> Operand | None:
    special = _BY_OP.get(node.op)
    if special is not None:
        return special(replay, node)
    for rule in RULES.get(node.op, ()):
        bindings = match(rule, node, replay.producer)
        if bindings is None or not holds(rule, bindings, CONDITIONS):
            continue
        found = build(rule.replacement, bindings, replay.op, FUNCTIONS)
        if isinstance(found, Value) and same_type(found.type, node.output.type):
            return found
    return None


def simplify(graph: Graph, config: Config) -> Graph:
    """The graph without arithmetic that changes nothing; numbers stay the same bit for bit, but for the sign of a
    NaN."""
    return replay(graph, _rewrite)
