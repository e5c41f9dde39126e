"""Schedule directives: which loops of a loop program are vectorised, tiled, interchanged or split, as data.

    rows (i0: n0)                                           rows (i0: n0)
      columns (i1: n1)                 + Vectorize("i1")      columns (i1: n1) vector i1
        r0: f32 = load p0[i1*n0 + i0]    -->                    r0: f32 = load p0[i1*n0 + i0]
        store p1[i0*n1 + i1] r0                                 store p1[i0*n1 + i1] r0

A program has at most one directive of a kind. They are chosen in kernel/schedule, read by a backend's code generator,
and a part of the text form and so of the kernel's name: `str` writes a directive, `read` reads it from a match of its
`FORM`. Their axes are loop variables of the program; a code generator refuses a program whose directives do not fit its
loops.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from anyshape.sym import parse as size_text
from anyshape.sym.expr import Size

Loop = Callable[[str], tuple[str, Size]]  # reads a new variable and its extent, `VARIABLE: EXTENT`


@dataclass(frozen=True, slots=True)
class Vectorize:
    """The loop variable `axis` is taken several values at a time: the last column variable, or the last row variable
    (then a row block is a strip of consecutive values of it, everything that depends on it is a vector, and the column
    loops run one by one). A value that does not depend on it is uniform (scalar). Without this directive all is scalar.
    """

    axis: str

    def __str__(self) -> str:
        return f"vector {self.axis}"


@dataclass(frozen=True, slots=True)
class Tile:
    """A row block is `sizes[0]` consecutive values of the last row variable `axes[0]`; all of them go through
    `sizes[1]` values of the only column variable `axes[1]`, which is the vector, then through the next ones.

    transposed: the registers of loads that step by one along the rows and by more along the columns. A tile of such a
    load is read along the rows and transposed in registers. Nothing is reduced.
    """

    axes: tuple[str, str]
    sizes: tuple[int, int]
    transposed: tuple[int, ...]
    FORM: ClassVar[re.Pattern[str]] = re.compile(
        r"tile \((\w+), (\w+)\) by \((\d+), (\d+)\) transposed (r\d+(?:, r\d+)*)$")

    @classmethod
    def read(cls, match: re.Match[str], _: Loop) -> Tile:
        """The directive of a line."""
        row, column, rows, columns, registers = match.groups()
        return cls((row, column), (int(rows), int(columns)), tuple(int(one[1:]) for one in registers.split(", ")))

    def __str__(self) -> str:
        rows, columns = self.sizes
        registers = ", ".join(f"r{register}" for register in self.transposed)
        return f"tile ({', '.join(self.axes)}) by ({rows}, {columns}) transposed {registers}"


@dataclass(frozen=True, slots=True)
class Interchange:
    """The last row variable `axis`, the vector, is gone through inside of the columns, in each column stage: at
    every point of the columns, `strip` consecutive values of it at most. For what lies side by side along it, and far
    apart from column to column. Nothing is scanned."""

    axis: str
    strip: int
    FORM: ClassVar[re.Pattern[str]] = re.compile(r"interchange (\w+) by (\d+)$")

    @classmethod
    def read(cls, match: re.Match[str], _: Loop) -> Interchange:
        """The directive of a line."""
        return cls(match[1], int(match[2]))

    def __str__(self) -> str:
        return f"interchange {self.axis} by {self.strip}"


@dataclass(frozen=True, slots=True)
class SplitReduction:
    """Reductions over rows (`fold`) are split: rows are run in `parts` groups of consecutive rows (in row-major order,
    all of them nearly equally large), at most as many as there are rows; the variable `axis` counts them.

    The rows of a part run one after another, so that `fold` can combine over them; parts run in parallel. Which rows
    are in a part is a matter of sizes only, so that a sum comes out the same on any number of threads. Columns are the
    vector, and their extents do not depend on rows.
    """

    axis: str
    parts: Size
    FORM: ClassVar[re.Pattern[str]] = re.compile(r"split_reduction \((.*)\)$")

    @classmethod
    def read(cls, match: re.Match[str], loop: Loop) -> SplitReduction:
        """The directive of a line; its axis is a new variable."""
        return cls(*loop(match[1]))

    def __str__(self) -> str:
        return f"split_reduction ({self.axis}: {self.parts})"


@dataclass(frozen=True, slots=True)
class Interleave:
    """The loop `short`, whose extent is a number, is unrolled inside of the loop `long`, which is the vector. One is
    the only column loop, the other a row loop. Loads and stores that go on by one along `short`, and by its extent
    along `long`, are whole vectors, which are interleaved in registers. Nothing is reduced, scanned or scattered."""

    short: str
    long: str
    FORM: ClassVar[re.Pattern[str]] = re.compile(r"interleave (\w+) inside of (\w+)$")

    @classmethod
    def read(cls, match: re.Match[str], _: Loop) -> Interleave:
        """The directive of a line."""
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"interleave {self.short} inside of {self.long}"


SPANNING = ("reduce", "scan", "scatter", "fold", "check")  # instructions that no kernel with a product has


@dataclass(frozen=True, slots=True)
class Product:
    """The buffer `name` is not in memory: it is the product of the params `left` and `right`, a matrix of all rows by
    all columns, which the code of the kernel computes in tiles and reads in registers (epilogue fusion). Element
    [m, n] is the sum over `inner` values of k of left[m*strides[0] + k*strides[1]] * right[k*strides[2] +
    n*strides[3]], accumulated in f32 and rounded to `dtype`: that of the operands, or f32 where something is added
    before the sum is rounded. All strides are in elements. It is loaded at the point's
    own place only, in row-major order; there are only column stages, and nothing in them spans columns."""

    name: str
    dtype: str
    left: str
    right: str
    inner: Size
    strides: tuple[Size, Size, Size, Size]
    FORM: ClassVar[re.Pattern[str]] = re.compile(
        r"product (\w+): (\w+) = (\w+)\[(.*); (.*)\] @ (\w+)\[(.*); (.*)\] over (.*)$")

    @classmethod
    def read(cls, match: re.Match[str], _: Loop) -> Product:
        """The directive of a line; its name is a new buffer."""
        name, dtype, left, *first, right, third, fourth, inner = match.groups()
        down, along, under, beside, count = (size_text.parse(text) for text in (*first, third, fourth, inner))
        return cls(name, dtype, left, right, count, (down, along, under, beside))

    def __str__(self) -> str:
        down, along, under, beside = self.strides
        return (f"product {self.name}: {self.dtype} = {self.left}[{down}; {along}] @ {self.right}[{under}; {beside}] "
                f"over {self.inner}")


Directive = Vectorize | Tile | Interchange | SplitReduction | Interleave | Product
# those that have a line of their own; `Vectorize` stands at its loops
LINES = (Tile, Interchange, SplitReduction, Interleave, Product)
