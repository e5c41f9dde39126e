"""Interpreted kernels of the Triton backend, in a process with TRITON_INTERPRET=1 (tests/test_triton.py starts it)."""
from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import test_triton as texts
from anyshape.backend.cpu.llvm.scalar_ops import unsupported
from anyshape.backend.cpu.machine.target import HARDWARE as CPU
from anyshape.backend.triton.interpret import InterpretedKernel
from anyshape.backend.triton.schedule import emit
from anyshape.backend.triton.text import read
from anyshape.kernel.loop_ir.directives import Product
from anyshape.kernel.loop_ir.program import LoopProgram, Param
from anyshape.kernel.schedule.tile_scan import tiled_scan
from anyshape.sym.expr import evaluate
from device_kernels import difference, memory_of, on_cpu

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTHS = (0, 1, 2, 3, 7, 13, 1023, 1024, 1025, 5003)


def agree(program: LoopProgram, all_sizes: Sequence[Sequence[int]], within: float = 1e-5,
          every: bool = False) -> InterpretedKernel:
    """The interpreted kernel leaves what the CPU's does, and nothing around it. every: so does each of its versions
    that may run at these sizes, with 64-bit offsets."""
    cpu, device = on_cpu(program), InterpretedKernel(read(emit(program)))
    for sizes in all_sizes:
        wanted = memory_of(program, sizes)
        found = wanted.copy()
        cpu(wanted, sizes)
        device.run(found.addresses(), sizes)
        assert difference(found, wanted) < within, (sizes, device.ran[-1])
        assert found.is_whole(), (sizes, device.ran[-1])
        values = dict(zip(program.sizes, sizes, strict=True))
        for version in device.source.versions if every else ():
            if all(evaluate(size, values) >= 0 for size in version.conditions):
                found = memory_of(program, sizes)
                device.launch(dataclasses.replace(version, index="i64"), found.addresses(), sizes)
                assert difference(found, wanted) < within and found.is_whole(), (sizes, version.name)
    return device


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_softmax(dtype: str) -> None:
    program = texts.program(texts.SOFTMAX.replace("bf16", dtype))
    device = InterpretedKernel(read(emit(program)))
    for rows, columns in [*((3, width) for width in WIDTHS), (0, 5), (1, 20_000)]:
        memory = memory_of(program, [rows, columns])
        x = memory.arrays()[0][:rows * columns].reshape(rows, columns)
        if dtype == "bf16":
            x = (x.astype(np.uint32) << 16).view(np.float32)
        exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True, initial=-np.inf))
        exact /= exact.sum(1, keepdims=True)
        device.run(memory.addresses(), [rows, columns])
        found = memory.arrays()[1][:rows * columns].reshape(rows, columns)
        if dtype == "bf16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(found, exact, rtol=4e-3 if dtype == "bf16" else 2e-6, atol=1e-30)
        assert memory.is_whole()
    assert {name.split()[0] for name in device.ran} >= {
        "rows4", "rows1024", "rows1024_window", "rows5120_window", "looped"}


def test_nan_and_infinity() -> None:
    program = texts.program(texts.SOFTMAX.replace("bf16", "f32"))
    wanted = memory_of(program, [3, 20])
    wanted.arrays()[0][[1, 22, 43]] = np.nan, np.inf, -np.inf
    found = wanted.copy()
    on_cpu(program)(wanted, [3, 20])
    InterpretedKernel(read(emit(program))).run(found.addresses(), [3, 20])
    assert np.isnan(wanted.arrays()[1][:20]).all() and difference(found, wanted) < 1e-6


