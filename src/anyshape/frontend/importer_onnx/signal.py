"""Translations of ONNX operators on signals: windows, Fourier transforms, mel weights.

    HannWindow(n)  -->  sub(0.5, mul(0.5, cos(mul(iota(n), 2*pi/n))))
"""
from __future__ import annotations

import math
from typing import Any

from anyshape.frontend.aten.table import Decline
from anyshape.frontend.importer_onnx.model import ELEMENTS
from anyshape.frontend.importer_onnx.table import Call, translates
from anyshape.ir.types import TensorType
from anyshape.sym.expr import floordiv

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
    return c.extern("onnx.dft", x, shape[axis] if half and inverse else count, axis, inverse, half,
                    types=TensorType(x.tensor.dtype, tuple(shape)))


@translates("STFT")
def short_time(c: Call) -> Any:
    x, step = c.value(0), int(c.numbers(1)[0])
    window = c.value(2) if c.has(2) else None
    length = c.sizes(3)[0] if c.has(3) else window.tensor.shape[0] if window is not None else None
    if length is None:
        raise Decline("no length of frames")
    half = bool(c.attr("onesided", 1))
    frames = floordiv(x.tensor.shape[1] - length, step) + 1
    places = floordiv(length, 2) + 1 if half else length
    return c.extern("onnx.stft", x, step, window, length, half,
                    types=TensorType(x.tensor.dtype, (x.tensor.shape[0], frames, places, 2)))


@translates("MelWeightMatrix")
def mel_weights(c: Call) -> Any:
    bins, length, rate = (int(c.numbers(place)[0]) for place in range(3))
    low, high = float(c.numbers(3)[0]), float(c.numbers(4)[0])
    dtype = ELEMENTS[c.attr("output_datatype", 1)]
    return c.extern("onnx.mel_weights", bins, length, rate, low, high, dtype,
                    types=TensorType(dtype, (length // 2 + 1, bins)))
