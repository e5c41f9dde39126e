"""Native bytecode encoder of matrix products: which routine does a product of such windows, and its words.

`c = alpha * (a @ b) + beta * addend`, batched over leading dims, becomes a product of column-major matrices by BLAS, of
a matrix and few vectors, by our packed panels, or a call of PyTorch where no routine takes the strides. Where it
depends on a question that the autotuner has not answered, the result is below 0 (`ask`).
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    CALL,
    F32,
    MATMUL,
    PACKED_GROUP,
    PACKED_PAD,
    PLAIN,
    PRODUCT,
    STEP_WORDS,
    TURNED,
    Dim,
    LibraryProduct,
    PackedProduct,
    ProductStep,
    Thin,
)
from anyshape.backend.cpu.bytecode.products import (
    DEEP,
    DEEP_HALF,
    FEW_ROWS,
    MANY_BYTES,
    MANY_INNER,
    MANY_SIDE,
    PANELS,
    SMALL_MATRIX,
    SUMS,
    TILE_PANELS,
    WHOLE,
)
from anyshape.backend.cpu.bytecode.template import (
    FEW,
    FULL,
    MANY,
    MOST_DIMS,
    OF_DTYPE,
    OVER_PANELS,
    QUESTIONS,
    THIN_COUNTS,
    THIN_ONES,
    Kind,
    ProductPiece,
    WindowWords,
)
from anyshape.backend.cpu.native.records import (
    Array,
    Struct,
    copy_bytes,
    fill_zero,
    i64,
    maximum,
    minimum,
    new,
    size_of,
    tail,
    words,
    words_of,
)
from anyshape.ir.panels import PANEL, WORD

TOO_LARGE = 1 << 31  # sizes that BLAS takes are below
DIM_WORDS, LIBRARY_WORDS, PACKED_WORDS = map(words_of, (Dim, LibraryProduct, PackedProduct))
LOOP = 1 + 4  # words of a batch dim: its size, and the strides of a, b, c and the addend


class Matrix(Struct):
    """A batch of matrices, in elements; item: bytes of one; batch: strides of the batch dims."""

    slot: i64
    bytes: i64
    item: i64
    rows: i64
    columns: i64
    row: i64
    column: i64
    batch: Array[i64]


class Loops(Struct):
    """Batch dims, `LOOP` words each, and how many there are."""

    count: i64
    dims: Array[i64]


def ask(kind: Kind, question: int) -> int:
    """The answer to a question; below 0, and which question it is, where nobody has asked."""
    answer = kind.answers[question]
    return answer if answer >= 0 else -1 - (QUESTIONS * kind.number + question)


def rounded(size: int, to: int) -> int:
    """The size up to a multiple."""
    return (size + (to - 1)) // to * to


def encode_call(number: int, out: Array[i64]) -> int:
    """The words of a step that PyTorch does."""
    out[0] = CALL
    out[1] = STEP_WORDS
    out[2] = number
    return STEP_WORDS


def next_window(window: WindowWords) -> WindowWords:
    """What follows a window."""
    return WindowWords(tail(window.numbers, 2 * window.rank))


def take_matrix(result: Matrix, window: WindowWords, sizes: Array[i64], strides: Array[i64], rank: int, one_row: int,
                one_column: int, batch: Array[i64], dims: int) -> int:
    """The matrices of a window, for each of the batch; of vectors, matrices of one row or one column. What the batch
    repeats has the stride 0."""
    result.slot = window.slot
    result.bytes = window.offset * window.item
    result.item = window.item
    result.rows = 1
    result.row = 0
    result.columns = 1
    result.column = 0
    rest = rank
    if not one_column:
        rest -= 1
        result.columns = sizes[rest]
        result.column = strides[rest]
    if not one_row:
        rest -= 1
        result.rows = sizes[rest]
        result.row = strides[rest]
    spread_strides(sizes, strides, rest, batch, dims, result.batch)
    return 0


def spread_strides(sizes: Array[i64], strides: Array[i64], rank: int, wanted: Array[i64], dims: int,
                   result: Array[i64]) -> int:
    """Strides of an operand seen at the broadcast sizes `wanted`."""
    lead = dims - rank
    for i in range(dims):
        stride = 0
        if i >= lead:
            stride = 0 if sizes[i - lead] == 1 and wanted[i] != 1 else strides[i - lead]
        result[i] = stride
    return 0


def turn(matrix: Matrix) -> int:
    """The transposed matrix."""
    rows = matrix.rows
    row = matrix.row
    matrix.rows = matrix.columns
    matrix.row = matrix.column
    matrix.columns = rows
    matrix.column = row
    return 0


def leading_of(matrix: Matrix) -> int:
    """The leading dim with which the library reads a matrix; below 0: transposed; 0: it cannot."""
    rows = matrix.rows
    columns = matrix.columns
    if (matrix.column == 1 or columns <= 1) and (matrix.row >= maximum(columns, 1) or rows <= 1):
        return matrix.row if rows > 1 else maximum(columns, 1)
    if (matrix.row == 1 or rows <= 1) and (matrix.column >= maximum(rows, 1) or columns <= 1):
        return 0 - (matrix.column if columns > 1 else maximum(rows, 1))
    return 0


def encode_product(piece: ProductPiece, out: Array[i64]) -> int:
    """The words of a product; how many; none when there is nothing to compute."""
    kind = piece.kind
    if kind.half:
        does = ask(kind, OF_DTYPE)
        if does <= 0:
            return encode_call(piece.number, out) if does == 0 else does
    left_window = WindowWords(piece.windows)
    right_window = next_window(left_window)
    result_window = next_window(right_window)
    sizes = result_window.numbers
    rank = result_window.rank
    for i in range(rank):
        if sizes[i] == 0:
            return 0
    if piece.addend and piece.weighted and not kind.half and left_window.numbers[left_window.rank - 1] == 0:
        return encode_call(piece.number, out)
    one_row = left_window.rank == 1
    one_column = right_window.rank == 1
    dims = rank - 2 + one_row + one_column
    if piece.panels and not are_panels(left_window, right_window, result_window):
        return encode_call(piece.number, out)
    room = words(4 * MOST_DIMS)
    a = new(Matrix)
    b = new(Matrix)
    c = new(Matrix)
    addend = new(Matrix)
    a.batch = room
    b.batch = tail(room, MOST_DIMS)
    c.batch = tail(room, 2 * MOST_DIMS)
    addend.batch = tail(room, 3 * MOST_DIMS)
    take_matrix(a, left_window, left_window.numbers, tail(left_window.numbers, left_window.rank), left_window.rank,
                one_row, 0, sizes, dims)
    if piece.panels:
        b.slot = right_window.slot
        b.bytes = right_window.offset * right_window.item
        b.item = right_window.item
        b.rows = a.columns
        b.columns = sizes[rank - 1]
        b.row = right_window.numbers[5]
        b.column = right_window.numbers[4]
        fill_zero(b.batch, 8 * dims)
    else:
        take_matrix(b, right_window, right_window.numbers, tail(right_window.numbers, right_window.rank),
                    right_window.rank, 0, one_column, sizes, dims)
    take_matrix(c, result_window, sizes, tail(sizes, rank), rank, one_row, one_column, sizes, dims)
    if piece.addend:
        window = next_window(result_window)
        spread = words(MOST_DIMS)
        spread_strides(window.numbers, tail(window.numbers, window.rank), window.rank, sizes, rank, spread)
        take_matrix(addend, window, sizes, spread, rank, one_row, one_column, sizes, dims)
    length = encode_matrices(piece, a, b, c, addend, sizes, dims, out)
    if piece.panels and length > 0 and out[0] == PRODUCT:
        PackedProduct(out).a_item = 0
    return length


def are_panels(left: WindowWords, right: WindowWords, result: WindowWords) -> int:
    """Whether these are matrices, panels of one that goes with them, and their products."""
    if left.rank < 2 or right.rank != 4 or result.rank != left.rank:
        return 0
    of = right.numbers  # sizes, then strides
    word = WORD // right.item
    last = left.rank - 1
    return (of[2] == PANEL and of[3] == word and of[6] == word and of[7] == 1 and of[5] >= PANEL * word
            and of[4] >= of[5] * of[1] and left.numbers[last] <= word * of[1]
            and result.numbers[last] <= PANEL * of[0])


def encode_matrices(piece: ProductPiece, a: Matrix, b: Matrix, c: Matrix, addend: Matrix, batch: Array[i64], dims: int,
                    out: Array[i64]) -> int:
    """The words of a product of matrices, for each of the batch."""
    kind = piece.kind
    order = leading_of(c)
    if order == 0 or (order < 0 and piece.panels):
        return encode_call(piece.number, out)
    left = a
    right = b
    if order < 0:  # the result is column-major: compute its transpose
        turn(a)
        turn(b)
        turn(c)
        turn(addend)
        left = b
        right = a
    loops = new(Loops)
    table = words(LOOP * MOST_DIMS)
    loops.dims = table
    batches = taller(left, right, c, addend, batch, dims, loops)
    leading = leading_of(c)
    if leading <= 0 or (piece.addend and addend.column != 1 and c.item != addend.item):
        return encode_call(piece.number, out)  # such an addend is written into the result first
    thin = new(Thin)
    if piece.panels:
        find_over_panels(kind, left, right, c, thin)
    else:
        find_thin(kind, left, right, c, thin)
    if thin.function != 0 and not kind.half and not piece.panels:
        ours = ask(kind, THIN_ONES)
        if ours < 0:
            return ours
        if ours == 0:
            fill_zero(thin, size_of(Thin))
    plain = not kind.f64 and left.columns > 0 and not piece.scaled and not (piece.addend and piece.weighted)
    by_us = 0
    if not kind.half and plain and thin.function == 0 and not piece.panels:
        by_us = ours_do(kind, c.rows, c.columns, left.columns, batches)
        if by_us < 0:
            return by_us
    length = 0
    head = ProductStep(out)
    if kind.library and not by_us and not piece.panels:
        length = by_library(kind, left, right, c, leading, thin, LibraryProduct(out))
    if length == 0 and thin.function != 0 and (kind.half or piece.panels or (kind.f32 and not kind.library)):
        length = by_vectors(thin, LibraryProduct(out))
    if length == 0 and (plain or kind.half):
        length = by_panels(kind, left, right, c, PANELS, PackedProduct(out))
    if length == 0:
        return encode_call(piece.number, out)
    encode_head(piece, head, left, right, c, addend, leading, batches, loops.count)
    if head.op == PRODUCT and kind.f32:
        head.beta = kind.one  # to the sums of the blocks before
    head.length = length + place_dims(loops, left, right, c, kind.item, tail(out, length))
    return head.length


def place_dims(loops: Loops, left: Matrix, right: Matrix, c: Matrix, item: int, out: Array[i64]) -> int:
    """The words of the batch dims. item: bytes of an element of the addend."""
    for k in range(loops.count):
        loop = tail(loops.dims, LOOP * k)
        dim = Dim(tail(out, DIM_WORDS * k))
        dim.size = loop[0]
        dim.steps[0] = loop[2] * right.item
        dim.steps[1] = loop[1] * left.item
        dim.steps[2] = loop[3] * c.item
        dim.steps[3] = loop[4] * item
    return DIM_WORDS * loops.count


def taller(left: Matrix, right: Matrix, c: Matrix, addend: Matrix, batch: Array[i64], dims: int, loops: Loops) -> int:
    """The batch dims that are left where a batch of left operands against one right operand is one taller matrix, and
    how many products they are."""
    table = loops.dims
    count = 0
    for i in range(dims):
        if batch[i] != 1:
            loop = tail(table, LOOP * count)
            loop[0] = batch[i]
            loop[1] = left.batch[i]
            loop[2] = right.batch[i]
            loop[3] = c.batch[i]
            loop[4] = addend.batch[i]
            count += 1
    rows = c.rows
    left_row = left.row
    c_row = c.row
    addend_row = addend.row
    while count > 0:
        last = tail(table, LOOP * (count - 1))
        if last[2] != 0:
            break
        if rows > 1 and (last[1] != rows * left_row or last[3] != rows * c_row or last[4] != rows * addend_row):
            break
        if rows <= 1:
            left_row = last[1]
            c_row = last[3]
            addend_row = last[4]
        rows *= last[0]
        count -= 1
    if rows != c.rows or left_row != left.row or c_row != c.row:
        left.rows = rows
        left.row = left_row
        c.rows = rows
        c.row = c_row
    addend.row = addend_row
    loops.count = count
    batches = 1
    for k in range(count):
        batches *= table[LOOP * k]
    return batches


def encode_head(piece: ProductPiece, step: ProductStep, left: Matrix, right: Matrix, c: Matrix, addend: Matrix,
                leading: int, batches: int, rank: int) -> int:
    """What all products have in common; in column-major terms our right operand is A."""
    kind = piece.kind
    step.number = piece.number
    step.m = c.columns
    step.n = c.rows
    step.k = left.columns
    step.ldc = leading
    step.alpha = piece.alpha
    step.beta = piece.beta
    step.item = kind.item
    step.a.slot = right.slot
    step.a.bytes = right.bytes
    step.b.slot = left.slot
    step.b.bytes = left.bytes
    step.c.slot = c.slot
    step.c.bytes = c.bytes
    step.bias.slot = addend.slot if piece.addend else -1
    step.bias.bytes = addend.bytes
    step.bias_row = addend.row * kind.item
    step.bias_column = addend.column * kind.item
    step.batches = batches
    step.rank = rank
    return 0


def ours_do(kind: Kind, rows: int, columns: int, inner: int, batches: int) -> int:
    """Whether our own routine does a product of f32; below 0: see `ask`."""
    if rows >= kind.our_rows and columns >= kind.our_columns and inner >= kind.our_inner:
        return ask(kind, FULL if rows >= FEW_ROWS else FEW)
    moved = F32 * batches * (rows * inner + inner * columns + rows * columns)
    if batches > 1 and minimum(rows, columns) >= MANY_SIDE and inner >= MANY_INNER and moved >= MANY_BYTES:
        return ask(kind, MANY)
    return 0


def by_library(kind: Kind, left: Matrix, right: Matrix, c: Matrix, leading: int, thin: Thin,
               step: LibraryProduct) -> int:
    """A product by BLAS: the words before its batch dims; 0 when it cannot take these strides."""
    left_order = leading_of(left)
    right_order = leading_of(right)
    if left_order == 0 or right_order == 0:
        return 0
    lda = right_order if right_order > 0 else 0 - right_order
    ldb = left_order if left_order > 0 else 0 - left_order
    largest = maximum(maximum(c.columns, c.rows), maximum(left.columns, leading))
    if maximum(largest, maximum(lda, ldb)) >= TOO_LARGE:
        return 0
    step.op = MATMUL
    step.function = kind.product
    step.transpose_a = PLAIN if right_order > 0 else TURNED
    step.transpose_b = PLAIN if left_order > 0 else TURNED
    step.lda = lda
    step.ldb = ldb
    copy_bytes(step.thin, thin, size_of(Thin))
    step.batch = kind.many if c.columns * c.rows * left.columns < SMALL_MATRIX else 0
    return LIBRARY_WORDS


def by_vectors(thin: Thin, step: LibraryProduct) -> int:
    """A product with few vectors that the library is not needed for: the words before its batch dims."""
    step.op = MATMUL
    step.function = 0
    step.transpose_a = 0
    step.transpose_b = 0
    step.lda = 0
    step.ldb = 0
    copy_bytes(step.thin, thin, size_of(Thin))
    step.batch = 0
    return LIBRARY_WORDS


def by_panels(kind: Kind, left: Matrix, right: Matrix, c: Matrix, most_bytes: int, step: PackedProduct) -> int:
    """A product by packed panels (backend/cpu/routines/packed_gemm.py): the words before its batch dims. A block of
    rows, and of columns, is whole panels; a block of k is whole vectors of words. most_bytes: of a thread's scratch,
    where no whole tiles are multiplied."""
    inner = maximum((left.columns + kind.per_word - 1) // kind.per_word, 1)
    high = 3 * kind.grain
    wide = 2 * kind.lanes
    most = DEEP if kind.f32 else WHOLE
    deep = DEEP if kind.f32 else DEEP_HALF
    if inner <= most:
        deep = rounded(inner, kind.lanes)
    waits = inner > most and not kind.f32  # sums of the rows and columns of a block wait for the next one
    columns = minimum(SUMS, rounded(c.columns, wide)) if waits else wide
    row = 4 * deep + (4 * columns if waits else 0)
    room = TILE_PANELS if kind.tiles else most_bytes
    group = PACKED_GROUP if kind.tiles else 1
    most_rows = maximum((room - 4 * wide * (group * deep + high)) // row // high * high, high)
    blocks = (c.rows + most_rows - 1) // most_rows
    rows = minimum(rounded((c.rows + blocks - 1) // blocks, high), rounded(c.rows, high))
    sums = rows * columns if waits else high * wide
    step.op = PRODUCT
    step.function = kind.packed
    step.a_lane = right.column * right.item
    step.b_lane = left.row * left.item
    step.a_inner = right.row * right.item
    step.b_inner = left.column * left.item
    step.lanes = kind.lanes
    step.grain = kind.grain
    step.per_word = kind.per_word
    step.rows = rows
    step.columns = columns
    step.deep = deep
    step.a_item = right.item
    step.b_item = left.item
    step.c_item = c.item
    step.scratch = 4 * (rows * deep + group * wide * deep + sums) + PACKED_PAD * (rows // high + group)
    return PACKED_WORDS


def find_thin(kind: Kind, left: Matrix, right: Matrix, c: Matrix, thin: Thin) -> int:
    """A product of a matrix with few vectors: the rows of the left operand, or the columns of the right one. It is
    result (vectors x results) = vectors (vectors x k) times matrix (k x results)."""
    second = c.rows > c.columns  # in the library's terms, where our left operand is operand B
    count = c.columns if second else c.rows
    if left.columns == 0 or count > kind.most_vectors:
        return 0
    matrix = left if second else right
    vectors = right if second else left
    row = matrix.column if second else matrix.row
    column = matrix.row if second else matrix.column
    vector = vectors.column if second else vectors.row
    element = vectors.row if second else vectors.column
    results = c.rows if second else c.columns
    result = c.column if second else c.row
    result_step = c.row if second else c.column
    count = vectors.columns if second else vectors.rows
    way = 0
    step = column
    most = kind.most_dot
    if row != 1 or element != 1:
        if column != 1 or (result_step != 1 and results != 1):
            return 0
        way = 1
        step = row
        most = kind.most_spread
    if count > most or vectors.item != kind.item or c.item != kind.item:
        return 0
    thin.function = kind.thin[THIN_COUNTS * (2 * way + (matrix.item != kind.item)) + count]
    if thin.function == 0:
        return 0
    thin.second = second
    thin.rows = results
    thin.step = step * matrix.item
    thin.count = count
    thin.vector = vector * kind.item
    thin.element = element * kind.item
    thin.result = result * kind.item
    thin.result_step = result_step * kind.item
    return 0


def find_over_panels(kind: Kind, left: Matrix, right: Matrix, c: Matrix, thin: Thin) -> int:
    """A product of few rows with a matrix that lies in panels (backend/cpu/microkernels/gemv_panels.py)."""
    if c.rows >= THIN_COUNTS or left.columns == 0 or (left.column != 1 and left.columns != 1):
        return 0
    thin.function = kind.thin[THIN_COUNTS * OVER_PANELS + c.rows]
    thin.second = 0
    thin.rows = c.columns
    thin.step = right.column * right.item
    thin.count = c.rows
    thin.vector = left.row * left.item
    thin.element = left.item
    thin.result = c.row * c.item
    thin.result_step = c.item
    return 0
