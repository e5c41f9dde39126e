"""Codegen of scalar instructions: each as a Triton expression, and the Triton functions that some of them call.

Numbers are those of the CPU's kernels (backend/cpu/llvm/scalar_ops.py): divisions round to nearest, a NaN operand of
`maximum` gives NaN, whole divisions by 0 give 0, shifts as far as the type is wide give 0 or the sign.
"""
from __future__ import annotations

import re

from anyshape.base.errors import VerifyError
from anyshape.ir.scalar import SCALAR
from anyshape.ir.types import kind_of

TYPES = {"f32": "tl.float32", "f64": "tl.float64", "i64": "tl.int64", "i32": "tl.int32", "i16": "tl.int16",
         "i8": "tl.int8", "u8": "tl.uint8", "bool": "tl.int1", "bf16": "tl.bfloat16", "f16": "tl.float16"}
BITS = {"i64": 64, "i32": 32, "i16": 16, "i8": 8, "u8": 8}
INFINITE = 'float("inf")'

# of any dtype; `{k}` is the text of operand k
PLAIN = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "neg": "-{0}", "abs": "tl.abs({0})",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}",
    "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
    "where": "tl.where({0}, {1}, {2})",
}
LIBRARY_ONE = ("tanh expm1 log1p log10 tan trunc erfc asin acos atan sinh cosh asinh acosh atanh lgamma "
               "erfinv").split()
LIBRARY_TWO = ("pow", "atan2", "copysign", "hypot", "nextafter")
FLOAT = {
    "neg": "{0} * -1.0",  # Triton's minus is 0 - x, which is 0 and not -0 at 0
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})",
    "rsqrt": "tl.rsqrt({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})", "erf": "tl.erf({0})",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "round": "libdevice.nearbyint({0})", "isnan": "{0} != {0}",
    "isinf": f"tl.abs({{0}}) == {INFINITE}", "maximum": "_max({0}, {1})", "minimum": "_min({0}, {1})",
    "sign": "_sign({0})", "fmod": "libdevice.fmod({0}, {1})", "remainder": "_remainder({0}, {1})",
    "floor_div": "_floor_div({0}, {1})", "digamma": "_digamma({0})",
    **{name: f"libdevice.{name}({{0}})" for name in LIBRARY_ONE},
    **{name: f"libdevice.{name}({{0}}, {{1}})" for name in LIBRARY_TWO},
}
# Triton's own division and square root of f32 do not round to nearest
BY_DTYPE = {
    "f32": {"div": "tl.div_rn({0}, {1})", "sqrt": "tl.sqrt_rn({0})", "reciprocal": "_reciprocal({0})",
            "sigmoid": "_sigmoid({0})", "trunc_div": "libdevice.trunc(tl.div_rn({0}, {1}))",
            "signbit": "{0}.to(tl.int32, bitcast=True) < 0"},
    "f64": {"div": "{0} / {1}", "sqrt": "tl.sqrt({0})", "reciprocal": "1.0 / {0}",
            "sigmoid": "1.0 / (1.0 + tl.exp(-{0}))", "trunc_div": "libdevice.trunc({0} / {1})",
            "signbit": "{0}.to(tl.int64, bitcast=True) < 0"},
}
WHOLE = {
    "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})", "not": "~{0}", "signbit": "{0} < 0",
    "sign": "({0} > 0).to({T}) - ({0} < 0).to({T})", "trunc_div": "_whole_div({0}, {1})",
    "fmod": "tl.where({1} == 0, 0, {0} - _whole_div({0}, {1}) * {1}).to({T})",
    "floor_div": "_whole_floor_div({0}, {1})", "remainder": "_whole_remainder({0}, {1})",
    "shift_left": "tl.where(({1} >= 0) & ({1} < {B}), {0} << ({1} & ({B} - 1)), {0} * 0)",
    "shift_right": "{0} >> tl.where(({1} >= 0) & ({1} < {B}), {1}, {B} - 1)",
}
UNSIGNED = {
    "shift_right": "tl.where({1} < {B}, {0} >> ({1} & ({B} - 1)), {0} * 0)", "signbit": "{0} != {0}",
    "sign": "({0} != 0).to({T})", "not": "{0} ^ 255",
    **dict.fromkeys(("trunc_div", "floor_div"), "_unsigned_div({0}, {1})"),
    **dict.fromkeys(("fmod", "remainder"), "tl.where({1} == 0, 0, {0} - _unsigned_div({0}, {1}) * {1}).to({T})"),
}
BOOL = {"maximum": "{0} | {1}", "minimum": "{0} & {1}", "not": "{0} == 0", "add": "{0} | {1}", "mul": "{0} & {1}",
        "sign": "{0}", "abs": "{0}", "signbit": "{0} != {0}"}

