"""Matrix products by BLAS: matrix products and copies of the host, in the native subset; see
backend/cpu/interpreter.py."""
from __future__ import annotations

from typing import Annotated

from anyshape.backend.cpu.bytecode.format import (
    BATCH,
    COPY_BLOCK,
    LARGE_MATRIX,
    PARALLEL_BYTES,
    PARALLEL_FLOPS,
    SHORT_RUN,
    THIN_ROWS,
    CallBlock,
    CopyStepWords,
    Functions,
    LibraryProduct,
    Place,
)
from anyshape.backend.cpu.native.records import (
    Array,
    Inline,
    Struct,
    array_at,
    call_void,
    copy_bytes,
    fill_zero,
    i64,
    load8,
    load16,
    load32,
    load64,
    maximum,
    minimum,
    new,
    store8,
    store16,
    store32,
    store64,
    tail,
    words,
)
from anyshape.backend.cpu.routines.threads import parallel_for, share


class LibraryWork(Struct):
    """What the threads of a product by the library share; `threads`: on how many it is worth to run."""

    functions: Functions
    block: CallBlock
    step: LibraryProduct
    threads: i64


class CopyWork(Struct):
    """What the threads of a copy share."""

    block: CallBlock
    step: CopyStepWords


class Matrices(Struct):
    """Addresses of matrices of A, of B and of C."""

    a: Annotated[Array[i64], Inline(BATCH)]
    b: Annotated[Array[i64], Inline(BATCH)]
    c: Annotated[Array[i64], Inline(BATCH)]


def address(block: CallBlock, place: Place) -> int:
    """The address that the two words (slot, bytes) at `place` stand for."""
    return block.slots[place.slot] + place.bytes


def entry_of(functions: Functions, number: int) -> Array[i64]:
    """The table of functions from an entry on that a step names."""
    return tail(array_at(i64, functions), number)


def run_matmul(block: CallBlock, step: LibraryProduct) -> int:
    """A batch of matrix products: in parallel over the batch, over the rows of a matrix that meets few vectors, or
    inside the library."""
    data = new(LibraryWork)
    threads = matmul_threads(block, step, data)
    if threads > 0:
        parallel_for(block, matmul_share, data, threads)
    return 0


