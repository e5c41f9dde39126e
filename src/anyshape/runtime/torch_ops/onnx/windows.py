"""Windows over images whose places matter: pools with positions, their inverse, deformed and folded windows."""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch


def max_pool_positions(x: torch.Tensor, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
                       low: Sequence[int], high: Sequence[int], out: Sequence[int],
                       order: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The maxima of windows, and where each lies in the whole tensor, counted by rows or (order 1) by columns."""
    dims = len(kernel)
    least = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    padded = torch.nn.functional.pad(x, [n for d in reversed(range(dims)) for n in (low[d], max(
        high[d], (out[d] - 1) * strides[d] + dilations[d] * (kernel[d] - 1) + 1 - x.shape[2 + d] - low[d]))],
        value=least)
    best = torch.full((*x.shape[:2], *out), least, dtype=x.dtype)
    where = torch.full(best.shape, -1, dtype=torch.int64)
    steps = [math.prod(x.shape[2 + d + 1:]) if not order else math.prod(x.shape[2:2 + d]) for d in range(dims)]
    for place in itertools.product(*map(range, kernel)) if best.numel() else ():
        part, at = padded, torch.zeros([1] * dims, dtype=torch.int64)
        for d in range(dims):
            begin = place[d] * dilations[d]
            part = part.narrow(2 + d, begin, (out[d] - 1) * strides[d] + 1)
            part = part[(slice(None),) * (2 + d) + (slice(None, None, strides[d]),)]
            own = (torch.arange(out[d]) * strides[d] + begin - low[d]) * steps[d]
            at = at + own.view([-1 if k == d else 1 for k in range(dims)])
        more = (part > best) | (where < 0) & (part == best)
        best = torch.where(more, part, best)
        where = torch.where(more, at, where)
    area = math.prod(x.shape[2:])
    first = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[0], x.shape[1], *[1] * dims) * area
    return best, where + first


def max_unpool(x: torch.Tensor, at: torch.Tensor, wanted: Sequence[int], inferred: Sequence[int]) -> torch.Tensor:
    """A tensor of zeros with elements of x at their places in the inferred shape, in a larger one where that is
    wanted."""
    flat = x.new_zeros(math.prod(inferred))
    flat[at.reshape(-1)] = x.reshape(-1)
    found = flat.view(list(inferred))
    if list(wanted) == list(inferred):
        return found
    whole = x.new_zeros(list(wanted))
    whole[tuple(slice(0, n) for n in inferred)] = found
    return whole


def col2im(x: torch.Tensor, image: Sequence[int], block: Sequence[int], strides: Sequence[int],
           dilations: Sequence[int], pads: Sequence[int]) -> torch.Tensor:
    """Columns [n, c*block, l] added up as blocks of images [n, c, *image]."""
    dims = len(image)
    low, high = pads[:dims], pads[dims:]
    whole = [n + p + q for n, p, q in zip(image, low, high, strict=True)]
    counts = [(n - a * (k - 1) - 1) // s + 1 for n, k, s, a in zip(whole, block, strides, dilations, strict=True)]
    channels = x.shape[1] // math.prod(block)
    parts = x.reshape(x.shape[0], channels, *block, *counts)
    found = x.new_zeros(x.shape[0], channels, *whole)
    for place in itertools.product(*map(range, block)):
        target = found[(slice(None), slice(None), *(
            slice(p * a, p * a + (n - 1) * s + 1, s)
            for p, a, n, s in zip(place, dilations, counts, strides, strict=True)))]
        target += parts[(slice(None), slice(None), *place)]
    return found[(slice(None), slice(None), *(slice(p, p + n) for p, n in zip(low, image, strict=True)))].contiguous()


def deform_conv(x: torch.Tensor, w: torch.Tensor, offset: torch.Tensor, bias: torch.Tensor | None,
                mask: torch.Tensor | None, strides: Sequence[int], dilations: Sequence[int], low: Sequence[int],
                groups: int, offset_groups: int) -> torch.Tensor:
    """A convolution over places that are moved by offsets (Dai et al., Deformable Convolutional Networks, 2017)."""
    n, channels = x.shape[:2]
    rows, columns = w.shape[2:]
    height, width = offset.shape[2:]
    moved = offset.view(n, offset_groups, rows * columns, 2, height, width)
    own = channels // offset_groups
    patches = []
    for group in range(offset_groups):
        image = x[:, group * own:(group + 1) * own]
        for k, (i, j) in enumerate(itertools.product(range(rows), range(columns))):
            y = torch.arange(height)[:, None] * strides[0] - low[0] + i * dilations[0] + moved[:, group, k, 0]
            z = torch.arange(width) * strides[1] - low[1] + j * dilations[1] + moved[:, group, k, 1]
            values = _at(image, y, z)
            if mask is not None:
                values = values * mask.view(n, offset_groups, rows * columns, height, width)[:, group, k].unsqueeze(1)
            patches.append(values)
    stacked = torch.stack(patches).view(offset_groups, rows * columns, n, own, height, width)
    stacked = stacked.permute(2, 0, 3, 1, 4, 5).reshape(n, groups, channels // groups * rows * columns, height * width)
    weights = w.reshape(groups, w.shape[0] // groups, -1)
    found = torch.einsum("goc,ngcp->ngop", weights, stacked).reshape(n, w.shape[0], height, width)
    return (found if bias is None else found + bias.view(1, -1, 1, 1)).contiguous()


def _at(image: torch.Tensor, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Bilinear values at [n, h, w] places, 0 outside."""
    n, channels, height, width = image.shape
    found = image.new_zeros(n, channels, *y.shape[1:])
    flat = image.flatten(2)
    for dy, dx in itertools.product((0, 1), repeat=2):
        row, column = y.floor() + dy, x.floor() + dx
        weight = (1 - (y - row).abs()) * (1 - (x - column).abs())
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        place = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
        values = flat.gather(2, place.flatten(1).unsqueeze(1).expand(-1, channels, -1)).view_as(found)
        found = found + values * torch.where(inside, weight, torch.zeros_like(weight)).unsqueeze(1)
    return found