def test_softmax_by_every_version() -> None:
    softmax = texts.program(texts.SOFTMAX.replace("bf16", "f32"))
    agree(softmax, [[2, 57], [3, 101]], 1e-6, every=True)
    device = agree(softmax, [[3, 1024], [3, 1031], [2, 1032], [3, 1283], [2, 1290], [3, 2300], [3, 3072]], 1e-6)
    assert [name.split()[0] for name in device.ran] == [
        "rows1024", "rows1280_window", "rows1280", "rows1280_window", "rows1536_window", "rows2560", "rows3072"]
    device = agree(texts.program(texts.SOFTMAX), [[3, 1031], [2, 1032], [3, 1287], [5, 1543], [2, 3079]], 1e-2)
    assert [name.split()[0] for name in device.ran] == [
        "rows1024_window", "rows1280", "rows1280_window", "rows1536_window", "rows3072_window"]


LONG = {"softmax": texts.SOFTMAX, "norm": texts.NORM, "known columns": texts.NORM.replace("n1", "16411").replace(
    "n0, 16411)", "n0)")}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_long_rows(name: str, dtype: str) -> None:
    """Both reductions in one pass: values far from 0, that rise, and that are infinite or no numbers."""
    program = texts.program(LONG[name].replace("bf16", dtype).replace("f32", "f64" if dtype == "f64" else "f32"))
    cpu, device = on_cpu(program), InterpretedKernel(read(emit(program)))
    for columns in (16411,) if name == "known columns" else (16411, 20_000):
        sizes = [5, columns][:len(program.sizes)]
        wanted = memory_of(program, sizes)
        x = np.random.default_rng(1).standard_normal((5, columns)) * 0.1
        x[0] += 1000
        x[1] += np.linspace(-90, 90, columns)
        x[2, :9000], x[2, -20:] = -np.inf, -np.inf
        x[3, 7], x[3, 15_000] = np.nan, np.inf
        x[4] = -np.inf
        given = rounded(x.astype(np.float32), dtype) if dtype == "bf16" else x
        wanted.arrays()[0][:x.size] = given.ravel()
        exact, found = as_f64(wanted.arrays()[0], dtype)[:x.size].reshape(5, columns), wanted.copy()
        cpu(wanted, sizes)
        device.run(found.addresses(), sizes)
        result, other = (as_f64(one.arrays()[-1], dtype)[:x.size].reshape(5, columns) for one in (found, wanted))
        np.testing.assert_array_equal(np.isnan(result), np.isnan(other))
        mean = exact[:2].mean(1, keepdims=True)
        best = np.exp(exact[:3] - exact[:3].max(1, keepdims=True)) if name == "softmax" else (
            exact[:2] - mean) / np.sqrt(((exact[:2] - mean)**2).mean(1, keepdims=True) + 1e-5)
        if name == "softmax":
            best /= best.sum(1, keepdims=True)
        else:
            weight, bias = (as_f64(one, dtype)[:columns] for one in wanted.arrays()[1:3])
            best = best * weight + bias
        distances = [np.abs(one[:len(best)] - best).max(1) for one in (result, other)]
        assert (distances[0] <= 4 * distances[1] + 1e-6 * np.abs(best).max()).all(), distances
        assert found.is_whole() and device.ran[-1].startswith("looped")


def as_f64(array: np.ndarray, dtype: str) -> np.ndarray:
    return as_f32(array, dtype).astype(np.float64) if dtype == "bf16" else array.astype(np.float64)


@pytest.mark.parametrize("combine", ["mul", "maximum"])
def test_scans_of_rows_that_begin_anywhere(combine: str) -> None:
    """What stands before a row in its first 16 bytes takes no part."""
    agree(texts.program(texts.CUMSUM.replace("add", combine)), [[3, 101], [4, 259], [3, 4099]], 1e-5)


def test_linear_recurrences() -> None:
    """Factors are below 1: what there is in memory is drawn from a normal distribution."""
    below = "r1: f32 = load p1[i0*n1 + i1]\n      r4: f32 = tanh r0\n      r2: f32 = scan linear r1, r4"
    text = texts.LINEAR.replace("r1: f32 = load p1[i0*n1 + i1]\n      r2: f32 = scan linear r1, r0", below)
    agree(texts.program(text), [[0, 3], [3, 0], [2, 1], [3, 101], [2, 1024], [1, 17_000]], 1e-5)


