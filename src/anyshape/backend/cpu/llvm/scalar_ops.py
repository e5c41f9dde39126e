"""Scalar instructions: the scalar operations of the loop language as LLVM instructions, on scalars and vectors alike;
and conversions."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from anyshape.backend.cpu.llvm import float_formats, libm, vector_math
from anyshape.backend.cpu.llvm.ir_builder import BITS, FLOATS, Code, Value, constant
from anyshape.base.errors import Unsupported
from anyshape.kernel.loop_ir.program import ROUNDING

# dtype of a buffer's element -> type in which its bits travel between memory and register
IN_MEMORY = {"bool": "u8", "bf16": "i16"}

_COMPARE_FLOAT = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_FLOAT_OPS = {"add": "fadd contract", "sub": "fsub contract", "mul": "fmul contract", "div": "fdiv"}
_INT_OPS = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor"}
_BOOL_OPS = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "and": "and", "or": "or", "xor": "xor",
             "sub": "xor"}
_ROUNDING = {"floor": "floor", "ceil": "ceil", "round": "roundeven", "trunc": "trunc", "sqrt": "sqrt"}


def scalar(code: Code, op: str, args: Sequence[Value], dtype: str) -> Value:
    """The value of `op` (a name of loop.SCALAR); raises Unsupported for the few that have no code here."""
    if op == "cast":
        return convert(code, args[0], dtype)
    if op == "where":
        return code.select(*args)
    if op == "random":
        return _random(code, *args)
    if op in ROUNDING:
        return from_memory(code, to_memory(code, args[0], ROUNDING[op]), ROUNDING[op], dtype)
    kind = args[0].dtype
    if op in _COMPARE_FLOAT:
        return _compare(code, op, args[0], args[1])
    if kind == "bool":
        return _bool(code, op, args)
    return (_float if kind in FLOATS else _integer)(code, op, args)


def _missing(op: str, dtype: str) -> Unsupported:
    return Unsupported(f"the CPU backend has no code for {op} on {dtype}", why="libm has no such function",
                       do="keep the operation out of kernels (llvm_libm.UNSUPPORTED)")


def _compare(code: Code, op: str, a: Value, b: Value) -> Value:
    if a.dtype in FLOATS:
        return code.compare(_COMPARE_FLOAT[op], a, b)
    if op in ("eq", "ne"):
        return code.compare(op, a, b)
    return code.compare(("u" if a.dtype in ("u8", "bool") else "s") + op, a, b)


def _bool(code: Code, op: str, args: Sequence[Value]) -> Value:
    if op in _BOOL_OPS:
        return code.binary(_BOOL_OPS[op], args[0], args[1])
    if op == "not":
        return code.binary("xor", args[0], constant("bool", True, args[0].lanes))
    if op in ("isnan", "isinf", "signbit"):
        return constant("bool", False, args[0].lanes)
    if op in ("floor", "ceil", "round", "trunc", "abs", "sign"):
        return args[0]
    raise _missing(op, "bool")


# floats


def _float(code: Code, op: str, args: Sequence[Value]) -> Value:
    x = args[0]
    if op in _FLOAT_OPS:
        return code.binary(_FLOAT_OPS[op], x, args[1])
    if op in _ROUNDING:
        return code.intrinsic(_ROUNDING[op], x)
    if op in vector_math.FUNCTIONS:
        return vector_math.FUNCTIONS[op](code, x)
    if op in _FLOAT_RULES:
        return _FLOAT_RULES[op](code, *args)
    if op in libm.LIBM:
        return libm.libm(code, op, args)
    raise _missing(op, x.dtype)


def _same(x: Value, number: float) -> Value:
    return constant(x.dtype, number, x.lanes)


def float_extreme(code: Code, op: str, a: Value, b: Value) -> Value:
    """maximum or minimum; a NaN on either side gives NaN."""
    # the first comparison is false when b is NaN, which gives b; a NaN in a is put back by the second
    chosen = code.select(code.compare("ogt" if op == "maximum" else "olt", a, b), a, b)
    return code.select(code.compare("uno", a, a), a, chosen)


def _reciprocal(code: Code, x: Value) -> Value:
    return code.binary("fdiv", _same(x, 1.0), x)


def _rsqrt(code: Code, x: Value) -> Value:
    return _reciprocal(code, code.intrinsic("sqrt", x))


def _sign(code: Code, x: Value) -> Value:
    # as torch: sign(NaN) is 0
    positive = code.select(code.compare("ogt", x, _same(x, 0.0)), _same(x, 1.0), _same(x, 0.0))
    return code.select(code.compare("olt", x, _same(x, 0.0)), _same(x, -1.0), positive)


def _signs_differ(code: Code, remainder: Value, divisor: Value) -> Value:
    """The remainder is not 0 and has the other sign than the divisor."""
    zero = _same(remainder, 0)
    smaller = "olt" if remainder.dtype in FLOATS else "slt"
    unequal = "une" if remainder.dtype in FLOATS else "ne"
    differ = code.binary("xor", code.compare(smaller, remainder, zero), code.compare(smaller, divisor, zero))
    return code.binary("and", differ, code.compare(unequal, remainder, zero))


def _float_remainder(code: Code, a: Value, b: Value) -> Value:
    rest = libm.libm(code, "fmod", [a, b])
    return code.select(_signs_differ(code, rest, code.spread(b, rest.lanes)), code.binary("fadd", rest, b), rest)


def _float_floor_div(code: Code, a: Value, b: Value) -> Value:
    # Python's rule, as torch has it (c10/util/generic_math.h, div_floor_floating)
    rest = libm.libm(code, "fmod", [a, b])
    quotient = code.binary("fdiv", code.binary("fsub", a, rest), b)
    one = _same(quotient, 1.0)
    lowered = code.select(_signs_differ(code, rest, code.spread(b, rest.lanes)),
                          code.binary("fsub", quotient, one), quotient)
    floor = code.intrinsic("floor", lowered)
    above = code.compare("ogt", code.binary("fsub", lowered, floor), _same(quotient, 0.5))
    floor = code.select(above, code.binary("fadd", floor, one), floor)
    plain = code.binary("fdiv", a, b)
    zero = _same(quotient, 0.0)
    result = code.select(code.compare("une", lowered, zero), floor, code.intrinsic("copysign", zero, plain))
    return code.select(code.compare("oeq", b, _same(b, 0.0)), plain, result)


def _float_trunc_div(code: Code, a: Value, b: Value) -> Value:
    return code.intrinsic("trunc", code.binary("fdiv", a, b))


def _is_inf(code: Code, x: Value) -> Value:
    return code.compare("oeq", code.intrinsic("fabs", x), _same(x, float("inf")))


def _signbit(code: Code, x: Value) -> Value:
    integer = float_formats.FORMAT[x.dtype].integer
    return code.compare("slt", code.bits(x, integer), constant(integer, 0, x.lanes))


_FLOAT_RULES: dict[str, Callable[..., Value]] = {
    "maximum": lambda code, a, b: float_extreme(code, "maximum", a, b),
    "minimum": lambda code, a, b: float_extreme(code, "minimum", a, b),
    "pow": vector_math.power,
    "copysign": lambda code, a, b: code.intrinsic("copysign", a, b),
    "neg": lambda code, x: code.negate(x), "abs": lambda code, x: code.intrinsic("fabs", x),
    "sign": _sign, "reciprocal": _reciprocal, "rsqrt": _rsqrt, "remainder": _float_remainder,
    "floor_div": _float_floor_div, "trunc_div": _float_trunc_div, "isinf": _is_inf, "signbit": _signbit,
    "isnan": lambda code, x: code.compare("uno", x, x),
}  # fmt: skip


# integers


def _integer(code: Code, op: str, args: Sequence[Value]) -> Value:
    x = args[0]
    unsigned = x.dtype == "u8"
    if op in _INT_OPS:
        return code.binary(_INT_OPS[op], x, args[1])
    if op in ("maximum", "minimum"):
        return code.intrinsic(("u" if unsigned else "s") + op[:3], *args)
    if op in ("floor_div", "trunc_div", "remainder", "fmod"):
        return _divide(code, op, x, args[1])
    if op in ("shift_left", "shift_right"):
        return _shift(code, op, x, args[1])
    if op == "neg":
        return code.negate(x)
    if op == "abs":
        return x if unsigned else code.intrinsic("abs", x, flag="false")
    if op == "sign":
        one = _same(x, 1)
        return code.intrinsic("umin", x, one) if unsigned else code.intrinsic(
            "smax", code.intrinsic("smin", x, one), _same(x, -1))
    if op == "not":
        return code.binary("xor", x, _same(x, -1))
    if op in ("floor", "ceil", "round", "trunc"):
        return x
    if op in ("isnan", "isinf"):
        return constant("bool", False, x.lanes)
    if op == "signbit":
        return constant("bool", False, x.lanes) if unsigned else code.compare("slt", x, _same(x, 0))
    raise _missing(op, x.dtype)


def _divide(code: Code, op: str, a: Value, b: Value) -> Value:
    """Division that never traps: by 0 gives 0, the least number by -1 wraps around."""
    (a, b), _, _ = code.align(a, b)
    zero, one = _same(a, 0), _same(a, 1)
    by_zero = code.compare("eq", b, zero)
    if a.dtype == "u8":
        safe = code.select(by_zero, one, b)
        result = code.binary("udiv" if op in ("floor_div", "trunc_div") else "urem", a, safe)
        return code.select(by_zero, zero, result)
    by_minus_one = code.compare("eq", b, _same(a, -1))
    safe = code.select(code.binary("or", by_zero, by_minus_one), one, b)
    quotient = code.binary("sdiv", a, safe)
    rest = code.binary("sub", a, code.binary("mul", quotient, safe))
    differ = _signs_differ(code, rest, safe)
    if op in ("floor_div", "trunc_div"):
        if op == "floor_div":
            quotient = code.select(differ, code.binary("sub", quotient, one), quotient)
        result = code.select(by_minus_one, code.negate(a), quotient)
    else:
        if op == "remainder":
            rest = code.select(differ, code.binary("add", rest, safe), rest)
        result = code.select(by_minus_one, zero, rest)
    return code.select(by_zero, zero, result)


def _shift(code: Code, op: str, a: Value, amount: Value) -> Value:
    """By a negative amount or one as large as the type: 0, or the sign everywhere for shift_right, as torch."""
    (a, amount), _, _ = code.align(a, amount)
    bits = BITS[a.dtype]
    limit = _same(a, bits)
    inside = code.compare("ult", amount, limit)
    if op == "shift_right" and a.dtype != "u8":
        return code.binary("ashr", a, code.select(inside, amount, _same(a, bits - 1)))
    safe = code.select(inside, amount, _same(a, 0))
    return code.select(inside, code.binary("shl" if op == "shift_left" else "lshr", a, safe), _same(a, 0))


def _mix(code: Code, z: Value) -> Value:
    """The finaliser of SplitMix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = code.binary("xor", z, code.binary("lshr", z, _same(z, shift)))
        z = code.binary("mul", z, _same(z, factor))
    return code.binary("xor", z, code.binary("lshr", z, _same(z, 31)))


