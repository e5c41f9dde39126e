"""Translations of elementwise ATen ops that are not one pointwise row, cast by cast: arithmetic, selection, casts.

    aten.add.Tensor(x f32, y i64, alpha=2)  -->  c = cast(y | f32); s = mul(c, 2.0); add(x, s)
"""
from __future__ import annotations

import math
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline, Translator, is_float, translates, wide
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.torch_compat import aten
from anyshape.torch_compat.dtypes import TORCH_DTYPES

prims = torch.ops.prims

_ROUNDING = ("floor", "ceil", "trunc", "round")


def _rounding(name: str) -> None:
    def translation(t: Translator, x: Any) -> Value:
        return t.pointwise(name, x) if is_float(t.out.dtype) else t.cast(x, t.out.dtype)
    translates(getattr(aten, name).default)(translation)


def _bitwise(name: str, row: str) -> None:
    def translation(t: Translator, x: Any, y: Any) -> Value:
        return t.pointwise(row, x, y)
    translates(getattr(aten, name))(translation)


def _logical(name: str, row: str) -> None:
    def translation(t: Translator, x: Value, y: Value) -> Value:
        return t.pointwise(row, t.cast(x, "bool"), t.cast(y, "bool"), dtype="bool")
    translates(getattr(aten, name).default)(translation)


def _test(name: str) -> None:
    def translation(t: Translator, x: Value) -> Value:
        if is_float(x.tensor.dtype):
            return t.op(name, x)
        return t.op("lt", x, 0) if name == "signbit" and kind_of(x.tensor.dtype) == "int" else t.full(
            False, x.tensor.shape, "bool")
    translates(getattr(aten, name).default)(translation)


for _name in _ROUNDING:
    _rounding(_name)
for _name, _row in (("__and__", "bit_and"), ("__or__", "bit_or"), ("__xor__", "bit_xor"),
                    ("__lshift__", "shift_left"), ("__rshift__", "shift_right")):
    _bitwise(_name, _row)
for _name, _row in (("logical_and", "bit_and"), ("logical_or", "bit_or"), ("logical_xor", "bit_xor")):
    _logical(_name, _row)
for _name in ("isnan", "isinf", "signbit"):
    _test(_name)


@translates(aten.logical_not.default)
def logical_not(t: Translator, x: Value) -> Value:
    return t.op("bit_not", t.cast(x, "bool"))


@translates(aten.isfinite.default)
def isfinite(t: Translator, x: Value) -> Value:
    if not is_float(x.tensor.dtype):
        return t.full(True, x.tensor.shape, "bool")
    return t.op("lt", t.op("abs", x), math.inf)


@translates(aten.abs.default, prims.abs.default)
def absolute(t: Translator, x: Value) -> Value:
    return x if kind_of(x.tensor.dtype) in ("bool", "uint") else t.pointwise("abs", x)


@translates(aten.sign.default, aten.sgn.default)
def sign(t: Translator, x: Value) -> Value:
    return x if x.tensor.dtype == "bool" else t.pointwise("sign", x)


@translates(aten.round.decimals)
def round_decimals(t: Translator, x: Value, *, decimals: int = 0) -> Value:
    if decimals != 0:
        raise Decline("rounding to a number of decimals")
    return t.pointwise("round", x) if is_float(t.out.dtype) else x


@translates(aten.square.default)
def square(t: Translator, x: Value) -> Value:
    y = t.cast(x, t.out.dtype)
    return t.op("mul", y, y)


@translates(aten.frac.default)
def frac(t: Translator, x: Value) -> Value:
    return t.op("sub", x, t.op("trunc", x))


@translates(aten.add.Tensor, aten.add.Scalar, prims.add.default)
def add(t: Translator, x: Any, y: Any, alpha: Any = 1) -> Value:
    if t.out.dtype == "bool":
        return t.pointwise("bit_or", x, y)
    return t.pointwise("add", t.bound(x), t.bound(_scaled(t, y, alpha)))


@translates(aten.sub.Tensor, aten.sub.Scalar, prims.sub.default)
def sub(t: Translator, x: Any, y: Any, alpha: Any = 1) -> Value:
    return t.pointwise("sub", t.bound(x), t.bound(_scaled(t, y, alpha)))


