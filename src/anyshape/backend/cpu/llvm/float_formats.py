"""Float formats, and the steps that vector functions are built of: polynomials, powers of two, clamps."""
from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyshape.backend.cpu.llvm.ir_builder import Code, Value, constant, llvm_type


@dataclass(frozen=True, slots=True)
class Format:
    """Of a float type: its integer twin, mantissa bits, exponent bias; 1.5 * 2^mantissa rounds to whole numbers."""

    integer: str
    mantissa: int
    bias: int
    tiny: float
    largest_exp: float
    smallest_exp: float

    @property
    def bytes(self) -> int:
        return 4 if self.integer == "i32" else 8

    @property
    def magic(self) -> float:
        return 1.5 * 2.0**self.mantissa

    @property
    def magic_bits(self) -> int:
        """The bits of `magic`: subtracted from the bits of magic + n they leave n."""
        return (self.bias + self.mantissa << self.mantissa) | 1 << (self.mantissa - 1)


FORMAT = {
    "f32": Format("i32", 23, 127, 2.0**-126, 89.0, -104.0),
    "f64": Format("i64", 52, 1023, 2.0**-1022, 710.0, -746.0),
}


def _single(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def parts_of(dtype: str, high: float, *lower: float) -> tuple[float, ...]:
    """A constant given as an unevaluated sum of doubles, cut into parts of the float type."""
    if dtype == "f64":
        return (high, *lower)
    parts: list[float] = []
    for _ in range(1 + len(lower)):  # math.fsum rounds once, as if it had summed exactly
        parts.append(_single(math.fsum((high, *lower, *(-part for part in parts)))))
    return tuple(parts)


def parts_below(dtype: str, *terms: float) -> tuple[float, ...]:
    """As many parts of the float type as there are terms, each cut towards 0, so that all have the sign of their sum:
    a positive number that is subtracted in such parts, 0 times, leaves -0.0 as it is."""
    rest = list(terms)
    parts = []
    for _ in terms:
        part = math.fsum(rest) if dtype == "f64" else _single(math.fsum(rest))
        left = math.fsum((*rest, -part))
        if left < 0 < part or part < 0 < left:
            part = math.nextafter(part, 0.0) if dtype == "f64" else _single_below(part)
        parts.append(part)
        rest.append(-part)
    return tuple(parts)


def _single_below(number: float) -> float:
    """The next f32 towards 0."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    return float(struct.unpack("<f", struct.pack("<I", bits - 1))[0])


def horner(code: Code, x: Value, coefficients: Sequence[float]) -> Value:
    """coefficients[0] + coefficients[1]*x + ..."""
    like = constants_like(x)
    result = like(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        result = code.fma(result, x, like(c))
    return result


def constants_like(x: Value) -> Callable[[float], Value]:
    """Makes constants of the type of x."""
    return lambda number: constant(x.dtype, number, x.lanes)


def nearest_whole(code: Code, scaled: Value) -> tuple[Value, Value]:
    """The nearest whole number of a value below 2^(mantissa - 1): as a float, and as an integer. NaN stays NaN."""
    form = FORMAT[scaled.dtype]
    return split_magic(code, code.binary("fadd", scaled, constants_like(scaled)(form.magic)))


def split_magic(code: Code, shifted: Value) -> tuple[Value, Value]:
    """The same of the value with `magic` added already."""
    form = FORMAT[shifted.dtype]
    number = code.binary("fsub", shifted, constants_like(shifted)(form.magic))
    bits = code.bits(shifted, form.integer)
    return number, code.binary("sub", bits, constant(form.integer, form.magic_bits, shifted.lanes))


def power_of_two(code: Code, n: Value, dtype: str) -> Value:
    """2^n for a whole n within the range of normal numbers."""
    form = FORMAT[dtype]
    biased = code.binary("add", n, constant(n.dtype, form.bias, n.lanes))
    return code.bits(code.binary("shl", biased, constant(n.dtype, form.mantissa, n.lanes)), dtype)


def scale_by_power(code: Code, p: Value, whole: Value, n: Value) -> Value:
    """p * 2^n, right below the normal range and beyond the largest number; `whole` is n as a float."""
    if code.target.vector_bytes == 64 and p.lanes:
        return _scale_avx512(code, p, whole)
    # two steps: 2^n alone may be out of range
    half = code.binary("ashr", n, constant(n.dtype, 1, n.lanes))
    rest = code.binary("sub", n, half)
    return code.binary("fmul", code.binary("fmul", p, power_of_two(code, half, p.dtype)),
                       power_of_two(code, rest, p.dtype))


def _scale_avx512(code: Code, p: Value, whole: Value) -> Value:
    """The same by the instruction vscalef."""
    lanes, letter, mask = (16, "s", "i16") if p.dtype == "f32" else (8, "d", "i8")
    if p.lanes < lanes:
        padded = [k % p.lanes for k in range(lanes)]
        full = _scale_avx512(code, code.shuffle(p, padded), code.shuffle(whole, padded))
        return code.shuffle(full, range(p.lanes))
    kind = llvm_type(p.dtype, lanes)
    name = f"llvm.x86.avx512.mask.scalef.p{letter}.512"
    code.declare(kind, name, [kind, kind, kind, mask, "i32"])
    parts = []
    for first in range(0, p.lanes, lanes):
        picks = range(first, first + lanes)
        a, b = (v if v.lanes == lanes else code.shuffle(v, picks) for v in (p, whole))
        parts.append(code.put(f"call {kind} @{name}({a.typed}, {b.typed}, {kind} zeroinitializer, {mask} -1, i32 4)",
                              p.dtype, lanes, max(a.level, b.level)))
    return code.concat(parts)


def clamp(code: Code, x: Value, low: float, high: float) -> Value:
    """x within [low, high]; NaN stays."""
    like = constants_like(x)
    below = at_most(code, x, high)
    return code.select(code.compare("ogt", like(low), below), like(low), below)


def at_most(code: Code, x: Value, high: float) -> Value:
    """The smaller of x and high; NaN stays."""
    like = constants_like(x)
    return code.select(code.compare("olt", like(high), x), like(high), x)
