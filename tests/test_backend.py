"""The CPU backend against numpy: hand-built loop programs of every schedule, dtype and access at awkward sizes."""
from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.llvm.jit import LoadedKernel, build, object_key
from anyshape.backend.cpu.machine.target import Machine, host, target_of
from anyshape.backend.cpu.microkernels import gemv
from anyshape.backend.cpu.microkernels.tables import gemv as gemv_table
from anyshape.base.errors import VerifyError
from anyshape.kernel.loop_ir.directives import Interchange, SplitReduction, Tile, Vectorize
from anyshape.kernel.loop_ir.program import Instruction as I
from anyshape.kernel.loop_ir.program import LoopProgram, Param, Scratch, Stage
from anyshape.sym.expr import ceildiv, floordiv, minimum, mod, symbol
from sampling import crossed

SIZES = (0, 1, 3, 16, 17, 63, 64, 65, 1000)
i, j, k, m, n = (symbol(name) for name in "ijkmn")
NUMPY = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "i64": np.int64, "i32": np.int32, "i16": np.int16,
         "i8": np.int8, "u8": np.uint8, "bool": np.bool_}


def run(kernel: LoadedKernel, arrays: list[np.ndarray], sizes: list[int], parts: int = 1) -> int:
    """Run all row blocks in `parts` calls; returns their number."""
    block = np.array([a.ctypes.data for a in arrays] + sizes, dtype=np.int64)
    at = block.ctypes.data
    count = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)
    blocks, bytes_needed = count(kernel.blocks)(at), count(kernel.scratch)(at)
    guard = 64
    scratch = np.full(bytes_needed + 64 + guard, 0xAB, np.uint8)
    aligned = (scratch.ctypes.data + 63) // 64 * 64
    main = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)(kernel.run)
    edges = [blocks * part // parts for part in range(parts + 1)]
    for begin, end in itertools.pairwise(edges):
        main(at, begin, end, aligned)
    used = aligned - scratch.ctypes.data + bytes_needed
    assert (scratch[used:] == 0xAB).all(), "wrote past its scratch"
    assert count(kernel.work)(at) >= 0
    return blocks


def compiled(program: LoopProgram) -> LoadedKernel:
    return build([emit(program, host())], host())[0]


def guarded(shape: tuple[int, ...], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """An output array and its whole memory, filled with a pattern behind the end."""
    count = math.prod(shape)
    whole = np.frombuffer(bytes([0x5A]) * ((count + 70) * np.dtype(dtype).itemsize), dtype=dtype).copy()
    return whole[:count].reshape(shape), whole


def untouched(whole: np.ndarray, count: int) -> bool:
    return (whole[count:].view(np.uint8) == 0x5A).all()


def vectorized(axis: str) -> tuple[Vectorize, ...]:
    return (Vectorize(axis),) if axis else ()


def pointwise(name: str, dtype: str, out: str, *body: I, inputs: int = 1, register: str = "") -> LoopProgram:
    """One dimension n as strips: loads x0, x1 ... into registers 0, 1 ..., runs body, stores its last register."""
    loads = [I(r, "load", (), register or dtype, f"x{r}", i) for r in range(inputs)]
    last = body[-1] if body else loads[-1]
    store = I(99, "store", (last.result,), last.dtype, "y", i)
    params = tuple(Param(f"x{r}", dtype, "in") for r in range(inputs)) + (Param("y", out, "out"),)
    return LoopProgram(name, params, ("n",), (("i", n),), (), (Vectorize("i"),),
                       (Stage("row", (*loads, *body, store)),))


def apply(program: LoopProgram, out: type, *inputs: np.ndarray) -> np.ndarray:
    result, whole = guarded((len(inputs[0]),), out)
    run(compiled(program), [*inputs, result], [len(inputs[0])])
    assert untouched(whole, len(inputs[0]))
    return result


@pytest.mark.parametrize("vector", ["i", "j", ""])
def test_pointwise_two_dimensions(vector: str) -> None:
    body = (I(0, "load", (), "f32", "x", i * n + j), I(1, "load", (), "f32", "w", j), I(2, "load", (), "f32", "s", 0),
            I(3, "mul", (0, 1)), I(4, "add", (3, 2)), I(5, "store", (4,), "f32", "y", i * n + j))
    params = (Param("x", "f32", "in"), Param("w", "f32", "in"), Param("s", "f32", "in"), Param("y", "f32", "out"))
    row = vector != "i"
    rows, columns = ((("i", m),), (("j", n),)) if row else ((("j", n), ("i", m)), ())
    program = LoopProgram("two", params, ("m", "n"), rows, columns, vectorized(vector),
                          (Stage("column" if row else "row", body),))
    kernel = compiled(program)
    random = np.random.default_rng(0)
    for height in (0, 1, 5, 67):
        for width in SIZES:
            x, w, s = (random.standard_normal(shape, dtype=np.float32) for shape in ((height, width), (width,), (1,)))
            y, whole = guarded(x.shape, np.float32)
            run(kernel, [x, w, s, y], [height, width], parts=3)
            np.testing.assert_allclose(y, x * w + s, rtol=1e-6, atol=1e-6)
            assert untouched(whole, x.size)


def softmax(dtype: str = "f32") -> LoopProgram:
    offset = i * n + j
    first = Stage("column", (I(0, "load", (), "f32", "x", offset), I(1, "reduce", (0,), "f32", combine="maximum")))
    second = Stage("column", (I(2, "load", (), "f32", "x", offset), I(3, "sub", (2, 1)), I(4, "exp", (3,)),
                              I(5, "store", (4,), "f32", "e", j), I(6, "reduce", (4,), combine="add")), "model.py:1")
    third = Stage("row", (I(7, "reciprocal", (6,)),))
    fourth = Stage("column", (I(8, "load", (), "f32", "e", j), I(9, "mul", (8, 7)),
                              I(10, "store", (9,), "f32", "y", offset)))
    return LoopProgram("softmax", (Param("x", dtype, "in"), Param("y", dtype, "out")), ("m", "n"), (("i", m),),
                       (("j", n),), (Vectorize("j"),), (first, second, third, fourth), (Scratch("e", "f32", n),))


def test_softmax() -> None:
    kernel = compiled(softmax())
    for width in SIZES:
        x = np.random.default_rng(width).standard_normal((7, width)).astype(np.float32) * 10
        x[1:2, :1], x[2:3, -1:], x[3:4, :] = np.inf, np.nan, -1e38
        y, whole = guarded(x.shape, np.float32)
        run(kernel, [x, y], [7, width], parts=2)
        with np.errstate(all="ignore"):
            e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True, initial=-np.inf))
            np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=2e-6, atol=1e-9)
        assert untouched(whole, x.size)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest even (no NaN)."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def test_softmax_bf16() -> None:
    kernel = compiled(softmax("bf16"))
    for width in SIZES[1:]:
        x = bf16_bits(np.random.default_rng(width).standard_normal((5, width)))
        wide = (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        y = np.zeros_like(x)
        run(kernel, [x, y], [5, width])
        e = np.exp(wide - wide.max(1, keepdims=True))
        got = (y.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(got, e / e.sum(1, keepdims=True), rtol=2**-8)


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32"])
@pytest.mark.parametrize("combine", ["add", "maximum", "minimum", "mul"])
@pytest.mark.parametrize("schedule", ["row", "column"])
def test_reduce(dtype: str, combine: str, schedule: str) -> None:
    """Over the last dimension (row schedule) or the first (column schedule) of x[m, n]."""
    over_rows = schedule == "column"
    body = (I(0, "load", (), dtype, "x", i * n + j), I(1, "reduce", (0,), dtype, combine=combine))
    out = j if over_rows else i
    stages = (Stage("column", body), Stage("row", (I(2, "store", (1,), dtype, "y", out),)))
    rows, columns = ((("j", n),), (("i", m),)) if over_rows else ((("i", m),), (("j", n),))
    kernel = compiled(LoopProgram("reduce", (Param("x", dtype, "in"), Param("y", dtype, "out")), ("m", "n"), rows,
                                  columns, (Vectorize("j"),), stages))
    random = np.random.default_rng(1)
    for height, width in [(a, b) for a in (0, 1, 5, 300) for b in SIZES]:
        x = (random.standard_normal((height, width)) * (1 if combine != "mul" else 0.1) + 1).astype(NUMPY[dtype])
        y, whole = guarded((width if over_rows else height,), NUMPY[dtype])
        run(kernel, [x, y], [height, width], parts=2)
        function = {"add": np.sum, "mul": np.prod, "maximum": np.max, "minimum": np.min}[combine]
        start = {}
        if combine in ("maximum", "minimum"):
            limit = np.inf if dtype[0] == "f" else np.iinfo(x.dtype).max
            low = -limit if dtype[0] == "f" else np.iinfo(x.dtype).min
            start = {"initial": x.dtype.type(low if combine == "maximum" else limit)}
        want = function(x.astype(np.float64) if dtype == "f32" else x, axis=0 if over_rows else 1, **start)
        np.testing.assert_allclose(y, want.astype(x.dtype), rtol=1e-4 if combine == "mul" else 2e-5, atol=1e-5)
        assert untouched(whole, y.size)


def test_long_sum_is_accurate() -> None:
    """A plain float32 running sum in 64 lanes would be off by 1e-5 and more."""
    stages = (Stage("column", (I(0, "load", (), "f32", "x", j), I(1, "reduce", (0,), combine="add"))),
              Stage("row", (I(2, "store", (1,), "f32", "y", 0),)))
    program = LoopProgram("long", (Param("x", "f32", "in"), Param("y", "f32", "out")), ("n",), (), (("j", n),),
                          (Vectorize("j"),), stages)
    x = np.random.default_rng(0).random(3_000_001, dtype=np.float32)
    y = np.zeros(1, np.float32)
    assert run(compiled(program), [x, y], [x.size]) == 1
    assert abs(y[0] / x.sum(dtype=np.float64) - 1) < 3e-7


def test_several_columns_and_bool() -> None:
    """any(x > 0) and sum over the two last dimensions of x[m, n, 5]."""
    stages = (Stage("column", (I(0, "load", (), "f32", "x", i * n * 5 + j * 5 + k), I(1, "constant", (), "f32"),
                               I(2, "gt", (0, 1), "bool"), I(3, "reduce", (2,), "bool", combine="or"),
                               I(4, "reduce", (0,), "f32", combine="add"), I(5, "index", (), "i64", offset=j * 5 + k),
                               I(6, "reduce", (5,), "i64", combine="add"))),
              Stage("row", (I(7, "store", (3,), "bool", "a", i), I(8, "store", (4,), "f32", "s", i),
                            I(9, "store", (6,), "i64", "t", i))))
    params = (Param("x", "f32", "in"), Param("a", "bool", "out"), Param("s", "f32", "out"), Param("t", "i64", "out"))
    kernel = compiled(LoopProgram("any", params, ("m", "n"), (("i", m),), (("j", n), ("k", 5)),
                                  (Vectorize("k"),), stages))
    for width in (0, 1, 7, 40):
        x = np.random.default_rng(2).standard_normal((9, width, 5)).astype(np.float32)
        x[3:6] = -abs(x[3:6])
        a, s, t = np.zeros(9, np.bool_), np.zeros(9, np.float32), np.zeros(9, np.int64)
        run(kernel, [x, a, s, t], [9, width])
        assert (a == (x > 0).any((1, 2))).all()
        np.testing.assert_allclose(s, x.sum((1, 2)), rtol=1e-4, atol=1e-4)
        assert (t == sum(range(width * 5))).all()


def test_strided_and_transposed() -> None:
    """y[j, i] = x[i, 2j] + x[i, n-1-j] in both schedules."""
    for vector in ("i", "j"):
        body = (I(0, "load", (), "f32", "x", i * 2 * n + 2 * j), I(1, "load", (), "f32", "x", i * 2 * n + n - 1 - j),
                I(2, "add", (0, 1)), I(3, "store", (2,), "f32", "y", j * m + i))
        rows, columns, level = ((("i", m),), (("j", n),), "column") if vector == "j" else (
            (("j", n), ("i", m)), (), "row")
        params = (Param("x", "f32", "in"), Param("y", "f32", "out"))
        kernel = compiled(LoopProgram("stride", params, ("m", "n"), rows, columns, (Vectorize(vector),),
                                      (Stage(level, body),)))
        for height, width in ((1, 1), (5, 17), (33, 64), (3, 0), (2, 100)):
            x = np.random.default_rng(3).standard_normal((height, 2 * width)).astype(np.float32)
            y, whole = guarded((width, height), np.float32)
            run(kernel, [x, y], [height, width])
            np.testing.assert_array_equal(y, (x[:, ::2] + x[:, :width][:, ::-1]).T)
            assert untouched(whole, y.size)


def test_divided_index() -> None:
    """Row and column taken apart inside the vector: y[i] = x[i mod n, i // n]."""
    body = (I(0, "load", (), "f32", "x", mod(i, n) * m + floordiv(i, n)), I(1, "store", (0,), "f32", "y", i))
    params = (Param("x", "f32", "in"), Param("y", "f32", "out"))
    program = LoopProgram("divide", params, ("m", "n"), (("i", m * n),), (), (Vectorize("i"),),
                          (Stage("row", body),))
    kernel = compiled(program)
    for height, width in ((1, 1), (5, 17), (33, 64), (3, 0), (1000, 3)):
        x = np.random.default_rng(4).standard_normal((width, height)).astype(np.float32)
        y, whole = guarded((height, width), np.float32)
        run(kernel, [x, y], [height, width])
        np.testing.assert_array_equal(y, x.T)
        assert untouched(whole, y.size)


@pytest.mark.parametrize("vector", ["i", "j"])
@pytest.mark.parametrize("index", ["i64", "i32"])
def test_gather(vector: str, index: str) -> None:
    """An embedding: y[i, j] = w[t[i], j], the index uniform (row schedule) or one per lane (column schedule)."""
    look = I(0, "load", (), index, "t", i)
    read = (I(1, "load", (), "f32", "w", symbol("%0") * n + j), I(2, "store", (1,), "f32", "y", i * n + j))
    if vector == "j":
        rows, columns, stages = (("i", m),), (("j", n),), (Stage("row", (look,)), Stage("column", read))
    else:
        rows, columns, stages = (("j", n), ("i", m)), (), (Stage("row", (look, *read)),)
    params = (Param("w", "f32", "in"), Param("t", index, "in"), Param("y", "f32", "out"))
    kernel = compiled(LoopProgram("embed", params, ("m", "n"), rows, columns, vectorized(vector), stages))
    random = np.random.default_rng(5)
    for height, width in ((1, 1), (5, 17), (33, 64), (0, 3), (200, 3)):
        w = random.standard_normal((50, width)).astype(np.float32)
        t = random.integers(0, 50, height).astype(NUMPY[index])
        y, whole = guarded((height, width), np.float32)
        run(kernel, [w, t, y], [height, width])
        np.testing.assert_array_equal(y, w[t])
        assert untouched(whole, y.size)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64", "bool"])
@pytest.mark.parametrize("vector", ["i", "j", ""])
def test_scatter(vector: str, dtype: str) -> None:
    """y[t[i], j] += x[i, j], where t[i] is not negative: lanes meet in one element when the vector runs over i."""
    register = "f32" if dtype == "bf16" else dtype
    look = I(0, "load", (), "i64", "t", i)
    add = (I(1, "load", (), register, "x", i * n + j), I(2, "constant", (), "i64", value=0), I(3, "ge", (0, 2), "bool"),
           I(4, "scatter", (1, 3), register, "y", symbol("%0") * n + j, combine="add"))
    rows, columns, stages = (("j", n),), (("i", m),), (Stage("column", (look, *add)),)
    params = (Param("x", dtype, "in"), Param("t", "i64", "in"), Param("y", dtype, "inout"))
    kernel = compiled(LoopProgram("scatter", params, ("m", "n"), rows, columns, vectorized(vector), stages))
    random = np.random.default_rng(6)
    for height, width in ((1, 1), (5, 17), (33, 64), (0, 3), (40, 3)):
        whole = random.integers(-4, 5, (height, width))
        t = random.integers(-2, 7, height)
        want = np.zeros((7, width), bool if dtype == "bool" else float)
        np.add.at(want, t[t >= 0], whole[t >= 0] > 0 if dtype == "bool" else whole[t >= 0])
        whole = whole > 0 if dtype == "bool" else whole
        if dtype == "bf16":
            x, y = bf16_bits(whole.astype(np.float32)), np.zeros((7, width), np.uint16)
        else:
            x, y = whole.astype(NUMPY[dtype]), np.zeros((7, width), NUMPY[dtype])
        run(kernel, [x, t, y], [height, width])
        got = (y.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else y
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("combine", ["add", "maximum"])
@pytest.mark.parametrize("vector", ["j", ""])
@pytest.mark.parametrize("dtype", ["f32", "f64", "i32"])
def test_fold(dtype: str, vector: str, combine: str) -> None:
    """y[part, j] over the rows of each part, z[i] over the columns of each row; parts in one call, or in several."""
    part, parts = symbol("part"), minimum(5, ceildiv(m, 3))
    stages = (Stage("column", (I(0, "load", (), dtype, "x", i * n + j), I(1, "reduce", (0,), dtype, combine=combine),
                               I(-1, "fold", (0,), dtype, "y", part * n + j, combine=combine))),
              Stage("row", (I(-1, "store", (1,), dtype, "z", i),)))
    params = (Param("x", dtype, "in"), Param("y", dtype, "out"), Param("z", dtype, "out"))
    kernel = compiled(LoopProgram("fold", params, ("m", "n"), (("i", m),), (("j", n),),
                                  (*vectorized(vector), SplitReduction("part", parts)), stages))
    random = np.random.default_rng(6)
    for height, width, calls in itertools.product((0, 1, 7, 40, 1000), (1, 17, 64, 131), (1, 3)):
        x = random.integers(-9, 9, (height, width)).astype(NUMPY[dtype])
        count = min(5, -(-height // 3))
        y, whole = guarded((count, width), NUMPY[dtype])
        z = np.empty(height, NUMPY[dtype])
        assert run(kernel, [x, y, z], [height, width], calls) == count
        over = np.add.reduce if combine == "add" else np.maximum.reduce
        for number in range(count):
            rows = x[height * number // count:height * (number + 1) // count]
            np.testing.assert_array_equal(y[number], over(rows, axis=0))
        np.testing.assert_array_equal(z, over(x, axis=1))
        assert untouched(whole, y.size)


def test_masked_load_and_where() -> None:
    """Padding: y[i] = x[i - 3] where 3 <= i < n + 3, else -inf; nothing outside x is read."""
    body = (I(0, "index", (), "i64", offset=i), I(1, "constant", (), "i64", value=3), I(2, "ge", (0, 1), "bool"),
            I(3, "index", (), "i64", offset=n + 3), I(4, "lt", (0, 3), "bool"), I(5, "and", (2, 4), "bool"),
            I(6, "load", (5,), "f32", "x", i - 3, value=-math.inf), I(7, "neg", (6,)),
            I(8, "where", (5, 6, 7), "f32"), I(9, "store", (8,), "f32", "y", i),
            I(10, "store", (6, 5), "f32", "z", i))
    params = (Param("x", "f32", "in"), Param("y", "f32", "out"), Param("z", "f32", "out"))
    for vector in ("i", ""):
        program = LoopProgram("pad", params, ("n",), (("i", n + 7),), (), vectorized(vector), (Stage("row", body),))
        kernel = compiled(program)
        for width in SIZES:
            x = np.random.default_rng(7).standard_normal(width).astype(np.float32)
            y, z = np.zeros(width + 7, np.float32), np.zeros(width + 7, np.float32)
            run(kernel, [x, y, z], [width])
            np.testing.assert_array_equal(y, np.pad(x, (3, 4), constant_values=np.inf))
            np.testing.assert_array_equal(z, np.pad(x, (3, 4)))


def test_scratch_in_the_column_schedule() -> None:
    """Every lane has its own row buffer: y[i, j] = x[i, j] - sum over i of x, through scratch."""
    stages = (Stage("column", (I(0, "load", (), "f32", "x", i * n + j), I(1, "store", (0,), "f32", "e", i),
                               I(2, "reduce", (0,), combine="add"))),
              Stage("column", (I(3, "load", (), "f32", "e", i), I(4, "sub", (3, 2)),
                               I(5, "store", (4,), "f32", "y", i * n + j))))
    program = LoopProgram("own", (Param("x", "f32", "in"), Param("y", "f32", "out")), ("m", "n"), (("j", n),),
                          (("i", m),), (Vectorize("j"),), stages, (Scratch("e", "f32", m),))
    kernel = compiled(program)
    for height, width in ((1, 1), (5, 17), (33, 64), (0, 3), (40, 130)):
        x = np.random.default_rng(8).standard_normal((height, width)).astype(np.float32)
        y = np.zeros_like(x)
        run(kernel, [x, y], [height, width])
        np.testing.assert_allclose(y, x - x.sum(0), rtol=1e-4, atol=1e-4)


def test_emit_is_deterministic_and_named() -> None:
    first, second = emit(softmax(), host()), emit(softmax(), host())
    assert first == second
    assert first.startswith("; kernel softmax\n")
    assert "; model.py:1" in first
    for name in ("softmax", "softmax_blocks", "softmax_scratch", "softmax_work"):
        assert f"@{name}(" in first


def narrow(cpu: str, *without: str) -> Machine:
    """The host as an older processor."""
    features = frozenset(f[1:] for f in host().features.split(",") if not any(w in f for w in without))
    return target_of(host().triple, cpu, features)


@pytest.mark.skipif(not host().triple.startswith("x86_64"), reason="older x86 processors")
@pytest.mark.parametrize("vector_bytes", [16, 32])
def test_older_processors(vector_bytes: int) -> None:
    late = ("avx512", "amx", "avx10", "evex") if vector_bytes == 32 else ("avx", "fma", "f16c", "amx", "vaes", "vpcl")
    target = narrow("haswell" if vector_bytes == 32 else "nehalem", *late)
    assert target.vector_bytes == vector_bytes
    kernel = build([emit(softmax(), target)], target)[0]
    for width in SIZES[1:]:
        x = np.random.default_rng(width).standard_normal((3, width)).astype(np.float32)
        y = np.zeros_like(x)
        run(kernel, [x, y], [3, width])
        e = np.exp(x.astype(np.float64))
        np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=3e-6)


@pytest.mark.skipif(not host().triple.startswith("x86_64"), reason="older x86 processors")
@pytest.mark.parametrize(("vector_bytes", "way"), crossed([16, 32, 64], ["dot", "spread"]))
def test_a_matrix_and_few_vectors(vector_bytes: int, way: str) -> None:
    """Every routine, with beta and without, at sizes that leave rests; a part of the results only."""
    late = {16: ("avx", "fma", "f16c", "amx", "vaes", "vpcl"), 32: ("avx512", "amx", "avx10", "evex"), 64: ()}
    target = narrow({16: "nehalem", 32: "haswell"}.get(vector_bytes, host().cpu), *late[vector_bytes])
    if target.vector_bytes != vector_bytes:
        pytest.skip("a processor without such vectors")
    names = [name for name in gemv_table.routines() if "f32" in name or "f64" in name]
    routines = jit.load(gemv.emit_thin(target), names, target)
    random = np.random.default_rng(0)
    for dtype, kind in (("f32", np.float32), ("f64", np.float64)):
        for count in range(1, max(gemv_table.COUNTS[way]) + 1):
            name = gemv_table.routine(way, dtype, count)
            call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(routines.address[name])
            for inner, results, beta in ((37, 2100, 0.0), (70, 9, 0.5), (1, 1, 0.5), (0, 5, 0.0)):
                matrix = random.standard_normal((results, inner) if way == "dot" else (inner, results)).astype(kind)
                vectors = random.standard_normal((count, inner)).astype(kind)
                found = random.standard_normal((count, results)).astype(kind)
                wanted = 2 * vectors @ (matrix.T if way == "dot" else matrix) + beta * found
                wanted[:, :results // 3] = found[:, :results // 3]
                rows = [min(i, count - 1) for i in range(gemv_table.PLACES)]
                places = np.array([*(vectors[i].ctypes.data for i in rows), *(found[i].ctypes.data for i in rows)])
                scalars = np.zeros(16 // kind().itemsize, kind)
                scalars[0], scalars[8 // kind().itemsize] = 2, beta
                call(matrix.ctypes.data, matrix.strides[0], inner, results // 3, results, places.ctypes.data,
                     kind().itemsize, kind().itemsize, scalars.ctypes.data)
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_text_for_neon() -> None:
    target = target_of("aarch64-unknown-linux-gnu", "neoverse-n1", frozenset(("neon",)))
    assert target.vector_bytes == 16 and target.fma
    assert "<4 x float>" in emit(softmax(), target)


def test_malformed_programs_are_refused() -> None:
    good = softmax()
    vector = Vectorize("j")
    for change, message in (({"schedule": (Vectorize("q"),)}, "not the last"), ({"name": "a b"}, "no name"),
                            ({"schedule": (vector, vector)}, "of one kind"),
                            ({"schedule": (vector, Tile(("j", "i"), (8, 8), (0,)))}, "these are not the last row"),
                            ({"schedule": (vector, Tile(("i", "j"), (8, 0), (0,)))}, "no rows or columns"),
                            ({"schedule": (vector, Interchange("i", 64))}, "this is not the last row"),
                            ({"schedule": (Vectorize("i"), SplitReduction("p", 4))}, "rows one by one"),
                            ({"columns": (("j", symbol("zz")),)}, "over the kernel's sizes"),
                            ({"params": good.params[1:]}, "unknown buffer"),
                            ({"scratch": (*good.scratch, *good.scratch)}, "one name")):
        with pytest.raises(VerifyError, match=message):
            emit(dataclasses.replace(good, **change), host())
    with pytest.raises(VerifyError, match="refuses"):
        build(["; kernel bad\ndefine void @bad() { ret i32 }"], host())


class Store(dict):
    """An object cache that counts."""

    hits = 0

    def get(self, key: str) -> bytes | None:
        found = super().get(key)
        self.hits += found is not None
        return found

    def put(self, key: str, data: bytes) -> None:
        self[key] = data


def test_cache_and_many_modules() -> None:
    programs = [dataclasses.replace(softmax(), name=f"many{number}") for number in range(5)]
    texts = [emit(program, host()) for program in programs]
    store = Store()
    first = build(texts[:3], host(), store)
    second = build(texts, host(), store)  # the same names again, while the first are loaded
    assert (len(store), store.hits) == (5, 3)
    assert [kernel.name for kernel in second] == [f"many{number}" for number in range(5)]
    assert len({kernel.run for kernel in first + second}) == 8
    assert object_key(texts[0], host()) != object_key(texts[0], narrow("haswell", "avx512"))
    x = np.random.default_rng(0).standard_normal((3, 33)).astype(np.float32)
    for kernel in first + second:
        y = np.zeros_like(x)
        run(kernel, [x, y], [3, 33])
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-5)


def test_build_from_several_threads() -> None:
    def make(number: int) -> float:
        kernel = build([emit(dataclasses.replace(softmax(), name=f"thread{number}"), host())], host())[0]
        x, y = np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32)
        run(kernel, [x, y], [1, 8])
        return float(y.sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(make, range(8))) == [1.0] * 8


def test_where_free_memory_is_in_small_pieces_far_apart() -> None:
    """An object's sections must lie within 2 GB; the linker that LLVM takes by itself ended the process here."""
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, folder / "scattered.py"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": f"{folder.parent / 'src'}{os.pathsep}{folder}"})
    assert done.returncode == 0 and done.stdout == "well\n", done.stderr