@translates(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(t: Translator, x: Any, y: Any, alpha: Any = 1) -> Value:
    return t.pointwise("sub", t.bound(y), t.bound(_scaled(t, x, alpha)))


def _scaled(t: Translator, y: Any, alpha: Any) -> Any:
    # a number of 1 leaves y alone; the product is taken in the dtype of the result, as torch does
    if isinstance(alpha, (int, float)) and alpha == 1:
        return y
    if not isinstance(y, Value) and not isinstance(alpha, Value):
        return y * alpha
    return t.pointwise("mul", y, alpha)


@translates(aten.mul.Tensor, aten.mul.Scalar, prims.mul.default)
def mul(t: Translator, x: Any, y: Any) -> Value:
    return t.pointwise("bit_and", x, y) if t.out.dtype == "bool" else _by_scalar(t, "mul", x, y, (x, y))


def _by_scalar(t: Translator, name: str, x: Any, y: Any, scalars: tuple[Any, ...]) -> Value:
    """A product or quotient. Half precision takes a tensor of rank 0 that is wider as it is, not rounded."""
    kind = wide(t.out.dtype)
    wider = [one for one in scalars
             if isinstance(one, Value) and not one.tensor.rank and one.tensor.dtype in (kind, "f64")]
    if kind == t.out.dtype or not wider:
        return t.pointwise(name, x, y)
    return t.cast(t.pointwise(name, x, y, dtype=kind), t.out.dtype)


@translates(aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor)
def div(t: Translator, x: Any, y: Any) -> Value:
    return _by_scalar(t, "div", t.bound(x), y, (y,))


@translates(prims.div.default)
def prims_div(t: Translator, x: Any, y: Any) -> Value:
    return t.pointwise("div" if is_float(t.out.dtype) else "trunc_div", x, t.divisor(y))


@translates(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(t: Translator, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    name = {None: "div", "floor": "floor_div", "trunc": "trunc_div"}[rounding_mode]
    return _by_scalar(t, name, t.bound(x), t.divisor(y), (y,))


@translates(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(t: Translator, x: Any, y: Any) -> Value:
    return _by_scalar(t, "floor_div", t.bound(x), t.divisor(y), (y,))


@translates(aten.maximum.default)
def maximum(t: Translator, x: Any, y: Any) -> Value:
    return t.pointwise("bit_or" if t.out.dtype == "bool" else "maximum", x, y)


@translates(aten.minimum.default)
def minimum(t: Translator, x: Any, y: Any) -> Value:
    return t.pointwise("bit_and" if t.out.dtype == "bool" else "minimum", x, y)


translates(aten.max.other)(maximum)
translates(aten.min.other)(minimum)


@translates(aten.fmax.default)
def fmax(t: Translator, x: Any, y: Any) -> Value:
    return _ignoring_nan(t, "maximum", x, y)


@translates(aten.fmin.default)
def fmin(t: Translator, x: Any, y: Any) -> Value:
    return _ignoring_nan(t, "minimum", x, y)


def _ignoring_nan(t: Translator, row: str, x: Value, y: Value) -> Value:
    if not is_float(t.out.dtype):
        return t.pointwise(row, x, y)
    a, b = t.cast(x, t.out.dtype), t.cast(y, t.out.dtype)
    # of two zeros eager PyTorch gives the first, in bfloat16 the second
    order = (a, b) if t.out.dtype == "bf16" else (b, a)
    return t.where(t.op("isnan", a), b, t.where(t.op("isnan", b), a, t.pointwise(row, *order)))


def _by_squares(t: Translator, base: Value, exponent: int) -> Value:
    """A power of whole numbers; what overflows wraps around, as in PyTorch."""
    half = base if exponent < 4 else _by_squares(t, base, exponent // 2)
    square = t.op("mul", half, half)
    return t.op("mul", square, base) if exponent % 2 else square


@translates(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(t: Translator, x: Any, exponent: Any) -> Value:
    kind = t.out.dtype
    if isinstance(exponent, (bool, int, float)) and isinstance(x, Value):
        base = t.cast(x, kind)
        if exponent == 0:
            return t.full(1, base.tensor.shape, kind)
        if exponent == 1:
            return base
        if exponent in (2, 3, 4):
            twice = t.op("mul", base, base)
            return twice if exponent == 2 else t.op("mul", twice, base if exponent == 3 else twice)
        if is_float(kind):
            if exponent == 0.5 and kind != "f16":  # of -0.0 and -inf they give others than powers, as eager's f16 does
                return t.op("sqrt", base)
            if exponent == -0.5 and kind != "f16":
                return t.op("rsqrt", base)
            if exponent == -1:
                return t.op("reciprocal", base)
            if exponent == -2:
                return t.op("reciprocal", t.op("mul", base, base))
        elif isinstance(exponent, int) and 0 < exponent < 64:
            return _by_squares(t, base, exponent)
    if not is_float(kind):
        raise Decline("a power of whole numbers")
    return t.pointwise("pow", t.bound(x), t.bound(exponent))


@translates(aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, prims.where.default)
def where(t: Translator, condition: Value, x: Any, y: Any) -> Value:
    return t.where(condition, x, y)


@translates(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(t: Translator, x: Value, mask: Value, value: Any) -> Value:
    return t.broadcast(t.where(mask, value, x), t.out.shape)


@translates(aten.clamp.default, aten.clamp.Tensor)
def clamp(t: Translator, x: Value, min: Any = None, max: Any = None) -> Value:
    if (min is None) != (max is None) and any(isinstance(one, float) and math.isnan(one) for one in (min, max)):
        raise Decline("a bound that is NaN, beside which torch 2.11 leaves the operand as it is")
    y = x
    if min is not None:
        y = clamp_min(t, y, min)
    if max is not None:
        y = clamp_max(t, y, max)
    return t.cast(y, t.out.dtype)


@translates(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(t: Translator, x: Value, min: Any) -> Value:
    return t.pointwise("maximum", t.bound(min), x)  # -0.0 is not below 0.0, and stays: of equal ones the row gives x


@translates(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(t: Translator, x: Value, max: Any) -> Value:
    return t.pointwise("minimum", t.bound(max), x)


@translates(aten.addcmul.default)
def addcmul(t: Translator, x: Value, a: Value, b: Value, *, value: Any = 1) -> Value:
    return t.pointwise("add", x, t.pointwise("mul", _scaled(t, a, value), b))


@translates(aten.addcdiv.default)
def addcdiv(t: Translator, x: Value, a: Value, b: Value, *, value: Any = 1) -> Value:
    return t.pointwise("add", x, t.pointwise("div", _scaled(t, a, value), b))


@translates(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(t: Translator, start: Value, end: Value, weight: Any) -> Value:
    # from the nearer end, as ATen/native/Lerp.h
    difference = t.pointwise("sub", end, start)
    if not isinstance(weight, Value):
        if abs(weight) < 0.5:
            return t.pointwise("add", start, t.pointwise("mul", difference, weight))
        return t.pointwise("sub", end, t.pointwise("mul", difference, 1 - weight))
    low = t.pointwise("add", start, t.pointwise("mul", difference, weight))
    high = t.pointwise("sub", end, t.pointwise("mul", difference, t.pointwise("sub", 1.0, weight)))
    small = t.op("lt", t.op("abs", t.cast(weight, t.out.dtype)), 0.5)
    return t.where(small, low, high)


@translates(aten.nan_to_num.default)
def nan_to_num(t: Translator, x: Value, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Value:
    if not is_float(x.tensor.dtype):
        return x
    largest = torch.finfo(TORCH_DTYPES[x.tensor.dtype]).max
    y = t.where(t.op("isnan", x), 0.0 if nan is None else nan, x)
    y = t.where(t.op("eq", y, math.inf), largest if posinf is None else posinf, y)
    return t.where(t.op("eq", y, -math.inf), -largest if neginf is None else neginf, y)


if hasattr(prims, "fma"):
    @translates(prims.fma.default)
    def fma(t: Translator, a: Value, b: Value, c: Value) -> Value:
        return t.pointwise("add", t.pointwise("mul", a, b), c)


@translates(prims.convert_element_type.default)
def convert_element_type(t: Translator, x: Value, dtype: torch.dtype) -> Value:
    return t.cast(x, t.out.dtype)


@translates(aten.fill.Scalar, aten.fill.Tensor)
def fill(t: Translator, x: Value, value: Any) -> Value:
    return t.full(value, t.out.shape, t.out.dtype)
