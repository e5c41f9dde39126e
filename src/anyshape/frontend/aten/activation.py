"""Translations of activation functions, forward and backward. Half precisions are computed in f32.

    aten.silu(x)  -->  mul(x, sigmoid(x))
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from anyshape.frontend.aten.table import Decline, Translator, is_float, translates, wide
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.torch_compat import aten


def _in_wide(function: Callable[..., Value]) -> Callable[..., Value]:
    """Runs a translation with value operands cast to the computing dtype, and casts its result back."""
    def translation(t: Translator, *arguments: Any, **more: Any) -> Value:
        kind = wide(t.out.dtype)
        given = [t.cast(x, kind) if isinstance(x, Value) and is_float(x.tensor.dtype) else x for x in arguments]
        named = {name: t.cast(x, kind) if isinstance(x, Value) and is_float(x.tensor.dtype) else x
                 for name, x in more.items()}
        return t.cast(function(t, *given, **named), t.out.dtype)
    return translation


def _choose(t: Translator, condition: Value, x: Any, y: Any) -> Value:
    kind = next(v.tensor.dtype for v in (x, y) if isinstance(v, Value))
    return t.where(condition, x, y, kind)


def _sigmoid_slope(t: Translator, s: Value) -> Value:
    return t.op("mul", s, t.op("sub", 1.0, s))


@translates(aten.relu.default)
def relu(t: Translator, x: Value) -> Value:
    return t.pointwise("maximum", 0, x)  # of two zeros the row gives the second: -0.0 stays


@translates(aten.relu6.default)
def relu6(t: Translator, x: Value) -> Value:
    return t.pointwise("minimum", 6, t.pointwise("maximum", 0, x))


@translates(aten.threshold_backward.default)
def threshold_backward(t: Translator, grad: Value, x: Value, threshold: Any) -> Value:
    return t.where(_at_most(t, x, threshold), 0, grad)


@translates(aten.threshold.default)
def threshold(t: Translator, x: Value, limit: Any, value: Any) -> Value:
    return t.where(_at_most(t, x, limit), value, x)


def _at_most(t: Translator, x: Value, limit: Any) -> Value:
    """x <= limit, a number that is not rounded to half precision."""
    return t.compare("le", t.cast(x, wide(x.tensor.dtype)), limit)


def _unit_bounds(t: Translator, eps: float | None) -> tuple[float, float]:
    """Where logit cuts its operand off, in the operand's dtype: the upper bound of f16 and bf16 may be 1."""
    low = t.bound(float(eps or 0.0))
    return low, t.bound(1.0 - low)


@translates(aten.logit.default)
def logit(t: Translator, x: Value, eps: float | None = None) -> Value:
    y = t.cast(x, t.out.dtype)
    if eps is not None and eps >= 0:
        low, high = _unit_bounds(t, eps)
        y = t.op("minimum", high, t.op("maximum", low, y))
    kind = wide(t.out.dtype)
    y = t.cast(y, kind)
    rest = t.cast(t.cast(t.op("sub", 1.0, y), t.out.dtype), kind)  # half precision is rounded at every step
    return t.op("log", t.cast(t.op("div", y, rest), t.out.dtype))


@translates(aten.logit_backward.default)
@_in_wide
def logit_backward(t: Translator, grad: Value, x: Value, eps: float | None = None) -> Value:
    slope = t.op("div", grad, t.op("mul", x, t.op("sub", 1.0, x)))
    known = eps is not None and eps >= 0
    low, high = _unit_bounds(t, eps if known else None)
    inside = t.op("bit_and", t.op("ge", x, low), t.op("le", x, high))
    return t.where(inside, slope, 0.0 if known else math.nan, x.tensor.dtype)


@translates(aten.leaky_relu.default)
@_in_wide
def leaky_relu(t: Translator, x: Value, slope: Any = 0.01) -> Value:
    return _choose(t, t.op("gt", x, 0.0), x, t.op("mul", x, slope))


@translates(aten.leaky_relu_backward.default)
@_in_wide
def leaky_relu_backward(t: Translator, grad: Value, x: Value, slope: Any, is_result: bool) -> Value:
    return _choose(t, t.op("gt", x, 0.0), grad, t.op("mul", grad, slope))


