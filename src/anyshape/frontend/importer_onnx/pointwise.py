"""Translations of ONNX operators that work element by element, with numpy's broadcasting.

    PRelu(x, slope)  -->  where(lt(x, 0), mul(x, slope), x)
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anyshape.frontend.aten.table import Decline, is_float, wide
from anyshape.frontend.importer_onnx.model import ELEMENTS
from anyshape.frontend.importer_onnx.table import Call, moves, translates
from anyshape.frontend.symbols.known import Known
from anyshape.ir.graph import Value
from anyshape.ir.types import NATIVE, TensorType, kind_of
from anyshape.sym.expr import Expr, Size, floordiv
from anyshape.torch_compat import aten
from anyshape.torch_compat.dtypes import TORCH_DTYPES

WIDE = ("u16", "u32", "u64")  # dtypes that kernels do not compute on, and PyTorch in part


def broadcast_type(c: Call, *operands: Any, dtype: str) -> TensorType:
    """The type of an elementwise result."""
    values = [one for one in operands if isinstance(one, Value)]
    c.t.check_broadcast(values)
    rank = max((one.tensor.rank for one in values), default=0)
    shape: list[Size] = [1] * rank
    for one in values:
        for place, size in enumerate(one.tensor.shape, rank - one.tensor.rank):
            shape[place] = size if shape[place] == 1 else shape[place]
    return TensorType(dtype, tuple(shape))


def foreign(c: Call, name: str, *operands: Any, dtype: str) -> Value:
    """An elementwise operator on whole numbers that kernels do not compute on; by numpy's function of that name."""
    values = [c.tensor(one) for one in operands]
    return c.extern("onnx.by_numpy", name, values, types=broadcast_type(c, *values, dtype=dtype),
                    why=f"no kernel computes on {values[0].tensor.dtype}")  # type: ignore[no-any-return]


def both(c: Call) -> tuple[list[Any], str]:
    """The operands, known numbers as such, and their one dtype."""
    return [c.operand(place) for place in range(len(c.inputs))], c.dtype(0)


def binary(c: Call, row: str, x: Any, y: Any, dtype: str) -> Value:
    """An op of the table, of operands of one dtype."""
    return c.t.pointwise(row, x, y, dtype=dtype)


def _row(*names: str, row: str, numpy: str = "") -> None:
    @translates(*names)
    def translation(c: Call) -> Any:
        (x, *more), dtype = both(c)
        if c.attr("broadcast") is not None:
            raise Decline("broadcasting along an axis, of operator sets before 7")
        if dtype in WIDE:
            return foreign(c, numpy or row, x, *more, dtype=dtype)
        result = x if more else c.tensor(x)
        for y in more:
            result = binary(c, row, result, y, dtype)
        return result


_row("Add", "Sum", row="add")
_row("Sub", row="sub", numpy="subtract")
_row("Mul", row="mul", numpy="multiply")
_row("Max", row="maximum")
_row("Min", row="minimum")


@translates("Mean")
def mean(c: Call) -> Any:
    (x, *more), dtype = both(c)
    for y in more:
        x = binary(c, "add", x, y, dtype)
    return binary(c, "div", x, float(len(more) + 1), dtype)


@translates("Div")
def div(c: Call) -> Any:
    (x, y), dtype = both(c)
    if dtype in WIDE:
        return foreign(c, "floor_divide", x, y, dtype=dtype)
    return binary(c, "div" if is_float(dtype) else "trunc_div", x, y, dtype)


@translates("Mod")
def modulo(c: Call) -> Any:
    (x, y), dtype = both(c)
    if dtype in WIDE:
        return foreign(c, "remainder", x, y, dtype=dtype)
    return binary(c, "fmod" if c.attr("fmod", 0) else "remainder", x, y, dtype)


@translates("Pow")
def power(c: Call) -> Any:
    (x, y), dtype = both(c)
    if isinstance(x, Value) and not isinstance(y, Value) and is_float(dtype) and not isinstance(y, Expr):
        return c.aten(aten.pow.Tensor_Scalar, x, y, types=x.tensor)
    values = [c.value(0), c.value(1)]
    if is_float(dtype):
        return binary(c, "pow", x if isinstance(x, Value) else values[0], converted(c, values[1], dtype), dtype)
    if any(one.tensor.dtype in WIDE for one in values):
        return foreign(c, "power", *values, dtype=dtype)
    raised = binary(c, "pow", c.t.cast(values[0], "f64"), c.t.cast(values[1], "f64"), "f64")
    return c.t.cast(raised, dtype)