def test_a_failed_run_writes_nothing() -> None:
    program = texts.program(texts.CUMSUM)
    device = InterpretedKernel(read(emit(program)))
    memory, status = memory_of(program, [3, 5]), np.array([0], np.int64)
    before = memory.arrays()[1].copy()
    for value in (1, 0):
        status[0] = value
        device.run(memory.addresses(), [3, 5], status.ctypes.data)
        assert np.array_equal(memory.arrays()[1], before) == bool(value)


def test_scatter_scan_fold_random() -> None:
    device = agree(texts.program(texts.EMBEDDING), [[0], [1], [9], [300]])
    assert device.ran[-1].startswith("buckets")
    agree(texts.program(texts.BIAS), [[0], [1], [31], [100]])
    agree(texts.program(texts.CUMSUM), [[0, 3], [3, 0], [2, 1], [3, 7], [1, 5003]])
    agree(texts.program(texts.DROPOUT), [[0], [1], [1025]], within=1e-30)  # the same bits


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("text", [texts.RELU, texts.GATED])
def test_products_with_an_epilogue(text: str, dtype: str) -> None:
    """Against the CPU's epilogue of the product that numpy makes, rounded as a product in memory is."""
    fused = texts.program(text.replace("bf16", dtype))
    multiplied = fused.directive(Product)
    assert multiplied is not None
    apart = dataclasses.replace(fused, schedule=fused.schedule[:1], params=(
        *fused.params, Param(multiplied.name, dtype, "in")))
    cpu, device = on_cpu(apart), InterpretedKernel(read(emit(fused)))
    for sizes in ((0, 3, 5), (3, 0, 5), (2, 3, 0), (1, 1, 1), (2, 3, 1), (7, 13, 11), (64, 64, 64), (65, 129, 67),
                  (131, 257, 3), (1, 1024, 16), (1023, 2, 9), (2, 1024, 17), (3, 1025, 65), (1025, 129, 31),
                  (5, 3, 1023), (5, 3, 1025)):
        found, wanted = memory_of(fused, sizes), memory_of(apart, sizes)
        device.run(found.addresses(), sizes)
        for one, other in zip(wanted.arrays()[:3], found.arrays()[:3], strict=True):
            one[:len(other)] = other[:len(one)]
        if sizes[0] * sizes[1]:
            values = dict(zip(fused.sizes, sizes, strict=True))
            down, along, under, beside = (evaluate(stride, values) for stride in multiplied.strides)
            left = matrix(as_f32(found.arrays()[0], dtype), (sizes[0], sizes[2]), (down, along))
            right = matrix(as_f32(found.arrays()[1], dtype), (sizes[2], sizes[1]), (under, beside))
            wanted.arrays()[4][:sizes[0] * sizes[1]] = rounded(left @ right, dtype).ravel()
        cpu(wanted, sizes)
        result, exact = (as_f32(one.arrays()[3][:sizes[0] * sizes[1]], dtype) for one in (found, wanted))
        within = {"bf16": 1.6e-2, "f16": 2e-3, "f32": 1e-4}[dtype]  # sums in another order may round to the next number
        np.testing.assert_allclose(result, exact, rtol=within, atol=within)
        assert found.is_whole(), (sizes, device.ran[-1])
    assert {name.split()[0] for name in device.ran} == {"product64x64", "product128x128"}
    assert any("/16" in name for name in device.ran)


def test_a_product_in_registers_is_rounded_as_in_memory() -> None:
    """1 + 2**-9 is 1 in bfloat16, of which the epilogue leaves 0."""
    fused = texts.program(texts.RELU)
    memory = memory_of(fused, [1, 1, 2])
    for array, numbers in zip(memory.arrays(), ([1, 2.0**-9], [1, 1], [-1], [5]), strict=True):
        array[:len(numbers)] = np.array(numbers, np.float32).view(np.uint32) >> 16
    InterpretedKernel(read(emit(fused))).run(memory.addresses(), [1, 1, 2])
    assert memory.arrays()[3][0] == 0


