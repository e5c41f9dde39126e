"""Words of products, attention, grouped products, bands, copies, joined products and direct convolutions, by encoders
in Python: what the native ones are compared with. `None` instead of words means that the host cannot do it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode.conv_spec import ConvSpec, dense, least
from anyshape.backend.cpu.bytecode.products import (
    ATTENTION,
    DEEP,
    DEEP_HALF,
    FEW,
    FEW_ROWS,
    FULL,
    LIBRARY,
    MANY,
    MANY_BYTES,
    MANY_INNER,
    MANY_SIDE,
    MOST_VECTORS,
    OUR_COLUMNS,
    OUR_INNER,
    OUR_ROWS,
    PACKED,
    PANELS,
    SMALL_MATRIX,
    SUMS,
    THIN,
    THIN_ONES,
    TILE_PANELS,
    WHOLE,
    Products,
    Shape,
    at_slots,
    bits,
    does,
    native,
)
from anyshape.backend.cpu.machine import low_precision
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.cpu.machine.low_precision import tiles
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.tables import direct_conv, gemm, gemv, softmax_rows
from anyshape.backend.cpu.native.records import words_of
from anyshape.backend.cpu.routines.encoding.attention import CAUSAL_TILES, FEWEST, HALF_ROWS, ROWS, SCORES
from anyshape.backend.cpu.routines.encoding.attention import FEW as FEW_QUERIES
from anyshape.backend.cpu.routines.encoding.direct_conv import BAND, POSITIONS
from anyshape.backend.cpu.routines.encoding.grouped import GROUP_PANELS, LEAST_ROWS, ROWS_BYTES
from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.ops.attention import roles, wide


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
    return (machine.lanes, gemm.grain(machine, dtype), low_precision.per_word(machine, dtype), tiles(machine, dtype))


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



WIDE = frozenset(("mask", "sums", "products"))
HEADS_FIRST = frozenset(("q", "k", "v", "mask", "gradient"))  # [B, H, M, D]; results are [B, M, H, D]
_PLACES = host.KernelStepWords.index("places")
_attention, _OPERANDS = host.AttentionStep.encoder(), host.AttentionStep.index("operands")
# fields of products by packed panels: of their vectors, and where in a thread's scratch what is
_VECTORS = ("lanes", "grain", "per_word")
_PARTS = ("gradients", "keys", "values", "keys_again", "row_panels", "column_panels", "dkeys", "dvalues", "sums",
          "factors")


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What does not depend on sizes in a step: the op, and per window (slot, bytes per element)."""

    number: int
    op: str
    dtype: str
    causal: bool
    scale: float | None
    places: tuple[tuple[int, int], ...]


def attention_words(products: Products, spec: AttentionSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of operands and results, in the order of the plan."""
    return placed(unplaced(products, spec, windows), spec, windows)


def unplaced(products: Products, spec: AttentionSpec, windows: tuple[Any, ...]) -> tuple[int, ...] | None:
    """What the words of a step have in common with those of others that have equal windows, in other slots."""
    return attention_step(products.machine, products.ours(ATTENTION), products.blas, spec.op, spec.dtype, spec.causal,
                  spec.scale, tuple([(shape, strides) for shape, strides, _ in windows]))


def placed(words: tuple[int, ...] | None, spec: AttentionSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; words: what it has in common with others."""
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, range(_OPERANDS, len(words), words_of(host.Operand)), spec.number, spec.places, windows)


