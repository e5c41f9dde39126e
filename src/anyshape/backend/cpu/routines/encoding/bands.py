"""Native bytecode encoder of a product and the flat kernel that reads its result, in bands of rows
(plan/schedule/gemm_consumer_tiling.py): one step of the host, with the words of both for one band after the other."""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    MATMUL,
    PRODUCT,
    SERIES_HEAD,
    KernelStepWords,
    Place,
    SeriesStep,
    StepHead,
)
from anyshape.backend.cpu.bytecode.format import SERIES as SERIES_OP
from anyshape.backend.cpu.bytecode.template import NO_PRODUCT, BandsPiece, ProductPiece, WindowWords
from anyshape.backend.cpu.native.records import Array, copy_bytes, i64, minimum, tail, words_of
from anyshape.backend.cpu.routines.encoding.product import encode_product, next_window

PLACE_WORDS, KERNEL_WORDS = map(words_of, (Place, KernelStepWords))


def encode_bands(piece: BandsPiece, product: ProductPiece, kernel: Array[i64], length: int, out: Array[i64]) -> int:
    """The words of all bands, without the head of the step. product: of all rows, which are changed; kernel: its words
    for all rows, `length`."""
    left = WindowWords(product.windows)
    right = next_window(left)
    result = next_window(right)
    rows = left.numbers[0]
    if left.numbers[1] == 0:  # no terms: a sum of nothing, whatever the strides
        left.numbers[2] = 1
        left.numbers[3] = 1
        right.numbers[2] = piece.columns
        right.numbers[3] = 1
    first = left.offset
    count = 0
    row = 0
    while row < rows:
        high = minimum(piece.rows, rows - row)
        left.offset = first + row * left.numbers[2]
        left.numbers[0] = high
        result.numbers[0] = high
        series = SeriesStep(tail(out, count))
        step = StepHead(tail(out, count + SERIES_HEAD))
        more = encode_product(product, tail(out, count + SERIES_HEAD))
        if more < 0:
            return more
        if more == 0 or (step.op != MATMUL and step.op != PRODUCT):
            return NO_PRODUCT
        one = tail(out, count + SERIES_HEAD + more)
        copy_bytes(one, kernel, 8 * length)
        move_kernel(piece, one, length, row, high)
        series.op = SERIES_OP
        series.length = SERIES_HEAD
        series.number = piece.number
        series.words = more + length
        count += SERIES_HEAD + more + length
        row += high
    return count


def move_kernel(piece: BandsPiece, kernel: Array[i64], length: int, row: int, rows: int) -> int:
    """A kernel for all rows becomes one for `rows` of them, from `row` on."""
    for k in range(piece.params):
        place = Place(tail(kernel, KERNEL_WORDS + PLACE_WORDS * k))
        place.bytes += row * piece.steps[k]
    kernel[length - 1] = rows * piece.columns
    return 0
