"""Translations of elementwise operations of StableHLO, and of the dialect chlo.

Whole numbers follow StableHLO: a division by 0 gives all bits set, its remainder the dividend, and sums wrap.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_stablehlo.table import COMPLEX, HELD, Call, bounds, held, translates
from anyshape.ir.graph import Value
from anyshape.ir.types import kind_of
from anyshape.torch_compat.dtypes import TORCH_DTYPES

aten = torch.ops.aten
LOWEST = -(1 << 63)

UNARY = {
    "exponential": "exp", "exponential_minus_one": "expm1", "log": "log", "log_plus_one": "log1p", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "tanh": "tanh", "tan": "tan", "sine": "sin", "cosine": "cos", "logistic": "sigmoid",
    "floor": "floor", "ceil": "ceil", "round_nearest_even": "round", "chlo.erf": "erf", "chlo.erfc": "erfc",
    "chlo.erf_inv": "erfinv", "chlo.acos": "acos", "chlo.acosh": "acosh", "chlo.asin": "asin", "chlo.asinh": "asinh",
    "chlo.atan": "atan", "chlo.atanh": "atanh", "chlo.cosh": "cosh", "chlo.sinh": "sinh", "chlo.tan": "tan",
    "chlo.lgamma": "lgamma", "chlo.digamma": "digamma",
}  # fmt: skip
BINARY = {"add": "add", "subtract": "sub", "multiply": "mul", "atan2": "atan2", "chlo.next_after": "nextafter",
          "maximum": "maximum", "minimum": "minimum", "power": "pow"}
# of complex numbers, by PyTorch
BY_TORCH = {
    "exponential": aten.exp, "exponential_minus_one": aten.expm1, "log": aten.log, "log_plus_one": aten.log1p,
    "sqrt": aten.sqrt, "rsqrt": aten.rsqrt, "tanh": aten.tanh, "tan": aten.tan, "sine": aten.sin, "cosine": aten.cos,
    "logistic": aten.sigmoid, "chlo.acos": aten.acos, "chlo.acosh": aten.acosh, "chlo.asin": aten.asin,
    "chlo.asinh": aten.asinh, "chlo.atan": aten.atan, "chlo.atanh": aten.atanh, "chlo.cosh": aten.cosh,
    "chlo.sinh": aten.sinh, "chlo.tan": aten.tan, "chlo.conj": aten.conj_physical, "negate": aten.neg,
    "sign": aten.sgn,
}  # fmt: skip
PAIRS_BY_TORCH = {"add": aten.add, "subtract": aten.sub, "multiply": aten.mul, "divide": aten.div, "power": aten.pow}


def _by_torch(c: Call, target: Any, *values: Value) -> Value:
    overload = getattr(target, "Tensor", None) or getattr(target, "Tensor_Tensor", None) or target.default
    return c.aten(overload, *values, types=c.type(values[0].tensor.shape))  # type: ignore[no-any-return]


def _full_name(c: Call) -> str:
    return c.operation.name.removeprefix("stablehlo.")


@translates(*UNARY)
def unary(c: Call) -> Any:
    x = c.value(0)
    if c.dtype in COMPLEX:
        return _by_torch(c, BY_TORCH[_full_name(c)], x)
    return c.op(UNARY[_full_name(c)], x)


@translates("negate", "abs", "sign", "chlo.conj", "chlo.square", "cbrt", "round_nearest_afz", "not", "is_finite",
            "chlo.is_inf", "chlo.is_pos_inf", "chlo.is_neg_inf")
def others(c: Call) -> Any:
    x, name = c.value(0), c.name
    if c.given(0) in COMPLEX:
        if name == "abs":
            return c.aten(aten.abs.default, x, types=c.type(x.tensor.shape))
        return _by_torch(c, BY_TORCH[_full_name(c)], x)
    return _OTHERS[name](c, x)


def _nearest_away(c: Call, x: Value) -> Value:
    whole = c.op("trunc", x)
    far = c.op("ge", c.op("abs", c.op("sub", x, whole)), 0.5)
    return c.op("where", far, c.op("add", whole, c.op("copysign", c.op("full", 1.0, shape=x.tensor.shape,
                                                                        dtype=x.tensor.dtype), x)), whole)


def _cbrt(c: Call, x: Value) -> Value:
    wide = c.t.cast(x, "f64" if x.tensor.dtype == "f64" else "f32")
    size = c.op("abs", wide)
    root = c.op("pow", size, 1 / 3)
    # one step of Newton's method: a power is not rounded as a root
    step = c.op("div", c.op("sub", root, c.op("div", size, c.op("mul", root, root))), 3.0)
    good = c.op("bit_and", c.op("gt", size, 0.0), c.op("lt", size, math.inf))
    root = c.op("where", good, c.op("sub", root, step), root)
    return c.t.cast(c.op("copysign", root, wide), x.tensor.dtype)


def _not(c: Call, x: Value) -> Value:
    return c.wrapped(c.op("bit_not", x))


def _finite(c: Call, x: Value) -> Value:
    return c.op("lt", c.op("abs", x), math.inf)


_OTHERS: dict[str, Callable[[Call, Value], Value]] = {
    "negate": lambda c, x: c.wrapped(c.op("neg", x)), "cbrt": _cbrt, "round_nearest_afz": _nearest_away, "not": _not,
    "abs": lambda c, x: x if c.dtype in ("u8", *HELD) else c.op("abs", x), "chlo.conj": lambda c, x: x,
    "conj": lambda c, x: x, "square": lambda c, x: c.wrapped(c.op("mul", x, x)),
    "sign": lambda c, x: c.op("cast", c.op("ne", x, 0), dtype=held(c.dtype)) if c.dtype == "u64" else _sign(c, x),
    "is_finite": _finite, "is_inf": lambda c, x: c.op("eq", c.op("abs", x), math.inf),
    "is_pos_inf": lambda c, x: c.op("eq", x, math.inf), "is_neg_inf": lambda c, x: c.op("eq", x, -math.inf),
}


def _sign(c: Call, x: Value) -> Value:
    found = c.op("sign", x)
    if kind_of(x.tensor.dtype) != "float":
        return found
    return c.op("where", c.op("bit_or", c.op("isnan", x), c.op("eq", x, 0.0)), x, found)  # NaN stays, and so does -0


@translates(*BINARY)
def binary(c: Call) -> Any:
    name = _full_name(c)
    x, y = c.same(c.values())
    if c.dtype in COMPLEX:
        if name in PAIRS_BY_TORCH:
            return _by_torch(c, PAIRS_BY_TORCH[name], x, y)
        if name in ("maximum", "minimum"):
            return c.aten(aten.where.self, _complex_less(c, *((y, x) if name == "maximum" else (x, y))), x, y,
                          types=c.type(x.tensor.shape))
        raise Decline("of complex numbers")
    if c.dtype == "bool":
        return c.op({"add": "bit_or", "maximum": "bit_or", "multiply": "bit_and", "minimum": "bit_and"}[name], x, y)
    if name in ("maximum", "minimum") and c.dtype == "u64":
        return c.op("where", _less_unsigned(c, *((y, x) if name == "maximum" else (x, y))), x, y)
    if name == "power" and kind_of(held(c.dtype)) != "float":
        return c.wrapped(_whole_power(c, x, y))
    if name == "chlo.next_after" and x.tensor.dtype in ("f16", "bf16"):
        return _next_half(c, x, y)
    return c.wrapped(c.op(BINARY[name], x, y))


def _next_half(c: Call, x: Value, y: Value) -> Value:
    """The next number of 16 bits toward y: bits are in the order of the numbers, on either side of 0."""
    bits = _reinterpreted(c, x, "i16")
    up = c.op("bit_xor", c.op("lt", x, y), c.op("lt", x, 0.0))  # away from 0
    moved = c.op("add", bits, c.op("where", up, c.t.full(1, bits.tensor.shape, "i16"),
                                   c.t.full(-1, bits.tensor.shape, "i16")))
    least = c.op("where", c.op("lt", y, 0.0), c.t.full(-32767, bits.tensor.shape, "i16"),
                 c.t.full(1, bits.tensor.shape, "i16"))
    found = _reinterpreted(c, c.op("where", c.op("eq", x, 0.0), least, moved), x.tensor.dtype)
    found = c.op("where", c.op("eq", x, y), y, found)
    return c.op("where", c.op("bit_or", c.op("isnan", x), c.op("isnan", y)), c.op("add", x, y), found)


def _whole_power(c: Call, x: Value, y: Value) -> Value:
    """By squaring; of a negative exponent 0, but of bases 1 and -1."""
    result = c.t.full(1, x.tensor.shape, x.tensor.dtype)
    base, left = x, y
    for _ in range(6):  # beyond, only 0, 1 and -1 have powers that mean something, and they repeat
        odd = c.op("ne", c.op("bit_and", left, 1), 0)
        result = c.op("where", odd, c.wrapped(c.op("mul", result, base)), result)
        base, left = c.wrapped(c.op("mul", base, base)), c.op("shift_right", left, 1)
    if c.dtype in ("u8", *HELD):
        return result
    odd = c.op("ne", c.op("bit_and", y, 1), 0)
    one = c.op("where", odd, x, c.t.full(1, x.tensor.shape, x.tensor.dtype))
    unit = c.op("bit_or", c.op("eq", x, 1), c.op("eq", x, -1))
    small = c.op("where", unit, one, c.t.full(0, x.tensor.shape, x.tensor.dtype))
    return c.op("where", c.op("lt", y, 0), small, result)


def _less_unsigned(c: Call, x: Value, y: Value) -> Value:
    return c.op("lt", c.op("bit_xor", x, LOWEST), c.op("bit_xor", y, LOWEST))


def _complex_less(c: Call, x: Value, y: Value) -> Value:
    (a, b), (p, q) = c.parts(x), c.parts(y)
    return c.op("where", c.op("eq", a, p), c.op("lt", b, q), c.op("lt", a, p))


@translates("real")
def real(c: Call) -> Any:
    x = c.value(0)
    return c.parts(x)[0] if c.given(0) in COMPLEX else x


@translates("imag")
def imag(c: Call) -> Any:
    x = c.value(0)
    if c.given(0) in COMPLEX:
        return c.parts(x)[1]
    return c.t.full(0.0, x.tensor.shape, x.tensor.dtype)


@translates("complex")
def complex_(c: Call) -> Any:
    return c.of_parts(*c.same(c.values()))


@translates("divide")
def divide(c: Call) -> Any:
    x, y = c.same(c.values())
    if c.dtype in COMPLEX:
        return _by_torch(c, aten.div, x, y)
    if kind_of(x.tensor.dtype) == "float":
        return c.op("div", x, y)
    none = c.op("eq", y, 0)
    safe = c.op("where", none, c.t.full(1, y.tensor.shape, y.tensor.dtype), y)
    quotient = _unsigned_quotient(c, x, safe) if c.dtype == "u64" else c.op("trunc_div", x, safe)
    ones = {"u8": 255, "u16": 0xFFFF, "u32": 0xFFFFFFFF}.get(c.dtype, -1)
    return c.op("where", none, c.t.full(ones, x.tensor.shape, x.tensor.dtype), quotient)


def _unsigned_quotient(c: Call, x: Value, y: Value) -> Value:
    """Of whole numbers of 64 bits without sign, held as those with one (Hacker's Delight, section 9-3)."""
    half = c.op("bit_and", c.op("shift_right", x, 1), (1 << 63) - 1)
    rough = c.op("shift_left", c.op("trunc_div", half, y), 1)
    left = c.op("sub", x, c.op("mul", rough, y))
    more = c.op("cast", c.op("bit_not", _less_unsigned(c, left, y)), dtype="i64")
    small = c.op("add", rough, more)
    large = c.op("cast", c.op("bit_not", _less_unsigned(c, x, y)), dtype="i64")  # y is 2^63 or more
    return c.op("where", c.op("lt", y, 0), large, small)


@translates("remainder")
def remainder(c: Call) -> Any:
    x, y = c.same(c.values())
    if kind_of(x.tensor.dtype) == "float":
        return c.op("fmod", x, y)
    none = c.op("eq", y, 0)
    safe = c.op("where", none, c.t.full(1, y.tensor.shape, y.tensor.dtype), y)
    if c.dtype == "u64":
        rest = c.op("sub", x, c.op("mul", _unsigned_quotient(c, x, safe), safe))
    else:
        rest = c.op("fmod", x, safe)
    return c.op("where", none, x, rest)


@translates("and", "or", "xor")
def logic(c: Call) -> Any:
    return c.op(f"bit_{c.name}", *c.same(c.values()))


def _bits(dtype: str) -> int:
    return int("".join(one for one in dtype if one.isdigit()))


@translates("shift_left", "shift_right_logical", "shift_right_arithmetic")
def shift(c: Call) -> Any:
    x, far = c.same(c.values())
    bits = _bits(c.dtype)
    inside = c.op("bit_and", c.op("ge", far, 0), c.op("lt", far, bits))
    near = c.op("where", inside, far, c.t.full(0, far.tensor.shape, far.tensor.dtype))
    zero = c.t.full(0, x.tensor.shape, x.tensor.dtype)
    if c.name == "shift_left":
        return c.op("where", inside, c.wrapped(c.op("shift_left", x, near)), zero)
    if c.name == "shift_right_arithmetic":
        if c.dtype in ("u8", "u16", "u32"):  # the highest bit is the sign
            top = 1 << (bits - 1)
            wide = c.op("sub", c.op("bit_xor", c.op("cast", x, dtype="i64"), top), top)
            far = c.op("minimum", c.op("cast", far, dtype="i64"), bits - 1)
            far = c.op("where", c.op("lt", far, 0), c.t.full(bits - 1, far.tensor.shape, "i64"), far)
            return c.op("cast", c.op("bit_and", c.op("shift_right", wide, far), (1 << bits) - 1), dtype=x.tensor.dtype)
        last = c.op("where", c.op("lt", x, 0), c.t.full(-1, x.tensor.shape, x.tensor.dtype), zero)
        return c.op("where", inside, c.op("shift_right", x, near), last)
    if c.dtype in ("u8", "u16", "u32"):
        return c.op("where", inside, c.op("shift_right", x, near), zero)
    if bits < 64:
        wide = c.op("bit_and", c.op("cast", x, dtype="i64"), (1 << bits) - 1)
        moved = c.op("cast", c.op("shift_right", wide, c.op("cast", near, dtype="i64")), dtype=x.tensor.dtype)
    else:
        none = c.op("eq", near, 0)
        less = c.op("where", none, zero, c.op("sub", near, 1))
        half = c.op("bit_and", c.op("shift_right", x, 1), (1 << 63) - 1)
        moved = c.op("where", none, x, c.op("shift_right", half, less))
    return c.op("where", inside, moved, zero)


@translates("popcnt", "count_leading_zeros")
def count_bits(c: Call) -> Any:
    x, bits = c.value(0), _bits(c.dtype)
    wide = c.op("cast", x, dtype="i64")
    if bits < 64:
        wide = c.op("bit_and", wide, (1 << bits) - 1)
    if c.name == "count_leading_zeros":
        for step in (1, 2, 4, 8, 16, 32):
            if step < bits:
                far = c.op("bit_and", c.op("shift_right", wide, step), (1 << (64 - step)) - 1)
                wide = c.op("bit_or", wide, far)
    count = _ones(c, wide)
    if c.name == "count_leading_zeros":
        count = c.op("add", c.op("neg", count), bits)
    return c.op("cast", count, dtype=held(c.dtype))


def _ones(c: Call, x: Value) -> Value:
    """How many bits of an i64 are set (Hacker's Delight, section 5-1)."""
    def shifted(value: Value, step: int) -> Value:
        return c.op("bit_and", c.op("shift_right", value, step), (1 << (64 - step)) - 1)
    masks = (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F)
    x = c.op("sub", x, c.op("bit_and", shifted(x, 1), masks[0]))
    x = c.op("add", c.op("bit_and", x, masks[1]), c.op("bit_and", shifted(x, 2), masks[1]))
    x = c.op("bit_and", c.op("add", x, shifted(x, 4)), masks[2])
    return shifted(c.op("mul", x, 0x0101010101010101), 56)


@translates("compare")
def compare(c: Call) -> Any:
    x, y = c.same(c.values())
    way, dtype = c.attr("comparison_direction"), c.given(0)
    if dtype in COMPLEX:
        (a, b), (p, q) = c.parts(x), c.parts(y)
        if way in ("EQ", "NE"):
            equal = c.op("bit_and", c.op("eq", a, p), c.op("eq", b, q))
            return equal if way == "EQ" else c.op("bit_not", equal)
        strict = c.op("lt" if way in ("LT", "LE") else "gt", a, p)
        return c.op("where", c.op("eq", a, p), c.op(way.lower(), b, q), strict)
    if c.attr("compare_type") == "TOTALORDER" and kind_of(held(dtype)) == "float":
        x, y = (total_order(c, one) for one in (x, y))
    elif dtype == "u64" and way not in ("EQ", "NE"):
        x, y = (c.op("bit_xor", one, LOWEST) for one in (x, y))
    return c.op(way.lower(), x, y)


def total_order(c: Call, x: Value) -> Value:
    """Whole numbers in the total order of floats (IEEE 754, section 5.10)."""
    size = {"f16": "i16", "bf16": "i16", "f32": "i32", "f64": "i64"}[x.tensor.dtype]
    bits = _reinterpreted(c, x, size)
    most = (1 << (_bits(size) - 1)) - 1
    return c.op("where", c.op("lt", bits, 0), c.op("bit_xor", bits, most), bits)


def _reinterpreted(c: Call, x: Value, dtype: str) -> Value:
    return c.extern("aten.view_copy.dtype", x, TORCH_DTYPES[dtype],  # type: ignore[no-any-return]
                    types=c.type(x.tensor.shape, dtype))


@translates("bitcast_convert")
def bitcast_convert(c: Call) -> Any:
    x, given, dtype = c.value(0), c.given(0), c.dtype
    if given == dtype:
        return x
    if given in COMPLEX or dtype in COMPLEX or "bool" in (given, dtype):
        raise Decline("of complex numbers or bools")
    if _bits(given) != _bits(dtype):
        return _resized(c, x, _bits(given), _bits(dtype))
    if given in MASKED:  # to the signed dtype of that size
        x = c.op("cast", x, dtype={"u16": "i16", "u32": "i32"}[given])
    between = {"u16": "i16", "u32": "i32", "u64": "i64"}.get(dtype, dtype)
    if x.tensor.dtype != between:
        whole = kind_of(x.tensor.dtype) != "float" and kind_of(between) != "float"
        x = c.op("cast", x, dtype=between) if whole else _reinterpreted(c, x, between)
    if dtype in MASKED:
        x = c.wrapped(c.op("cast", x, dtype=held(dtype)))
    return x


def _resized(c: Call, x: Value, have: int, want: int) -> Value:
    """Bits of one number as those of several, the lowest ones first, along a last dim that is new; or the reverse."""
    if kind_of(x.tensor.dtype) == "float":
        x = _reinterpreted(c, x, f"i{have}")
    bits = c.op("cast", x, dtype="i64")
    if have < 64:
        bits = c.op("bit_and", bits, (1 << have) - 1)
    count, small = max(have, want) // min(have, want), min(have, want)
    if have > want:
        bits = c.t.reshape(bits, (*bits.tensor.shape, 1))
    shape = (*bits.tensor.shape[:-1], count)
    steps = c.t.broadcast(c.t.reshape(c.op("mul", c.t.iota(count), small), (1,) * (len(shape) - 1) + (count,)), shape)
    if have > want:
        bits = c.op("bit_and", c.op("shift_right", c.t.broadcast(bits, shape), steps), (1 << small) - 1)
    else:
        bits = c.op("sum", c.op("shift_left", bits, steps), dims=(len(shape) - 1,), keep=False)
    if kind_of(held(c.dtype)) == "float":
        return _reinterpreted(c, c.op("cast", bits, dtype=f"i{want}"), c.dtype)
    return c.op("cast", bits, dtype=held(c.dtype))


MASKED = ("u16", "u32")


@translates("select")
def select(c: Call) -> Any:
    return chosen(c, *c.same(c.values()))


def chosen(c: Call, condition: Value, x: Value, y: Value) -> Value:
    """Elements of x where the condition holds, of y elsewhere."""
    if x.tensor.dtype in COMPLEX:
        return c.aten(aten.where.self, condition, x, y, types=x.tensor.dense())  # type: ignore[no-any-return]
    return c.op("where", condition, x, y)


@translates("clamp")
def clamp(c: Call) -> Any:
    low, x, high = c.same(c.values())
    if c.dtype in COMPLEX:
        raise Decline("of complex numbers")
    if c.dtype == "u64":
        x = c.op("where", _less_unsigned(c, x, low), low, x)
        return c.op("where", _less_unsigned(c, high, x), high, x)
    return c.op("minimum", c.op("maximum", x, low), high)


@translates("convert")
def convert(c: Call) -> Any:
    x, given, dtype = c.value(0), c.given(0), c.dtype
    if given == dtype:
        return x
    if given in COMPLEX and dtype not in COMPLEX:
        x = c.parts(x)[0]
        given = x.tensor.dtype
    if dtype in COMPLEX:
        if given in COMPLEX:
            return c.extern("prims.convert_element_type.default", x,
                            {"c64": torch.complex64, "c128": torch.complex128}[dtype], types=c.type(x.tensor.shape))
        half = "f32" if dtype == "c64" else "f64"
        x = _cast(c, x, given, half)
        return c.of_parts(x, c.t.full(0.0, x.tensor.shape, half))
    return _cast(c, x, given, dtype)


def _cast(c: Call, x: Value, given: str, dtype: str) -> Value:
    if given == "u64" and kind_of(held(dtype)) == "float":
        half = c.op("bit_or", c.op("bit_and", c.op("shift_right", x, 1), (1 << 63) - 1), c.op("bit_and", x, 1))
        wide = "f64" if dtype == "f64" else "f32"
        large = c.op("mul", c.op("cast", half, dtype=wide), 2.0)
        return c.t.cast(c.op("where", c.op("lt", x, 0), large, c.op("cast", x, dtype=wide)), dtype)
    if kind_of(x.tensor.dtype) == "float" and kind_of(held(dtype)) in ("int", "uint"):
        return _saturated(c, x, dtype)
    return c.wrapped(c.t.cast(x, held(dtype)), dtype)


def _saturated(c: Call, x: Value, dtype: str) -> Value:
    """A float as a whole number: the nearest of those that there are, and 0 for what is no number, as XLA has it."""
    if x.tensor.dtype in ("f16", "bf16"):  # have not all bounds of 16 bits
        x = c.op("cast", x, dtype="f32")
    low, high, largest = bounds(dtype, x.tensor.dtype)
    exact = largest == high
    x = c.op("where", c.op("eq", x, x), x, 0.0)
    inside = c.op("minimum", c.op("maximum", x, float(low)), largest)
    if dtype == "u64":  # held by its bits: the half above 2**63 by what it is larger
        large = c.op("ge", inside, -float(LOWEST))
        found = c.op("cast", c.op("where", large, c.op("add", inside, float(LOWEST)), inside), dtype="i64")
        found = c.op("where", large, c.op("bit_xor", found, LOWEST), found)
        high = -1
    else:
        found = c.op("cast", inside, dtype=held(dtype))
    return found if exact else c.op("where", c.op("gt", x, largest), high, found)


@translates("reduce_precision")
def reduce_precision(c: Call) -> Any:
    """By rounding bits, as XLA does it: what is too large becomes infinite, what is too small 0."""
    x, exponent, mantissa = c.value(0), c.attr("exponent_bits"), c.attr("mantissa_bits")
    have_exponent, have = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}[c.dtype]
    if exponent >= have_exponent and mantissa >= have:
        return x
    bits = _reinterpreted(c, x, f"i{1 + have_exponent + have}")
    if mantissa < have:
        last = c.op("bit_and", c.op("shift_right", bits, have - mantissa), 1)  # ties go to even
        bits = c.op("add", bits, c.op("add", last, (1 << (have - mantissa - 1)) - 1))
        bits = c.op("bit_and", bits, -(1 << (have - mantissa)))
    found = _reinterpreted(c, bits, c.dtype)
    if exponent < have_exponent:
        size, most = c.op("abs", found), (1 << (exponent - 1)) - 1
        found = c.op("where", c.op("ge", size, 2.0 ** (most + 1)), c.op("copysign", c.t.full(
            math.inf, x.tensor.shape, c.dtype), x), found)
        found = c.op("where", c.op("lt", size, 2.0 ** (1 - most)), c.op("copysign", c.t.full(
            0.0, x.tensor.shape, c.dtype), x), found)
    return c.op("where", c.op("isnan", x), x, found)


@translates("optimization_barrier", "sdy.sharding_constraint")
def barrier(c: Call) -> Any:
    return tuple(c.inputs)


@translates("map")
def map_(c: Call) -> Any:
    return c.walk.run(c.operation.regions[0], c.same(c.values()))
