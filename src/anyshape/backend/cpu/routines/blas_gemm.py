"""Matrix products by BLAS: matrix products and copies of the host, in the native subset; see
backend/cpu/interpreter.py."""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    BATCH,
    COPY_DIMS,
    COPY_INNER,
    COPY_ITEM,
    COPY_OUTER,
    COPY_RANK,
    COPY_SOURCE,
    COPY_TARGET,
    FUNCTIONS,
    GOMP_PARALLEL,
    LARGE_MATRIX,
    MATMUL_A,
    MATMUL_ALPHA,
    MATMUL_B,
    MATMUL_BATCH,
    MATMUL_BATCHES,
    MATMUL_BETA,
    MATMUL_BIAS,
    MATMUL_BIAS_COLUMN,
    MATMUL_BIAS_ROW,
    MATMUL_C,
    MATMUL_DIMS,
    MATMUL_FUNCTION,
    MATMUL_ITEM,
    MATMUL_K,
    MATMUL_LDA,
    MATMUL_LDB,
    MATMUL_LDC,
    MATMUL_M,
    MATMUL_N,
    MATMUL_RANK,
    MATMUL_THIN,
    MATMUL_THIN_COUNT,
    MATMUL_THIN_ELEMENT,
    MATMUL_THIN_RESULT,
    MATMUL_THIN_RESULT_STEP,
    MATMUL_THIN_ROWS,
    MATMUL_THIN_SECOND,
    MATMUL_THIN_STEP,
    MATMUL_THIN_VECTOR,
    MATMUL_TRANSPOSE_A,
    MATMUL_TRANSPOSE_B,
    PARALLEL_BYTES,
    PARALLEL_FLOPS,
    SLOTS,
    TEAM_SIZE,
    THIN_ROWS,
    THREAD_NUMBER,
    THREADS,
)
from anyshape.backend.cpu.native.compiler import (
    call,
    call_void,
    copy_bytes,
    fill_zero,
    load8,
    load16,
    load32,
    load64,
    maximum,
    minimum,
    set_word,
    store8,
    store16,
    store32,
    store64,
    word,
    words,
)
from anyshape.backend.cpu.routines.threads import fork


def address(block: int, place: int) -> int:
    """The address that the two words (slot, bytes) at `place` stand for."""
    return word(block, SLOTS + word(place, 0)) + word(place, 1)


def run_matmul(block: int, step: int) -> int:
    """A batch of matrix products: in parallel over the batch, over the rows of a matrix that meets few vectors, or
    inside the library."""
    data = words(4)
    threads = matmul_threads(block, step, data)
    if threads == 1:
        matmul_range(data, 0, word(step, MATMUL_BATCHES), 0, word(step, MATMUL_THIN_ROWS))
    elif threads > 1:
        fork(block, matmul_part, data, threads)
    return 0


