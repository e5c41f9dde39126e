"""Alignment: sizes and offsets of buffers are rounded up to multiples of it."""
from __future__ import annotations

from typing import Any, TypeVar

ALIGNMENT = 64  # bytes, of each buffer in a block of memory: a cache line, and a vector of the widest kind
LARGE_PAGE = 2 << 20  # bytes of one, of which large memory is better made (runtime/memory/huge_pages.py)

T = TypeVar("T")


def align(size: T, to: int = ALIGNMENT) -> T:
    """`size`, which is a number, an array of numbers or a formula, rounded up to a multiple of `to`."""
    number: Any = size
    return (number + (to - 1)) // to * to  # type: ignore[no-any-return]
