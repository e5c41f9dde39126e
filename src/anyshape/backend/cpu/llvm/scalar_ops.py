"""Scalar instructions as LLVM code: conversions, and the emitters of all that is no elementary function."""
from __future__ import annotations

from collections.abc import Sequence

from anyshape.backend.cpu.llvm import float_formats, libm, vector_math  # noqa: F401  (vector_math has emitters)
from anyshape.backend.cpu.llvm.emitters import EMITTERS, WEIGHTS, emits
from anyshape.backend.cpu.llvm.ir_builder import BITS, FLOATS, Code, Value, constant
from anyshape.base.errors import Unsupported
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import kind_of

# dtype of a buffer's element -> type in which its bits travel between memory and register
IN_MEMORY = {"bool": "u8", "bf16": "i16"}
_WHOLE = ("int", "uint")


def scalar(code: Code, op: str, args: Sequence[Value], dtype: str) -> Value:
    """The value of the scalar instruction `op`, of dtype `dtype`.

    Raises:
        Unsupported: there is no emitter for operands of this dtype.
    """
    if op == "cast":
        return convert(code, args[0], dtype)
    emitter = EMITTERS.get((op, kind_of(args[0].dtype)))
    if emitter is None:
        raise Unsupported(f"the CPU backend has no code for {op} on {args[0].dtype}", why="it has no emitter",
                          do="keep the operation out of kernels (`unsupported` in llvm/scalar_ops.py)")
    return emitter(code, *args)


def unsupported() -> frozenset[str]:
    """The scalar instructions that this backend has no code for."""
    return frozenset(SCALAR) - {op for op, _ in EMITTERS} - {"cast"}


def weight_of(op: str) -> int:
    """How many instructions of the processor `op` takes per point, roughly."""
    return WEIGHTS.get(op, 1)


# one instruction of LLVM


def _instruction(op: str, kind: str, name: str, weight: int = 1) -> None:
    @emits(op, kind, weight=weight)
    def emit(code: Code, a: Value, b: Value) -> Value:
        return code.binary(name, a, b)


def _comparison(op: str, kind: str, name: str) -> None:
    @emits(op, kind)
    def emit(code: Code, a: Value, b: Value) -> Value:
        return code.compare(name, a, b)


def _rounding(op: str, name: str, weight: int = 1) -> None:
    @emits(op, "float", weight=weight)
    def emit(code: Code, x: Value) -> Value:
        return code.intrinsic(name, x)


for _op, _name in (("add", "fadd contract"), ("sub", "fsub contract"), ("mul", "fmul contract")):
    _instruction(_op, "float", _name)
_instruction("div", "float", "fdiv", weight=3)
for _op in ("add", "sub", "mul", "and", "or", "xor"):
    for _kind in _WHOLE:
        _instruction(_op, _kind, _op)
for _op, _name in {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "and": "and", "or": "or",
                   "xor": "xor", "sub": "xor"}.items():
    _instruction(_op, "bool", _name)
for _op, _name in {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}.items():
    _comparison(_op, "float", _name)
    for _kind, _prefix in (("int", "s"), ("uint", "u"), ("bool", "u")):
        _comparison(_op, _kind, _op if _op in ("eq", "ne") else _prefix + _op)
for _op in ("floor", "ceil", "trunc"):
    _rounding(_op, _op)
_rounding("round", "roundeven")
_rounding("sqrt", "sqrt", weight=4)


@emits("where", "bool")
def _where(code: Code, condition: Value, a: Value, b: Value) -> Value:
    return code.select(condition, a, b)


# bool, and what whole numbers do alike


@emits("not", "bool")
def _not(code: Code, x: Value) -> Value:
    return code.binary("xor", x, constant("bool", True, x.lanes))


@emits("isnan", *_WHOLE, "bool")
@emits("isinf", *_WHOLE, "bool")
@emits("signbit", "uint", "bool")
def _never(code: Code, x: Value) -> Value:
    return constant("bool", False, x.lanes)


@emits("floor", *_WHOLE, "bool")
@emits("ceil", *_WHOLE, "bool")
@emits("round", *_WHOLE, "bool")
@emits("trunc", *_WHOLE, "bool")
@emits("abs", "uint", "bool")
@emits("sign", "bool")
def _itself(code: Code, x: Value) -> Value:
    return x


# floats


def _same(x: Value, number: float) -> Value:
    return constant(x.dtype, number, x.lanes)


@emits("neg", "float", "int", "uint")
def _negative(code: Code, x: Value) -> Value:
    return code.negate(x)


@emits("abs", "float")
def _magnitude(code: Code, x: Value) -> Value:
    return code.intrinsic("fabs", x)


@emits("copysign", "float")
def _copysign(code: Code, a: Value, b: Value) -> Value:
    return code.intrinsic("copysign", a, b)


@emits("maximum", "float", weight=3)
def _maximum(code: Code, a: Value, b: Value) -> Value:
    return float_extreme(code, "maximum", a, b)


