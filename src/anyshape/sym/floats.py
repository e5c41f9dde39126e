"""Floats inside sizes: a float64 is kept as its bits, a whole number like every other part of a size."""
from __future__ import annotations

import struct
from math import isqrt


def bits_of(factor: float) -> int:
    """The bits of a float64, as a whole number of 64 bits with a sign."""
    return int.from_bytes(struct.pack("<d", factor), "little", signed=True)


def float_of(bits: object) -> float:
    """The float64 with these bits."""
    assert isinstance(bits, int), bits
    return float(struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0])


def scaled_number(number: int, bits: int) -> int:
    """A number times a float64, rounded to float64 and then toward zero, as PyTorch scales sizes."""
    return int(number * float_of(bits))


def root_number(number: int) -> int:
    """The whole square root of a number of at least 0, rounded down. Below 2**52 float64's square root, rounded toward
    zero, is the same: one that is no whole number lies further below the next one than float64 can round."""
    return isqrt(max(number, 0))
