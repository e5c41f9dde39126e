"""Bytecode encoder of matrix products in Python: library steps as words of the host's program, at given
sizes. Word layouts: backend/cpu/interpreter.py.

`None` instead of words means that the host cannot do it (dtype, strides); the step is then done by PyTorch.
"""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.llvm import half_precision
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels import gemm, gemv
from anyshape.backend.cpu.microkernels.amx import tiles
from anyshape.base.align import align
from anyshape.ir.types import size_of

Shape = tuple[int, ...]


class Area(NamedTuple):
    """A window at given sizes: `bytes` from the start of its slot's buffer; strides in elements."""

    slot: int
    bytes: int
    item: int
    shape: Shape
    strides: Shape


class Matrix(NamedTuple):
    """A batch of rows x columns matrices; batch strides broadcast to the batch of the result; item: bytes of an
    element."""

    slot: int
    bytes: int
    item: int
    rows: int
    columns: int
    row: int
    column: int
    batch: Shape

    def turned(self) -> Matrix:
        return Matrix(self.slot, self.bytes, self.item, self.columns, self.rows, self.column, self.row, self.batch)


Places = dict[str, Any]  # the fields of a product that say where its matrices are, and how many
_library_product, _packed_product, _series = (kind.encoder() for kind in (
    host.LibraryProduct, host.PackedProduct, host.SeriesStep))
SMALL_MATRIX = 1 << 20  # multiply-adds below which many products in one call are quicker than one by one
# dtype -> products of matrices, of many matrices, struct code of a scalar
LIBRARY = {"f32": (host.SGEMM, host.SGEMM_BATCH, "f"), "f64": (host.DGEMM, host.DGEMM_BATCH, "d")}
PACKED = {dtype: host.PACKED + gemm.ROUTINES * index for index, dtype in enumerate(gemm.DTYPES)}
THIN = {name: host.THIN + index for index, name in enumerate(gemv.routines())}
# of a product by packed panels: bytes of a thread's scratch at most, most of it for rows, which stay in the second
# cache; words along k in a block; in half precision, up to how many words there is one block; with several, words in
# each, and the columns whose sums are kept
PANELS, DEEP, WHOLE, DEEP_HALF, SUMS = 768 << 10, 256, 704, 384, 256
TILE_PANELS = 1536 << 10  # the same on processors that multiply whole tiles, whose second caches hold 2 megabytes
# features of processors that multiply whole tiles at once, several times faster than vectors: where our routines do not
# (backend/cpu/microkernels/amx.py), PyTorch's do attention, and products too unless ours were measured to be faster
TILE_UNITS = {"bf16": "amx-bf16", "f16": "amx-fp16"}
# Products that our routines and the library's can do, by size; which one does them on this machine:
# backend/cpu/autotune.py. FULL and FEW: of f32, from so many rows, columns, and terms of a sum on, few up to so many
# rows; MANY: small ones that are not in the caches, for the library does not fetch what it needs next; THIN_ONES: few
# vectors; a dtype: all of it
FULL, FEW, MANY, THIN_ONES, ATTENTION = "f32", "few rows", "small matrices", "vectors", "attention"
OUR_ROWS, OUR_COLUMNS, OUR_INNER, FEW_ROWS = 12, 64, 128, 32
MANY_SIDE, MANY_INNER, MANY_BYTES = 24, 32, 2 << 20


class Products(Protocol):
    """Which products our routines do on a machine, and which the library's (backend/cpu/autotune.py). Hashable."""

    def __hash__(self) -> int: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def blas(self) -> BlasRoutines: ...

    def ours(self, kind: str) -> bool:
        """Whether our routines do those of a kind."""


class Fixed(NamedTuple):
    """The same answer for all products."""

    machine: Machine
    own: bool
    blas: BlasRoutines = BlasRoutines()

    def ours(self, kind: str) -> bool:
        return self.own



def at_slots(words: Sequence[int], marks: Iterable[int], number: int, places: Sequence[tuple[int, int]],
             windows: tuple[Any, ...]) -> list[int]:
    """Words that repeated layers share, as those of step `number`: at `marks`, the position of a window (-1: none)
    becomes its slot, and the word after it the bytes to its first element. places: (slot, bytes per element) of each
    window."""
    result = [*words]
    if result:
        result[2] = number
        for at in marks:
            window = words[at]
            if window >= 0:
                slot, item = places[window]
                result[at] = slot
                result[at + 1] = windows[window][2] * item
    return result