for _name, _op in (("Less", "lt"), ("LessOrEqual", "le"), ("Greater", "gt"), ("GreaterOrEqual", "ge"), ("Equal", "eq")):
    @translates(_name)
    def comparison(c: Call, row: str = _op) -> Any:
        (x, y), dtype = both(c)
        if dtype in WIDE:
            return foreign(c, {"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
                               "eq": "equal"}[row], x, y, dtype="bool")
        return binary(c, row, x, y, dtype)

for _name, _op in (("And", "bit_and"), ("Or", "bit_or"), ("Xor", "bit_xor"), ("BitwiseAnd", "bit_and"),
                   ("BitwiseOr", "bit_or"), ("BitwiseXor", "bit_xor")):
    @translates(_name)
    def logic(c: Call, row: str = _op) -> Any:
        (x, y), dtype = both(c)
        if dtype in WIDE:
            return foreign(c, {"bit_and": "bitwise_and", "bit_or": "bitwise_or", "bit_xor": "bitwise_xor"}[row], x, y,
                           dtype=dtype)
        return binary(c, row, x, y, dtype)


@translates("Not", "BitwiseNot")
def complement(c: Call) -> Any:
    x = c.value(0)
    return foreign(c, "invert", x, dtype=x.tensor.dtype) if x.tensor.dtype in WIDE else c.op("bit_not", x)


@translates("BitShift")
def shift(c: Call) -> Any:
    (x, y), dtype = both(c)
    left = c.attr("direction") == "LEFT"
    if dtype in WIDE or dtype == "u8":
        return foreign(c, "left_shift" if left else "right_shift", x, y, dtype=dtype)
    return binary(c, "shift_left" if left else "shift_right", x, y, dtype)


UNARY = {
    "Neg": "neg", "Abs": "abs", "Sign": "sign", "Floor": "floor", "Ceil": "ceil", "Round": "round", "Exp": "exp",
    "Log": "log", "Sqrt": "sqrt", "Reciprocal": "reciprocal", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Tanh": "tanh",
    "Sigmoid": "sigmoid", "Erf": "erf", "Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh",
    "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "IsNaN": "isnan",
}  # fmt: skip

for _name, _op in UNARY.items():
    @translates(_name)
    def unary(c: Call, row: str = _op) -> Any:
        x = c.value(0)
        dtype = x.tensor.dtype
        if kind_of(dtype) == "uint" and row in ("abs", "sign") and row == "abs":
            return x
        return c.op(row, x)


@translates("IsInf")
def is_infinite(c: Call) -> Any:
    x = c.value(0)
    if c.attr("detect_negative", 1) and c.attr("detect_positive", 1):
        return c.op("isinf", x)
    if c.attr("detect_negative", 1) or c.attr("detect_positive", 1):
        return c.op("eq", x, -math.inf if c.attr("detect_negative", 1) else math.inf)
    return c.t.full(False, x.tensor.shape, "bool")


@translates("Where")
@moves(1, 2)
def where(c: Call) -> Any:
    condition, x, y = c.value(0), c.operand(1), c.operand(2)
    dtype = c.dtype(1)
    if dtype not in NATIVE:
        raise Decline(f"dtype {dtype}")
    return c.t.where(condition, x, y, dtype)


@translates("Cast", "CastLike")
def cast(c: Call) -> Any:
    x = c.value(0)
    dtype = c.dtype(1) if c.name == "CastLike" else ELEMENTS.get(c.attr("to"), "")
    return converted(c, x, dtype)


def converted(c: Call, x: Value, dtype: str) -> Value:
    """The tensor in another dtype, by numpy's rules."""
    have = x.tensor.dtype
    if have == dtype:
        return x
    if have in NATIVE and dtype in NATIVE:
        return c.t.cast(x, dtype)  # type: ignore[no-any-return]
    if dtype not in TORCH_DTYPES or have not in TORCH_DTYPES:
        raise Decline(f"a cast from {have} to {dtype}")
    return c.extern("onnx.converted", x, TORCH_DTYPES[dtype],  # type: ignore[no-any-return]
                    types=TensorType(dtype, x.tensor.shape), why=f"no kernel computes on {have} or {dtype}")


