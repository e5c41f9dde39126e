"""Elementary functions on vectors, written as LLVM instructions; float32 within about 2 ulp, float64 to about 1e-15.

Sources. exp, expm1, sin and cos: Cody and Waite, "Software Manual for the Elementary Functions" (1980): subtract a
multiple of ln 2 or pi/2 held in two or three parts, then a polynomial. log: the reduction to [sqrt(1/2), sqrt(2)) of
FreeBSD's msun; in float64 the series of 2*atanh(f / (2 + f)). tanh is expm1(2x) / (expm1(2x) + 2). erf: a
polynomial below 1, 1 - exp(polynomial) above. The float32 polynomials were fitted for this file (least squares
driven to the minimax error by Lawson's weights); the float64 ones are Taylor series long enough for the interval.

Everything else calls libm lane by lane. Functions that are odd keep the sign of zero.
"""
from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from anyshape.backend.cpu.llvm.emitters import emits
from anyshape.backend.cpu.llvm.float_formats import (
    FORMAT,
    at_most,
    clamp,
    constants_like,
    horner,
    nearest_whole,
    parts_below,
    parts_of,
    power_of_two,
    scale_by_power,
    split_magic,
)
from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant
from anyshape.backend.cpu.llvm.libm import libm

_EXP32 = (0.4999999403953552, 0.1666651964187622, 0.04166839271783829, 0.008368780836462975, 0.001381446490995586)
_EXPM1_32 = (0.5, 0.1666666716337204, 0.04166635498404503, 0.00833327416330576, 0.0013941116631031036,
             0.00019913705182261765)
_LOG32 = (0.33333316445350647, -0.25000816583633423, 0.20002302527427673, -0.16624347865581512, 0.14180703461170197,
          -0.13130463659763336, 0.12885838747024536, -0.07859894633293152)
_ERF32 = (0.12837916612625122, -0.37612637877464294, 0.11283782869577408, -0.02686544507741928, 0.005221074912697077,
          -0.00084847112884745, 0.00011270544928265736, -9.680136827228125e-06)
_ERFC32 = (1.1285711526870728, 0.6355364322662354, 0.10543347895145416, -0.02285253256559372, 0.003039451315999031,
           -8.883974805939943e-05, -3.7931622500764206e-05, 4.314356829127064e-06)
_SIN32 = (-0.1666666567325592, 0.008333326317369938, -0.00019840840832330287, 2.7524529286893085e-06,
          -2.3873580445865628e-08)  # on |r| <= pi/2; moved by units of the last place until cos(0) is 1
_SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(1, 11))
_COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(2, 10))
_LN2 = (0.6931471805599453, 2.3190468138462996e-17)
_HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33)
_LOG2_E = (1.4426950408889634, 2.0355273740931033e-17)
_LOG10_E = (0.4342944819032518, 1.098319650216765e-17)
_LOG10_2 = (0.3010299956639812, -2.8037281277851704e-18)


def _reduce_exp(code: Code, x: Value) -> tuple[Value, Value, Value]:
    """n as float and as integer, and r, with x = n*ln2 + r, |r| <= ln2 / 2."""
    form = FORMAT[x.dtype]
    like = constants_like(x)
    whole, n = split_magic(code, code.fma(x, like(_LOG2_E[0]), like(form.magic)))
    high, low = parts_of(x.dtype, *_LN2)
    r = code.fma(whole, like(-high), x)
    return whole, n, code.fma(whole, like(-low), r)


def _exp_tail(code: Code, r: Value, coefficients: Sequence[float]) -> Value:
    """(e^r - 1 - r) / r^2."""
    if r.dtype == "f32":
        return horner(code, r, coefficients)
    return horner(code, r, [1.0 / math.factorial(k) for k in range(2, 14)])


@emits("exp", "float", weight=20)
def exp(code: Code, x: Value) -> Value:
    """e^x."""
    form = FORMAT[x.dtype]
    return _exp_of(code, *_reduce_exp(code, clamp(code, x, form.smallest_exp, form.largest_exp)))


def _exp_of(code: Code, whole: Value, n: Value, r: Value) -> Value:
    like = constants_like(r)
    p = code.fma(r, _exp_tail(code, r, _EXP32), like(1.0))
    return scale_by_power(code, code.fma(p, r, like(1.0)), whole, n)


@emits("exp2", "float", weight=20)
def exp2(code: Code, x: Value) -> Value:
    """2^x."""
    form = FORMAT[x.dtype]
    like = constants_like(x)
    x = clamp(code, x, form.smallest_exp / math.log(2) - 1, form.largest_exp / math.log(2))
    whole, n = nearest_whole(code, x)
    fraction = code.binary("fsub", x, whole)
    high, low = parts_of(x.dtype, *_LN2)
    return _exp_of(code, whole, n, code.fma(fraction, like(high), code.binary("fmul", fraction, like(low))))


