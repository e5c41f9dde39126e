"""Sampling of images at computed places: grids, affine grids, regions."""
from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from anyshape.runtime.numpy_ops import resize as general
from anyshape.runtime.torch_ops.onnx.elements import on_arrays


def resize(x: torch.Tensor, *settings: Any) -> torch.Tensor:
    """The tensor in another shape; settings: as of runtime/numpy_ops/resize.py (ONNX Resize-19)."""
    return on_arrays(general.resize, x, *settings)  # type: ignore[no-any-return]


def affine_grid(theta: torch.Tensor, size: Sequence[int], align: bool) -> torch.Tensor:
    """Places [n, *spatial, dims] that an affine map gives."""
    return torch.nn.functional.affine_grid(theta.double(), list(size), align_corners=align).to(theta.dtype)


def _reflected(at: torch.Tensor, low: float, high: float) -> torch.Tensor:
    span = high - low
    if span <= 0:
        return torch.full_like(at, low)
    away = (at - low).abs() % (2 * span)
    return low + torch.minimum(away, 2 * span - away)


def _placed(at: torch.Tensor, size: int, padding: str, align: bool) -> torch.Tensor:
    if padding == "border":
        return at.clamp(0, size - 1)
    if padding == "reflection":
        return _reflected(at, 0, size - 1) if align else _reflected(at, -0.5, size - 0.5).clamp(-0.5, size - 0.5)
    return at


def _read(x: torch.Tensor, places: Sequence[torch.Tensor], padding: str, align: bool) -> torch.Tensor:
    """x[n, :, *places], 0 outside for zeros. places: whole numbers [n, m] for each spatial dim."""
    flat = torch.zeros_like(places[0], dtype=torch.long)
    inside = torch.ones_like(flat, dtype=torch.bool)
    for at, size in zip(places, x.shape[2:], strict=True):
        if padding != "zeros":
            at = _placed(at, size, padding, align).round()
        inside &= (at >= 0) & (at < size)
        flat = flat * size + at.clamp(0, size - 1).long()
    values = x.flatten(2).gather(2, flat.unsqueeze(1).expand(-1, x.shape[1], -1))
    return torch.where(inside.unsqueeze(1), values, torch.zeros_like(values))


def grid_sample(x: torch.Tensor, grid: torch.Tensor, mode: str, padding: str, align: bool) -> torch.Tensor:
    """Elements of x [n, c, *spatial] at the places of a grid [n, *out, dims] in [-1, 1], the last dim of x first
    (ONNX GridSample-20)."""
    dims = x.dim() - 2
    n, out = grid.shape[0], grid.shape[1:-1]
    kind = torch.float64
    points = grid.reshape(n, -1, dims).to(kind)
    y = x.to(kind)
    at = []
    for d, size in enumerate(x.shape[2:]):
        own = points[..., dims - 1 - d]
        at.append((own + 1) / 2 * (size - 1) if align else ((own + 1) * size - 1) / 2)
    if mode == "nearest":
        placed = [_placed(own, size, padding, align).round() for own, size in zip(at, x.shape[2:], strict=True)]
        found = _read(y, placed, padding, align)
    else:
        if mode == "linear":
            at = [_placed(own, size, padding, align) for own, size in zip(at, x.shape[2:], strict=True)]
        base = [own.floor() for own in at]
        steps = (0, 1) if mode == "linear" else (-1, 0, 1, 2)
        found = y.new_zeros(n, x.shape[1], points.shape[1])
        for offsets in itertools.product(steps, repeat=dims):
            weight = torch.ones_like(at[0])
            for own, first, step in zip(at, base, offsets, strict=True):
                distance = own - first - step
                weight = weight * ((1 - distance.abs()) if mode == "linear" else on_arrays(
                    general.cubic, distance, -0.75))
            places = [first + step for first, step in zip(base, offsets, strict=True)]
            found = found + _read(y, places, padding, align) * weight.unsqueeze(1)
    return found.reshape(n, x.shape[1], *out).to(x.dtype).contiguous()


def roi_align(x: torch.Tensor, rois: torch.Tensor, batch: torch.Tensor, height: int, width: int, ratio: int,
              scale: float, mode: str, half: bool) -> torch.Tensor:
    """Pooled regions [rois, c, height, width]: means (or maxima) of points inside of each (ONNX RoiAlign-16)."""
    found = x.new_zeros(rois.shape[0], x.shape[1], height, width)
    shift = 0.5 if half else 0.0
    for place in range(rois.shape[0]):
        x1, y1, x2, y2 = (float(v) * scale - shift for v in rois[place])
        w, h = x2 - x1, y2 - y1
        if not half:
            w, h = max(w, 1.0), max(h, 1.0)
        rows = ratio or -int(-h // height)
        columns = ratio or -int(-w // width)
        ys = y1 + (torch.arange(height * rows, dtype=torch.float64) + 0.5) * (h / height / max(rows, 1))
        xs = x1 + (torch.arange(width * columns, dtype=torch.float64) + 0.5) * (w / width / max(columns, 1))
        points = _bilinear(x[int(batch[place])].double(), ys, xs, mode)
        grouped = points.unflatten(2, (width, columns)).unflatten(1, (height, rows))
        found[place] = (grouped.amax((2, 4)) if mode == "max" else grouped.mean((2, 4))).to(x.dtype)
    return found


def _bilinear(image: torch.Tensor, ys: torch.Tensor, xs: torch.Tensor, mode: str) -> torch.Tensor:
    """[c, len(ys), len(xs)]; points more than 1 outside are 0. Of the mode max each point is the largest of its four
    weighted neighbours."""
    height, width = image.shape[1:]

    def parts(at: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
        inside = (at >= -1) & (at <= size)
        at = at.clamp(min=0)
        low = at.floor().long().clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        at = torch.where(low >= size - 1, low.double(), at)
        return low, high, at - low, inside
    y0, y1, fy, iny = parts(ys, height)
    x0, x1, fx, inx = parts(xs, width)

    def corner(rows: torch.Tensor, columns: torch.Tensor, wy: torch.Tensor, wx: torch.Tensor) -> torch.Tensor:
        return image[:, rows][:, :, columns] * wy[:, None] * wx[None]
    four = [corner(y0, x0, 1 - fy, 1 - fx), corner(y0, x1, 1 - fy, fx), corner(y1, x0, fy, 1 - fx),
            corner(y1, x1, fy, fx)]
    found = torch.stack(four).amax(0) if mode == "max" else four[0] + four[1] + four[2] + four[3]
    return found * (iny[:, None] & inx[None])
