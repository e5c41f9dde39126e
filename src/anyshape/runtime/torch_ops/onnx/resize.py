"""Resizing of tensors in all of ONNX's modes: along one dim after the other, as products with weights of neighbours.

Coordinates, weights and rounding are those of the operator's specification (ONNX operators, Resize-19).
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def _coordinates(size: int, out: int, scale: float, mode: str, region: tuple[float, float]) -> torch.Tensor:
    """Where each element of the result lies in the operand, in f64."""
    at = torch.arange(out, dtype=torch.float64)
    if mode == "asymmetric":
        return at / scale
    if mode == "align_corners":
        length = scale * size
        return torch.zeros_like(at) if length == 1 else at * (size - 1) / (length - 1)
    if mode == "tf_crop_and_resize":
        begin, end = region
        if out > 1:
            return begin * (size - 1) + at * (end - begin) * (size - 1) / (out - 1)
        return at * 0 + 0.5 * (begin + end) * (size - 1)
    if mode == "pytorch_half_pixel" and out == 1:
        return at * 0 - 0.5
    if mode == "half_pixel_symmetric":
        adjusted = out / (scale * size)
        return size / 2 * (1 - adjusted) + (at + 0.5) / scale - 0.5
    return (at + 0.5) / scale - 0.5  # half_pixel


def _nearest(at: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "round_prefer_floor":
        return torch.ceil(at - 0.5)
    if mode == "round_prefer_ceil":
        return torch.floor(at + 0.5)
    return torch.floor(at) if mode == "floor" else torch.ceil(at)


def _cubic(distance: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' kernel (Cubic Convolution Interpolation for Digital Image Processing, 1981)."""
    x = distance.abs()
    inner = ((a + 2) * x - (a + 3)) * x * x + 1
    outer = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


def _weights(at: torch.Tensor, size: int, scale: float, mode: str, a: float, exclude: bool, antialias: bool,
             nearest: str) -> torch.Tensor:
    """The matrix [out, size] of one dim."""
    out = at.shape[0]
    matrix = torch.zeros(out, size, dtype=torch.float64)
    if mode == "nearest":
        matrix[torch.arange(out), _nearest(at, nearest).clamp(0, size - 1).long()] = 1
        return matrix
    shrink = min(scale, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / shrink
    first = torch.floor(at).long()
    steps = torch.arange(-math.ceil(reach) + 1, math.ceil(reach) + 1)
    places = first[:, None] + steps
    distance = (places - at[:, None]) * shrink
    weights = (1 - distance.abs()).clamp(min=0) if mode == "linear" else _cubic(distance, a)
    if antialias:
        weights = weights / weights.sum(1, keepdim=True)
    if exclude:
        inside = (places >= 0) & (places < size)
        weights = torch.where(inside, weights, torch.zeros_like(weights))
        weights = weights / weights.sum(1, keepdim=True)
    matrix.scatter_add_(1, places.clamp(0, size - 1), weights)
    return matrix


def resize(x: torch.Tensor, shape: Sequence[int], scales: Sequence[float], mode: str, coordinates: str, nearest: str,
           a: float, exclude: bool, extrapolation: float, antialias: bool, roi: Sequence[float],
           axes: Sequence[int]) -> torch.Tensor:
    """The tensor in another shape. scales: by dim, negative where the sizes say it; roi: begins, then ends, by axes."""
    regions = {axis: (roi[place], roi[place + len(axes)]) for place, axis in enumerate(axes)} if roi else {}
    dtype = x.dtype
    plain = mode == "nearest"
    y = x if plain else x.to(torch.float64 if dtype == torch.float64 else torch.float32)
    outside = []
    for d, out in enumerate(shape):
        size, scale = x.shape[d], scales[d]
        scale = out / size if scale < 0 else scale
        region = regions.get(d, (0.0, 1.0))
        if out == size and scale == 1.0 and coordinates != "tf_crop_and_resize":
            continue
        at = _coordinates(size, out, scale, coordinates, region)
        if coordinates == "tf_crop_and_resize":
            outside.append((d, (at < 0) | (at > size - 1)))
        if plain:
            y = y.index_select(d, _nearest(at, nearest).clamp(0, size - 1).long())
            continue
        y = _along(y, d, _weights(at, size, scale, mode, a, exclude, antialias, nearest))
    for d, mask in outside:
        y = torch.where(mask.view([-1 if k == d else 1 for k in range(y.dim())]), torch.tensor(extrapolation).to(
            y.dtype), y)
    if not dtype.is_floating_point and not plain:
        limits = torch.iinfo(dtype)
        y = y.round().clamp(limits.min, limits.max)
    return y.to(dtype).contiguous()


def _along(y: torch.Tensor, d: int, matrix: torch.Tensor) -> torch.Tensor:
    """The product with [out, size] along one dim: by at most a few neighbours, where there are few."""
    used = matrix != 0
    most = int(used.sum(1).max()) if used.numel() else 0
    weights = matrix.to(y.dtype)
    if 0 < most <= 4:
        order = torch.argsort(~used, dim=1, stable=True)[:, :most]  # places of the neighbours
        shape = [-1 if k == d else 1 for k in range(y.dim())]
        total: torch.Tensor | None = None
        for place in range(most):
            part = y.index_select(d, order[:, place]) * weights.gather(1, order[:, place:place + 1]).view(shape)
            total = part if total is None else total + part
        assert total is not None
        return total
    return (y.movedim(d, -1) @ weights.T).movedim(-1, d)