def _random(code: Code, seed: Value, counter: Value) -> Value:
    """Element `counter` of the SplitMix64 stream whose state starts at mix(seed); its top 24 bits over 2^24.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014):
    state = mix(seed) + (counter + 1) * 0x9E3779B97F4A7C15; result = (mix(state) >> 40) * 2^-24, all modulo 2^64.
    """
    golden = 0x9E3779B97F4A7C15
    # the seed is uniform in most kernels: its half of the work leaves the loop
    start = code.binary("add", _mix(code, seed), _same(seed, golden))
    state = code.binary("add", code.binary("mul", counter, _same(counter, golden)), start)
    top = code.binary("lshr", _mix(code, state), constant("i64", 40, state.lanes))
    number = code.convert("uitofp", code.convert("trunc", top, "i32"), "f32")
    return code.binary("fmul", number, constant("f32", 2.0**-24, number.lanes))


# conversions


def convert(code: Code, a: Value, dtype: str) -> Value:
    """`a` as another register dtype, as a cast in torch: floats are cut towards 0, to bool is "not 0"."""
    source = a.dtype
    if source == dtype:
        return a
    if dtype == "bool":
        return code.compare("une" if source in FLOATS else "ne", a, _same(a, 0))
    if source in FLOATS:
        if dtype in FLOATS:
            return code.convert("fpext" if BITS[dtype] > BITS[source] else "fptrunc", a, dtype)
        return _float_to_integer(code, a, dtype)
    if dtype in FLOATS:
        return code.convert("uitofp" if source in ("u8", "bool") else "sitofp", a, dtype)
    if BITS[dtype] == BITS[source]:
        return Value(a.text, dtype, a.lanes, a.level)
    if BITS[dtype] < BITS[source]:
        return code.convert("trunc", a, dtype)
    return code.convert("zext" if source in ("u8", "bool") else "sext", a, dtype)