def matmul_words(number: int, dtype: str, a: Area, b: Area, c: Area, bias: Area | None, alpha: float,
                 beta: float, products: Products) -> list[int] | None:
    """c = alpha * (a @ b) + beta * bias, batched over leading dims; [] when there is nothing to compute."""
    if not does(dtype, products):
        return None
    if 0 in c.shape:
        return []
    if bias is None or beta == 0:
        bias, beta = None, 0.0
    if a.shape[-1] == 0 and bias is not None and beta != 1 and dtype in LIBRARY:
        return None
    # every operand with both matrix dims, whatever its rank
    one_row, one_column = len(a.shape) == 1, len(b.shape) == 1
    batch = c.shape[:len(c.shape) - 2 + one_row + one_column]
    left = _matrix(a, a.shape, a.strides, one_row, False, batch)
    right = _matrix(b, b.shape, b.strides, False, one_column, batch)
    result = _matrix(c, c.shape, c.strides, one_row, one_column, batch)
    addend = None
    if bias is not None:
        spread = _broadcast(bias.shape, bias.strides, c.shape)
        addend = _matrix(bias, c.shape, spread, one_row, one_column, batch)
    return _words(number, dtype, left, right, result, addend, batch, alpha, beta, products)


def native(dtype: str, machine: Machine, blas: BlasRoutines = BlasRoutines()) -> bool:
    """Whether the host's routines for this dtype suit the processor, by its features; `blas`: of the library."""
    if dtype in LIBRARY:
        return dtype == "f32" or blas.products
    return dtype in half_precision.dtypes(machine) and (tiles(machine, dtype) or not machine.has(TILE_UNITS[dtype]))


def has(dtype: str, products: Products) -> bool:
    """Whether the host has a routine for products of this dtype, whichever is taken."""
    if dtype in LIBRARY:
        return dtype == "f32" or products.blas.products
    return dtype in (*half_precision.dtypes(products.machine), half_precision.BYTES)


def does(dtype: str, products: Products) -> bool:
    """Whether the host does products of this dtype."""
    return has(dtype, products) and (dtype in (*LIBRARY, half_precision.BYTES) or products.ours(dtype))


def takes_any_strides(dtype: str, products: Products) -> bool:
    """Whether the host does products of this dtype whatever the strides of the operands."""
    return dtype != "f64" and does(dtype, products)


def _broadcast(shape: Shape, strides: Shape, wanted: Shape) -> Shape:
    """Strides of an operand seen at the broadcast shape `wanted`."""
    if shape == wanted:
        return strides
    padded = (1,) * (len(wanted) - len(shape)) + tuple(shape)
    padded_strides = (0,) * (len(wanted) - len(shape)) + tuple(strides)
    return tuple([0 if have == 1 and want != 1 else stride
                  for have, want, stride in zip(padded, wanted, padded_strides, strict=True)])


def _matrix(area: Area, shape: Shape, strides: Shape, one_row: bool, one_column: bool, batch: Shape) -> Matrix:
    """An operand's matrices, for each of the `batch`; of vectors, matrices of one row or one column."""
    if one_row:
        at = len(shape) - (0 if one_column else 1)
        shape, strides = (*shape[:at], 1, *shape[at:]), (*strides[:at], 0, *strides[at:])
    if one_column:
        shape, strides = (*shape, 1), (*strides, 0)
    spread = _broadcast(shape[:-2], strides[:-2], batch) if batch else ()
    return Matrix(area.slot, area.bytes, area.item, shape[-2], shape[-1], strides[-2], strides[-1], spread)


