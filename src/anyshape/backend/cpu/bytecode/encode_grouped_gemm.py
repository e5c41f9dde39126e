"""Bytecode encoder of grouped matrix products: products of groups of rows at given sizes: the words that the host reads
(backend/cpu/routines/grouped_gemm.py), or PyTorch.

    grouped(x [S, K], weights [E, K, N], ends [E])    -->    GROUPED, ..., ends, bytes from group to group and from row
        to row of each operand, the words of one group's product by packed panels, and those by the library

Where groups begin and end is data, so the host chooses for each group, by its rows, between the routine for few rows
and one of the two ways. Where panels are the faster one they are so from fewer rows on than of a product that stands
alone (f32, 8 groups of 256x1024, 8 rows each: 0.74 ms against 1.28; AMD Zen 4, one thread, 2026-11-22).
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.encode_gemm import (
    FULL,
    OUR_COLUMNS,
    OUR_INNER,
    OUR_ROWS,
    Matrix,
    Products,
    Shape,
    at_slots,
    bits,
    by_library,
    by_panels,
    by_vectors,
    native,
    thin_words,
)
from anyshape.backend.cpu.native.compiler import words_of
from anyshape.ir.types import size_of

_grouped = host.GroupedStep.encoder()
_MARKS = tuple(map(host.GroupedStep.index, ("ends", "order", *(
    f"{product}.{operand}" for product in ("panels", "library") for operand in ("a", "b", "c")))))
_THIN, _SCRATCH = host.LibraryProduct.index("thin"), host.PackedProduct.index("scratch")
_DEEP, _PER_WORD = host.PackedProduct.index("deep"), host.PackedProduct.index("per_word")
# bytes of a thread's scratch for panels, as PANELS: groups are many and small, and the weights are packed in no time (8
# groups of 8192x256 @ 256x64 take as long with 768 KiB; AMD Zen, one thread, 2026-11-25)
GROUP_PANELS = 192 << 10
# of rows that are gathered for the library: how many bytes of a thread's scratch, and rows at least
ROWS_BYTES, LEAST_ROWS = 128 << 10, 16


@dataclass(frozen=True, slots=True)
class GroupedSpec:
    """What does not depend on sizes in a step: (slot, bytes per element) of x, y, ends, perhaps an order, and the
    result."""

    number: int
    op: str
    dtype: str
    places: tuple[tuple[int, int], ...]


def grouped_words(products: Products, spec: GroupedSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of x, y, ends, perhaps an order, and the result."""
    words = _words(products, spec.op, spec.dtype, spec.places[2][1],
                   tuple([(shape, strides) for shape, strides, _ in windows]))
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, _MARKS, spec.number, spec.places, windows)


@lru_cache(maxsize=4096)
def _words(products: Products, op: str, dtype: str, end_item: int,
           types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words with positions among the windows in place of slots; () when there is nothing to compute, None when the
    host cannot take these strides."""
    if not native(dtype, products.machine, products.blas):
        return None
    (x_shape, x_strides), (_, y_strides), (ends, end_strides), *order, (shape, strides) = types
    if 0 in shape:
        return ()
    if order and order[0][1] != (1,):
        return None
    inner = op == "grouped_inner"
    item, size = size_of(dtype), x_shape[1] if inner else shape[0]
    rows, columns = shape[-2:]
    depth = x_shape[1]

    def matrix(position: int, rows: int, columns: int, steps: Shape) -> Matrix:
        return Matrix(position, 0, item, rows, columns, steps[-2], steps[-1], ())

    at_result = len(types) - 1
    a, b = matrix(0, rows, depth, x_strides), matrix(1, depth, columns, y_strides)
    c, one = matrix(at_result, rows, columns, strides), 1.0
    leading = columns if rows == 1 else strides[-2]
    places = {"a": (b.slot, 0), "b": (a.slot, 0), "c": (c.slot, 0), "bias": (-1, 0), "bias_row": 0, "bias_column": 0,
              "batches": 1, "rank": 0}
    left = matrix(0, rows, depth, (depth, 1)) if order else a  # rows are gathered side by side for the library
    library = by_library(products.blas, 0, dtype, left, b, c, leading, one, 0.0, places, (0,) * 9)
    panels = by_panels(products.machine, 0, dtype, a, b, c, leading, one, one, places,
                       GROUP_PANELS) if dtype != "f64" else None
    few = [] if inner else _few(dtype, item, depth, columns, x_strides, b, (at_result, strides))
    # without the library its words still say the sizes, and do the products with few rows
    plain = library or by_vectors(0, columns, rows, depth, leading, bits(one, "f"), 0, item, places, (0,) * 9)
    if few:
        plain[_THIN:_THIN + len(few[0])] = few[0]
    if panels is None and library is None:
        return None
    by_us = panels is not None and (library is None or (columns >= OUR_COLUMNS and (
        rows >= OUR_ROWS if inner else depth >= OUR_INNER) and products.ours(FULL)))
    scratch = panels[_SCRATCH] if by_us and panels is not None else 0
    at_once = max(LEAST_ROWS, ROWS_BYTES // max(depth * item, 1)) if order else 0
    if order and by_us and panels is not None:  # a vector's lanes of rows
        scratch += products.machine.lanes * (panels[_DEEP] * panels[_PER_WORD] * item + host.LINE)
    elif order:
        scratch = at_once * depth * item
    x_group, x_row = (0, x_strides[1]) if inner else (0, 0 if order else x_strides[0])
    y_group, y_row = (0, y_strides[0]) if inner else (y_strides[0], 0)
    result_group, result_row = (strides[0], 0) if inner else (0, strides[0])
    wide = 2 * products.machine.lanes
    words = _grouped(
        op=host.GROUPED, length=words_of(host.GroupedStep), number=0, ends=(2, 0), end_item=end_item,
        end_step=end_strides[0] * end_item, count=ends[0], size=size,
        along=host.ALONG_TERMS if inner else host.ALONG_ROWS, a_group=y_group * item, b_group=x_group * item,
        c_group=result_group * item, a_along=y_row * item, b_along=x_row * item, c_along=result_row * item,
        order=(3 if order else -1, 0), cells=x_shape[0], row=x_strides[0] * item,
        element=x_strides[1] * item, rows=at_once, apart=depth * item,
        most_few=len(few), ours=int(by_us), wide=wide, scratch=scratch, lane=y_strides[-1] * item,
        thin=[*(way[0] for way in few), *[0] * (host.GROUPED_FEW - len(few))], panels=panels or plain, library=plain)
    return tuple(words)


def _few(dtype: str, item: int, depth: int, columns: int, x_strides: Shape, b: Matrix,
         result: tuple[int, Shape]) -> list[tuple[int, ...]]:
    """The words of products of 1, 2, ... rows with the matrix b, as far as there are routines. result: its position
    among the windows, its strides."""
    at, strides = result
    found: list[tuple[int, ...]] = []
    while len(found) < host.GROUPED_FEW:
        count = len(found) + 1
        way = thin_words(dtype, item, Matrix(0, 0, item, count, depth, x_strides[-2], x_strides[-1], ()), b,
                         Matrix(at, 0, item, count, columns, strides[-2], strides[-1], ()))
        if not way[0] or way[1]:
            break
        found.append(way)
    return found