# ---- activations


def _aten(name: str, target: Any, *defaults: tuple[str, Any]) -> None:
    @translates(name)
    def translation(c: Call) -> Any:
        x = c.value(0)
        return c.aten(target, x, *(float(c.attr(key, value)) for key, value in defaults), types=x.tensor)


_aten("Relu", aten.relu.default)
_aten("LeakyRelu", aten.leaky_relu.default, ("alpha", 0.01))
_aten("Elu", aten.elu.default, ("alpha", 1.0))
_aten("HardSwish", aten.hardswish.default)
_aten("Mish", aten.mish.default)
_aten("Softplus", aten.softplus.default)


def activated(c: Call, x: Value) -> Value:
    """The tensor behind the activation of a fused operator, which attributes name, with its numbers."""
    name = c.attr("activation", "")
    numbers = c.attr("activation_params") or [
        c.attr(key) for key in ("activation_alpha", "activation_beta") if c.attr(key) is not None]
    first, second = (*(float(one) for one in numbers), None, None)[:2]
    if name in ("Sigmoid", "Tanh"):
        return c.op(name.lower(), x)
    if name == "Relu":
        return c.aten(aten.relu.default, x, types=x.tensor)  # type: ignore[no-any-return]
    if name == "LeakyRelu":
        slope = 0.01 if first is None else first
        return c.aten(aten.leaky_relu.default, x, slope, types=x.tensor)  # type: ignore[no-any-return]
    if name == "HardSigmoid":
        return _hard_sigmoid(c, x, 0.2 if first is None else first, 0.5 if second is None else second)
    if name == "Clip" and second is not None:
        return c.op("minimum", c.op("maximum", x, first), second)
    if name:
        raise Decline(f"the activation {name}")
    return x


@translates("Gelu")
def gelu(c: Call) -> Any:
    x = c.value(0)
    return c.aten(aten.gelu.default, x, approximate=c.attr("approximate", "none"), types=x.tensor)


@translates("FastGelu", "QuickGelu", "Gelu", "BiasGelu", domain="com.microsoft")
def microsoft_gelu(c: Call) -> Any:
    x = c.value(0)
    if c.has(1):
        x = c.t.pointwise("add", x, c.value(1), dtype=x.tensor.dtype)
    if c.name == "QuickGelu":
        return c.op("mul", x, c.op("sigmoid", c.op("mul", x, float(c.attr("alpha", 1.702)))))
    return c.aten(aten.gelu.default, x, approximate="tanh" if c.name == "FastGelu" else "none", types=x.tensor)


@translates("BiasAdd", domain="com.microsoft")
def sum_of_three(c: Call) -> Any:
    x = c.t.pointwise("add", c.value(0), c.value(1), dtype=c.dtype())
    return c.t.pointwise("add", x, c.value(2), dtype=c.dtype())


@translates("BiasSplitGelu", domain="com.microsoft")
def gated_gelu(c: Call) -> Any:
    x = c.t.pointwise("add", c.value(0), c.value(1), dtype=c.dtype())
    last = x.tensor.rank - 1
    half = floordiv(x.tensor.shape[last], 2)
    gate = c.t.window(x, last, half, half)
    return c.op("mul", c.t.window(x, last, 0, half), c.aten(aten.gelu.default, gate, types=gate.tensor))


def in_wide(c: Call, x: Value, body: Callable[[Value], Value]) -> Value:
    """A composition in the dtype that PyTorch computes in, rounded once."""
    return c.t.cast(body(c.t.cast(x, wide(x.tensor.dtype))), x.tensor.dtype)  # type: ignore[no-any-return]


@translates("HardSigmoid")
def hard_sigmoid(c: Call) -> Any:
    return _hard_sigmoid(c, c.value(0), float(c.attr("alpha", 0.2)), float(c.attr("beta", 0.5)))


def _hard_sigmoid(c: Call, x: Value, alpha: float, beta: float) -> Value:
    return in_wide(c, x, lambda x: c.op("minimum", c.op("maximum", c.op("add", c.op("mul", x, alpha), beta),
                                                                 0.0), 1.0))