def as_f32(array: np.ndarray, dtype: str) -> np.ndarray:
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else array.astype(np.float32)


def matrix(memory: np.ndarray, shape: tuple[int, int], strides: tuple[int, int]) -> np.ndarray:
    """A strided matrix in memory."""
    return memory[np.arange(shape[0])[:, None] * strides[0] + np.arange(shape[1])[None, :] * strides[1]]


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy() if dtype == "bf16" else array


def test_windows_of_tiles() -> None:
    device = agree(texts.program(texts.SCALED), [[3, 101], [2, 1100], [4, 1023], [0, 99]], 1e-30, every=True)
    assert device.ran[2] == "tiles_window i32"


def test_row_buffers_in_memory() -> None:
    """What is scanned is not computed again; and a scan down the columns of a matrix in tiles reads what it stored."""
    device = agree(texts.program(texts.SCANNED), [[2, 57], [2, 20_000], [0, 3]], within=1e-4)
    assert device.ran[1].startswith("looped")
    down = texts.program(texts.DOWN)
    agree(down, [[0, 3], [5, 7], [40, 131]])
    small = dataclasses.replace(CPU, row_buffer_bytes=64)
    tiled = tiled_scan(down, small)
    assert tiled is not None
    agree(tiled, [[5, 7], [3, 19]])


