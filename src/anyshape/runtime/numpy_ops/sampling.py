"""Image resizing (aten.upsample_*) and sampling on a grid (aten.grid_sampler_*) as PyTorch does them, by numpy."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from anyshape.runtime.numpy_ops.resize import along, cubic, neighbours

Array = np.ndarray[Any, Any]
CUBIC = -0.75  # PyTorch's coefficient of Keys' kernel


def upsample(x: Array, sizes: Sequence[int] | None, align: bool, scales: Sequence[float | None], mode: str) -> Array:
    """The tensor with its last dims in other sizes: these, or the scales' where they are None.

    Source: the coordinates are those of ATen/native/UpSample.h, of single precision where elements are picked by them.
    """
    first = x.ndim - len(scales)
    if sizes is None:
        sizes = [math.floor(n * float(s or 0)) for n, s in zip(x.shape[first:], scales, strict=True)]
    y = x
    for d, (out, scale) in enumerate(zip(sizes, scales, strict=True), first):
        size = x.shape[d]
        if out < 1 or not size:
            raise ValueError(f"sizes are above 0, not {size} and {out}")
        if out == size and mode == "linear":
            continue  # whatever the scale
        if mode == "nearest" and len(scales) == 2 and out in (size, 2 * size):
            scale = None
        step = (size - 1) / max(out - 1, 1) if align else 1 / scale if scale else size / out
        at = np.arange(out, dtype=np.float64)
        if mode.startswith("nearest"):
            begin = np.float32(0.5 if mode == "nearest_exact" else 0)
            places = np.floor((at.astype(np.float32) + begin) * np.float32(step))
            y = np.take(y, np.clip(places, 0, size - 1).astype(np.int64), d)
        elif x.dtype.kind != "f":
            raise TypeError(f"{x.dtype} is resized by its nearest elements only")
        else:
            at = at * step if align else (at + 0.5) * step - 0.5
            y = along(y, d, *neighbours(at, size, 1.0, mode, CUBIC, False, False))
    return y if y is not x else x.copy()


def _by_scales(x: Array, sizes: Sequence[int] | None, *rest: Any, mode: str, dims: int) -> Array:
    """The overload "vec": sizes or scales, of which one is None."""
    *align, scales = rest
    return upsample(x, sizes, bool(align and align[0]), scales or [None] * dims, mode)


def _by_sizes(x: Array, sizes: Sequence[int], *rest: Any, mode: str, dims: int) -> Array:
    """The overload "default": sizes, and a scale for each dim that counts for the coordinates."""
    align, *scales = rest if mode in ("linear", "cubic") else (False, *rest)
    return upsample(x, sizes, bool(align), [*scales, *[None] * (dims - len(scales))], mode)


def _reflected(at: Array, size: int, align: bool) -> Array:
    """Coordinates reflected at the centres of the outer elements, or at their edges."""
    low, span = (0.0, size - 1) if align else (-0.5, size)
    if not span:
        return np.zeros_like(at)
    from_low = np.abs(at - low)
    rest, turns = np.mod(from_low, span), np.floor(from_low / span)
    return np.clip(np.where(turns % 2 == 0, rest + low, span - rest + low), 0, size - 1)


def grid_sample(x: Array, grid: Array, mode: int, padding: int, align: bool) -> Array:
    """x [N, C, *sizes] at grid [N, *out, dims], whose coordinates are in [-1, 1], the last dim's first: [N, C, *out].
    mode: 0 linear, 1 nearest, 2 cubic; padding: 0 zeros, 1 the border, 2 reflection.

    Source: ATen/native/GridSampler.h.
    """
    sizes = x.shape[2:]
    if grid.shape[-1] != len(sizes) or grid.shape[0] != x.shape[0] or 0 in sizes or (mode == 2 and len(sizes) != 2):
        raise ValueError(f"a grid {grid.shape} is none for {x.shape}")

    def inside(at: Array, size: int) -> Array:
        return at if padding == 0 else np.clip(at, 0, size - 1) if padding == 1 else _reflected(at, size, align)

    taps: list[list[tuple[Array, Any]]] = []  # of each dim: places and their weights
    for d, size in enumerate(sizes):
        given = np.nan_to_num(grid[..., len(sizes) - 1 - d], nan=-1.0)
        at = (given + 1) / 2 * (size - 1) if align else ((given + 1) * size - 1) / 2
        at = np.clip(at if mode == 2 else inside(at, size), -1e9, 1e9)
        if mode == 1:
            taps.append([(np.rint(at), 1.0)])
            continue
        low = np.floor(at)
        reach = range(-1, 3) if mode == 2 else range(2)
        taps.append([(inside(low + k, size) if mode == 2 else low + k,
                      cubic(low + k - at, CUBIC) if mode == 2 else np.maximum(1 - np.abs(low + k - at), 0))
                     for k in reach])
    rows: Any = np.arange(x.shape[0]).reshape(-1, *[1] * len(sizes))
    total = np.zeros((*grid.shape[:-1], x.shape[1]), x.dtype)
    for chosen in itertools.product(*taps):
        valid = math.prod((place >= 0) & (place < size) for (place, _), size in zip(chosen, sizes, strict=True))
        weight = math.prod(one for _, one in chosen) * valid
        places = [np.clip(place, 0, size - 1).astype(np.int64) for (place, _), size in zip(chosen, sizes, strict=True)]
        where: Any = (rows, slice(None), *places)
        total += x[where] * np.asarray(weight, x.dtype)[..., None]
    return np.ascontiguousarray(np.moveaxis(total, -1, 1))


def _operators() -> dict[str, Callable[..., Any]]:
    names = {("nearest", d): f"upsample_nearest{d}d" for d in (1, 2, 3)}
    names |= {("nearest_exact", d): f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)}
    names |= {("linear", 1): "upsample_linear1d", ("linear", 2): "upsample_bilinear2d",
              ("linear", 3): "upsample_trilinear3d", ("cubic", 2): "upsample_bicubic2d"}
    return {f"aten.{name}.{overload}": partial(way, mode=mode, dims=dims) for (mode, dims), name in names.items()
            for overload, way in (("vec", _by_scales), ("default", _by_sizes))}


OPERATORS: dict[str, Callable[..., Any]] = {
    **_operators(), "aten.grid_sampler_2d.default": grid_sample, "aten.grid_sampler_3d.default": grid_sample,
}