@lru_cache(maxsize=4096)
def attention_step(machine: Machine, by_panels: bool, blas: BlasRoutines, op: str, dtype: str, causal: bool,
           scale: float | None, types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words with positions among the windows in place of slots; None when the host cannot take these strides.
    by_panels: products of f32 are made from packed panels, not by the library."""
    if not native(dtype, machine, blas):
        return None
    windows = dict(zip(roles(op, len(types)), enumerate(types), strict=True))
    batch, heads, rows, depth = windows["q"][1][0]
    groups, columns = windows["k"][1][0][1:3]
    half = dtype not in LIBRARY or (
        dtype == "f32" and (not blas.products or (by_panels and rows >= OUR_ROWS)))
    product, code = (PACKED[dtype], "f") if half else LIBRARY[dtype][::2]
    if 0 in (heads, groups, depth) or max(rows, columns, depth) >= 2**30:
        return None
    operands: list[int] = []
    for role in host.OPERANDS:
        position, kind = windows.get(role, (-1, ((), ())))
        steps = _steps(role, *kind, (batch, heads, rows, columns)) if position >= 0 else (0, 0, 0)
        if steps is None:
            return None
        operands += [position, 0, *(step * size_of(wide(dtype) if role in WIDE else dtype) for step in steps)]
    backward = op == "attention_backward"
    item = size_of(wide(dtype))
    most = HALF_ROWS if half else ROWS
    tile = min(most, SCORES // (item * max(columns, 1)), columns // CAUSAL_TILES if causal else most)
    tile = max(tile, FEWEST)
    if half:  # whole panels
        tile = align(tile, 3 * gemm.grain(machine, dtype))
    tile = max(min(tile, rows), 1)
    # rows of scores begin at different places of the cache's lines
    step = align(columns * item, 64)
    step += 64 if step % 1024 == 0 else 0
    few = 0 < rows <= FEW_QUERIES and not backward and not half
    dot, spread = (THIN[gemv.routine(way, dtype, rows)] if few else 0 for way in ("dot", "spread"))
    factor = depth**-0.5 if scale is None else scale
    weigh = host.WEIGH + softmax_rows.routines().index(f"{'unweigh' if backward else 'weigh'}_{wide(dtype)}")
    scratch, panels = _attention_panels(machine, dtype, backward, tile, step, columns, depth) if half \
        else (tile * step * (1 + backward), dict.fromkeys((*_VECTORS, *_PARTS), 0))
    return tuple(_attention(
        op=host.ATTENTION, length=words_of(host.AttentionStep), number=0, product=product, weigh=weigh,
        backward=int(backward), batch=batch, groups=groups, share=heads // groups, rows=rows, columns=columns,
        depth=depth, causal=int(causal), item=size_of(dtype), scale=bits(factor, code), one=bits(1.0, code), zero=0,
        tile=tile, step=step, scratch=scratch, dot=dot, spread=spread, **panels, operands=operands))


def _attention_panels(machine: Machine, dtype: str, backward: bool, tile: int, step: int, columns: int,
            depth: int) -> tuple[int, dict[str, int]]:
    """What half precision needs: bytes of scratch per thread, and the fields that only it has."""
    lanes, grain, per_word = machine.lanes, gemm.grain(machine, dtype), low_precision.per_word(machine, dtype)

    def panels(size: int, count: int, top: int, least: int) -> int:
        """Bytes of panels of `size` lanes by `count` elements."""
        return 4 * align(size, least) * align(-(-count // per_word), lanes) + host.PACKED_PAD * -(-size // top)

    def of_columns(size: int, count: int) -> int:
        return panels(size, count, 2 * lanes, lanes)

    def of_rows(size: int, count: int) -> int:
        return panels(size, count, 3 * grain, grain)

    scores = align(tile, grain) * step
    keys = 4 * align(columns, grain) * align(depth, lanes) * backward  # sums of the gradients of keys, or of values
    sums = 4 * (3 * grain * 2 * lanes if backward else align(tile, grain) * align(depth, lanes))
    parts = {"gradients": scores * backward, "keys": of_columns(columns, depth),
             "values": of_columns(columns, depth) if backward else of_columns(depth, columns),
             "keys_again": of_columns(depth, columns) * backward,
             "row_panels": max(of_rows(tile, depth), of_rows(tile, columns), of_rows(columns, tile) * backward),
             "column_panels": of_columns(depth, tile) * backward, "dkeys": keys, "dvalues": keys, "sums": sums,
             "factors": 0 if backward else 8 * (tile + 1)}
    places = {}
    at = align(scores, 64)
    for name in _PARTS:
        places[name] = at
        at = align(at + parts[name], 64)
    return at, dict(zip(_VECTORS, (lanes, grain, per_word), strict=True)) | places


def _steps(role: str, shape: Shape, strides: Shape, scores: Shape) -> tuple[int, int, int] | None:
    """Elements from batch to batch, from head to head and from row to row; None when the elements of a row are not
    next to each other, or rows lie in each other."""
    if role in ("sums", "products"):
        return strides[0], strides[1], strides[2]
    if role == "mask":
        if shape[3] != scores[3] or (strides[3] != 1 and shape[3] > 1):
            return None
        batch, head, row = (0 if have == 1 else step for have, step in zip(shape[:3], strides[:3], strict=True))
        return batch, head, row
    batch, head, row = strides[:3] if role in HEADS_FIRST else (strides[0], strides[2], strides[1])
    count = shape[2] if role in HEADS_FIRST else shape[1]
    if shape[3] > 1 and strides[3] != 1:
        return None
    if count <= 1:
        row = shape[3]
    return None if row < shape[3] else (batch, head, row)






_grouped = host.GroupedStep.encoder()
_GROUPED_MARKS = tuple(map(host.GroupedStep.index, ("ends", "order", *(
    f"{product}.{operand}" for product in ("panels", "library") for operand in ("a", "b", "c")))))
_THIN, _PANELS_SCRATCH = host.LibraryProduct.index("thin"), host.PackedProduct.index("scratch")
_DEEP, _PER_WORD = host.PackedProduct.index("deep"), host.PackedProduct.index("per_word")


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
    words = grouped_step(products, spec.op, spec.dtype, spec.places[2][1],
                   tuple([(shape, strides) for shape, strides, _ in windows]))
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, _GROUPED_MARKS, spec.number, spec.places, windows)


@lru_cache(maxsize=4096)
def grouped_step(products: Products, op: str, dtype: str, end_item: int,
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
    scratch = panels[_PANELS_SCRATCH] if by_us and panels is not None else 0
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


def band_words(products: Products, rows: int, dtype: str, windows: Sequence[Area], number: int, kernel: list[int],
               steps: tuple[int, ...]) -> list[int]:
    """The words of a product and of a flat kernel that reads its result, for so many rows after the others. windows: of
    a, b and the result; kernel: its words for all of them; steps: per param, how many bytes it goes on from row to
    row."""
    a, b, c = windows
    columns = c.shape[1]
    if a.shape[1] == 0:  # no terms: a sum of nothing, whatever the strides
        a, b = a._replace(strides=(1, 1)), b._replace(strides=(columns, 1))
    words: list[int] = []
    for row in range(0, a.shape[0], rows):
        count = min(rows, a.shape[0] - row)
        product = matmul_words(number, dtype, a._replace(
            shape=(count, a.shape[1]), bytes=a.bytes + row * a.strides[0] * a.item), b,
            c._replace(shape=(count, columns)), None, 1.0, 0.0, products)
        assert product is not None
        one = [*kernel]
        for place, bytes_ in enumerate(steps):
            one[_PLACES + words_of(host.Place) * place + host.Place.index("bytes")] += row * bytes_
        one[-1] = count * columns
        words += finished(product, number, one)
    return [*_series(op=host.BANDS, length=host.SERIES_HEAD, number=number, words=len(words)), *words]


_copy = host.CopyStepWords.encoder()
# words in which products have to agree to be joined: what is said of their rows, and how the work is cut
_SAME = tuple(map(host.PackedProduct.index, (
    "op", "function", "n", "k", "b_lane", "b_inner", "item", "b.slot", "b.bytes", "rows", "deep", "b_item")))
_SCRATCH = host.PackedProduct.index("scratch")


def joined(products: Sequence[list[int]]) -> list[int]:
    """Products that may run side by side as one step, whose length says how many there are, if all are single ones from
    panels and have the same rows; as they are otherwise."""
    result = [word for product in products for word in product]
    first = products[0]
    if all(len(one) == host.MATMUL_DIMS and one[0] == host.PRODUCT for one in products) and all(
            one[at] == first[at] for one in products for at in _SAME):
        result[1] = len(result)
        result[_SCRATCH] = max(one[_SCRATCH] for one in products)
    return result


def copy_words(number: int, source: Area, target: Area) -> list[int]:
    """A strided copy between windows of one shape and dtype; [] when there is nothing to copy."""
    if 0 in target.shape:
        return []
    item = target.item
    dims = [(size, t * item, s * item)
            for size, t, s in zip(target.shape, target.strides, source.strides, strict=True) if size != 1]
    dims.sort(key=lambda dim: (-abs(dim[1]), -abs(dim[2])))
    merged: list[tuple[int, int, int]] = []
    for size, t, s in dims:
        if merged and merged[-1][1] == size * t and merged[-1][2] == size * s:
            merged[-1] = (merged[-1][0] * size, t, s)
        else:
            merged.append((size, t, s))
    inner = merged.pop() if merged else (1, item, item)
    outer = 1
    for size, _, _ in merged:
        outer *= size
    words = _copy(op=host.COPY, length=0, number=number, item=item, target=(target.slot, target.bytes),
                  source=(source.slot, source.bytes), outer=outer, rank=len(merged), inner=inner,
                  dims=[word for dim in merged for word in dim])
    words[1] = len(words)
    return words


_words_of_step = host.DirectConvStep.encoder()
_MARKS = tuple(map(host.DirectConvStep.index, ("x", "weight", "bias", "factors", "shifts", "addend", "result")))


def direct_conv_words(machine: Machine, spec: ConvSpec, windows: tuple[Any, ...]) -> list[int]:
    """The words of a step; windows: (shape, strides, offset) of x, weight, what else there is of the operands, and the
    result."""
    types = tuple((shape, strides) for shape, strides, _ in windows)
    words = _direct_conv(machine, spec.settings, (spec.scaled, spec.shifted, spec.added), spec.relu, types)
    if words is None:
        return [host.CALL, host.STEP_WORDS, spec.number]
    return at_slots(words, _MARKS, spec.number, spec.places, windows)


def _direct_conv(machine: Machine, settings: tuple[tuple[int, ...], ...], optional: tuple[bool, bool, bool], relu: bool,
                 types: tuple[tuple[Shape, Shape], ...]) -> tuple[int, ...] | None:
    """The words with positions among the windows in place of slots; () when there is nothing to compute, None when the
    host does not take these strides or sizes."""
    (x, _), (weight, weight_strides), (result, _) = *types[:2], types[-1]
    if 0 in result:
        return ()
    if 0 in x or 0 in weight or any(not _lies(strides, dense(shape), shape)
                                    for shape, strides in (types[0], *types[2:])):
        return None
    outs, channels, kernel_y, kernel_x = weight
    taps = channels * kernel_y * kernel_x
    is_last = not _lies(weight_strides, dense(weight), weight)
    if is_last and not _lies(weight_strides, (taps, 1, kernel_x * channels, channels), weight):
        return None
    (stride_y, stride_x), (padding_y, padding_x), (dilation_y, dilation_x) = settings
    images, size_y, size_x, _ = x
    _, out_y, out_x, _ = result
    lanes, grain = machine.lanes, direct_conv.grain(machine)
    padded = padding_y > 0 or padding_x > 0
    wide = 4 * channels * size_x
    line = wide + 8 * channels * padding_x
    reach = (kernel_y - 1) * dilation_y + 1
    lines = max(1, min(out_y, (BAND // line - reach) // stride_y + 1, POSITIONS // out_x))
    bands = -(-out_y // lines)
    lines = -(-out_y // bands)  # bands of equal heights
    band_lines = (lines - 1) * stride_y + reach
    panels = -(-outs // (2 * lanes))
    scales = 4 * (align(taps, lanes) + 1) * 2 * lanes
    panel_bytes = 4 * (align(taps, lanes) + 3) * 2 * lanes
    places = align(8 * taps, 64)
    weights = align(places + 8 * (lines * out_x + 3 * grain), 64)
    at_input = weights + panels * panel_bytes
    scratch = at_input + (band_lines * line if padded else 0)
    bias, factors, shifts, addend = _positions(len(types), optional)
    words = _words_of_step(
        op=host.DIRECT_CONV, length=words_of(host.DirectConvStep), number=0, x=(0, 0), weight=(1, 0),
        bias=(bias, 0), factors=(factors, 0), shifts=(shifts, 0), addend=(addend, 0), result=(len(types) - 1, 0),
        least=least(relu), images=images, channels=channels, outs=outs, taps=taps, size_y=size_y,
        out_y=out_y, out_x=out_x, kernel_y=kernel_y, kernel_x=kernel_x, stride_y=stride_y, stride_x=stride_x,
        padding_y=padding_y, padding_x=padding_x, dilation_y=dilation_y, dilation_x=dilation_x, wide=wide, line=line,
        lines=lines, bands=bands, band_lines=band_lines, padded=int(padded), weights_last=int(is_last), lanes=lanes,
        grain=grain, function=host.CONV_LAST, turn=PACKED["f32"] + host.PACKED_TURN, panels=panels,
        panel_bytes=panel_bytes, scales=scales, places=places, weights=weights, input=at_input, scratch=scratch)
    return tuple(words)


def _positions(count: int, optional: tuple[bool, bool, bool]) -> tuple[int, int, int, int]:
    """Where bias, factors, shifts and addend are among `count` windows; -1: there is none."""
    present = (count - 3 > sum(optional), *optional)
    first, second, third, fourth = (2 + sum(present[:place]) if there else -1 for place, there in enumerate(present))
    return first, second, third, fourth


def _lies(strides: Shape, wanted: Shape, shape: Shape) -> bool:
    """Are these the strides, but for dims of size 1?"""
    return all(have == want or size == 1 for have, want, size in zip(strides, wanted, shape, strict=True))