@pytest.mark.parametrize("dtype", ["f32", "f64", "i64", "i32", "u8", "i8", "bool"])
def test_every_scalar_instruction(dtype: str) -> None:
    program = texts.every_scalar(dtype, unsupported())
    cpu, device = on_cpu(program), InterpretedKernel(read(emit(program)))
    for size in (0, 1025):
        wanted = memory_of(program, [size])
        if dtype[0] in "iu":
            for array in wanted.arrays()[:2]:
                array[:] = np.random.default_rng(7).permutation(np.resize(np.arange(-9, 10), len(array)))
        found = wanted.copy()
        cpu(wanted, [size])
        device.run(found.addresses(), [size])
        assert difference(found, wanted) < 2e-5 and found.is_whole()


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_digamma(dtype: str) -> None:
    """The CPU's kernels have none: against PyTorch's."""
    kernel = texts.program(texts.DIGAMMA.replace("f32", dtype))
    array = {"f32": np.float32, "f64": np.float64}[dtype]
    x = np.concatenate([np.linspace(-8.3, 40, 997), [0.0, -0.0, -1.0, -7.0, 1e-6, -1e-6, 1e9, np.inf, -np.inf, np.nan],
                        np.geomspace(1e-5, 1e5, 100)]).astype(array)
    found = np.zeros_like(x)
    InterpretedKernel(read(emit(kernel))).run([x.ctypes.data, found.ctypes.data], [len(x)])
    wanted = torch.digamma(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    within = {"f32": (2e-4, 1e-5), "f64": (1e-11, 1e-12)}[dtype]
    np.testing.assert_allclose(found, wanted, *within)


@pytest.mark.parametrize("op", ["remainder", "floor_div"])
def test_a_comparison_of_numbers(op: str) -> None:
    """Its result meets those of lanes."""
    text = texts.DIGAMMA.replace("r1: f32 = digamma r0", f"r2: f32 = -0.3\n      r1: f32 = {op} r0, r2")
    program = texts.program(text)
    agree(program, [[1025]], within=1e-6)


def test_the_sign_of_zero() -> None:
    kernel = texts.program(texts.DIGAMMA.replace("digamma", "neg"))
    x, found = np.array([0.0, -0.0, 1.0], np.float32), np.zeros(3, np.float32)
    InterpretedKernel(read(emit(kernel))).run([x.ctypes.data, found.ctypes.data], [3])
    np.testing.assert_array_equal(np.signbit(found), [True, False, True])


def test_bf16_rounds_to_nearest_even() -> None:
    program = texts.program("""kernel narrow(p0: in f32, p1: out bf16; n0)
  rows (i0: n0) vector i0
    row
      r0: f32 = load p0[i0]
      store p1[i0] r0
""")
    agree(program, [[4099]], within=1e-30)


def test_extents_that_are_products() -> None:
    """Rows are taken apart by `//` and `%` of what may be a product."""
    program = texts.program("""kernel move(p0: in f32, p1: in f32, p2: out f32; n0, n1)
  rows (i0: n0, i1: 2*n1)
    columns (i2: 16) vector i2
      r0: f32 = load p0[16*i1 + i2]
      r1: f32 = load p1[i0]
      r2: f32 = mul r0, r1
      store p2[32*i0*n1 + 16*i1 + i2] r2
""")
    agree(program, [[3, 5], [1, 1], [2, 33], [0, 4]], within=1e-30)


def test_rows_of_different_lengths() -> None:
    """No version has a condition on a row; what it gives for the columns of each."""
    body = """kernel uneven(p0: in f32, p1: out f32, p2: out f32; n0, n1)
  rows (i0: n0)
    columns (i1: i0 + 1) vector i1
      r0: f32 = load p0[i0*n1 + i1]
      r1: f32 = reduce add r0
      store p2[i0*n1 + i1] r0
    row
      store p1[i0] r1
"""
    kernel = InterpretedKernel(read(emit(texts.program(body))))
    for rows, columns in ((3, 3), (70, 71), (1, 1), (0, 5)):
        x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
        sums, copy = np.full(rows, np.nan, np.float32), np.zeros_like(x)
        kernel.run([one.ctypes.data for one in (x, sums, copy)], [rows, columns])
        np.testing.assert_array_equal(copy, np.tril(x))
        np.testing.assert_allclose(sums, np.tril(x).sum(1), rtol=1e-5, atol=1e-5)


def test_windows_that_begin_before_the_memory() -> None:
    """A part of a concatenation reads its operand from a place left of it on."""
    program = texts.program("""kernel shifted(p0: in f32, p1: in f32, p2: out f32; n0, n1)
  rows (i0: n0)
    row
      r1: i64 = index n1
    columns (i1: n1) vector i1
      r0: i64 = index i1
      r2: bool = lt r0, r1
      r3: f32 = load p0[i0*n1 + i1 - 2*n1] where r2 else 0
      r4: f32 = load p1[i0*n1 + i1 - 2*n1] where r2 else 0
      r5: f32 = add r3, r4
      store p2[i0*n1 + i1] r5
""")
    kernel = InterpretedKernel(read(emit(program)))
    for rows, columns in ((3, 70), (5, 1022), (2, 514)):
        given = [np.random.default_rng(0).standard_normal(rows * columns).astype(np.float32) for _ in range(2)]
        result = np.full(rows * columns, np.nan, np.float32)
        kernel.run([*(one.ctypes.data + 8 * columns for one in given), result.ctypes.data], [rows, columns])
        np.testing.assert_array_equal(result, given[0] + given[1])
    assert any("window" in name for name in kernel.ran)


def recorded_programs(models: Sequence[str]) -> dict[str, LoopProgram]:
    import recorded
    return {made.name: made for model in models for _, made in recorded.compiled(model)
            if isinstance(made, LoopProgram)}


@pytest.mark.full
def test_recorded_kernels() -> None:
    """All kernels of the recorded graphs, as they are for a GPU, against the CPU's."""
    import recorded
    for program in recorded_programs(recorded.MODELS).values():
        agree(program, [[1, 1, 1, 1][:len(program.sizes)], [3, 2, 5, 2][:len(program.sizes)]], 3e-5, every=True)
        agree(program, [[5, 7, 33, 3][:len(program.sizes)]], 3e-5)


def test_a_sample_of_recorded_kernels() -> None:
    found = list(recorded_programs(["t5"]).values())
    assert len(found) > 5
    for program in found[::6]:
        agree(program, [[3, 2, 5, 2][:len(program.sizes)]], within=3e-5)


warnings.filterwarnings("ignore", category=RuntimeWarning)