@emits("minimum", "float", weight=3)
def _minimum(code: Code, a: Value, b: Value) -> Value:
    return float_extreme(code, "minimum", a, b)


def float_extreme(code: Code, op: str, a: Value, b: Value) -> Value:
    """maximum or minimum; a NaN on either side gives NaN."""
    # the first comparison is false when b is NaN, which gives b; a NaN in a is put back by the second
    chosen = code.select(code.compare("ogt" if op == "maximum" else "olt", a, b), a, b)
    return code.select(code.compare("uno", a, a), a, chosen)


@emits("reciprocal", "float")
def _reciprocal(code: Code, x: Value) -> Value:
    return code.binary("fdiv", _same(x, 1.0), x)


@emits("rsqrt", "float", weight=6)
def _rsqrt(code: Code, x: Value) -> Value:
    return _reciprocal(code, code.intrinsic("sqrt", x))


@emits("sign", "float")
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


@emits("remainder", "float", weight=64)
def _float_remainder(code: Code, a: Value, b: Value) -> Value:
    rest = libm.libm(code, "fmod", [a, b])
    return code.select(_signs_differ(code, rest, code.spread(b, rest.lanes)), code.binary("fadd", rest, b), rest)


@emits("floor_div", "float", weight=64)
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


@emits("trunc_div", "float", weight=64)
def _float_trunc_div(code: Code, a: Value, b: Value) -> Value:
    return code.intrinsic("trunc", code.binary("fdiv", a, b))


@emits("isinf", "float")
def _is_inf(code: Code, x: Value) -> Value:
    return code.compare("oeq", code.intrinsic("fabs", x), _same(x, float("inf")))


@emits("signbit", "float")
def _signbit(code: Code, x: Value) -> Value:
    integer = float_formats.FORMAT[x.dtype].integer
    return code.compare("slt", code.bits(x, integer), constant(integer, 0, x.lanes))


@emits("isnan", "float")
def _is_nan(code: Code, x: Value) -> Value:
    return code.compare("uno", x, x)


# whole numbers


def _integer_extreme(op: str, kind: str) -> None:
    @emits(op, kind, weight=3)
    def emit(code: Code, a: Value, b: Value) -> Value:
        return code.intrinsic(("u" if kind == "uint" else "s") + op[:3], a, b)


@emits("abs", "int")
def _integer_magnitude(code: Code, x: Value) -> Value:
    return code.intrinsic("abs", x, flag="false")


@emits("sign", "int", "uint")
def _integer_sign(code: Code, x: Value) -> Value:
    one = _same(x, 1)
    return code.intrinsic("umin", x, one) if x.dtype == "u8" else code.intrinsic(
        "smax", code.intrinsic("smin", x, one), _same(x, -1))


@emits("not", "int", "uint")
def _integer_not(code: Code, x: Value) -> Value:
    return code.binary("xor", x, _same(x, -1))


@emits("signbit", "int")
def _integer_signbit(code: Code, x: Value) -> Value:
    return code.compare("slt", x, _same(x, 0))


def _division(op: str) -> None:
    @emits(op, *_WHOLE, weight=64)
    def emit(code: Code, a: Value, b: Value) -> Value:
        return _divide(code, op, a, b)


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


def _shifting(op: str) -> None:
    @emits(op, *_WHOLE)
    def emit(code: Code, a: Value, amount: Value) -> Value:
        return _shift(code, op, a, amount)


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


for _op in ("maximum", "minimum"):
    for _kind in _WHOLE:
        _integer_extreme(_op, _kind)
for _op in ("floor_div", "trunc_div", "remainder", "fmod"):
    _division(_op)
for _op in ("shift_left", "shift_right"):
    _shifting(_op)


def _mix(code: Code, z: Value) -> Value:
    """The finaliser of SplitMix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = code.binary("xor", z, code.binary("lshr", z, _same(z, shift)))
        z = code.binary("mul", z, _same(z, factor))
    return code.binary("xor", z, code.binary("lshr", z, _same(z, 31)))


@emits("random", "int", weight=24)
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


def _narrowing(op: str, stored: str) -> None:
    @emits(op, "float")
    def emit(code: Code, x: Value) -> Value:
        return from_memory(code, to_memory(code, x, stored), stored, "f32")


for _stored in ("bf16", "f16"):
    _narrowing(f"to_{_stored}", _stored)


def _round_bf16(code: Code, x: Value) -> Value:
    bits = code.bits(x, "i32")

    def number(value: int) -> Value:
        return constant("i32", value, x.lanes)

    last = code.binary("and", code.binary("lshr", bits, number(16)), number(1))
    rounded = code.binary("add", bits, code.binary("add", last, number(0x7FFF)))
    nan = code.binary("or", bits, number(0x400000))
    chosen = code.select(code.compare("uno", x, x), nan, rounded)
    return code.convert("trunc", code.binary("lshr", chosen, number(16)), "i16")
