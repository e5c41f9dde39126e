"""Translations of ONNX operators on signals: windows, Fourier transforms, mel weights; and of random numbers.

    HannWindow(n)  -->  sub(0.5, mul(0.5, cos(mul(iota(n), 2*pi/n))))
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_onnx.matmul import matmul
from anyshape.frontend.importer_onnx.model import ELEMENTS
from anyshape.frontend.importer_onnx.table import Call, translates
from anyshape.frontend.symbols.known import known
from anyshape.frontend.symbols.numpy_arrays import numpy_dtype
from anyshape.ir.graph import Value
from anyshape.ir.types import TensorType
from anyshape.sym.expr import Size, floordiv
from anyshape.torch_compat import aten
from anyshape.torch_compat.dtypes import TORCH_DTYPES

LONGEST_PRODUCT = 1024  # of a frame
_WINDOWS = {"HannWindow": (0.5, 0.5, 0.0), "HammingWindow": (25 / 46, 21 / 46, 0.0),
            "BlackmanWindow": (0.42, 0.5, 0.08)}


@translates(*_WINDOWS)
def cosine_window(c: Call) -> Any:
    size = c.sizes(0)[0]
    dtype = ELEMENTS[c.attr("output_datatype", 1)]
    places = size if c.attr("periodic", 1) else size - 1
    angle = c.op("div", c.op("mul", c.t.iota(size, 0, 1, "f64"), 2 * math.pi), c.t.full(places, (), "f64"))
    first, second, third = _WINDOWS[c.name]
    found = c.op("sub", c.t.full(first, (size,), "f64"), c.op("mul", c.op("cos", angle), second))
    if third:
        found = c.op("add", found, c.op("mul", c.op("cos", c.op("mul", angle, 2.0)), third))
    return c.t.cast(found, dtype)


@translates("DFT")
def fourier(c: Call) -> Any:
    x = c.value(0)
    rank = x.tensor.rank
    axis = int(c.numbers(2)[0]) if c.has(2) else c.attr("axis", 1 if c.version < 20 else -2)
    axis = c.dim(axis, rank)
    size = c.sizes(1)[0] if c.has(1) else None
    inverse, half = bool(c.attr("inverse", 0)), bool(c.attr("onesided", 0))
    count = x.tensor.shape[axis] if size is None else size
    shape = list(x.tensor.shape)
    shape[-1] = 2
    shape[axis] = count
    if half and not inverse:
        shape[axis] = floordiv(count, 2) + 1
    elif half:
        shape[axis] = count if size is not None else (x.tensor.shape[axis] - 1) * 2
        shape[-1] = 1
    if half and inverse:
        count = shape[axis]
    found = _transformed(c, x, axis, count, inverse, half)
    if found is not None:
        return found
    return c.extern("onnx.dft", x, count, axis, inverse, half, types=TensorType(x.tensor.dtype, tuple(shape)))


def _transformed(c: Call, x: Value, axis: int, count: Size, inverse: bool, half: bool) -> Value | None:
    """The transform along an axis as a product with a matrix; None where that is long, or is something else."""
    length, parts = x.tensor.shape[axis], x.tensor.shape[-1]
    if not (isinstance(length, int) and isinstance(count, int) and isinstance(parts, int)
            and 0 < length * parts <= LONGEST_PRODUCT and 0 < count <= LONGEST_PRODUCT
            and x.tensor.dtype in ("f32", "f64")):
        return None
    rest = [d for d in range(x.tensor.rank - 1) if d != axis]
    order = (*rest, axis, x.tensor.rank - 1)
    rows = c.t.permute(x, order)
    lines = rows.tensor.shape[:-2]
    matrix = _matrix(length, parts, count, inverse, half, x.tensor.dtype)
    found = matmul(c, c.t.reshape(rows, (*lines, length * parts)), c.tensor(known(matrix)))
    out = 1 if inverse and half else 2
    found = c.t.reshape(found, (*lines, matrix.shape[1] // out, out))
    return c.t.permute(found, tuple(order.index(d) for d in range(x.tensor.rank)))  # type: ignore[no-any-return]


def _matrix(length: int, parts: int, count: int, inverse: bool, half: bool, dtype: str) -> np.ndarray:
    """What makes of `length` numbers their transform of `count`: [length * parts, places * 2], or [.., count] where the
    transform is real. parts: 1, numbers are real; 2, with their imaginary parts beside them."""
    units = np.stack([np.eye(length), 1j * np.eye(length)][:parts], 1).reshape(length * parts, length)
    if inverse and half:
        return np.fft.irfft(units, count).astype(numpy_dtype(dtype))
    found = (np.fft.ifft if inverse else np.fft.fft)(units, count)
    found = found[:, :count // 2 + 1] if half else found
    return np.stack([found.real, found.imag], -1).reshape(length * parts, -1).astype(numpy_dtype(dtype))


@translates("STFT")
def short_time(c: Call) -> Any:
    x, step = c.value(0), int(c.numbers(1)[0])
    window = c.value(2) if c.has(2) else None
    length = c.sizes(3)[0] if c.has(3) else window.tensor.shape[0] if window is not None else None
    if length is None:
        raise Decline("no length of frames")
    half = bool(c.attr("onesided", 1))
    found = _by_product(c, x, step, window, length, half)
    if found is not None:
        return found
    frames = floordiv(x.tensor.shape[1] - length, step) + 1
    places = floordiv(length, 2) + 1 if half else length
    return c.extern("onnx.stft", x, step, window, length, half,
                    types=TensorType(x.tensor.dtype, (x.tensor.shape[0], frames, places, 2)))


def _by_product(c: Call, x: Value, step: int, window: Value | None, length: Size, half: bool) -> Value | None:
    """Transforms of frames of a real signal in f32 as a product with the matrix of cosines and sines, which is quick
    enough for frames of speech and deployed without PyTorch; None where frames are long, or are something else."""
    real = x.tensor.rank == 2 or x.tensor.shape[-1] == 1
    if not isinstance(length, int) or not 0 < length <= LONGEST_PRODUCT or not real or x.tensor.dtype != "f32":
        return None
    signal = c.t.reshape(x, x.tensor.shape[:2])
    room = x.tensor.shape[1] - length
    c.assume(room)
    frames, places = floordiv(room, step) + 1, length // 2 + 1 if half else length
    begins = c.op("mul", c.t.reshape(c.t.iota(frames, 0, 1, "i64"), (frames, 1)), step)
    at = c.op("add", begins, c.t.iota(length, 0, 1, "i64"))
    rows = c.op("take", signal, at, dim=1)
    if window is not None:
        rows = c.op("mul", rows, window)
    found = matmul(c, rows, c.tensor(known(_matrix(length, 1, length, False, half, "f32"))))
    return c.t.reshape(found, (x.tensor.shape[0], frames, places, 2))


@translates("MelWeightMatrix")
def mel_weights(c: Call) -> Any:
    bins, length, rate = (int(c.numbers(place)[0]) for place in range(3))
    low, high = float(c.numbers(3)[0]), float(c.numbers(4)[0])
    dtype = ELEMENTS[c.attr("output_datatype", 1)]
    return c.extern("onnx.mel_weights", bins, length, rate, low, high, dtype,
                    types=TensorType(dtype, (length // 2 + 1, bins)))


# ---- random numbers: ONNX does not say which, so they are PyTorch's


def _drawn(c: Call, name: str, shape: Sequence[Size], dtype: str) -> Value:
    if c.attr("seed") is not None:
        raise Decline("numbers by a seed of the model's own")
    kind = dtype if dtype in ("f32", "f64") else "f32"
    found = c.extern(f"aten.{name}.default", list(shape), types=TensorType(kind, tuple(shape)), effect=True,
                     why="random numbers are PyTorch's", dtype=TORCH_DTYPES[kind])
    return c.t.cast(found, dtype)  # type: ignore[no-any-return]


@translates("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
def random_numbers(c: Call) -> Any:
    like = c.name.endswith("Like")
    shape = c.kind(0).shape if like else c.attr("shape")
    dtype = ELEMENTS[c.attr("dtype")] if c.attr("dtype") is not None else c.dtype(0) if like else "f32"
    if "Normal" in c.name:
        scale, start = c.attr("scale", 1.0), c.attr("mean", 0.0)
    else:
        start = c.attr("low", 0.0)
        scale = c.attr("high", 1.0) - start
    found = _drawn(c, "randn" if "Normal" in c.name else "rand", shape, dtype)
    return c.op("add", c.op("mul", found, float(scale)), float(start))


@translates("Multinomial")
def multinomial(c: Call) -> Any:
    if c.attr("seed") is not None:
        raise Decline("numbers by a seed of the model's own")
    x, count = c.value(0), c.attr("sample_size", 1)
    shares = c.aten(aten._softmax.default, x, 1, False, types=x.tensor)
    found = c.extern("aten.multinomial.default", shares, count, True, effect=True, why="random numbers are PyTorch's",
                     types=TensorType("i64", (x.tensor.shape[0], count)))
    return c.t.cast(found, ELEMENTS[c.attr("dtype", 6)])