# Triton functions, by name; a kernel's text has those that it calls
FUNCTIONS = {
    "_add": "def _add(a, b):\n    return a + b",
    "_mul": "def _mul(a, b):\n    return a * b",
    "_linear": "def _linear(a, b, c, d):\n    return a * c, c * b + d",
    "_and": "def _and(a, b):\n    return a & b",
    "_or": "def _or(a, b):\n    return a | b",
    "_max": "def _max(a, b):\n    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    "_min": "def _min(a, b):\n    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)",
    # of online reductions (codegen/online.py)
    "_finite": "def _finite(a):\n    return tl.where(a == -float(\"inf\"), 0.0, a)",
    "_squares": """def _squares(n, s, q, m, t, p):
    apart = t / tl.maximum(m, 1.0) - s / tl.maximum(n, 1.0)
    return q + p + apart * apart * (n * (m / tl.maximum(n + m, 1.0)))""",
    "_whole_max": "def _whole_max(a, b):\n    return tl.maximum(a, b)",
    "_whole_min": "def _whole_min(a, b):\n    return tl.minimum(a, b)",
    "_reciprocal": "def _reciprocal(a):\n    return tl.div_rn(tl.full(a.shape, 1.0, tl.float32), a)",
    "_sigmoid": "def _sigmoid(a):\n    return _reciprocal(1.0 + tl.exp(-a))",
    "_sign": "def _sign(a):\n    return tl.where(a > 0, 1.0, 0.0).to(a.dtype) - tl.where(a < 0, 1.0, 0.0).to(a.dtype)",
    "_remainder": """def _remainder(a, b):
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) ^ (b < 0)), rest + b, rest)""",
    "_floor_div": """def _floor_div(a, b):
    rest = libdevice.fmod(a, b)
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((rest < 0) ^ (b < 0)), quotient - 1.0, quotient)
    floor = tl.floor(quotient)
    floor = tl.where(quotient - floor > 0.5, floor + 1.0, floor)
    plain = a / b
    return tl.where(b == 0, plain, tl.where(quotient != 0, floor, libdevice.copysign(plain * 0.0, plain)))""",
    # by the reflection formula below 0, the recurrence up to 10, and the asymptotic series from there on (Bernardo, AS
    # 103, 1976; Abramowitz and Stegun 6.3.5, 6.3.7, 6.3.18); infinite at 0, NaN at negative whole numbers, as PyTorch
    "_digamma": """def _digamma(a):
    below = a < 0
    x = tl.where(below, 1.0 - a, a)
    found = x * 0.0
    for _ in tl.static_range(10):
        small = x < 10
        found = tl.where(small, found - 1.0 / x, found)
        x = tl.where(small, x + 1.0, x)
    z = 1.0 / (x * x)
    series = z * (0.08333333333333333 - z * (0.008333333333333333 - z * (0.003968253968253968 - z * (
        0.004166666666666667 - z * (0.007575757575757576 - z * (0.021092796092796094 - z * 0.08333333333333333))))))
    found = tl.where(x - x == 0, found + tl.log(x) - 0.5 / x - series, x)
    rest = a - libdevice.trunc(a)
    reflected = found - 3.141592653589793 / libdevice.tan(3.141592653589793 * rest)
    found = tl.where(below, tl.where(rest == 0, float("nan"), reflected), found)
    return tl.where(a == 0, libdevice.copysign(float("inf") + a * 0.0, a * -1.0), found)""",
    "_whole_div": """def _whole_div(a, b):
    minus = b == -1
    safe = tl.where((b == 0) | minus, 1, b).to(a.dtype)
    return tl.where(b == 0, 0, tl.where(minus, -a, a // safe)).to(a.dtype)""",
    "_unsigned_div": """def _unsigned_div(a, b):
    return tl.where(b == 0, 0, a // tl.where(b == 0, 1, b).to(a.dtype)).to(a.dtype)""",
    "_whole_floor_div": """def _whole_floor_div(a, b):
    quotient = _whole_div(a, b)
    rest = a - quotient * b
    return tl.where((b != 0) & (rest != 0) & ((rest < 0) ^ (b < 0)), quotient - 1, quotient)""",
    "_whole_remainder": """def _whole_remainder(a, b):
    return tl.where(b == 0, 0, a - _whole_floor_div(a, b) * b).to(a.dtype)""",
    "_floor": """def _floor(a, b):
    quotient = a // b
    return tl.where(a - quotient * b < 0, quotient - 1, quotient)""",
    "_mix": """def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)""",
    # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): the same bits as on the CPU
    "_random": """def _random(seed, counter):
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64, bitcast=True)) + golden + counter.to(tl.uint64, bitcast=True) * golden
    return (_mix(state) >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08""",
}
BESIDE = ("cast", "random", "to_bf16", "to_f16")  # instructions that `scalar` writes without a table
REDUCERS = {"add": "_add", "mul": "_mul", "maximum": "_max", "minimum": "_min", "and": "_and", "or": "_or"}


