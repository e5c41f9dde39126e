"""Known bugs of oneDNN: which convolutions it computes rightly.

oneDNN's convolutions in bf16 with channels last are right where they are plain. Others give wrong numbers at some
sizes, or end the process. With torch 2.13 on a processor with AVX512-BF16 (2026-11-23), of 3,000 random ones of each
kind: 13 over volumes, 10 dilated, one transposed; of those in groups of few channels one in 300; no plain one, and none
of f32.

On a processor with AMX (2026-11-24) more are wrong, in any layout: they read scratch that nothing was written to.
Results and gradients are of it where images or results have one place along an axis, with strides also where they
have two; there a dilated window ends the process. A dilated window with strides is wrong at times, at any size. And
gradients of weights take products of zero and what lies behind rows of pixels, for some widths (61 with a window of 3
and a padding of 1, 32 with a window of 2): they are right unless a NaN or an infinity happens to lie there.
"""
from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 16  # channels of a group, or a multiple of so many


def right_with_channels_last(dtype: str, shape: Sequence[object], dilation: Sequence[int], transposed: bool,
                             groups: int) -> bool:
    """Is a convolution of PyTorch, forward and backward, right with channels last? shape: of the weights."""
    if dtype in ("f32", "f64"):
        return True
    if len(shape) > 4 or transposed or any(one != 1 for one in dilation):
        return False
    if groups == 1:
        return True
    number, channels = shape[:2]
    if not isinstance(number, int) or not isinstance(channels, int):
        return False
    each = number // groups
    return channels == each == 1 or channels % _BLOCK == each % _BLOCK == 0


def right_in_half(images: Sequence[int], results: Sequence[int], window: Sequence[int], strides: Sequence[int],
                  dilation: Sequence[int]) -> bool:
    """Is a convolution in half precision right, forward and backward, whatever lies in memory? images, results: places
    along each axis. Not asked here: a NaN in the gradient of the weights."""
    has_strides, is_dilated = max(strides) > 1, max(dilation) > 1
    if has_strides or is_dilated:
        return not (has_strides and is_dilated) and min(*images, *results) > 2
    return max(window) == 1 or min(*images, *results) > 1
