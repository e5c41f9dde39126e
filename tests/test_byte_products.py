"""Products of 8-bit numbers: the routines on every processor, and ONNX's operators against whole numbers of numpy, with
every kind of zero point, rank and size."""
from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyshape
from anyshape.backend.cpu.llvm import half_precision, jit
from anyshape.backend.cpu.machine.target import Machine, host, target_of
from anyshape.backend.cpu.microkernels import gemm, gemv
from anyshape.backend.cpu.microkernels.tables import gemm as gemm_table
from anyshape.backend.cpu.microkernels.tables import gemv as gemv_table
from anyshape.ir.panels import from_panels, into_panels

X86 = host().triple.startswith("x86_64")


def targets() -> list[Machine]:
    """This machine; without VNNI; with half and a quarter of the width."""
    names = sorted(name[1:] for name in host().features.split(",") if name.startswith("+"))
    cut: list[tuple[str, ...]] = [(), ("avx512vnni", "avxvnni", "amx"), ("avx512", "avx10", "evex", "amx"),
           ("avx512", "avx10", "evex", "amx", "avxvnni"),
           ("avx512", "avx10", "evex", "amx", "avx2", "avxvnni", "avxifma", "avxneconvert", "fma", "f16c", "avx",
            "vaes", "vpcl")]
    result = []
    for late, cpu in zip(cut, (host().cpu, host().cpu, "haswell", "haswell", "nehalem"), strict=True):
        kept = frozenset(name for name in names if not (late and name.startswith(late)))
        target = target_of(host().triple, cpu, kept)
        off = ",".join(f"-{name}" for name in names if name not in kept)
        result.append(Machine(target.triple, target.cpu, f"{target.features},{off}" if off else target.features,
                              target.vector_bytes, target.fma, target.wide_int))
    return list(dict.fromkeys(result))