def _ordered(matrix: Matrix) -> tuple[str, int] | None:
    """How the library reads a matrix: (plain "N" or transposed "T", leading dim), or None when it cannot."""
    if (matrix.column == 1 or matrix.columns <= 1) and (matrix.row >= max(matrix.columns, 1) or matrix.rows <= 1):
        return "N", matrix.row if matrix.rows > 1 else max(matrix.columns, 1)
    if (matrix.row == 1 or matrix.rows <= 1) and (matrix.column >= max(matrix.rows, 1) or matrix.columns <= 1):
        return "T", matrix.column if matrix.columns > 1 else max(matrix.rows, 1)
    return None


def _words(number: int, dtype: str, a: Matrix, b: Matrix, c: Matrix, bias: Matrix | None, batch: Shape,
           alpha: float, beta: float, products: Products) -> list[int] | None:
    order = _ordered(c)
    if order is None:
        return None
    if order[0] == "T":  # the result is column-major: compute its transpose
        a, b, c, bias = b.turned(), a.turned(), c.turned(), bias.turned() if bias else None
    dims = [(size, *(m.batch[i] if m else 0 for m in (a, b, c, bias))) for i, size in enumerate(batch) if size != 1]
    rows = c.rows
    row_strides = [a.row, c.row, bias.row if bias else 0]
    # a batch of left operands against one right operand is one taller matrix
    while dims and dims[-1][2] == 0:
        size, a_step, _, c_step, bias_step = dims[-1]
        steps = [a_step, c_step, bias_step]
        if rows > 1 and steps != [rows * stride for stride in row_strides]:
            break
        row_strides = row_strides if rows > 1 else steps
        rows *= size
        dims.pop()
    if rows != c.rows or row_strides[0] != a.row or row_strides[1] != c.row:
        a = Matrix(a.slot, a.bytes, a.item, rows, a.columns, row_strides[0], a.column, a.batch)
        c = Matrix(c.slot, c.bytes, c.item, rows, c.columns, row_strides[1], c.column, c.batch)
    c_order = _ordered(c)
    if c_order is None or c_order[0] != "N":
        return None
    if bias and bias.column != 1 and c.item != bias.item:  # such an addend is written into the result first
        return None
    batches = 1
    for dim in dims:
        batches *= dim[0]
    item = size_of(dtype)
    place = (bias.slot, bias.bytes, row_strides[2] * item, bias.column * item) if bias else (-1, 0, 0, 0)
    places = {"a": (b.slot, b.bytes), "b": (a.slot, a.bytes), "c": (c.slot, c.bytes), "bias": place[:2],
              "bias_row": place[2], "bias_column": place[3], "batches": batches, "rank": len(dims)}
    thin = thin_words(dtype, item, a, b, c)
    if thin[0] and dtype in LIBRARY and not products.ours(THIN_ONES):
        thin = (0,) * len(thin)
    words = None
    plain = dtype != "f64" and a.columns > 0 and alpha == 1 and (not bias or beta == 1)  # what panels can do in f32
    if dtype in LIBRARY and not (plain and not thin[0] and ours_do(products, c.rows, c.columns, a.columns, batches)):
        words = by_library(products.blas, number, dtype, a, b, c, c_order[1], alpha, beta, places, thin)
    if words is None and thin[0] and (dtype not in LIBRARY or (dtype == "f32" and not products.blas.products)):
        words = by_vectors(number, c.columns, rows, a.columns, c_order[1], bits(alpha, "f"), bits(beta, "f"), item,
                           places, thin)
    if words is None and (plain or dtype not in LIBRARY):
        words = by_panels(products.machine, number, dtype, a, b, c, c_order[1], alpha, beta, places)
    if words is None:
        return None
    for size, a_step, b_step, c_step, bias_step in dims:
        words += [size, b_step * b.item, a_step * a.item, c_step * c.item, bias_step * item]
    words[1] = len(words)
    return words


def ours_do(products: Products, rows: int, columns: int, inner: int, batches: int) -> bool:
    """Whether our own routine does a product of f32."""
    if rows >= OUR_ROWS and columns >= OUR_COLUMNS and inner >= OUR_INNER:
        return products.ours(FULL if rows >= FEW_ROWS else FEW)
    moved = host.F32 * batches * (rows * inner + inner * columns + rows * columns)
    many = batches > 1 and min(rows, columns) >= MANY_SIDE and inner >= MANY_INNER and moved >= MANY_BYTES
    return many and products.ours(MANY)


