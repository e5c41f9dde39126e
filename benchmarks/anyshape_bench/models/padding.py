"""Padding into buckets, which the backend `inductor-padded` does for want of one program for all shapes.

    tokens [3, 130]  -->  bucket (4, 256): tokens [4, 256], and what keeps the padding out of the result

A batch has the next power of two, a length the next multiple of 128. The buckets' programs are compiled before anything
is timed; padding itself is part of a step.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from anyshape.base.errors import ConfigError
from anyshape_bench.models.suite import PADDED as BACKEND
from anyshape_bench.models.suite import Shape

LENGTH = 128  # a bucket's length is a multiple of this
IGNORED = -100  # a label that losses leave out
Inputs = tuple[Tensor, ...]
Pad = Callable[[Inputs, Shape], Inputs]


def bucket(shape: Shape, dims: tuple[str, ...]) -> Shape:
    """The bucket of a shape whose sizes are called `dims`: batch or length.

    Raises:
        ConfigError: another size is among them.
    """
    if not set(dims) <= {"batch", "length"}:
        raise ConfigError(f"sizes {', '.join(dims)} have no buckets", why="only a batch and a length of words are "
                          "padded", do=f"leave out the backend {BACKEND} for this model")
    return tuple(1 << (size - 1).bit_length() if name == "batch" else -(-size // LENGTH) * LENGTH
                 for size, name in zip(shape, dims, strict=True))


def tokens(inputs: Inputs, sizes: Shape) -> Inputs:
    """Words int64[batch, length] of a model in which none sees a later one."""
    return (_filled(inputs[0], sizes, 0),)


def tokens_and_mask(inputs: Inputs, sizes: Shape) -> Inputs:
    """Words int64[batch, length] and their mask: 1 for words, 0 for padding."""
    return _filled(inputs[0], sizes, 0), _filled(torch.ones_like(inputs[0]), sizes, 0)


def tokens_and_labels(inputs: Inputs, sizes: Shape) -> Inputs:
    """Words int64[batch, length], and the same as labels, with those of the padding left out of the loss."""
    return _filled(inputs[0], sizes, 0), _filled(inputs[0], sizes, IGNORED)


def _filled(tensor: Tensor, sizes: Shape, value: int) -> Tensor:
    (batch, length), (rows, columns) = tensor.shape, sizes
    return functional.pad(tensor, (0, columns - length, 0, rows - batch), value=value)