def unsupported() -> frozenset[str]:
    """The scalar instructions without a Triton expression."""
    known = {*PLAIN, *FLOAT, *WHOLE, *BESIDE, *(name for table in BY_DTYPE.values() for name in table)}
    return frozenset(name for name in SCALAR if name not in known)


def scalar(op: str, operands: list[str], dtype: str, source: str) -> str:
    """The text of a scalar instruction.

    Args:
        dtype: of the result. source: of the last operand.

    Raises:
        VerifyError: there is none.
    """
    kind = kind_of(source)
    if op == "cast":
        return cast(operands[0], source, dtype)
    if op in ("to_bf16", "to_f16"):
        return f"{operands[0]}.to({TYPES[op[3:]]}).to(tl.float32)"
    if op == "random":
        return f"_random({', '.join(operands)})"
    tables = {"float": (BY_DTYPE.get(source, {}), FLOAT), "int": (WHOLE,), "uint": (UNSIGNED, WHOLE),
              "bool": (BOOL, WHOLE)}[kind]
    for table in (*tables, PLAIN):
        if op in table:
            return (table[op].replace("{T}", TYPES[source]).replace("{B}", str(BITS.get(source, 1)))).format(*operands)
    raise VerifyError(f"the Triton backend has no {op} of {source}", do="report this as a bug of the compiler")


def cast(text: str, source: str, dtype: str) -> str:
    """A register as one of another dtype."""
    if source == dtype:
        return text
    if dtype == "bool":
        return f"{text} != 0"
    return f"{text}.to({TYPES[dtype]})"


def constant(value: float | int | bool, dtype: str) -> str:
    """A number of a dtype as Triton writes it."""
    if dtype == "bool":
        return repr(bool(value))
    if dtype in ("f32", "f64", "bf16", "f16"):
        number = float(value)
        return repr(number) if number - number == 0 else f'float("{number}")'
    return repr(int(value))


def combine(op: str, left: str, right: str, dtype: str) -> str:
    """Two partial results of a reduction as one."""
    return scalar(op, [left, right], dtype, dtype)


def reducer(op: str, dtype: str) -> str:
    """The Triton function that combines two values, for tl.reduce and tl.associative_scan."""
    if dtype == "bool":
        return {"add": "_or", "mul": "_and", "maximum": "_or", "minimum": "_and"}.get(op, REDUCERS[op])
    found = REDUCERS[op]
    return f"_whole{found}" if op in ("maximum", "minimum") and kind_of(dtype) != "float" else found


def identity(op: str, dtype: str) -> str:
    """What a reduction starts with."""
    if op in ("add", "or", "linear"):
        return constant(0, dtype)
    if op in ("mul", "and"):
        return constant(-1 if op == "and" and dtype != "bool" else 1, dtype)
    if dtype == "bool":
        return constant(op == "minimum", dtype)
    if kind_of(dtype) == "float":
        return f"-{INFINITE}" if op == "maximum" else INFINITE
    bits, signed = BITS[dtype], dtype != "u8"
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return repr(least if op == "maximum" else most)


def functions(text: str) -> str:
    """The Triton functions that a text calls, those that others call first."""
    called: set[str] = set()
    left = [text]
    while left:
        for name in re.findall(r"\b_[a-z_]+\b", left.pop()):
            if name in FUNCTIONS and name not in called:
                called.add(name)
                left.append(FUNCTIONS[name])
    return "".join(f"@triton.jit\n{FUNCTIONS[name]}\n\n\n" for name in FUNCTIONS if name in called)
