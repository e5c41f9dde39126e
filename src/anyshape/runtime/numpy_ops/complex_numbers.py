"""Fourier transforms and complex numbers, by numpy: kernels compute on real numbers alone (ir/types.py)."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anyshape.runtime.driver.numpy_driver import NUMPY_DTYPES

Array = np.ndarray[Any, Any]


def _scaled(x: Array, counts: Sequence[int], normalization: int) -> Array:
    """The sums x over lines of `counts` elements: as they are (0), or divided by the root of the count (1) or by the
    count (2)."""
    count = math.prod(counts)
    return x if normalization == 0 else x / (math.sqrt(count) if normalization == 1 else count)


def r2c(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    """aten._fft_r2c."""
    found = (np.fft.rfftn if onesided else np.fft.fftn)(x, axes=tuple(dim))
    return _scaled(found, [x.shape[d] for d in dim], normalization)


def c2c(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    """aten._fft_c2c."""
    if not dim:
        return x.copy()
    found = np.fft.fftn(x, axes=tuple(dim)) if forward else np.fft.ifftn(x, axes=tuple(dim), norm="forward")
    return _scaled(found, [x.shape[d] for d in dim], normalization)


def c2r(x: Array, dim: Sequence[int], normalization: int, last: int) -> Array:
    """aten._fft_c2r: the last of `dim` holds half of `last` numbers, and the number in the middle."""
    if x.shape[dim[-1]] != last // 2 + 1:
        raise ValueError(f"{x.shape[dim[-1]]} numbers are no half of {last}")
    counts = [*(x.shape[d] for d in dim[:-1]), last]
    return _scaled(np.fft.irfftn(x, counts, tuple(dim), norm="forward"), counts, normalization)


def as_real(x: Array) -> Array:
    """aten.view_as_real: [...] to [..., 2]."""
    return np.stack((x.real, x.imag), -1)


def as_complex(x: Array) -> Array:
    """aten.view_as_complex: [..., 2] to [...]."""
    return pair(x[..., 0], x[..., 1])


def pair(real: Array, imaginary: Array) -> Array:
    """aten.complex."""
    found = np.empty(np.broadcast_shapes(real.shape, imaginary.shape), np.result_type(real, imaginary, np.complex64))
    found.real, found.imag = real, imaginary  # a product with 1j would make NaN of an infinity
    return found


def polar(size: Array, angle: Array) -> Array:
    """aten.polar."""
    return pair(size * np.cos(angle), size * np.sin(angle))


def angle(x: Array) -> Array:
    """aten.angle; of a real number that is NaN, NaN."""
    if x.dtype.kind == "c":
        return np.arctan2(x.imag, x.real)
    found = np.where(x < 0, np.float32(math.pi) if x.dtype.kind in "biu" else x.dtype.type(math.pi), 0)
    return np.where(x != x, x, found) if x.dtype.kind == "f" else found


def direction(x: Array) -> Array:
    """aten.sgn: x / |x|, and 0 of 0."""
    size = np.abs(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(size == 0, 0, x / size) if x.dtype.kind == "c" else np.sign(x)


def _sum(x: Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: str | None = None) -> Array:
    """aten.sum, of no dims all."""
    return x.sum(tuple(dim) if dim else None, NUMPY_DTYPES[dtype] if dtype else None, keepdims=keepdim)


def _mean(x: Array, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: str | None = None) -> Array:
    """aten.mean, of no dims all."""
    return x.mean(tuple(dim) if dim else None, NUMPY_DTYPES[dtype] if dtype else None, keepdims=keepdim)


def _cut(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    """aten.slice."""
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _windows(x: Array, dim: int, size: int, step: int) -> Array:
    """aten.unfold: windows of a dim, which stand last."""
    if not x.ndim:
        return x[None][:size]
    return _cut(np.lib.stride_tricks.sliding_window_view(x, size, dim), dim % x.ndim, step=step)


def _without(x: Array, dim: int | Sequence[int] | None = None) -> Array:
    """aten.squeeze: without dims, or those named, of size 1."""
    named = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return x.squeeze(tuple(d for d in (one % max(x.ndim, 1) for one in named) if d < x.ndim and x.shape[d] == 1))


def _expanded(x: Array, sizes: Sequence[int], implicit: bool = False) -> Array:
    """aten.expand: -1 leaves a size as it is."""
    first = len(sizes) - x.ndim
    return np.broadcast_to(x, [x.shape[d - first] if n == -1 else n for d, n in enumerate(sizes)])


def _converted(x: Array, dtype: str | None = None, **_ignored: Any) -> Array:
    """prims.convert_element_type, aten._to_copy: a real number of a complex one is its real part."""
    kind = NUMPY_DTYPES[dtype] if dtype else x.dtype
    if dtype == "bf16":
        kind = np.dtype(np.float32)  # who stores the result rounds it
    return (x.real if x.dtype.kind == "c" and kind.kind != "c" else x).astype(kind)


def _full(sizes: Sequence[int], value: Any, *, dtype: str | None = None, **_ignored: Any) -> Array:
    """aten.full."""
    kind = NUMPY_DTYPES[dtype] if dtype and dtype != "bf16" else None
    return np.broadcast_to(np.asarray(value, kind), sizes)  # takes no memory, however many elements a file asks for


def _linear(op: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """x + alpha * y, or with another operation than +."""
    def run(x: Array, y: Any, alpha: Any = 1) -> Any:
        return op(x, y if alpha == 1 else alpha * y)
    return run


# numpy promotes arrays of 0 dims otherwise than PyTorch: results are stored in the type that the plan has
_ELEMENTS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "neg": np.negative, "reciprocal": np.reciprocal, "exp": np.exp, "log": np.log, "sqrt": np.sqrt,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    **dict.fromkeys(("_conj", "_conj_physical", "conj_physical"), np.conj), "angle": angle, "sgn": direction,
    "isfinite": np.isfinite, "isnan": np.isnan, "square": np.square,
}
_BINARY: dict[str, Callable[..., Any]] = {
    "mul": np.multiply, "div": np.true_divide, "add": _linear(np.add), "sub": _linear(np.subtract), "eq": np.equal,
    "ne": np.not_equal,
}
_MOVES: dict[str, Callable[..., Any]] = {
    "permute.default": np.transpose, "transpose.int": np.swapaxes, "expand.default": _expanded,
    **dict.fromkeys(("view.default", "_unsafe_view.default", "reshape.default"), np.reshape),
    "unsqueeze.default": np.expand_dims,
    **{f"squeeze.{name}": _without for name in ("default", "dim", "dims")},
    "select.int": lambda x, dim, place: np.take(x, place, dim), "slice.Tensor": _cut, "unfold.default": _windows,
    "cat.default": lambda parts, dim=0: np.concatenate(parts, dim),
    "stack.default": lambda parts, dim=0: np.stack(parts, dim),
    "index_select.default": lambda x, dim, places: np.take(x, places, dim), "flip.default": np.flip,
    "clone.default": lambda x, memory_format=None: x.copy(), "alias.default": lambda x: x,
    "_to_copy.default": _converted,
}

OPERATORS: dict[str, Callable[..., Any]] = {
    "aten._fft_r2c.default": r2c, "aten._fft_c2c.default": c2c, "aten._fft_c2r.default": c2r,
    "aten.view_as_real.default": as_real, "aten.view_as_complex.default": as_complex, "aten.complex.default": pair,
    "aten.polar.default": polar, "aten.full.default": _full, "prims.convert_element_type.default": _converted,
    **{f"aten.{name}.default": op for name, op in _ELEMENTS.items()},
    **{f"aten.{name}.{kind}": op for name, op in _BINARY.items() for kind in ("Tensor", "Scalar")},
    **{f"aten.pow.{kind}": np.power for kind in ("Tensor_Scalar", "Tensor_Tensor", "Scalar")},
    "aten.sum.default": _sum, "aten.sum.dim_IntList": _sum, "aten.mean.default": _mean, "aten.mean.dim": _mean,
    "aten.mm.default": np.matmul, "aten.bmm.default": np.matmul,
    "aten.where.self": np.where, **{f"aten.{name}": op for name, op in _MOVES.items()},
}
