"""The layout of a prepacked GEMM operand: a matrix [K, N] in panels of 32 columns, [N/32, K, 32, 1] of f32 and
[N/32, K/4, 32, 4] of i8, rounded up and filled up with zeros.

Word k of a panel is 4 bytes of each of its columns, so that a product reads a panel as one stream, whatever the vectors
of its processor are.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from anyshape.ir.types import size_of

PANEL, WORD = 32, 4  # columns of a panel; bytes of a column's elements along K that lie side by side
OUT_OF_PANELS = (1, 0, 2, 3)  # the dims of panels of f32 in the order of a matrix: its rows, then its columns


def panels_of(inner: int, columns: int, dtype: str) -> tuple[int, ...]:
    """The shape of a matrix [inner, columns] of f32 or i8 in panels."""
    word = WORD // size_of(dtype)
    return -(-columns // PANEL), -(-inner // word), PANEL, word


def into_panels(b: np.ndarray) -> np.ndarray:
    """A matrix [K, N] of f32 or i8 in panels."""
    inner, columns = b.shape
    word = WORD // b.itemsize
    filled = np.pad(b, ((0, -inner % word), (0, -columns % PANEL)))
    panels = filled.reshape(len(filled) // word, word, filled.shape[1] // PANEL, PANEL)
    return np.ascontiguousarray(panels.transpose(2, 0, 3, 1))


def from_panels(b: Any, inner: int, columns: int) -> Any:
    """The matrix [inner, columns] that lies in panels: arrays of numpy or tensors of torch."""
    count, words, _, word = b.shape
    return b.swapaxes(1, 2).reshape(count * PANEL, words * word)[:columns, :inner].swapaxes(0, 1)
