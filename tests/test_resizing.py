"""Resizing of images against eager PyTorch, over sizes and factors that are no whole numbers, and of nothing at all."""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import anyshape

Resize = Callable[[torch.Tensor], torch.Tensor]


def outcome(function: Resize, x: torch.Tensor) -> Any:
    try:
        return function(x)
    except (RuntimeError, IndexError):
        return None


def differing(function: Resize, shapes: Sequence[tuple[int, ...]], layout: torch.memory_format,
              near: float = 0.0) -> list[tuple[int, ...]]:
    """The shapes at which one program is not as eager; errors of both count as equal."""
    torch._dynamo.reset()
    fast, found = anyshape.compile(function), []
    for shape in shapes:
        x = torch.rand(shape).contiguous(memory_format=layout)
        wanted, result = outcome(function, x), outcome(fast, x)
        if wanted is None or result is None:
            right = wanted is result
        else:
            right = wanted.shape == result.shape and torch.allclose(wanted, result, rtol=near, atol=near)
        found += [] if right else [shape]
    return found


def images(axes: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return [(1, 2, *size) for size in itertools.product(sizes, repeat=axes)]


@pytest.mark.parametrize(("factor", "mode"), [(2.3, "nearest"), (0.7, "nearest-exact"), *(
    pytest.param(*one, marks=pytest.mark.full)
    for one in ((2.3, "nearest-exact"), (0.7, "nearest"), (3.0, "nearest"), (3.0, "nearest-exact")))])
def test_nearest_pixels(mode: str, factor: float) -> None:
    """Every size from 1 to 8; PyTorch's decomposition took other pixels at 28 of these 64 for a factor of 2.3."""
    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=factor, mode=mode)

    assert not differing(resize, images(2, range(1, 9)), torch.contiguous_format)


def test_nearest_pixels_of_lines_volumes_and_channels_last() -> None:
    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, scale_factor=2.3)

    assert not differing(resize, images(1, range(1, 13)), torch.contiguous_format)
    assert not differing(resize, [*images(3, (2, 3, 5)), (1, 2, 1, 5, 1)], torch.contiguous_format)
    assert not differing(resize, [*images(2, range(2, 9)), (1, 2, 1, 6)], torch.channels_last)


def test_factors_that_are_not_the_sizes() -> None:
    """The operator's sizes and scales need not agree."""
    def resize(x: torch.Tensor) -> torch.Tensor:
        return torch._C._nn.upsample_nearest2d(x, output_size=[6, 10], scales_h=2.3, scales_w=4.7)

    assert not differing(resize, images(2, range(1, 9)), torch.contiguous_format)


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "linear": (1, {}), "linear aligned": (1, {"align_corners": True}),
    "bilinear": (2, {}), "bilinear aligned": (2, {"align_corners": True}),
    "bilinear antialias": (2, {"antialias": True}),
    "bicubic": (2, {}), "bicubic aligned": (2, {"align_corners": True}), "bicubic antialias": (2, {"antialias": True}),
    "trilinear": (3, {}), "trilinear aligned": (3, {"align_corners": True}),
    "area": (2, {}), "nearest": (2, {}), "nearest-exact": (2, {}),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("given", [{"scale_factor": 2.3}, {"scale_factor": 0.7}, {"size": 5}, {"scale_factor": 1.5,
                                   "recompute_scale_factor": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode: str, given: dict[str, Any]) -> None:
    axes, more = MODES[mode]

    def resize(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, mode=mode.split()[0], **more, **given)

    sizes = range(1, 13) if axes == 1 else (1, 2, 3, 5, 8, 11) if axes == 2 else (1, 2, 3, 7)
    assert not differing(resize, images(axes, sizes), torch.contiguous_format, near=1e-5)


def test_of_nothing() -> None:
    """Images without pixels are refused, in an old program and in a first call."""
    shapes = [(1, 2, 4, 5), (1, 2, 3, 0), (1, 2, 0, 3), (1, 0, 3, 3), (0, 2, 3, 3), (1, 2, 1, 1)]
    for mode in ("nearest", "bilinear"):
        def resize(x: torch.Tensor, mode: str = mode) -> torch.Tensor:
            return F.interpolate(x, scale_factor=0.5, mode=mode)

        assert not differing(resize, shapes, torch.contiguous_format, near=1e-6)
        assert not differing(resize, shapes[1:], torch.contiguous_format, near=1e-6)


def test_adaptive_pools_to_sizes_of_another_input_are_one_program_for_all_sizes() -> None:
    """The positions of the largest elements, and gradients, are eager's too."""
    def pools(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = y.shape[-2:]
        wide = F.adaptive_max_pool2d(x, (rows, columns), return_indices=True)
        return (*wide, F.adaptive_max_pool1d(x[0], columns),
                F.adaptive_max_pool3d(x, (2, rows, columns)), F.adaptive_avg_pool1d(x[0], columns))

    fast = anyshape.compile(pools, strict=True)
    for k in (1, 2, 5, 9):
        y = torch.empty(k, 10 - k)
        x = torch.randint(0, 4, (2, 3, 4 + k, 12 - k)).float()  # the first of several largest is chosen
        results = []
        for function in (fast, pools):
            given = x.clone().requires_grad_()
            found = function(given, y)
            sum((one * torch.arange(one.numel()).view_as(one)).sum() for one in found).backward()
            results.append((*found, given.grad))
        torch.testing.assert_close(*results)
    assert len(fast.programs) == 2
