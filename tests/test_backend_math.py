"""The CPU backend's scalar operations: float accuracy in ulp, special values, integers, conversions, random."""
from __future__ import annotations

import math

import numpy as np
import pytest

from anyshape.backend.cpu.llvm.ir_builder import Code
from anyshape.ir.scalar import SCALAR
from anyshape.kernel.loop_ir.program import Instruction as I
from test_backend import NUMPY, apply, bf16_bits, compiled, pointwise, run

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, 88.7, 88.8, -87.4,
           -103.9, -104.1, 709.7, 0.5, -0.5, 2.0**-24, 2.0**-126, 127.0, 128.0, -126.5, -149.5, 1e6, 1e9, -1e20]


def spread(low: float, high: float, dtype: type, count: int = 40_000) -> np.ndarray:
    """Samples over the interval, evenly and by magnitude."""
    random = np.random.default_rng(0)
    small = random.uniform(-30, math.log2(max(abs(low), abs(high))), count // 2)
    sign = np.where(random.random(count // 2) < 0.5, -1, 1) if low < 0 else 1
    return np.concatenate((np.clip(sign * 2.0**small, low, high), random.uniform(low, high, count // 2))).astype(dtype)


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The distance in units of the last place of the wanted value (of the smallest normal number below it)."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        size = np.spacing(np.maximum(np.abs(want).astype(got.dtype), info.tiny)).astype(want.dtype)
        return np.abs(got.astype(want.dtype) - want) / size


def vectorised(function: object) -> object:
    return np.vectorize(lambda v: function(float(v)) if not math.isnan(v) else math.nan, otypes=[np.float64])


# op: (reference in the wider type, interval, ulp in f32, ulp in f64)
MATH = {
    "exp": (np.exp, (-104, 89), 1.1, 3), "exp2": (np.exp2, (-150, 128), 1.2, 4), "expm1": (np.expm1, (-20, 89), 2, 4),
    "log": (np.log, (0, 1e30), 1.5, 3), "log2": (np.log2, (0, 1e30), 1.5, 3), "log10": (np.log10, (0, 1e30), 1.5, 3),
    "log1p": (np.log1p, (-0.9999, 1e9), 2, 4), "sin": (np.sin, (-1e6, 1e6), 2.2, 3),
    "cos": (np.cos, (-1e6, 1e6), 2.2, 3), "tan": (np.tan, (-1e6, 1e6), 3, 6), "tanh": (np.tanh, (-12, 12), 2.5, 5),
    "sigmoid": (lambda x: 1 / (1 + np.exp(-x)), (-80, 80), 2.5, 5), "erf": (vectorised(math.erf), (-5, 5), 1.5, 0),
    "erfc": (vectorised(math.erfc), (-5, 9), 3, 0), "sqrt": (np.sqrt, (0, 1e30), 0.51, 0.51),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (0, 1e30), 1.5, 1.5), "reciprocal": (lambda x: 1 / x, (-9, 9), 0.51, 0.51),
    "asin": (np.arcsin, (-1, 1), 2, 2), "acos": (np.arccos, (-1, 1), 2, 2), "atan": (np.arctan, (-99, 99), 2, 2),
    "sinh": (np.sinh, (-80, 80), 3, 3), "cosh": (np.cosh, (-80, 80), 3, 3), "asinh": (np.arcsinh, (-99, 99), 3, 3),
    "acosh": (np.arccosh, (1, 99), 3, 3), "atanh": (np.arctanh, (-0.99, 0.99), 3, 3),
    "lgamma": (vectorised(math.lgamma), (0.1, 99), 6, 0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", MATH)
def test_function(op: str, dtype: str) -> None:
    reference, (low, high), *limits = MATH[op]
    limit = limits[dtype == "f64"]
    x = spread(low, high, NUMPY[dtype])
    x = x[np.isfinite(x)]
    if low > 0:
        x = np.maximum(x, NUMPY[dtype](low))
    got = apply(pointwise(f"fn_{op}_{dtype}", dtype, dtype, I(1, op, (0,), dtype)), NUMPY[dtype], x)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64 if dtype == "f32" else np.longdouble))
    if dtype == "f32" or limit:
        keep = np.abs(want) < float(np.finfo(NUMPY[dtype]).max)
        error = ulps(got[keep], want[keep])
        print(f"{op} {dtype}: {np.nanmax(error):.2f} ulp at {x[keep][np.nanargmax(error)]!r}")
        assert np.nanmax(error) <= limit, f"{np.nanmax(error)} ulp at {x[keep][np.nanargmax(error)]!r}"
    else:
        np.testing.assert_allclose(got, np.asarray(want, np.float64), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", sorted(set(MATH) - {"lgamma"}))
def test_special_values(op: str, dtype: str) -> None:
    with np.errstate(all="ignore"):
        x = np.array(SPECIAL, NUMPY[dtype])
        want = np.asarray(MATH[op][0](x.astype(np.float64 if dtype == "f32" else np.longdouble))).astype(x.dtype)
    got = apply(pointwise(f"sp_{op}_{dtype}", dtype, dtype, I(1, op, (0,), dtype)), NUMPY[dtype], x)
    exact = ~np.isfinite(want) | (want == 0)
    np.testing.assert_array_equal(got[exact], want[exact], err_msg=str(x[exact]))
    finite = np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=1e-6 if dtype == "f32" else 1e-14,
                               atol=3e-45 if dtype == "f32" else 0)


BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "maximum": np.maximum,
    "minimum": np.minimum, "remainder": np.remainder, "fmod": np.fmod, "floor_div": np.floor_divide,
    "trunc_div": lambda a, b: np.trunc(a / b), "pow": np.power, "atan2": np.arctan2, "copysign": np.copysign,
    "hypot": np.hypot, "nextafter": np.nextafter,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", BINARY)
def test_binary_float(op: str, dtype: str) -> None:
    values = [0.0, 1.0, -1.0, 2.5, -2.5, 7.0, -7.0, 0.1, 1e20, math.inf, -math.inf, math.nan, 3.0, -0.3]
    a, b = (g.ravel().astype(NUMPY[dtype]) for g in np.meshgrid(values, values))
    out = "bool" if op in ("eq", "ne", "lt", "le", "gt", "ge") else dtype
    with np.errstate(all="ignore"):
        want = BINARY[op](a, b)
    got = apply(pointwise(f"bi_{op}_{dtype}", dtype, out, I(2, op, (0, 1), out), inputs=2), NUMPY[out], a, b)
    np.testing.assert_allclose(got, want, rtol=2e-7 if dtype == "f32" else 1e-15)


UNARY = {"neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc,
         "isnan": np.isnan, "isinf": np.isinf, "signbit": np.signbit}


@pytest.mark.parametrize("op", [*UNARY, "sign"])
def test_unary_float(op: str) -> None:
    x = np.array([0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 7.2, -7.8, 1e20, math.inf, -math.inf, math.nan], np.float32)
    out = "bool" if op in ("isnan", "isinf", "signbit") else "f32"
    want = np.nan_to_num(np.sign(x)) if op == "sign" else UNARY[op](x)  # torch: sign(NaN) is 0
    got = apply(pointwise(f"un_{op}", "f32", out, I(1, op, (0,), out)), NUMPY[out], x)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64", "u8"])
@pytest.mark.parametrize("op", ["floor_div", "trunc_div", "remainder", "fmod", "maximum", "minimum", "add", "mul",
                                "and", "xor", "lt", "eq", "shift_left", "shift_right"])
def test_binary_integer(op: str, dtype: str) -> None:
    """Division by 0 gives 0 and never stops the process; shifts by too much give 0 or the sign, as torch."""
    info = np.iinfo(NUMPY[dtype])
    values = sorted({0, 1, 2, 3, 7, 100, info.max, info.max - 1, info.min, info.min + 1} |
                    (set() if dtype == "u8" else {-1, -2, -7, -100}))
    a, b = (g.ravel().astype(NUMPY[dtype]) for g in np.meshgrid(values, values))
    out = "bool" if op in ("lt", "eq") else dtype
    got = apply(pointwise(f"int_{op}_{dtype}", dtype, out, I(2, op, (0, 1), out), inputs=2), NUMPY[out], a, b)
    for x, y, result in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        assert result == integer(op, x, y, dtype), (op, x, y, result)


def integer(op: str, a: int, b: int, dtype: str) -> int | bool:
    """The operation on whole numbers, wrapped into the type."""
    bits = 8 * np.dtype(NUMPY[dtype]).itemsize
    if op in ("floor_div", "trunc_div", "remainder", "fmod"):
        if b == 0:
            return 0
        floor = a // b
        cut = -(-a // b) if (a < 0) != (b < 0) else floor
        value = {"floor_div": floor, "trunc_div": cut, "remainder": a - floor * b, "fmod": a - cut * b}[op]
    elif op in ("lt", "eq"):
        return a < b if op == "lt" else a == b
    elif op == "shift_left":
        value = a << b if 0 <= b < bits else 0
    elif op == "shift_right":
        value = a >> b if 0 <= b < bits else (-1 if a < 0 else 0)
    else:
        value = {"maximum": max(a, b), "minimum": min(a, b), "add": a + b, "mul": a * b, "and": a & b,
                 "xor": a ^ b}[op]
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype != "u8" and value >> (bits - 1) else value


@pytest.mark.parametrize("source", ["f32", "f64", "i64", "i32", "i8", "u8", "bool", "f16"])
@pytest.mark.parametrize("target", ["f32", "f64", "i64", "i32", "i8", "u8", "bool", "f16"])
def test_cast(source: str, target: str) -> None:
    x = np.array([0, 1, 2, 3, 100, 127, 5, 0, 1] * 9, NUMPY[source])
    if source[0] == "f":
        x = np.concatenate((x, np.array([0.5, 1.9, 99.5], x.dtype)))
    if source != "bool" and source != "u8" and target != "u8":
        x = np.concatenate((x, -x))
    register = "f32" if source == "f16" else source
    wanted = "f32" if target == "f16" else target
    program = pointwise(f"cast_{source}_{target}", source, target, I(1, "cast", (0,), wanted), register=register)
    np.testing.assert_array_equal(apply(program, NUMPY[target], x), x.astype(NUMPY[target]))


def test_float_to_integer_out_of_range() -> None:
    """As torch on x86: small integers wrap; nothing stops the process."""
    x = np.array([300.0, -1.0, 256.0, -129.0] * 5, np.float32)
    got = apply(pointwise("wrap", "f32", "u8", I(1, "cast", (0,), "u8")), np.uint8, x)
    assert got.tolist() == [44, 255, 0, 127] * 5
    x = np.array([math.nan, math.inf, -1e30] * 5, np.float32)
    apply(pointwise("far", "f32", "i64", I(1, "cast", (0,), "i64")), np.int64, x)


def test_bf16_and_f16_round_to_nearest_even() -> None:
    x = np.concatenate((spread(-1e5, 1e5, np.float32), np.array([3.4e38, math.inf, -math.inf, 1e-40], np.float32)))
    got = np.zeros(x.size, np.uint16)
    run(compiled(pointwise("to_bf16", "f32", "bf16", I(1, "neg", (0,)))), [x, got], [x.size])
    np.testing.assert_array_equal(got, bf16_bits(-x))
    nan = np.full(20, np.array([0x7F800001], np.uint32).view(np.float32)[0])
    out = np.zeros(20, np.uint16)
    run(compiled(pointwise("nan_bf16", "f32", "bf16")), [nan, out], [20])
    assert np.isnan((out.astype(np.uint32) << 16).view(np.float32)).all()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(apply(pointwise("to_f16", "f32", "f16"), np.float16, x), x.astype(np.float16))


def test_random_is_splitmix() -> None:
    body = (I(1, "constant", (), "i64", value=1234), I(2, "random", (1, 0), "f32"))
    counter = np.arange(-5, 100_000, dtype=np.int64)
    got = apply(pointwise("random", "i64", "f32", *body), np.float32, counter)

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    state = mix(np.full(counter.size, 1234, np.uint64)) + (counter.astype(np.uint64) + np.uint64(1)) * golden
    np.testing.assert_array_equal(got, ((mix(state) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)))
    assert got.min() >= 0 and got.max() < 1 and abs(got.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(got[:-1], got[1:])[0, 1]) < 0.01


def test_every_operation_has_code() -> None:
    """Each scalar instruction has an emitter, but for two that libm has no function for."""
    from anyshape.backend.cpu.llvm.emitters import EMITTERS
    from anyshape.backend.cpu.llvm.ir_builder import Value
    from anyshape.backend.cpu.llvm.scalar_ops import scalar, unsupported
    from anyshape.backend.cpu.machine.target import host

    assert unsupported() == {"digamma", "erfinv"}
    for op, count in ((op, row.arity) for op, row in SCALAR.items() if op not in unsupported()):
        kind = next((kind for name, kind in EMITTERS if name == op), "float")
        dtype = {"float": "f32", "int": "i64", "uint": "u8", "bool": "bool"}[kind]
        args = [Value(f"%a{number}", dtype, 16) for number in range(count)]
        result = scalar(Code(host()), op, args, "f32")
        assert result.lanes == 16, op
