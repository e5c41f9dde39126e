"""What libraries under PyTorch do wrongly, and for what.

oneDNN's convolutions in bf16 with channels last are right where they are plain. Others give wrong numbers at some
sizes, or end the process. With torch 2.13 on a processor with AVX512-BF16 (2026-11-23), of 3,000 random ones of each
kind: 13 over volumes, 10 dilated, one transposed; of those in groups of few channels one in 300; no plain one, and none
of f32. On one with AMX more are, of images of width 1 with padding and strides: as much as users of PyTorch have them.
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