def matmul_threads(block: int, step: int, data: int) -> int:
    """On how many threads such products are worth to run, 0 where there is nothing to do; writes to `data` (4 words)
    how they are shared out."""
    batches = word(step, MATMUL_BATCHES)
    m = word(step, MATMUL_M)
    n = word(step, MATMUL_N)
    if batches <= 0 or m <= 0 or n <= 0:
        return 0
    functions = word(block, FUNCTIONS)
    threads = minimum(word(block, THREADS), batches)
    cost = m * n * maximum(word(step, MATMUL_K), 1)
    set_word(data, 0, functions)
    set_word(data, 1, block)
    set_word(data, 2, step)
    rows = word(step, MATMUL_THIN_ROWS)
    thin = word(step, MATMUL_THIN)
    if thin != 0 and batches < word(block, THREADS):  # the matrix is what there is to share out
        threads = minimum(word(block, THREADS), (rows + THIN_ROWS - 1) // THIN_ROWS)
    elif thin == 0 and cost >= LARGE_MATRIX and batches < 4 * threads:  # the library shares out each product
        threads = 1
    set_word(data, 3, threads)
    if threads < 2 or word(functions, GOMP_PARALLEL) == 0 or cost * batches < PARALLEL_FLOPS:
        return 1
    return threads


def matmul_part(data: int) -> int:
    """What one thread does."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    matmul_share(data, number, call(word(functions, TEAM_SIZE)) & 4294967295)
    return 0


def matmul_share(data: int, number: int, team: int) -> int:
    """The share of thread `number`: of the batch, or of the rows of a matrix that meets few vectors."""
    step = word(data, 2)
    batches = word(step, MATMUL_BATCHES)
    rows = word(step, MATMUL_THIN_ROWS)
    if word(step, MATMUL_THIN) != 0 and batches < word(data, 3):
        begin = (rows * number // team + THIN_ROWS - 1) // THIN_ROWS * THIN_ROWS
        end = (rows * (number + 1) // team + THIN_ROWS - 1) // THIN_ROWS * THIN_ROWS
        matmul_range(data, 0, batches, minimum(begin, rows), minimum(end, rows))
        return 0
    matmul_range(data, batches * number // team, batches * (number + 1) // team, 0, rows)
    return 0


def matmul_range(data: int, begin: int, end: int, first_row: int, end_row: int) -> int:
    """The products begin..end-1 of the batch; of a matrix with few vectors these rows."""
    block = word(data, 1)
    step = word(data, 2)
    a_first = address(block, step + 8 * MATMUL_A)
    b_first = address(block, step + 8 * MATMUL_B)
    c_first = address(block, step + 8 * MATMUL_C)
    bias_first = 0
    if word(step, MATMUL_BIAS) >= 0:
        bias_first = address(block, step + 8 * MATMUL_BIAS)
    rank = word(step, MATMUL_RANK)
    places = words(192)  # BATCH addresses of A, of B and of C
    count = 0
    for index in range(begin, end):
        a = a_first
        b = b_first
        c = c_first
        bias = bias_first
        rest = index
        for back in range(rank):
            dim = step + 8 * (MATMUL_DIMS + 5 * (rank - 1 - back))
            size = word(dim, 0)
            position = rest % size
            rest = rest // size
            a += position * word(dim, 1)
            b += position * word(dim, 2)
            c += position * word(dim, 3)
            bias += position * word(dim, 4)
        if bias_first != 0:
            spread_bias(step, c, bias, first_row, end_row)
        set_word(places, count, a)
        set_word(places, BATCH + count, b)
        set_word(places, 2 * BATCH + count, c)
        count += 1
        if count == BATCH or index + 1 == end:
            multiply(word(data, 0), step, places, count, bias_first, first_row, end_row)
            count = 0
    return 0


def multiply(functions: int, step: int, places: int, count: int, bias: int, first_row: int, end_row: int) -> int:
    """The products of `count` pairs of matrices at `places`."""
    inner = word(step, MATMUL_K)
    batch = word(step, MATMUL_BATCH)
    sizes = words(2)
    set_word(sizes, 0, 1)
    set_word(sizes, 1, count)
    thin = word(step, MATMUL_THIN)
    if inner > 0 and batch != 0 and count > 1 and thin == 0:
        call_void(word(functions, batch), step + 8 * MATMUL_TRANSPOSE_A, step + 8 * MATMUL_TRANSPOSE_B,
                  step + 8 * MATMUL_M, step + 8 * MATMUL_N, step + 8 * MATMUL_K, step + 8 * MATMUL_ALPHA, places,
                  step + 8 * MATMUL_LDA, places + 8 * BATCH, step + 8 * MATMUL_LDB, step + 8 * MATMUL_BETA,
                  places + 16 * BATCH, step + 8 * MATMUL_LDC, sizes, sizes + 8, 1, 1)
        return 0
    for i in range(count):
        a = word(places, i)
        b = word(places, BATCH + i)
        c = word(places, 2 * BATCH + i)
        if inner > 0 and thin != 0:
            multiply_thin(functions, step, a, b, c, first_row, end_row)
        elif inner > 0:
            call_void(word(functions, word(step, MATMUL_FUNCTION)), step + 8 * MATMUL_TRANSPOSE_A,
                      step + 8 * MATMUL_TRANSPOSE_B, step + 8 * MATMUL_M, step + 8 * MATMUL_N, step + 8 * MATMUL_K,
                      step + 8 * MATMUL_ALPHA, a, step + 8 * MATMUL_LDA, b, step + 8 * MATMUL_LDB,
                      step + 8 * MATMUL_BETA, c, step + 8 * MATMUL_LDC, 1, 1)
        elif bias == 0:
            clear_matrix(step, c)
    return 0


def multiply_thin(functions: int, step: int, a: int, b: int, c: int, begin: int, end: int) -> int:
    """Rows begin..end-1 of a matrix times a few vectors."""
    matrix = b if word(step, MATMUL_THIN_SECOND) != 0 else a
    vectors = a if word(step, MATMUL_THIN_SECOND) != 0 else b
    places = words(16)
    for i in range(8):
        vector = minimum(i, word(step, MATMUL_THIN_COUNT) - 1)
        set_word(places, i, vectors + vector * word(step, MATMUL_THIN_VECTOR))
        set_word(places, 8 + i, c + vector * word(step, MATMUL_THIN_RESULT))
    call_void(word(functions, word(step, MATMUL_THIN)), matrix, word(step, MATMUL_THIN_STEP), word(step, MATMUL_K),
              begin, end, places, word(step, MATMUL_THIN_ELEMENT), word(step, MATMUL_THIN_RESULT_STEP),
              step + 8 * MATMUL_ALPHA)
    return 0


def clear_matrix(step: int, c: int) -> int:
    """A product over no terms is zero."""
    item = word(step, MATMUL_ITEM)
    for row in range(word(step, MATMUL_N)):
        fill_zero(c + row * word(step, MATMUL_LDC) * item, word(step, MATMUL_M) * item)
    return 0


def spread_bias(step: int, c: int, bias: int, first: int, end: int) -> int:
    """Writes the (broadcast) addend into C, to which the product is added; of a matrix with few vectors, where its
    rows first..end-1 give results."""
    item = word(step, MATMUL_ITEM)
    first_column = 0
    columns = word(step, MATMUL_M)
    first_row = 0
    end_row = word(step, MATMUL_N)
    if word(step, MATMUL_THIN) != 0:
        if word(step, MATMUL_THIN_SECOND) != 0:
            first_row = first
            end_row = end
        else:
            first_column = first
            columns = end - first
    inner = word(step, MATMUL_BIAS_COLUMN)
    for row in range(first_row, end_row):
        target = c + row * word(step, MATMUL_LDC) * item + first_column * item
        source = bias + row * word(step, MATMUL_BIAS_ROW) + first_column * inner
        if inner == item and source != target:
            copy_bytes(target, source, columns * item)
        elif inner != item:
            copy_run(target, source, columns, item, inner, item)
    return 0


def copy_run(target: int, source: int, count: int, target_stride: int, source_stride: int, item: int) -> int:
    """`count` elements of `item` bytes, each stride in bytes."""
    if item == 4:
        for _ in range(count):
            store32(target, load32(source))
            target += target_stride
            source += source_stride
    elif item == 8:
        for _ in range(count):
            store64(target, load64(source))
            target += target_stride
            source += source_stride
    elif item == 2:
        for _ in range(count):
            store16(target, load16(source))
            target += target_stride
            source += source_stride
    elif item == 1:
        for _ in range(count):
            store8(target, load8(source))
            target += target_stride
            source += source_stride
    else:
        for _ in range(count):
            copy_bytes(target, source, item)
            target += target_stride
            source += source_stride
    return 0


def run_copy(block: int, step: int) -> int:
    """A strided copy; large ones in parallel over the inner runs."""
    outer = word(step, COPY_OUTER)
    functions = word(block, FUNCTIONS)
    data = words(3)
    set_word(data, 0, functions)
    set_word(data, 1, block)
    set_word(data, 2, step)
    size = outer * word(step, COPY_INNER) * word(step, COPY_ITEM)
    threads = minimum(minimum(word(block, THREADS), outer), size // PARALLEL_BYTES)
    if threads < 2 or word(functions, GOMP_PARALLEL) == 0:
        copy_range(data, 0, outer)
        return 0
    fork(block, copy_part, data, threads)
    return 0


def copy_part(data: int) -> int:
    """One thread's share of the runs."""
    functions = word(data, 0)
    number = call(word(functions, THREAD_NUMBER)) & 4294967295
    team = call(word(functions, TEAM_SIZE)) & 4294967295
    outer = word(word(data, 2), COPY_OUTER)
    copy_range(data, outer * number // team, outer * (number + 1) // team)
    return 0


def copy_range(data: int, begin: int, end: int) -> int:
    """The inner runs begin..end-1."""
    block = word(data, 1)
    step = word(data, 2)
    item = word(step, COPY_ITEM)
    count = word(step, COPY_INNER)
    target_stride = word(step, COPY_INNER + 1)
    source_stride = word(step, COPY_INNER + 2)
    target_first = address(block, step + 8 * COPY_TARGET)
    source_first = address(block, step + 8 * COPY_SOURCE)
    rank = word(step, COPY_RANK)
    for index in range(begin, end):
        target = target_first
        source = source_first
        rest = index
        for back in range(rank):
            dim = step + 8 * (COPY_DIMS + 3 * (rank - 1 - back))
            position = rest % word(dim, 0)
            rest = rest // word(dim, 0)
            target += position * word(dim, 1)
            source += position * word(dim, 2)
        if target_stride == item and source_stride == item:
            copy_bytes(target, source, count * item)
        else:
            copy_run(target, source, count, target_stride, source_stride, item)
    return 0


LIBRARY_ROUTINES = (address, run_matmul, matmul_threads, matmul_part, matmul_share, matmul_range, multiply,
                    multiply_thin, clear_matrix, spread_bias, copy_run, run_copy, copy_part, copy_range)