@emits("expm1", "float", weight=24)
def expm1(code: Code, x: Value) -> Value:
    """e^x - 1, accurate near 0."""
    form = FORMAT[x.dtype]
    result = _expm1_inside(code, clamp(code, x, -form.mantissa * 1.0 - 7, form.largest_exp))
    return code.intrinsic("copysign", result, x)  # of -0.0 too


def _expm1_inside(code: Code, x: Value) -> Value:
    like = constants_like(x)
    _, n, r = _reduce_exp(code, x)
    p = code.fma(code.binary("fmul", r, r), _exp_tail(code, r, _EXPM1_32), r)
    # 2^n * (1 + p) - 1 as 2 * (2^(n-1) * p + (2^(n-1) - 1/2)): n may be one above the largest exponent
    half = power_of_two(code, code.binary("sub", n, constant(n.dtype, 1, n.lanes)), x.dtype)
    result = code.fma(half, p, code.binary("fsub", half, like(0.5)))
    return code.binary("fadd", result, result)


@emits("tanh", "float", weight=30)
def tanh(code: Code, x: Value) -> Value:
    """Hyperbolic tangent."""
    like = constants_like(x)
    limit = 10.0 if x.dtype == "f32" else 20.0
    magnitude = at_most(code, code.intrinsic("fabs", x), limit)
    grown = _expm1_inside(code, code.binary("fadd", magnitude, magnitude))
    result = code.binary("fdiv", grown, code.binary("fadd", grown, like(2.0)))
    return code.intrinsic("copysign", result, x)


@emits("sigmoid", "float", weight=26)
def sigmoid(code: Code, x: Value) -> Value:
    """1 / (1 + e^-x)."""
    like = constants_like(x)
    return code.binary("fdiv", like(1.0), code.binary("fadd", like(1.0), exp(code, code.negate(x))))


@dataclass(frozen=True, slots=True)
class _LogParts:
    """log(x) = exponent * ln2 + f + rest, f + 1 in [sqrt(1/2), sqrt(2))."""

    exponent: Value
    f: Value
    rest: Value


def _log_parts(code: Code, x: Value, correction: Value | None = None) -> _LogParts:
    """`correction`: what x lacks of the argument; d log = correction / x enters the rest."""
    form = FORMAT[x.dtype]
    like = constants_like(x)

    def whole(value: int) -> Value:
        return constant(form.integer, value, x.lanes)

    small = code.compare("olt", x, like(form.tiny))
    normal = code.select(small, code.binary("fmul", x, like(2.0 ** (form.mantissa + 1))), x)
    one = form.bias << form.mantissa
    layout = "<I" if x.dtype == "f32" else "<Q"
    root = struct.unpack(layout, struct.pack("<f" if x.dtype == "f32" else "<d", math.sqrt(0.5)))[0]
    moved = code.binary("add", code.bits(normal, form.integer), whole(one - root))
    raw = code.binary("sub", code.binary("ashr", moved, whole(form.mantissa)), whole(form.bias))
    shift = code.select(small, whole(form.mantissa + 1), whole(0))
    exponent = code.convert("sitofp", code.binary("sub", raw, shift), x.dtype)
    mantissa = code.binary("add", code.binary("and", moved, whole((1 << form.mantissa) - 1)), whole(root))
    f = code.binary("fsub", code.bits(mantissa, x.dtype), like(1.0))
    square = code.binary("fmul", f, f)
    if x.dtype == "f32":
        cubic = code.binary("fmul", code.binary("fmul", square, f), horner(code, f, _LOG32))
        rest = code.fma(square, like(-0.5), cubic)
    else:
        # log(1+f) = 2*atanh(s), s = f/(2+f); f - s*(f - series) with s*f folded as msun does
        s = code.binary("fdiv", f, code.binary("fadd", f, like(2.0)))
        z = code.binary("fmul", s, s)
        series = code.binary("fmul", z, horner(code, z, [2.0 / (2 * k + 1) for k in range(1, 12)]))
        halved = code.binary("fmul", square, like(0.5))
        rest = code.binary("fsub", code.binary("fmul", s, code.binary("fadd", halved, series)), halved)
    if correction is not None:
        rest = code.binary("fadd", rest, code.binary("fdiv", correction, x))
    return _LogParts(exponent, f, rest)


def _log_limits(code: Code, x: Value, result: Value, zero_at: float = 0.0) -> Value:
    """The results outside the domain: x is the argument, `zero_at` where the logarithm is -inf."""
    like = constants_like(x)
    result = code.select(code.compare("ult", x, like(math.inf)), result, x)
    result = code.select(code.compare("oeq", x, like(zero_at)), like(-math.inf), result)
    result = code.select(code.compare("olt", x, like(zero_at)), like(math.nan), result)
    return code.select(code.compare("uno", x, x), x, result)