def _float_to_integer(code: Code, a: Value, dtype: str) -> Value:
    # out of range the processor's own answer is taken; freeze keeps it from being an undefined value.
    # Small integers go through i32 and wrap, as torch does on x86.
    wide = "i64" if dtype == "i64" else "i32"
    whole = code.freeze(code.convert("fptosi", a, wide))
    return whole if wide == dtype else convert(code, whole, dtype)


def from_memory(code: Code, raw: Value, stored: str, dtype: str) -> Value:
    """A register of `dtype` from the bits of an element of dtype `stored`."""
    if stored == "bool":
        value = code.compare("ne", raw, _same(raw, 0))
    elif stored == "bf16":
        value = code.bits(code.binary("shl", code.convert("zext", raw, "i32"), constant("i32", 16, raw.lanes)), "f32")
    elif stored == "f16":
        value = code.convert("fpext", raw, "f32")
    else:
        value = raw
    return convert(code, value, dtype)


def to_memory(code: Code, value: Value, stored: str) -> Value:
    """The bits of an element of dtype `stored` that holds `value`, rounded to nearest even."""
    if stored == "bool":
        return code.convert("zext", convert(code, value, "bool"), "u8")
    if stored == "bf16":
        return _round_bf16(code, convert(code, value, "f32"))
    if stored == "f16":
        return code.convert("fptrunc", convert(code, value, "f32"), "f16")
    return convert(code, value, stored)


def _round_bf16(code: Code, x: Value) -> Value:
    bits = code.bits(x, "i32")

    def number(value: int) -> Value:
        return constant("i32", value, x.lanes)

    last = code.binary("and", code.binary("lshr", bits, number(16)), number(1))
    rounded = code.binary("add", bits, code.binary("add", last, number(0x7FFF)))
    nan = code.binary("or", bits, number(0x400000))
    chosen = code.select(code.compare("uno", x, x), nan, rounded)
    return code.convert("trunc", code.binary("lshr", chosen, number(16)), "i16")