@translates(aten.elu.default)
@_in_wide
def elu(t: Translator, x: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    low = t.op("mul", t.op("expm1", t.op("mul", x, float(input_scale))), float(alpha * scale))
    return _choose(t, t.op("gt", x, 0.0), t.op("mul", x, float(scale)), low)


@translates(aten.hardtanh.default)
def hardtanh(t: Translator, x: Value, low: Any = -1, high: Any = 1) -> Value:
    return t.pointwise("minimum", t.bound(high), t.pointwise("maximum", t.bound(low), x))


@translates(aten.hardtanh_backward.default)
def hardtanh_backward(t: Translator, grad: Value, x: Value, low: Any, high: Any) -> Value:
    outside = t.op("bit_or", t.compare("le", x, low), t.compare("ge", x, high))
    return t.where(outside, 0, grad)


@translates(aten.hardsigmoid.default)
@_in_wide
def hardsigmoid(t: Translator, x: Value) -> Value:
    return t.op("div", _relu6(t, t.op("add", x, 3.0)), 6.0)


@translates(aten.hardswish.default)
@_in_wide
def hardswish(t: Translator, x: Value) -> Value:
    return t.op("div", t.op("mul", x, _relu6(t, t.op("add", x, 3.0))), 6.0)


def _relu6(t: Translator, x: Value) -> Value:
    return t.op("minimum", 6.0, t.op("maximum", 0.0, x))


@translates(aten.silu.default)
@_in_wide
def silu(t: Translator, x: Value) -> Value:
    return t.op("mul", x, t.op("sigmoid", x))


@translates(aten.silu_backward.default)
@_in_wide
def silu_backward(t: Translator, grad: Value, x: Value) -> Value:
    s = t.op("sigmoid", x)
    slope = t.op("mul", s, t.op("add", t.op("mul", x, t.op("sub", 1.0, s)), 1.0))
    return t.pointwise("mul", grad, slope, dtype=s.tensor.dtype)


@translates(aten.mish.default)
@_in_wide
def mish(t: Translator, x: Value) -> Value:
    return t.op("mul", x, t.op("tanh", t.op("log1p", t.op("exp", x))))


@translates(aten.sigmoid_backward.default)
@_in_wide
def sigmoid_backward(t: Translator, grad: Value, output: Value) -> Value:
    return t.pointwise("mul", grad, _sigmoid_slope(t, output), dtype=output.tensor.dtype)


@translates(aten.tanh_backward.default)
@_in_wide
def tanh_backward(t: Translator, grad: Value, output: Value) -> Value:
    slope = t.op("sub", 1.0, t.op("mul", output, output))
    return t.pointwise("mul", grad, slope, dtype=output.tensor.dtype)


@translates(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(t: Translator, x: Value) -> tuple[Value, Value]:
    kind = wide(x.tensor.dtype)
    y = t.cast(x, kind)
    small = t.op("exp", t.op("neg", t.op("abs", y)))
    out = t.op("sub", t.op("minimum", y, 0.0), t.op("log1p", small))
    buffer = t.result[1]
    kept = small if buffer.shape == x.tensor.shape else t.full(0, buffer.shape, buffer.dtype)
    return t.cast(out, x.tensor.dtype), t.cast(kept, buffer.dtype)


@translates(aten.softplus.default)
@_in_wide
def softplus(t: Translator, x: Value, beta: Any = 1, limit: Any = 20) -> Value:
    scaled = t.op("mul", x, float(beta))
    soft = t.op("div", t.op("log1p", t.op("exp", scaled)), float(beta))
    return _choose(t, t.op("gt", scaled, float(limit)), x, soft)


@translates(aten.softplus_backward.default)
@_in_wide
def softplus_backward(t: Translator, grad: Value, x: Value, beta: Any, limit: Any) -> Value:
    scaled = t.op("mul", x, float(beta))
    return _choose(t, t.op("gt", scaled, float(limit)), grad, t.op("mul", grad, t.op("sigmoid", scaled)))


@translates(aten.gelu.default)
@_in_wide
def gelu(t: Translator, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        return t.op("mul", t.op("mul", x, 0.5), t.op("add", t.op("tanh", _tanh_argument(t, x)), 1.0))
    return t.op("mul", t.op("mul", x, 0.5), t.op("add", t.op("erf", t.op("mul", x, math.sqrt(0.5))), 1.0))


def _tanh_argument(t: Translator, x: Value) -> Value:
    cube = t.op("mul", t.op("mul", x, x), x)
    return t.op("mul", t.op("add", x, t.op("mul", cube, 0.044715)), math.sqrt(2 / math.pi))


@translates(aten.gelu_backward.default)
@_in_wide
def gelu_backward(t: Translator, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    if approximate == "tanh":
        k = math.sqrt(2 / math.pi)
        th = t.op("tanh", _tanh_argument(t, x))
        left = t.op("mul", t.op("add", th, 1.0), 0.5)
        inner = t.op("add", t.op("mul", t.op("mul", x, x), 3 * 0.044715 * k), k)
        right = t.op("mul", t.op("mul", t.op("mul", x, 0.5), t.op("sub", 1.0, t.op("mul", th, th))), inner)
        return t.op("mul", grad, t.op("add", left, right))
    below = t.op("mul", t.op("add", t.op("erf", t.op("mul", x, math.sqrt(0.5))), 1.0), 0.5)
    density = t.op("mul", t.op("exp", t.op("mul", t.op("mul", x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return t.op("mul", grad, t.op("add", below, t.op("mul", x, density)))


@translates(aten.glu.default)
def glu(t: Translator, x: Value, dim: int = -1) -> Value:
    dim = dim % x.tensor.rank
    half = t.out.shape[dim]
    a, b = t.window(x, dim, 0, half), t.window(x, dim, half, half)
    return t.op("mul", a, t.op("sigmoid", b))


@translates(aten.native_dropout_backward.default)
def dropout_backward(t: Translator, grad: Value, mask: Value, scale: Any) -> Value:
    return t.pointwise("mul", t.pointwise("mul", grad, mask), scale)


@translates(aten.bernoulli.p)
def drawn_mask(t: Translator, x: Value, share: Any, generator: Any = None) -> Value:
    """The mask of a dropout (frontend/aten/decompositions.py), drawn in the order of indices. Nothing but the shape of
    the operand counts."""
    if "bernoulli" not in t.target.own_ops:
        raise Decline("random numbers are PyTorch's on this device")
    if t.out.dtype != "bool" or generator is not None or not isinstance(share, float) or not 0.0 < share < 1.0:
        raise Decline("random numbers")
    shape = t.out.shape
    sizes = tuple(dict.fromkeys(size for size in shape if not isinstance(size, int)))
    entries = tuple(("int", size) if isinstance(size, int) else ("operand", sizes.index(size)) for size in shape)
    (drawn,) = t.builder.multi(
        "extern", *sizes, name="mask", types=(TensorType("bool", shape, None, x.tensor.device),),
        target="draws.bernoulli", template=(("args", ("list", *entries), ("float", share)), ("kwargs",)), effect=True)
    return drawn