def _natural(code: Code, parts: _LogParts) -> Value:
    like = constants_like(parts.f)
    high, low = parts_of(parts.f.dtype, *_LN2)
    if parts.f.dtype == "f64":
        high = struct.unpack("<d", struct.pack("<Q", struct.unpack("<Q", struct.pack("<d", high))[0] & ~0xFFFFF))[0]
        low = _LN2[0] - high + _LN2[1]
    small = code.fma(parts.exponent, like(low), parts.rest)
    return code.fma(parts.exponent, like(high), code.binary("fadd", parts.f, small))


@emits("log", "float", weight=24)
def log(code: Code, x: Value) -> Value:
    """Natural logarithm."""
    return _log_limits(code, x, _natural(code, _log_parts(code, x)))


@emits("log1p", "float", weight=32)
def log1p(code: Code, x: Value) -> Value:
    """log(1 + x), accurate near 0."""
    like = constants_like(x)
    total = code.binary("fadd", x, like(1.0))
    large = code.compare("ogt", x, like(1.0))
    lost = code.select(large, code.binary("fsub", like(1.0), code.binary("fsub", total, x)),
                       code.binary("fsub", x, code.binary("fsub", total, like(1.0))))
    result = _natural(code, _log_parts(code, total, lost))
    tiny = code.compare("olt", code.intrinsic("fabs", x), like(2.0**-(FORMAT[x.dtype].mantissa + 2)))
    return _log_limits(code, x, code.select(tiny, x, result), -1.0)


def _log_base(code: Code, x: Value, scale: tuple[float, float], unit: tuple[float, float]) -> Value:
    """Logarithm with 1 / ln(base) = scale and log_base(2) = unit, each a sum of two doubles."""
    parts = _log_parts(code, x)
    like = constants_like(x)
    scale_high, scale_low = parts_of(x.dtype, *scale)
    unit_high, unit_low = parts_of(x.dtype, *unit)
    product = code.binary("fmul", parts.f, like(scale_high))
    lost = code.fma(parts.f, like(scale_high), code.negate(product))
    small = code.fma(parts.rest, like(scale_high), code.fma(parts.f, like(scale_low), lost))
    whole = code.binary("fmul", parts.exponent, like(unit_high))
    small = code.binary("fadd", small, code.fma(parts.exponent, like(unit_high), code.negate(whole)))
    small = code.fma(parts.exponent, like(unit_low), small)
    total = code.binary("fadd", whole, product)
    # what the sum lost (Knuth's two-sum: either term may be the larger)
    back = code.binary("fsub", total, whole)
    error = code.binary("fadd", code.binary("fsub", whole, code.binary("fsub", total, back)),
                        code.binary("fsub", product, back))
    return _log_limits(code, x, code.binary("fadd", total, code.binary("fadd", small, error)))


@emits("log2", "float", weight=32)
def log2(code: Code, x: Value) -> Value:
    """Logarithm to base 2."""
    return _log_base(code, x, _LOG2_E, (1.0, 0.0))


@emits("log10", "float", weight=32)
def log10(code: Code, x: Value) -> Value:
    """Logarithm to base 10."""
    return _log_base(code, x, _LOG10_E, _LOG10_2)


def _circle(code: Code, x: Value) -> tuple[Value, Value, Value]:
    """sin(r), cos(r) and the quarter n of x = n*pi/2 + r, for |x| up to 2^20."""
    like = constants_like(x)
    whole, n = nearest_whole(code, code.binary("fmul", x, like(2 / math.pi)))
    r = x
    for part in parts_below(x.dtype, *_HALF_PI):
        r = code.fma(whole, like(-part), r)
    z = code.binary("fmul", r, r)
    terms = 4 if x.dtype == "f32" else 8
    sine = code.fma(code.binary("fmul", z, r), horner(code, z, _SIN[:terms]), r)
    sine = code.intrinsic("copysign", sine, r)  # 0.0 where r is -0.0
    cosine = horner(code, z, (1.0, -0.5, *_COS[:terms]))
    return sine, cosine, n


def _odd(code: Code, n: Value, bit: int) -> Value:
    masked = code.binary("and", n, constant(n.dtype, bit, n.lanes))
    return code.compare("ne", masked, constant(n.dtype, 0, n.lanes))


def _large_angle(code: Code, x: Value, fast: Value, name: str) -> Value:
    """The fast result, unless some |x| is beyond the reduction: then libm for all lanes."""
    like = constants_like(x)
    beyond = code.compare("ogt", code.intrinsic("fabs", x), like(2.0**20))
    return libm(code, name, [x], instead_of=fast, when=code.any_of(beyond))