@translates("Selu")
def selu(c: Call) -> Any:
    alpha, gamma = float(c.attr("alpha", 1.67326319217681884765625)), float(c.attr("gamma", 1.05070102214813232421875))

    def body(x: Value) -> Value:
        below = c.op("mul", c.op("expm1", c.op("minimum", x, 0.0)), alpha)
        return c.op("mul", c.op("where", c.op("gt", x, 0.0), x, below), gamma)
    return in_wide(c, c.value(0), body)


@translates("Celu")
def celu(c: Call) -> Any:
    alpha = float(c.attr("alpha", 1.0))

    def body(x: Value) -> Value:
        below = c.op("mul", c.op("expm1", c.op("div", c.op("minimum", x, 0.0), alpha)), alpha)
        return c.op("add", c.op("maximum", x, 0.0), below)
    return in_wide(c, c.value(0), body)


@translates("ThresholdedRelu")
def thresholded(c: Call) -> Any:
    x = c.value(0)
    return c.op("where", c.op("gt", x, float(c.attr("alpha", 1.0))), x, 0.0)


@translates("Softsign")
def softsign(c: Call) -> Any:
    return in_wide(c, c.value(0), lambda x: c.op("div", x, c.op("add", c.op("abs", x), 1.0)))


@translates("Swish")
def swish(c: Call) -> Any:
    alpha = float(c.attr("alpha", 1.0))
    return in_wide(c, c.value(0), lambda x: c.op("mul", x, c.op("sigmoid", c.op("mul", x, alpha))))


@translates("Shrink")
def shrink(c: Call) -> Any:
    x = c.value(0)
    bias, limit = float(c.attr("bias", 0.0)), float(c.attr("lambd", 0.5))
    y = c.t.cast(x, x.tensor.dtype if is_float(x.tensor.dtype) else "f64")
    above = c.op("where", c.op("gt", y, limit), c.op("sub", y, bias), 0.0)
    return c.t.cast(c.op("where", c.op("lt", y, -limit), c.op("add", y, bias), above), x.tensor.dtype)


@translates("PRelu")
def prelu(c: Call) -> Any:
    x, slope = c.value(0), c.operand(1)
    dtype = x.tensor.dtype
    if kind_of(dtype) == "uint":
        return x
    return c.t.where(c.op("lt", x, 0.0 if is_float(dtype) else 0), c.t.pointwise("mul", x, slope, dtype=dtype), x,
                     dtype)


@translates("Clip")
def clip(c: Call) -> Any:
    x = c.value(0)
    dtype = x.tensor.dtype
    low = c.operand(1) if c.has(1) else c.attr("min")
    high = c.operand(2) if c.has(2) else c.attr("max")
    if dtype in WIDE:
        low = c.t.full(0, (), dtype) if low is None else low
        return foreign(c, "clip", x, low, high, dtype=dtype)
    if low is not None:
        x = binary(c, "maximum", x, low, dtype)
    return x if high is None else binary(c, "minimum", x, high, dtype)


@translates("Dropout")
def dropout(c: Call) -> Any:
    x = c.value(0)
    training = c.at(2)
    if training is not None and not isinstance(training, Known):
        training = c.numbers(2)[0]
    elif training is not None:
        training = training.items()[0]
    if training and not (c.has(1) and c.numbers(1)[0] == 0.0):
        raise Decline("dropout that trains")
    mask = c.t.full(True, x.tensor.shape, "bool") if c.wants(1) else None
    return x, mask


@translates("Identity")
def identity(c: Call) -> Any:
    return c.at(0)


@translates("BitCast")
def bit_cast(c: Call) -> Any:
    x = c.value(0)
    dtype = ELEMENTS.get(c.attr("to"), "")
    if dtype not in TORCH_DTYPES or np.dtype(np.uint8).itemsize != 1:
        raise Decline(f"bits as {dtype}")
    if torch.empty(0, dtype=TORCH_DTYPES[dtype]).element_size() != torch.empty(
            0, dtype=TORCH_DTYPES[x.tensor.dtype]).element_size():
        raise Decline("elements of another size")
    return c.bits(x, dtype)
