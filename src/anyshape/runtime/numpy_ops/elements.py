"""Sorting and running results along a dim, by numpy. NaN is larger than numbers, and of equal elements the first comes
first, as in PyTorch's stable sort."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def order(x: Array, dim: int, descending: bool) -> Array:
    """The places of the elements of each line in order."""
    if not descending:
        return np.argsort(x, dim, kind="stable")
    # the places from the back, of the lines from the back: equal elements keep their order
    back = np.flip(np.argsort(np.flip(x, dim), dim, kind="stable"), dim)
    return x.shape[dim] - 1 - back


def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """aten.sort: the elements of each line in order, and their places."""
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    places = order(x, dim, descending)
    return np.take_along_axis(x, places, dim), places


def stable_sort(x: Array, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    """aten.sort with `stable`, as it is in either case."""
    return sort(x, dim, descending)


def topk(x: Array, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True) -> tuple[Array, Array]:
    """The largest or smallest elements of each line, sorted, and their places."""
    if not x.ndim:
        return x.copy(), np.zeros((), np.int64)
    places = np.take(order(x, dim, largest), range(k), dim)
    return np.take_along_axis(x, places, dim), places


def _running(name: str) -> Callable[..., tuple[Array, Array]]:
    def run(x: Array, dim: int) -> tuple[Array, Array]:
        """Running extremes, and where each was met last."""
        if not x.size or not x.ndim:
            return x.copy(), np.zeros(x.shape, np.int64)
        values = (np.maximum if name == "max" else np.minimum).accumulate(x, dim)
        shape = [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]
        met = (x == values) | ((x != x) & (values != values))
        places = np.where(met, np.arange(x.shape[dim]).reshape(shape), 0)
        return values, np.maximum.accumulate(places, dim)
    return run


def cumprod(x: Array, dim: int, dtype: str | None = None) -> Array:
    """aten.cumprod; whole numbers become i64."""
    kind = np.float32 if dtype in ("f16", "bf16") else np.dtype(_KINDS[dtype]) if dtype else \
        np.int64 if x.dtype.kind in "iub" else x.dtype
    return x.astype(kind) if not x.ndim else np.cumprod(x, dim, kind)


_KINDS = {"f32": "f4", "f64": "f8", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8", "u8": "u1", "bool": "?"}


def logcumsumexp(x: Array, dim: int) -> Array:
    """aten.logcumsumexp."""
    return x.copy() if not x.ndim else np.logaddexp.accumulate(x, dim)


def rounded(x: Array, *, decimals: int) -> Array:
    """aten.round.decimals."""
    ten = x.dtype.type(10.0 ** abs(decimals))
    return (np.rint(x / ten) * ten if decimals < 0 else np.rint(x * ten) / ten).astype(x.dtype)


def ldexp(x: Array, power: Array) -> Array:
    """aten.ldexp: x * 2**power."""
    dtype = np.result_type(x.dtype, power.dtype) if "f" in (x.dtype.kind, power.dtype.kind) else np.dtype(np.float32)
    dtype = np.dtype(np.float32) if dtype == np.float64 and np.float64 not in (x.dtype, power.dtype) else dtype
    with np.errstate(over="ignore", under="ignore"):
        return (x * np.exp2(power.astype(dtype))).astype(dtype)


def frexp(x: Array) -> tuple[Array, Array]:
    """aten.frexp: a number from 0.5 to 1, and the power of two that it is multiplied with."""
    number, power = np.frexp(x)
    return number, power.astype(np.int32)


def spread(keeps_mean: bool, deviation: bool) -> Callable[..., Any]:
    """aten.std and aten.var, with means or without."""
    def run(x: Array, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Any:
        if isinstance(dim, bool):  # in place of a dim stands whether one less is counted
            dim, unbiased = None, dim
        dims = tuple(range(x.ndim)) if dim is None or dim == [] else tuple(dim) if isinstance(dim, list) else (dim,)
        less = correction if correction is not None else int(unbiased)
        count = int(np.prod([x.shape[d] for d in dims])) if x.ndim else 1
        with np.errstate(divide="ignore", invalid="ignore"):
            wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
            at = (dims if x.ndim else ())
            mean = wide.sum(at, keepdims=True) / np.float64(count)
            found = (np.abs(wide - mean) ** 2).sum(at, keepdims=keepdim) / np.float64(max(count - less, 0))
            found = np.sqrt(found) if deviation else found
        kind = x.real.dtype
        values = np.asarray(found, kind)
        return (values, np.asarray(mean if keepdim else mean.squeeze(at), x.dtype)) if keeps_mean else values
    return run


def onnx_topk(x: Array, count: int, dim: int, largest: bool) -> tuple[Array, Array]:
    """ONNX TopK: as `topk`."""
    return topk(x, count, dim, largest)


OPERATORS: dict[str, Callable[..., Any]] = {
    "aten.sort.default": sort, "aten.sort.stable": stable_sort, "aten.topk.default": topk, "onnx.topk": onnx_topk,
    "aten.cummax.default": _running("max"), "aten.cummin.default": _running("min"),
    "aten.gcd.default": np.gcd, "aten.lcm.default": np.lcm, "aten.ldexp.Tensor": ldexp, "aten.frexp.Tensor": frexp,
    "aten.round.decimals": rounded, "aten.view_copy.default": lambda x, shape: x.reshape(shape).copy(),
    **{f"aten.{'std' if deviation else 'var'}{'_mean' if mean else ''}.{kind}": spread(mean, deviation)
       for deviation in (True, False) for mean in (True, False) for kind in ("default", "dim", "correction")},
    "aten.cumprod.default": cumprod, "aten.logcumsumexp.default": logcumsumexp,
}
