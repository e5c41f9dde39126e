"""Native bytecode encoder of grouped matrix products, products of groups of rows: the words that the host reads
(backend/cpu/routines/grouped_gemm.py), or a call of PyTorch.

    grouped(x [S, K], weights [E, K, N], ends [E])    -->    GROUPED, ..., ends, bytes from group to group and from row
        to row of each operand, the words of one group's product by packed panels, and those by the library

Where groups begin and end is data, so the host chooses for each group, by its rows, between the routine for few rows
and one of the two ways. Where panels are the faster one they are so from fewer rows on than of a product that stands
alone (f32, 8 groups of 256x1024, 8 rows each: 0.74 ms against 1.28; AMD Zen 4, one thread, 2026-11-22).
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ALONG_ROWS,
    ALONG_TERMS,
    GROUPED,
    GROUPED_FEW,
    LINE,
    GroupedStep,
    LibraryProduct,
    PackedProduct,
    Thin,
)
from anyshape.backend.cpu.bytecode.template import FULL, GroupedPiece, Kind, ProductPiece, WindowWords
from anyshape.backend.cpu.native.records import Array, copy_bytes, fill_zero, i64, maximum, new, size_of, words_of
from anyshape.backend.cpu.routines.encoding.product import (
    Matrix,
    ask,
    by_library,
    by_panels,
    by_vectors,
    encode_call,
    encode_head,
    find_thin,
    next_window,
)

GROUPED_WORDS = words_of(GroupedStep)
NEITHER = 2  # panels nor the library
# bytes of a thread's scratch for panels, as PANELS: groups are many and small, and the weights are packed in no time (8
# groups of 8192x256 @ 256x64 take as long with 768 KiB; AMD Zen, one thread, 2026-11-25)
GROUP_PANELS = 192 << 10
# of rows that are gathered for the library: how many bytes of a thread's scratch, and rows at least
ROWS_BYTES, LEAST_ROWS = 128 << 10, 16


def encode_grouped(piece: GroupedPiece, out: Array[i64]) -> int:
    """The words of a step; none when there is nothing to compute."""
    kind = piece.kind
    x = WindowWords(piece.windows)
    y = next_window(x)
    ends = next_window(y)
    order = next_window(ends)
    result = next_window(order) if piece.order else order
    for i in range(result.rank):
        if result.numbers[i] == 0:
            return 0
    if piece.order and order.numbers[1] != 1:
        return encode_call(piece.number, out)
    rank = result.rank
    rows = result.numbers[rank - 2]
    columns = result.numbers[rank - 1]
    depth = x.numbers[1]
    left = new(Matrix)
    right = new(Matrix)
    c = new(Matrix)
    set_matrix(left, x, rows, depth, x.numbers[2], x.numbers[3])
    set_matrix(right, y, depth, columns, y.numbers[2 * y.rank - 2], y.numbers[2 * y.rank - 1])
    set_matrix(c, result, rows, columns, result.numbers[2 * rank - 2], result.numbers[2 * rank - 1])
    step = GroupedStep(out)
    step.along = ALONG_TERMS if piece.of_terms else ALONG_ROWS
    by_us = encode_ways(piece, step, left, right, c)
    if by_us < 0:
        return by_us
    if by_us == NEITHER:
        return encode_call(piece.number, out)
    step.ours = by_us
    find_few(kind, step, left, right, c)
    if kind.f64:  # the words of the library's product still say the sizes
        copy_bytes(step.panels, step.library, size_of(LibraryProduct))
    place_groups(piece, step, x, y, result)
    item = kind.item
    step.op = GROUPED
    step.length = GROUPED_WORDS
    step.number = piece.number
    step.ends.slot = ends.slot
    step.ends.bytes = ends.offset * ends.item
    step.end_item = ends.item
    step.end_step = ends.numbers[1] * ends.item
    step.count = ends.numbers[0]
    step.order.slot = order.slot if piece.order else -1
    step.order.bytes = order.offset * order.item if piece.order else 0
    step.cells = x.numbers[0]
    step.row = x.numbers[2] * item
    step.element = x.numbers[3] * item
    step.apart = depth * item
    step.wide = 2 * kind.lanes
    step.lane = right.column * item
    at_once = maximum(LEAST_ROWS, ROWS_BYTES // maximum(depth * item, 1)) if piece.order else 0
    step.rows = at_once
    step.scratch = scratch_of(piece, step.panels, by_us, at_once * depth * item)
    return GROUPED_WORDS


def scratch_of(piece: GroupedPiece, panels: PackedProduct, by_us: int, gathered: int) -> int:
    """Bytes of a thread's scratch: of panels, and of rows that are gathered. gathered: bytes of these for the
    library."""
    if not by_us:
        return gathered
    rows = piece.kind.lanes * (panels.deep * panels.per_word * piece.kind.item + LINE)  # a vector's lanes of them
    return panels.scratch + (rows if piece.order else 0)


def set_matrix(matrix: Matrix, window: WindowWords, rows: int, columns: int, row: int, column: int) -> int:
    """One matrix of a window."""
    matrix.slot = window.slot
    matrix.bytes = window.offset * window.item
    matrix.item = window.item
    matrix.rows = rows
    matrix.columns = columns
    matrix.row = row
    matrix.column = column
    return 0


def encode_ways(piece: GroupedPiece, step: GroupedStep, left: Matrix, right: Matrix, c: Matrix) -> int:
    """One group's product by panels and by the library. 1: panels are taken; 0: the library is; below 0: see
    `ask`."""
    kind = piece.kind
    rows = c.rows
    leading = c.columns if rows == 1 else c.row
    head = new(ProductPiece)
    head.kind = kind
    head.alpha = kind.one
    none = new(Thin)
    none_there = new(Matrix)
    library = step.library
    length = 0
    if kind.library:
        gathered = new(Matrix)  # rows are gathered side by side for the library
        copy_bytes(gathered, left, size_of(Matrix))
        if piece.order:
            gathered.row = left.columns
            gathered.column = 1
        length = by_library(kind, gathered, right, c, leading, none, library)
    by_blas = length > 0
    if not by_blas:  # its words still say the sizes, and do the products with few rows
        by_vectors(none, library)
    encode_head(head, library, left, right, c, none_there, leading, 1, 0)
    library.length = 0
    if kind.f64:
        return 0 if by_blas else NEITHER
    by_panels(kind, left, right, c, GROUP_PANELS, step.panels)
    head.beta = kind.one
    encode_head(head, step.panels, left, right, c, none_there, leading, 1, 0)
    step.panels.length = 0
    if not by_blas:
        return 1
    long = rows >= kind.our_rows if piece.of_terms else left.columns >= kind.our_inner
    return ask(kind, FULL) if c.columns >= kind.our_columns and long else 0


def find_few(kind: Kind, step: GroupedStep, left: Matrix, right: Matrix, c: Matrix) -> int:
    """The routines for products of 1, 2, ... rows, as far as there are any."""
    rows = c.rows
    fill_zero(step.thin, 8 * GROUPED_FEW)
    found = 0
    most = 0 if step.along == ALONG_TERMS else GROUPED_FEW
    thin = new(Thin)
    while found < most:
        fill_zero(thin, size_of(Thin))
        left.rows = found + 1
        c.rows = found + 1
        find_thin(kind, left, right, c, thin)
        if thin.function == 0 or thin.second:
            break
        step.thin[found] = thin.function
        if found == 0:
            copy_bytes(step.library.thin, thin, size_of(Thin))
        found += 1
    left.rows = rows
    c.rows = rows
    step.most_few = found
    return 0


def place_groups(piece: GroupedPiece, step: GroupedStep, x: WindowWords, y: WindowWords, result: WindowWords) -> int:
    """Bytes from group to group, and along the dim that is cut into groups; in column-major terms y is A."""
    item = piece.kind.item
    first = y.numbers[y.rank] * item
    result_first = result.numbers[result.rank] * item
    of_rows = 0 if piece.of_terms else 1
    step.size = x.numbers[1] if piece.of_terms else result.numbers[0]
    step.a_group = first * of_rows
    step.b_group = 0
    step.c_group = 0 if of_rows else result_first
    step.a_along = 0 if of_rows else first
    step.b_along = x.numbers[3] * item
    if of_rows:
        step.b_along = 0 if piece.order else x.numbers[2] * item
    step.c_along = result_first * of_rows
    return 0