def by_library(blas: BlasRoutines, number: int, dtype: str, a: Matrix, b: Matrix, c: Matrix, leading: int,
               alpha: float, beta: float, places: Places, thin: tuple[int, ...]) -> list[int] | None:
    """The words of a product by BLAS but for its batch dims; None when it cannot take these strides, or is not
    there."""
    if dtype not in LIBRARY or not blas.products:
        return None
    a_order, b_order = _ordered(a), _ordered(b)
    if a_order is None or b_order is None:
        return None
    if max(c.columns, c.rows, a.columns, a_order[1], b_order[1], leading) >= 2**31:
        return None
    function, many, code = LIBRARY[dtype]
    small = c.columns * c.rows * a.columns < SMALL_MATRIX
    has_many = blas.f32_batches if dtype == "f32" else blas.f64_batches
    return _library_product(
        op=host.MATMUL, length=0, number=number, function=function, m=c.columns, n=c.rows, k=a.columns, ldc=leading,
        alpha=bits(alpha, code), beta=bits(beta, code), item=size_of(dtype), **places,
        transpose_a=ord(b_order[0]), transpose_b=ord(a_order[0]), lda=b_order[1], ldb=a_order[1], thin=thin,
        batch=many if small and has_many else 0, dims=())


def by_vectors(number: int, m: int, n: int, k: int, leading: int, alpha: int, beta: int, item: int, places: Places,
               thin: tuple[int, ...]) -> list[int]:
    """The words of a product with few vectors that the library is not needed for; alpha, beta: their bits."""
    return _library_product(
        op=host.MATMUL, length=0, number=number, function=0, m=m, n=n, k=k, ldc=leading, alpha=alpha, beta=beta,
        item=item, **places, transpose_a=0, transpose_b=0, lda=0, ldb=0, thin=thin, batch=0, dims=())


@lru_cache(maxsize=16)
def _panels(machine: Machine, dtype: str) -> tuple[int, int, int, bool]:
    """Lanes of a vector, rows of the smallest panel, elements in a word, and whether whole tiles are multiplied."""
    return (machine.lanes, gemm.grain(machine, dtype), half_precision.per_word(machine, dtype), tiles(machine, dtype))


