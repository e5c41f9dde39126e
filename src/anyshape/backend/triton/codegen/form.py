"""Loop tiling of a loop program on a device: which rows and columns one Triton program takes, as data.

    rows (i0: n0), columns (i1: n1)     tile   R rows, C >= n1 columns in registers; row buffers are registers
                                        loop   R rows; each column stage goes through its columns in steps of C
                                        grid   R rows, C columns; programs along both (nothing spans the columns)
"""
from __future__ import annotations

from dataclasses import dataclass

TILE, LOOP, GRID = "tile", "loop", "grid"


@dataclass(frozen=True, slots=True)
class Form:
    """How a Triton function is laid out. Its numbers of rows R and columns C are compile-time constants.

    columns: TILE, LOOP or GRID.
    strip: the R rows lie along the last row variable, and do not cross the end of it; else they are consecutive in
        row-major order.
    points: column stages, by position, whose columns are gone through one by one, in order.
    scratch: row buffers lie in memory, a piece for each of at most `scratch` Triton programs, which take blocks of rows
        by turns; 0: they are registers.
    two: a row of a TILE has two tiles, of C columns that all exist and of D more.
    window: rows are read and written in aligned windows (codegen/window.py).
    buckets: programs that share the columns of a scatter out by where they go; 0: none.
    """

    columns: str
    strip: bool = False
    points: frozenset[int] = frozenset()
    scratch: int = 0
    buckets: int = 0
    window: bool = False
    two: bool = False
