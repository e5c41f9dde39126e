"""Convolution steps as their bytecode encoders get them: what a step is without its sizes, and dense strides."""
from __future__ import annotations

from math import prod
from typing import NamedTuple

from anyshape.backend.cpu.bytecode.products import Shape

NOTHING = 0xFF800000  # the bits of -infinity: every number is at least that


class ConvSpec(NamedTuple):
    """What does not depend on sizes in a step.

    places: (slot, bytes per element) of its operands in order, an addend last, and of the result. settings: (stride,
    padding, dilation), one number a dim each. added: there is an addend. relu: the result is the maximum with 0.
    scaled, shifted: there are factors and shifts of channels, which stand behind the bias.
    gathered, scattered: of a grouped convolution; the order stands behind the ends.
    """

    number: int
    dtype: str
    places: tuple[tuple[int, int], ...]
    settings: tuple[tuple[int, ...], ...]
    added: bool
    relu: bool
    scaled: bool = False
    shifted: bool = False
    gathered: bool = False
    scattered: bool = False


def least(relu: bool) -> int:
    """The bits of what a result is at least."""
    return 0 if relu else NOTHING


def dense(shape: Shape) -> Shape:
    """The strides of a dense tensor."""
    return tuple(prod(shape[dim + 1:]) for dim in range(len(shape)))