@pytest.mark.skipif(not X86, reason="older x86 processors")
@pytest.mark.parametrize("target", targets(), ids=lambda t: f"{t.vector_bytes}{'-vnni' * half_precision.vnni(t)}")
def test_every_routine_of_panels(target: Machine) -> None:
    draw = np.random.default_rng(0)
    text = gemm.emit_packed(target, ("u8",))
    names = [name for name in gemm_table.routines() if "_u8" in name and f"@{name}(" in text]
    assert len(names) == gemm_table.TILES + 3 + 1  # tiles, packing, the end
    routines = jit.load(text, names, target)

    def call(name: str, *arguments: int) -> None:
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(routines.address[name])(*arguments)

    lanes, grain = target.lanes, gemm_table.grain(target, "u8")
    for inner, thirds, vectors, ways in itertools.product((0, 1, 2, 3, 4, 39, 256, 301), (1, 2, 3), (1, 2),
                                                          (("turn", "along"), ("along", "turn"), ("any", "any"))):
        rows, columns = thirds * grain, vectors * lanes
        x, y = draw.integers(0, 256, (rows, inner), np.uint8), draw.integers(-128, 128, (inner, columns), np.int8)
        x[:1], y[:, :1] = 255, -128
        x, y = (x if ways[0] != "along" else np.asfortranarray(x)), (y if ways[1] != "turn" else np.asfortranarray(y))
        count = -(-inner // 4)
        room = -(-count // lanes) * lanes
        first, second = (np.full(size * room + lanes, -1, np.int32) for size in (rows, columns))
        for i in range(0, rows, lanes):
            call(f"{ways[0]}_u8_wide", x.ctypes.data + i * x.strides[0], x.strides[0], x.strides[1],
                 min(lanes, rows - i), inner, first.ctypes.data + 4 * i, 4 * rows)
        for i in range(0, columns, lanes):
            call(f"{ways[1]}_u8_wide", y.ctypes.data + i * y.strides[1], y.strides[1], y.strides[0], lanes, inner,
                 second.ctypes.data + 4 * i, 4 * columns)
        exact = x.astype(np.int32) @ y.astype(np.int32)
        for add in (0, 1):
            sums = np.full((rows, columns), 2**31 - 1, np.int32)  # what is added wraps around
            ahead = (ctypes.c_int64 * 8)(sums.ctypes.data, 0, 1, 0, 3, sums.ctypes.data, 4 * columns, 4 * columns)
            call(f"tile_u8_{3 - thirds}_{vectors}", second.ctypes.data, first.ctypes.data, count, sums.ctypes.data,
                 4 * columns, add, ctypes.addressof(ahead))
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(sums, exact + np.int32(2**31 - 1) if add else exact)
        addend = draw.integers(-9, 9, (rows, columns), np.int32)
        for more in (None, addend):
            result = np.full((rows, columns + 3), 77, np.int32)
            call("finish_u8", exact.ctypes.data, 4 * columns, result.ctypes.data, 4 * (columns + 3), rows, columns - 1,
                 0 if more is None else more.ctypes.data, 4 * columns, 0, 0)
            wanted = exact if more is None else exact + addend
            np.testing.assert_array_equal(result[:, :columns - 1], wanted[:, :-1])
            assert (result[:, columns - 1:] == 77).all()


@pytest.mark.skipif(not X86, reason="instructions of x86")
def test_which_instructions_multiply() -> None:
    for target in targets():
        text = gemm.emit_packed(target, ("u8",))
        assert ("vpdpbusd" in text) == half_precision.vnni(target) and ("pmadd" in text) != half_precision.vnni(target)


@pytest.mark.skipif(not X86, reason="older x86 processors")
@pytest.mark.parametrize("target", targets(), ids=lambda t: f"{t.vector_bytes}{'-vnni' * half_precision.vnni(t)}")
def test_every_routine_over_panels(target: Machine) -> None:
    """A part of the results only; rests of words, of panels and of their halves."""
    draw = np.random.default_rng(0)
    names = [name for name in gemv_table.routines() if "_u8" in name]
    routines = jit.load(gemv.emit_thin(target, ("u8",)), names, target)
    for count, inner, (begin, end) in itertools.product(
            range(1, 9), (0, 1, 3, 4, 37, 130), ((0, 5), (32, 101), (64, 96))):
        x = draw.integers(0, 256, (count, inner), np.uint8)
        y = draw.integers(-128, 128, (inner, 101), np.int8)
        found = np.full((count, 101), 77, np.int32)
        panels = into_panels(y)
        np.testing.assert_array_equal(from_panels(panels, inner, 101), y)
        rows = [min(i, count - 1) for i in range(gemv_table.PLACES)]
        places = np.array([*(x[i].ctypes.data for i in rows), *(found[i].ctypes.data for i in rows)])
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(routines.address[gemv_table.over_panels("u8", count)])(
            panels.ctypes.data, panels.strides[0], inner, begin, end, places.ctypes.data, 1, 4, 0)
        np.testing.assert_array_equal(found[:, begin:end], (x.astype(np.int32) @ y.astype(np.int32))[:, begin:end])
        assert (found[:, :begin] == 77).all() and (found[:, end:] == 77).all()


@pytest.mark.skipif(not X86, reason="older x86 processors")
@pytest.mark.parametrize("target", targets(), ids=lambda t: f"{t.vector_bytes}{'-vnni' * half_precision.vnni(t)}")
def test_routines_over_panels_of_f32(target: Machine) -> None:
    """alpha * (x @ y) + beta * what is there; of vectors that stand several times, too."""
    draw = np.random.default_rng(0)
    names = [name for name in gemv_table.routines() if name.startswith(("panels_f32", "dot_f32", "spread_f32"))]
    routines = jit.load(gemv.emit_thin(target, ("f32",)), names, target)
    for count, inner, (begin, end), beta in itertools.product(
            range(1, 9), (0, 1, 37, 130), ((0, 5), (32, 101), (64, 96)), (0.0, 2.0)):
        x, y, there = (draw.standard_normal(shape, np.float32) for shape in (
            (count, inner), (inner, 101), (count, 101)))
        found, panels = there.copy(), into_panels(y)
        np.testing.assert_array_equal(from_panels(panels, inner, 101), y)
        rows = [min(i, count - 1) for i in range(gemv_table.PLACES)]
        places = np.array([*(x[i].ctypes.data for i in rows), *(found[i].ctypes.data for i in rows)])
        scalars = np.array([[0.5, 0], [beta, 0]], np.float32)
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 9)(routines.address[gemv_table.over_panels("f32", count)])(
            panels.ctypes.data, panels.strides[0], inner, begin, end, places.ctypes.data, 4, 4, scalars.ctypes.data)
        wanted = there.copy()
        wanted[:, begin:end] = 0.5 * (x @ y)[:, begin:end] + beta * there[:, begin:end]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


# ---- operators of ONNX

def model(a: np.ndarray, b: np.ndarray, zeros: tuple[np.ndarray | None, ...], constant: bool) -> bytes:
    helper, numpy_helper = pytest.importorskip("onnx").helper, pytest.importorskip("onnx").numpy_helper
    kinds = {"uint8": 2, "int8": 3, "int32": 6}
    given: dict[str, Any] = {"b": b, **{f"{name}z": z for name, z in zip("ab", zeros, strict=True) if z is not None}}
    node = helper.make_node("MatMulInteger", ["a", "b", *(
        f"{name}z" if zero is not None else "" for name, zero in zip("ab", zeros, strict=True))], ["y"])
    inputs = {"a": a, **({} if constant else given)}
    graph = helper.make_graph(
        [node], "bytes",
        [helper.make_tensor_value_info(name, kinds[str(x.dtype)], [
            1 if size == 1 else {"a": ["p", "q", "m", "k"], "b": ["p", "q", "k", "n"]}[name][dim - x.ndim]
            if name in "ab" and x.ndim > 1 else "k" if name in "ab" else size
            for dim, size in enumerate(x.shape)]) for name, x in inputs.items()],
        [helper.make_tensor_value_info("y", 6, None)],
        [numpy_helper.from_array(x, name) for name, x in given.items() if constant])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    return bytes(made.SerializeToString())


def drawn(draw: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return draw.integers(limits.min, limits.max + 1, shape).astype(dtype)


SHAPES = [((5, 7), (7, 6)), ((2, 3, 40), (40, 33)), ((2, 3, 1, 9), (2, 1, 9, 4)), ((9,), (9, 4)), ((3, 9), (9,)),
          ((0, 5), (5, 3)), ((300, 1100), (1100, 70))]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("left", "right"), list(itertools.product(("uint8", "int8"), repeat=2)))
def test_zero_points_of_all_kinds(left: str, right: str, constant: bool) -> None:
    draw = np.random.default_rng(0)
    before = anyshape.stats()["extern_calls"]
    for shape_a, shape_b in SHAPES if left != right else SHAPES[:3]:
        a, b = drawn(draw, left, *shape_a), drawn(draw, right, *shape_b)
        rows = [None, drawn(draw, left)]
        columns = [None, drawn(draw, right), *([drawn(draw, right, b.shape[-1])] if b.ndim == 2 else [])]
        for p, q in [*zip(rows, columns, strict=False), (None, columns[-1]), (rows[1], None)]:
            found = anyshape.compile_onnx(model(a, b, (p, q), constant))(
                *([a] if constant else [a, b, *(z for z in (p, q) if z is not None)]))
            wanted = (a.astype(np.int64) - (0 if p is None else p)) @ (b.astype(np.int64) - (0 if q is None else q))
            assert found.dtype == np.int32
            np.testing.assert_array_equal(found, wanted.astype(np.int32))
    assert anyshape.stats()["extern_calls"] == before


@pytest.mark.parametrize(("inner", "columns"), [(37, 101), (1500, 33), (4, 1), (64, 64)])
def test_constant_weights_lie_in_panels(inner: int, columns: int) -> None:
    """Few rows and many of them: by routines for few vectors, by tiles, of several blocks of terms and rows."""
    draw = np.random.default_rng(0)
    b = drawn(draw, "int8", inner, columns)
    found = anyshape.compile_onnx(model(drawn(draw, "uint8", 2, inner), b, (np.uint8(3), None), True))
    (program,) = found.compilation.programs
    assert list(into_panels(b).shape) in [list(one.shape) for one in program.constants]
    before = anyshape.stats()["extern_calls"]
    for rows in (0, 1, 2, 3, 7, 8, 9, 12, 13, 40, 1300):
        a = drawn(draw, "uint8", rows, inner)
        np.testing.assert_array_equal(found(a), (a.astype(np.int64) - 3) @ b)
    assert anyshape.stats()["extern_calls"] == before


# ---- of other front ends

def test_integer_products_of_pytorch() -> None:
    torch = pytest.importorskip("torch")

    @anyshape.compile(strict=True)
    def scaled(x: Any, w: Any, s: Any) -> Any:
        return torch._int_mm(x, w) * s

    draw = np.random.default_rng(0)
    before = anyshape.stats()["extern_calls"]
    for rows, inner, columns in ((17, 8, 8), (40, 64, 24), (130, 1032, 40)):
        x, w = (torch.from_numpy(drawn(draw, "int8", *shape)) for shape in ((rows, inner), (columns, inner)))
        s = torch.rand(columns)
        assert torch.equal(scaled(x, w.T, s), (x.long() @ w.T.long()).int() * s)
    assert anyshape.stats()["extern_calls"] == before


@pytest.mark.parametrize(("left", "right"), list(itertools.product(("i8", "ui8"), repeat=2)))
def test_products_of_stablehlo(left: str, right: str) -> None:
    pytest.importorskip("jaxlib")
    run = anyshape.compile_stablehlo(f"""
module {{
  func.func @main(%x: tensor<?x40x{left}>, %y: tensor<40x?x{right}>) -> tensor<?x?xi32> {{
    %z = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0]
        : (tensor<?x40x{left}>, tensor<40x?x{right}>) -> tensor<?x?xi32>
    return %z : tensor<?x?xi32>
  }}
}}
""")
    draw = np.random.default_rng(0)
    before = anyshape.stats()["extern_calls"]
    for rows, columns in ((3, 5), (1, 70), (100, 33)):
        x, y = (drawn(draw, {"i8": "int8", "ui8": "uint8"}[kind], *shape)
                for kind, shape in ((left, (rows, 40)), (right, (40, columns))))
        np.testing.assert_array_equal(run(x, y), x.astype(np.int32) @ y.astype(np.int32))
    assert anyshape.stats()["extern_calls"] == before


def test_saved_it_runs_without_torch(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    a, b = drawn(draw, "uint8", 3, 70), drawn(draw, "int8", 70, 9)
    anyshape.save(anyshape.compile_onnx(model(a, b, (np.uint8(9), np.int8(-3)), True)), tmp_path / "bytes.any")
    for rows in (3, 50):
        np.save(tmp_path / f"{rows}.npy", drawn(draw, "uint8", rows, 70))
    code = f"""
import sys
sys.modules["torch"] = sys.modules["llvmlite"] = None
import numpy as np, anyshape
run = anyshape.load({str(tmp_path / "bytes.any")!r}, trust_native=True)
for rows in (3, 50):
    np.save({str(tmp_path)!r} + f"/y{{rows}}.npy", run(np.load({str(tmp_path)!r} + f"/{{rows}}.npy")))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    for rows in (3, 50):
        x = np.load(tmp_path / f"{rows}.npy").astype(np.int64)
        np.testing.assert_array_equal(np.load(tmp_path / f"y{rows}.npy"), (x - 9) @ (b.astype(np.int64) + 3))
