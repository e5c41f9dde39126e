"""Constant folding: constants go into the equations that use them, and views of constants become constants.

before:
    graph example(x: f32[b, n])
      a = full(2.0 | shape=[], dtype="f32")             f32[]
      c = full(0.5 | shape=[1], dtype="f32")            f32[1]
      d = mul(a, c)                                     f32[1]
      e = broadcast(d | shape=[b, n])                   f32[b, n]
      f = sub(x, e)                                     f32[b, n]
      g = iota(| count=n, start=0, step=1, dtype="i64") i64[n]
      h = add(g, 5)                                     i64[n]
      return f, h
after:
    graph example(x: f32[b, n])
      a = full(2.0 | shape=[], dtype="f32")               f32[]
      c = full(0.5 | shape=[1], dtype="f32")              f32[1]
      d = full(1.0 | shape=[1], dtype="f32")              f32[1]
      e = full(1.0 | shape=[b, n], dtype="f32")           f32[b, n]
      f = sub(x, 1.0)                                     f32[b, n]
      g = iota(| count=n, start=0, step=1, dtype="i64")   i64[n]
      h = iota(| count=n, start=5, step=1, dtype="i64")   i64[n]
      return f, h
What has a literal size of 0 is a constant too. A constant is computed in the op's own dtype, and only by operations
whose result IEEE 754 fixes. What is not used any more is left to the pass dce.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

import numpy

from anyshape.base.config import Config
from anyshape.base.errors import VerifyError
from anyshape.ir.graph import Attr, Graph, Literal, Node, Operand, Value
from anyshape.ir.op import OPS, row
from anyshape.ir.types import NATIVE, TensorType, kind_of
from anyshape.passes.rewriter import Replay, replay, same_type
from anyshape.sym.expr import Expr, Size

_NUMPY: dict[str, Any] = {
    "f32": numpy.float32, "f64": numpy.float64, "i8": numpy.int8, "i16": numpy.int16, "i32": numpy.int32,
    "i64": numpy.int64, "u8": numpy.uint8, "bool": numpy.bool_,
    # computed in f32 and rounded once, as kernels and PyTorch do
    "f16": numpy.float32, "bf16": numpy.float32,
}  # fmt: skip

_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply, "div": numpy.divide,
    "maximum": numpy.maximum, "minimum": numpy.minimum, "neg": numpy.negative, "abs": numpy.absolute,
    "floor": numpy.floor, "ceil": numpy.ceil, "trunc": numpy.trunc, "round": numpy.rint, "sqrt": numpy.sqrt,
    "reciprocal": lambda x: numpy.divide(type(x)(1), x),
    "eq": numpy.equal, "ne": numpy.not_equal, "lt": numpy.less, "le": numpy.less_equal, "gt": numpy.greater,
    "ge": numpy.greater_equal, "bit_and": numpy.bitwise_and, "bit_or": numpy.bitwise_or, "bit_xor": numpy.bitwise_xor,
    "bit_not": numpy.invert, "isnan": numpy.isnan, "isinf": numpy.isinf,
    "where": lambda condition, x, y: x if condition else y,
}  # fmt: skip

# equations on sizes (i64), which stay formulas
_ON_SIZES: dict[str, Callable[..., Size]] = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "neg": lambda x: -x,
}  # fmt: skip


def round_to(value: Literal, dtype: str) -> Literal:
    """`value` as an element of `dtype` holds it: rounded to nearest even, integers wrapped."""
    kind = kind_of(dtype)
    if kind == "bool":
        return bool(value)
    if kind == "float":
        return _round_float(float(value), dtype)
    if isinstance(value, float):
        value = math.trunc(value)
    bits = 8 * numpy.dtype(_NUMPY[dtype]).itemsize
    wrapped = int(value) & ((1 << bits) - 1)
    return wrapped - (1 << bits) if kind == "int" and wrapped >> (bits - 1) else wrapped


def _round_float(value: float, dtype: str) -> float:
    if dtype == "f64" or not math.isfinite(value):
        return value
    with numpy.errstate(all="ignore"):
        if dtype == "f32":
            return float(numpy.float32(value))
        if dtype == "f16":
            return float(numpy.float16(value))
        # bf16: the upper half of an f32, rounded to nearest even
        single = numpy.float32(value)
        if not numpy.isfinite(single):
            return float(single)
        bits = int(single.view(numpy.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(numpy.uint32(bits).view(numpy.float32))


def _constant(replay: Replay, operand: Operand) -> Literal | Expr | None:
    """The number that fills the tensor `operand`; None when it is no constant."""
    node = replay.producer(operand)
    if node is None or node.op != "full":
        return None
    value = node.inputs[0]
    assert not isinstance(value, Value)
    dtype = node.output.tensor.dtype
    if isinstance(value, Expr):
        # other dtypes would have to round or wrap it
        return value if dtype in ("i64", "f64", "f32") else None
    if kind_of(dtype) != "float":
        return round_to(value, dtype)
    # an f32 literal is rounded to f32 wherever it is used; a narrower one need not be
    return round_to(value, dtype) if dtype in ("bf16", "f16") else float(value)


def _full(replay: Replay, value: Literal | Expr, kind: TensorType) -> Operand:
    device: dict[str, Attr] = {} if kind.device == "cpu" else {"device": kind.device}
    return replay.op("full", value, shape=kind.shape, dtype=kind.dtype, **device)


def _view(replay: Replay, node: Node) -> Operand | None:
    below = replay.producer(node.inputs[0])
    if below is not None and below.op == "full":
        value = below.inputs[0]
        assert not isinstance(value, Value)
        return _full(replay, value, node.output.tensor)
    if node.op == "slice" and below is not None and below.op == "iota" and node.output.tensor.dtype == "i64":
        first, stride, start, step = below.attr("start"), below.attr("step"), node.attr("start"), node.attr("step")
        if _is_size(first) and _is_size(stride) and _is_size(start) and _is_size(step):
            return _iota(replay, below, node.attr("count"), first + start * stride, stride * step)
    return None


def _iota(replay: Replay, like: Node, count: Attr, start: Attr, step: Attr) -> Operand:
    attrs = dict(like.attrs)
    attrs.update(count=count, start=start, step=step)
    return replay.op("iota", **attrs)


def _is_size(value: Attr | Operand) -> TypeGuard[Size]:
    return isinstance(value, (int, Expr)) and not isinstance(value, bool)


def _concat(replay: Replay, node: Node) -> Operand | None:
    values = [_constant(replay, operand) for operand in node.inputs]
    first = values[0]
    if first is None or any(type(v) is not type(first) or repr(v) != repr(first) for v in values):
        return None
    return _full(replay, first, node.output.tensor)


def _cast(replay: Replay, node: Node) -> Operand | None:
    value = _constant(replay, node.inputs[0])
    if value is None:
        return None
    assert isinstance(node.inputs[0], Value)
    source, kind = node.inputs[0].tensor.dtype, node.output.tensor
    if isinstance(value, Expr):
        return _full(replay, value, kind) if source == "i64" and kind.dtype in ("f32", "f64") else None
    value = round_to(value, source)
    if kind_of(kind.dtype) in ("int", "uint") and isinstance(value, float) and not abs(value) < 1 << 62:
        return None  # not a number, or out of range: left to the run time
    result = round_to(value, kind.dtype)
    if isinstance(value, float) and kind_of(kind.dtype) in ("int", "uint") and result != math.trunc(value):
        return None
    return _full(replay, result, kind)


def _pointwise(replay: Replay, node: Node) -> Operand | None:
    if node.op == "cast":
        return _cast(replay, node)
    if node.op == "divisor":  # a number or a size is looked at before the call (`divided_sizes` in
    # compiler/shape_preconditions.py)
        return node.inputs[0] if _constant(replay, node.inputs[0]) is not None else None
    values: list[Operand] = []
    found = False
    for operand in node.inputs:
        value = _constant(replay, operand) if isinstance(operand, Value) else operand
        values.append(operand if value is None else value)
        found = found or values[-1] is not operand
    if not any(isinstance(value, Value) for value in values):
        return _compute(replay, node, values)  # type: ignore[arg-type]
    shifted = _shifted_iota(replay, node, values)
    if shifted is not None or not found:
        return shifted
    try:
        kinds = OPS[node.op].infer(tuple(values), dict(node.attrs))
    except VerifyError:
        return None  # without the tensor the dtype would not be known
    if len(kinds) == 1 and same_type(kinds[0], node.output.type):
        return replay.op(node.op, *values, **dict(node.attrs))
    return None


def _compute(replay: Replay, node: Node, values: list[Literal | Expr]) -> Operand | None:
    dtype = next((x.tensor.dtype for x in reversed(node.inputs) if isinstance(x, Value)), "")
    if any(isinstance(value, Expr) for value in values):
        on_sizes = _ON_SIZES.get(node.op)
        if on_sizes is None or dtype != "i64" or not all(_is_size(value) for value in values):
            return None
        return _full(replay, on_sizes(*values), node.output.tensor)
    compute = _COMPUTE.get(node.op)
    if compute is None:
        return None
    if node.op == "where":
        condition, *rest = values
        arguments = [bool(condition), *(_NUMPY[dtype](round_to(value, dtype)) for value in rest)]  # type: ignore
    else:
        # arithmetic in bf16 and f16 sees a literal operand unrounded, as in PyTorch
        plain = "f32" if dtype in ("bf16", "f16") and node.output.tensor.dtype != "bool" else dtype
        arguments = [_NUMPY[dtype](round_to(value, plain)) for value in values]  # type: ignore[arg-type]
    if node.op in ("maximum", "minimum") and kind_of(dtype) == "float" and arguments[0] == arguments[1] == 0:
        return None  # IEEE 754 leaves open which zero it is
    with numpy.errstate(all="ignore"):
        result = compute(*arguments).item()
    return _full(replay, round_to(result, node.output.tensor.dtype), node.output.tensor)


def _shifted_iota(replay: Replay, node: Node, values: list[Operand]) -> Operand | None:
    """iota plus or times a whole number is an iota."""
    if node.op not in ("add", "sub", "mul") or node.output.tensor.dtype != "i64":
        return None
    x, y = values
    if node.op != "sub" and isinstance(y, Value):
        x, y = y, x
    below = replay.producer(x)
    if below is None or below.op != "iota" or not _is_size(y):
        return None
    start, step, count = below.attr("start"), below.attr("step"), below.attr("count")
    if not (_is_size(start) and _is_size(step)):
        return None
    if node.op == "mul":
        return _iota(replay, below, count, start * y, step * y)
    return _iota(replay, below, count, start + y if node.op == "add" else start - y, step)


# the result of reducing no elements; amax and amin have none
_NEUTRAL = {"sum": 0, "prod": 1, "any": 0, "all": 1, "matmul": 0}


def _empty(replay: Replay, node: Node) -> Operand | None:
    """A result without elements is any constant; a reduction of no elements is its neutral one. Kernels need not
    provide for operands of no elements, whose memory may not exist."""
    if len(node.outputs) != 1 or node.op in ("full", "extern"):
        return None
    kind = node.output.tensor
    if kind.dtype not in NATIVE:
        return None
    if 0 in kind.shape:
        return _full(replay, round_to(0, kind.dtype), kind)
    if node.op in _NEUTRAL and any(0 in value.tensor.shape for value in node.values()):
        return _full(replay, round_to(_NEUTRAL[node.op], kind.dtype), kind)
    return None


def _rewrite(replay: Replay, node: Node) -> Operand | None:
    empty = _empty(replay, node)
    if empty is not None:
        return empty
    kind = row(node).kind
    if kind == "pointwise":
        return _pointwise(replay, node)
    if kind == "view" or node.op == "flip":
        return _view(replay, node)
    return _concat(replay, node) if node.op == "concat" else None


def constant_folding(graph: Graph, config: Config) -> Graph:
    """The graph with constants inside of the equations that use them."""
    return replay(graph, _rewrite)