def by_panels(machine: Machine, number: int, dtype: str, a: Matrix, b: Matrix, c: Matrix, leading: int, alpha: float,
              beta: float, places: Places, room: int = PANELS) -> list[int]:
    """The words of a product by packed panels (backend/cpu/routines/packed_gemm.py) but for its batch dims.
    room: bytes of a thread's scratch at most, where no whole tiles are multiplied."""
    lanes, grain, per_word, is_tiles = _panels(machine, dtype)
    # a block of rows, and of columns, is whole panels; a block of k is whole vectors of words
    inner = max(-(-a.columns // per_word), 1)
    high, wide = 3 * grain, 2 * lanes
    most, deep = (DEEP, DEEP) if dtype == "f32" else (WHOLE, DEEP_HALF)
    if inner <= most:
        deep = align(inner, lanes)
    waits = inner > most and dtype != "f32"  # sums of the rows and columns of a block wait for the next one
    columns = min(SUMS, align(c.columns, wide)) if waits else wide
    row = 4 * deep + (4 * columns if waits else 0)
    room, group = (TILE_PANELS, host.PACKED_GROUP) if is_tiles else (room, 1)
    rows = max((room - 4 * wide * (group * deep + high)) // row // high * high, high)
    rows = min(align(-(-c.rows // -(-c.rows // rows)), high), align(c.rows, high))
    sums = rows * columns if waits else high * wide
    beta = 1.0 if dtype == "f32" else beta  # to the sums of the blocks before
    scratch = 4 * (rows * deep + group * wide * deep + sums) + host.PACKED_PAD * (rows // high + group)
    return _packed_product(
        op=host.PRODUCT, length=0, number=number, function=PACKED[dtype], m=c.columns, n=c.rows, k=a.columns,
        ldc=leading, alpha=bits(alpha, "f"), beta=bits(beta, "f"), item=size_of(dtype), **places,
        a_lane=b.column * b.item, b_lane=a.row * a.item, a_inner=b.row * b.item, b_inner=a.column * a.item, lanes=lanes,
        grain=grain, per_word=per_word, rows=rows, columns=columns, deep=deep, a_item=b.item, b_item=a.item,
        c_item=c.item, scratch=scratch, dims=())


def series(number: int, kernels: Sequence[int]) -> list[int]:
    """The words of kernel steps as one step; as they are where there is only one, or one that no version of fits."""
    count = _kernels(kernels)
    return [*_series(op=host.SERIES, length=host.SERIES_HEAD, number=number, words=len(kernels)),
            *kernels] if count > 1 else list(kernels)


def finished(products: Sequence[int], number: int, kernels: Sequence[int]) -> list[int]:
    """The words of products and of the kernels that follow, from step `number` on: the last product, if it is the
    host's, and the kernels are one step."""
    at = last = 0
    while at < len(products):
        last, at = at, at + products[at + 1]
    if not _kernels(kernels) or not products or products[last] not in (host.PRODUCT, host.MATMUL):
        return [*products, *series(number, kernels)]
    words = [*products[last:], *kernels]
    return [*products[:last], *_series(op=host.SERIES, length=host.SERIES_HEAD, number=products[last + 2],
                                       words=len(words)), *words]


def _kernels(words: Sequence[int]) -> int:
    """How many kernel steps there are; 0 where no version of one fits."""
    at = count = 0
    while at < len(words):
        if words[at] != host.KERNEL:
            return 0
        count += 1
        at += words[at + 1]
    return count


def may_pack_over(words: Sequence[int] | ctypes.Array[ctypes.c_int64], at: int) -> bool:
    """Whether the product whose words begin at `at` could pack its rows over themselves
    (backend/cpu/routines/packed_gemm_in_place.py), if nobody needs them later."""
    def has(field: str) -> int:
        return words[at + host.PackedProduct.index(field)]
    inner, lanes = has("k"), has("lanes")
    return (has("op") == host.PRODUCT and has("length") == host.MATMUL_DIMS
            and has("item") == host.F32 and has("bias.slot") < 0
            and has("a_item") == has("b_item") == has("c_item") == host.F32
            and has("batches") == 1 and has("n") > 1
            and 0 < inner <= host.OVER_INNER and inner % lanes == 0 and has("deep") <= DEEP
            and has("b_inner") == host.F32 and has("b_lane") == host.F32 * inner
            and has("b.slot") not in (has("a.slot"), has("c.slot")))


_NUMBER = {code: struct.Struct(f"<{code}").pack for code in "fd"}
_BITS = {"f": struct.Struct("<I").unpack, "d": struct.Struct("<q").unpack}
MOST_VECTORS = max(max(counts) for counts in gemv.COUNTS.values())


def thin_words(dtype: str, item: int, a: Matrix, b: Matrix, c: Matrix) -> tuple[int, ...]:
    """The words of a product of a matrix with few vectors: the rows of a, or the columns of b. None: all zero."""
    nothing = (0,) * 9
    if a.columns == 0:
        return nothing
    second = c.rows > c.columns  # in the library's terms, where our a is operand B
    if (c.columns if second else c.rows) > MOST_VECTORS:
        return nothing
    matrix, vectors, result = (a.turned(), b.turned(), c.turned()) if second else (b, a, c)
    # now: result (vectors x results) = vectors (vectors x k) times matrix (k x results)
    if matrix.row == 1 and vectors.column == 1:
        way, step = "dot", matrix.column
    elif matrix.column == 1 and (result.column == 1 or result.columns == 1):
        way, step = "spread", matrix.row
    else:
        return nothing
    if vectors.rows > max(gemv.COUNTS[way]) or vectors.item != item or result.item != item:
        return nothing
    return (THIN[gemv.routine(way, dtype, vectors.rows, matrix.item != item)], 1 if second else 0, result.columns,
            step * matrix.item,
            vectors.rows, vectors.row * item, vectors.column * item, result.row * item, result.column * item)


def bits(value: float, code: str) -> int:
    """The bits of a number as a float ("f") or a double ("d"), as a word of 64 bits with a sign."""
    return int(_BITS[code](_NUMBER[code](value))[0])
