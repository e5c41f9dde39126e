"""Convolutions of PyTorch, without what oneDNN does wrongly (torch 2.13, 2026-11-23). Eager PyTorch has these faults,
too; that a compiled program lies with channels last where eager did not must not bring them in.

Some of bf16 with channels last (base/onednn_bugs.py): they get their operands as PyTorch's users have them.

The gradient of weights without a window, with strides, of fewer than 16 channels that are last: oneDNN copies the
pixels that strides leave, to places for 16 channels, in memory for as many as there are (`sp * jcp.ic_block` in its
jit_avx512_common_1x1_convolution.cpp). An image of 128 x 160 with 3 channels ends the process. The copy is made here.

What would come from memory that nobody wrote to, in half precision on processors with AMX (base/onednn_bugs.py), is
computed in f32; on all processors, for such images are small.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.base.onednn_bugs import right_in_half, right_with_channels_last
from anyshape.torch_compat.dtypes import DTYPE_NAMES, HALVES

_BLOCK = 16  # channels that oneDNN takes at once


def guarded_convolution(target: Any) -> Callable[..., Any]:
    """`target` is aten.convolution; a function of the same arguments."""
    def call(images: torch.Tensor, weights: torch.Tensor, bias: Any, strides: Sequence[int], padding: Sequence[int],
             dilation: Sequence[int], transposed: bool, more: Sequence[int], groups: int) -> Any:
        rest = strides, padding, dilation, transposed, more, groups
        if images.dtype in HALVES and not right_in_half(images.shape[2:], result_places(images, weights, *rest[:-1]),
                                                        weights.shape[2:], strides, dilation):
            bias = None if bias is None else bias.float()
            return target(images.float(), weights.float(), bias, *rest).to(images.dtype)
        if not _right(images, weights, dilation, transposed, groups):
            images, weights = _dense(images), _dense(weights)
        return target(images, weights, bias, *rest)

    return call


def result_places(images: torch.Tensor, weights: torch.Tensor, strides: Sequence[int], padding: Sequence[int],
                  dilation: Sequence[int], transposed: bool, more: Sequence[int]) -> list[int]:
    """What is left of images [N, C, *S] along each axis; less than 1 where the window does not fit."""
    places = []
    for d, (size, kernel) in enumerate(zip(images.shape[2:], weights.shape[2:], strict=True)):
        stride, pad, step = (each[d if len(each) > 1 else 0] for each in (strides, padding, dilation))
        window = step * (kernel - 1) + 1
        places.append((size - 1) * stride - 2 * pad + window + more[d if len(more) > 1 else 0] if transposed else
                      (size + 2 * pad - window) // stride + 1)
    return places


def guarded_backward(target: Any) -> Callable[..., Any]:
    """`target` is aten.convolution_backward; a function of the same arguments."""
    def in_f32(gradient: torch.Tensor, images: torch.Tensor, weights: torch.Tensor, *rest: Any) -> Any:
        found = target(gradient.float(), images.float(), weights.float(), *rest)
        return tuple(None if one is None else one.to(images.dtype) for one in found)

    def call(gradient: torch.Tensor, images: torch.Tensor, weights: torch.Tensor, biases: Any, strides: Sequence[int],
             padding: Sequence[int], dilation: Sequence[int], transposed: bool, more: Sequence[int], groups: int,
             wanted: Sequence[bool]) -> Any:
        rest = padding, dilation, transposed, more, groups
        if images.dtype in HALVES and not right_in_half(
                images.shape[2:], gradient.shape[2:], weights.shape[2:], strides, dilation):
            return in_f32(gradient, images, weights, biases, strides, *rest, wanted)
        if not _right(images, weights, dilation, transposed, groups):
            gradient, images, weights = _dense(gradient), _dense(images), _dense(weights)
        strides = list(strides) * (weights.dim() - 2 if len(strides) == 1 else 1)
        pixels = weights.shape[2:].numel() == 1 and max(strides) > 1 and not any(padding) and not transposed
        if not (pixels and wanted[1] and images.shape[1] < _BLOCK and images.numel()):
            found = target(gradient, images, weights, biases, strides, *rest, wanted)
        else:
            first = None
            if wanted[0]:
                first = target(gradient, images, weights, biases, strides, *rest, [True, False, False])[0]
            images = images[(..., *(slice(None, None, stride) for stride in strides))]
            strides = [1] * len(strides)
            found = first, *target(gradient, images, weights, biases, strides, *rest, [False, True, wanted[2]])[1:]
        if images.dtype in HALVES and wanted[1] and found[1].sum().isnan():
            again = in_f32(gradient, images, weights, biases, strides, *rest, [False, True, False])
            found = found[0], again[1], found[2]
        return found

    return call


def _right(images: torch.Tensor, weights: torch.Tensor, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    return right_with_channels_last(DTYPE_NAMES[images.dtype], weights.shape, dilation, transposed, groups)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """In order, with the strides that say so also in dims of size 1: by these PyTorch sees channels last."""
    return tensor.contiguous().view(-1).view(tensor.shape)