def _half_turn(code: Code, x: Value, whole: Value, turns: Value, parts: Sequence[float]) -> Value:
    """sin(x - whole * period), its sign turned when the integer `turns` is odd; `parts` add up to the period."""
    form = FORMAT[x.dtype]
    r = x
    for part in parts:
        r = code.fma(whole, constants_like(x)(-part), r)
    z = code.binary("fmul", r, r)
    terms = _SIN32 if x.dtype == "f32" else _SIN
    sine = code.fma(code.binary("fmul", z, r), horner(code, z, terms), r)
    sine = code.intrinsic("copysign", sine, r)  # 0.0 where r is -0.0
    sign = code.binary("shl", turns, constant(turns.dtype, 8 * form.bytes - 1, turns.lanes))
    return code.bits(code.binary("xor", code.bits(sine, form.integer), sign), x.dtype)


@emits("sin", "float", weight=24)
def sin(code: Code, x: Value) -> Value:
    """Sine: with x = n*pi + r it is sin(r), negated for odd n."""
    whole, n = nearest_whole(code, code.binary("fmul", x, constants_like(x)(1 / math.pi)))
    parts = parts_below(x.dtype, *(2 * number for number in _HALF_PI))
    return _large_angle(code, x, _half_turn(code, x, whole, n, parts), "sin")


@emits("cos", "float", weight=24)
def cos(code: Code, x: Value) -> Value:
    """Cosine: with x = (n + 1/2)*pi + r it is -sin(r), negated for odd n."""
    like = constants_like(x)
    whole, n = nearest_whole(code, code.fma(x, like(1 / math.pi), like(-0.5)))
    halves = code.fma(whole, like(2.0), like(1.0))
    turns = code.binary("add", n, constant(n.dtype, 1, n.lanes))
    return _large_angle(code, x, _half_turn(code, x, halves, turns, parts_below(x.dtype, *_HALF_PI)), "cos")


@emits("tan", "float", weight=28)
def tan(code: Code, x: Value) -> Value:
    """Tangent."""
    sine, cosine, n = _circle(code, x)
    odd = _odd(code, n, 1)
    result = code.binary("fdiv", code.select(odd, code.negate(cosine), sine), code.select(odd, sine, cosine))
    return _large_angle(code, x, result, "tan")


@emits("erf", "float", weight=44)
def erf(code: Code, x: Value) -> Value:
    """Error function."""
    if x.dtype == "f64":
        return libm(code, "erf", [x])
    like = constants_like(x)
    t = code.intrinsic("fabs", x)
    near = code.fma(x, horner(code, code.binary("fmul", x, x), _ERF32), x)
    limited = at_most(code, t, 4.0)
    power = code.binary("fmul", limited, horner(code, limited, _ERFC32))
    far = code.binary("fsub", like(1.0), _exp_of(code, *_reduce_exp(code, code.negate(power))))
    far = code.intrinsic("copysign", far, x)
    return code.select(code.compare("olt", t, like(1.0)), near, far)


@emits("pow", "float", weight=64)
def power(code: Code, x: Value, y: Value) -> Value:
    """x^y, with C's rules for zeros, infinities, NaN and negative x. float32 is computed in float64."""
    if x.dtype == "f64":
        return libm(code, "pow", [x, y])
    (x, y), _, _ = code.align(x, y)
    base, exponent = code.convert("fpext", x, "f64"), code.convert("fpext", y, "f64")
    like = constants_like(base)
    size = code.intrinsic("fabs", base)
    result = exp2(code, code.binary("fmul", exponent, log2(code, size)))
    result = code.select(code.compare("oeq", size, like(1.0)), like(1.0), result)
    half = code.binary("fmul", exponent, like(0.5))
    whole = code.compare("oeq", code.intrinsic("floor", exponent), exponent)
    odd = code.binary("and", whole, code.compare("une", code.intrinsic("floor", half), half))
    signed = code.intrinsic("copysign", result, base)
    result = code.select(odd, signed, result)
    finite_below = code.binary("and", code.compare("olt", base, like(0.0)), code.compare("ogt", base, like(-math.inf)))
    not_whole = code.compare("une", code.intrinsic("floor", exponent), exponent)
    result = code.select(code.binary("and", finite_below, not_whole), like(math.nan), result)
    result = code.select(code.compare("uno", exponent, exponent), exponent, result)
    one = code.binary("or", code.compare("oeq", exponent, like(0.0)), code.compare("oeq", base, like(1.0)))
    return code.convert("fptrunc", code.select(one, like(1.0), result), "f32")