def matmul_threads(block: CallBlock, step: LibraryProduct, data: LibraryWork) -> int:
    """On how many threads such products are worth to run, 0 where there is nothing to do; writes to `data` how
    they are shared out."""
    batches = step.batches
    m = step.m
    n = step.n
    if batches <= 0 or m <= 0 or n <= 0:
        return 0
    functions = block.functions
    threads = minimum(block.threads, batches)
    cost = m * n * maximum(step.k, 1)
    data.functions = functions
    data.block = block
    data.step = step
    rows = step.thin.rows
    thin = step.thin.function
    if thin != 0 and batches < block.threads:  # the matrix is what there is to share out
        threads = minimum(block.threads, (rows + THIN_ROWS - 1) // THIN_ROWS)
    elif thin == 0 and cost >= LARGE_MATRIX and batches < 4 * threads:  # the library shares out each product
        threads = 1
    data.threads = threads
    if threads < 2 or functions.gomp_parallel == 0 or cost * batches < PARALLEL_FLOPS:
        return 1
    return threads


def matmul_share(data: LibraryWork, number: int, team: int) -> int:
    """The share of thread `number`: of the batch, or of the rows of a matrix that meets few vectors."""
    step = data.step
    batches = step.batches
    rows = step.thin.rows
    if step.thin.function != 0 and batches < data.threads:
        begin = (share(rows, number, team) + THIN_ROWS - 1) // THIN_ROWS * THIN_ROWS
        end = (share(rows, number + 1, team) + THIN_ROWS - 1) // THIN_ROWS * THIN_ROWS
        matmul_range(data, 0, batches, minimum(begin, rows), minimum(end, rows))
        return 0
    matmul_range(data, share(batches, number, team), share(batches, number + 1, team), 0, rows)
    return 0


def matmul_range(data: LibraryWork, begin: int, end: int, first_row: int, end_row: int) -> int:
    """The products begin..end-1 of the batch; of a matrix with few vectors these rows."""
    block = data.block
    step = data.step
    a_first = address(block, step.a)
    b_first = address(block, step.b)
    c_first = address(block, step.c)
    bias_first = 0
    if step.bias.slot >= 0:
        bias_first = address(block, step.bias)
    rank = step.rank
    places = new(Matrices)
    count = 0
    for index in range(begin, end):
        a = a_first
        b = b_first
        c = c_first
        bias = bias_first
        rest = index
        for back in range(rank):
            dim = step.dims[rank - 1 - back]
            size = dim.size
            position = rest % size
            rest = rest // size
            a += position * dim.steps[0]
            b += position * dim.steps[1]
            c += position * dim.steps[2]
            bias += position * dim.steps[3]
        if bias_first != 0:
            spread_bias(step, c, bias, first_row, end_row)
        places.a[count] = a
        places.b[count] = b
        places.c[count] = c
        count += 1
        if count == BATCH or index + 1 == end:
            multiply(data.functions, step, places, count, bias_first, first_row, end_row)
            count = 0
    return 0


def multiply(functions: Functions, step: LibraryProduct, places: Matrices, count: int, bias: int, first_row: int,
             end_row: int) -> int:
    """The products of `count` pairs of matrices at `places`."""
    inner = step.k
    batch = step.batch
    sizes = words(2)
    sizes[0] = 1
    sizes[1] = count
    thin = step.thin.function
    if inner > 0 and batch != 0 and count > 1 and thin == 0:
        call_void(entry_of(functions, batch)[0], step + LibraryProduct.transpose_a, step + LibraryProduct.transpose_b,
                  step + LibraryProduct.m, step + LibraryProduct.n, step + LibraryProduct.k,
                  step + LibraryProduct.alpha, places.a, step + LibraryProduct.lda, places.b,
                  step + LibraryProduct.ldb, step + LibraryProduct.beta, places.c, step + LibraryProduct.ldc,
                  sizes, tail(sizes, 1), 1, 1)
        return 0
    for i in range(count):
        a = places.a[i]
        b = places.b[i]
        c = places.c[i]
        if inner > 0 and thin != 0:
            multiply_thin(functions, step, a, b, c, first_row, end_row)
        elif inner > 0:
            call_void(entry_of(functions, step.function)[0], step + LibraryProduct.transpose_a,
                      step + LibraryProduct.transpose_b, step + LibraryProduct.m, step + LibraryProduct.n,
                      step + LibraryProduct.k, step + LibraryProduct.alpha, a, step + LibraryProduct.lda, b,
                      step + LibraryProduct.ldb, step + LibraryProduct.beta, c, step + LibraryProduct.ldc, 1, 1)
        elif bias == 0:
            clear_matrix(step, c)
    return 0


def multiply_thin(functions: Functions, step: LibraryProduct, a: int, b: int, c: int, begin: int, end: int) -> int:
    """Rows begin..end-1 of a matrix times a few vectors."""
    matrix = b if step.thin.second != 0 else a
    vectors = a if step.thin.second != 0 else b
    places = words(16)
    for i in range(8):
        vector = minimum(i, step.thin.count - 1)
        places[i] = vectors + vector * step.thin.vector
        places[8 + i] = c + vector * step.thin.result
    call_void(entry_of(functions, step.thin.function)[0], matrix, step.thin.step, step.k,
              begin, end, places, step.thin.element, step.thin.result_step,
              step + LibraryProduct.alpha)
    return 0


def clear_matrix(step: LibraryProduct, c: int) -> int:
    """A product over no terms is zero."""
    item = step.item
    for row in range(step.n):
        fill_zero(c + row * step.ldc * item, step.m * item)
    return 0


def spread_bias(step: LibraryProduct, c: int, bias: int, first: int, end: int) -> int:
    """Writes the (broadcast) addend into C, to which the product is added; of a matrix with few vectors, where its
    rows first..end-1 give results."""
    item = step.item
    first_column = 0
    columns = step.m
    first_row = 0
    end_row = step.n
    if step.thin.function != 0:
        if step.thin.second != 0:
            first_row = first
            end_row = end
        else:
            first_column = first
            columns = end - first
    inner = step.bias_column
    for row in range(first_row, end_row):
        target = c + row * step.ldc * item + first_column * item
        source = bias + row * step.bias_row + first_column * inner
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


def run_copy(block: CallBlock, step: CopyStepWords) -> int:
    """A strided copy; large ones in parallel over the inner runs."""
    outer = step.outer
    data = new(CopyWork)
    data.block = block
    data.step = step
    size = outer * step.inner.size * step.item
    threads = minimum(minimum(block.threads, outer), size // PARALLEL_BYTES)
    return parallel_for(block, copy_share, data, threads)


def copy_share(data: CopyWork, number: int, team: int) -> int:
    """The share of thread `number` of the runs."""
    outer = data.step.outer
    return copy_range(data, share(outer, number, team), share(outer, number + 1, team))


def copy_range(data: CopyWork, begin: int, end: int) -> int:
    """The inner runs begin..end-1."""
    block = data.block
    step = data.step
    item = step.item
    count = step.inner.size
    target_stride = step.inner.target
    source_stride = step.inner.source
    target_first = address(block, step.target)
    source_first = address(block, step.source)
    rank = step.rank
    whole = 1 if target_stride == item and source_stride == item else 0
    index = begin
    while index < end:
        target = target_first
        source = source_first
        rest = index
        for back in range(rank):
            dim = step.dims[rank - 1 - back]
            position = rest % dim.size
            rest = rest // dim.size
            target += position * dim.target
            source += position * dim.source
        if whole == 0 and rank > 0 and count <= SHORT_RUN:  # the few channels of an image: along its pixels
            last = step.dims[rank - 1]
            pixels = minimum(minimum(end - index, last.size - index % last.size), COPY_BLOCK)
            for k in range(count):
                copy_run(target + k * target_stride, source + k * source_stride, pixels, last.target, last.source, item)
            index += pixels
            continue
        index += 1
        if target_stride == item and source_stride == item:
            copy_bytes(target, source, count * item)
        else:
            copy_run(target, source, count, target_stride, source_stride, item)
    return 0
