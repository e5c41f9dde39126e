"""Native bytecode encoder of convolutions of 8-bit numbers: the words that the host reads
(backend/cpu/routines/packed_gemm.py), or a call of PyTorch.

    conv_bytes(x [N, H, W, C], w in panels)  -->  BYTE_CONV, ..., a product of a row a position with w, images, runs

A row is what a window sees: a run of KW*C bytes for each line of it; of C bytes for each place, where there are gaps.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import BYTE_CONV, LINE, ByteConvStep, PackedProduct
from anyshape.backend.cpu.bytecode.products import PANELS
from anyshape.backend.cpu.bytecode.template import ByteConvPiece, ProductPiece, WindowWords
from anyshape.backend.cpu.native.records import Array, i64, new, words, words_of
from anyshape.backend.cpu.routines.encoding.direct_conv import is_dense, is_empty
from anyshape.backend.cpu.routines.encoding.product import (
    PANEL,
    WORD,
    Matrix,
    by_panels,
    encode_call,
    encode_head,
    next_window,
)

STEP_WORDS, PRODUCT_WORDS = words_of(ByteConvStep), words_of(PackedProduct)


def encode_byte_conv(piece: ByteConvPiece, out: Array[i64]) -> int:
    """The words of a convolution; none when there is nothing to compute."""
    x = WindowWords(piece.windows)
    weights = next_window(x)
    result = next_window(weights)
    if is_empty(result):
        return 0
    channels = x.numbers[3]
    inner = piece.kernel_y * piece.kernel_x * channels
    outs = result.numbers[3]
    if (not is_dense(x) or not is_dense(weights) or not is_dense(result) or inner == 0 or not fits(piece, x, result)
            or weights.numbers[1] * WORD < inner or weights.numbers[0] * PANEL < outs):
        return encode_call(piece.number, out)
    room = words(4)
    a = new(Matrix)
    b = new(Matrix)
    c = new(Matrix)
    place_matrix(a, x, room)
    place_matrix(b, weights, room)
    place_matrix(c, result, room)
    a.rows = result.numbers[0] * result.numbers[1] * result.numbers[2]
    a.columns = inner
    a.row = channels
    a.column = 1
    b.rows = inner
    b.columns = outs
    b.row = PANEL * WORD
    b.column = PANEL * WORD * weights.numbers[1]
    c.rows = a.rows
    c.columns = outs
    c.row = outs
    c.column = 1
    step = ByteConvStep(out)
    step.op = BYTE_CONV
    step.length = STEP_WORDS
    step.number = piece.number
    product = new(ProductPiece)
    product.kind = piece.kind
    product.number = piece.number
    by_panels(piece.kind, a, b, c, PANELS, step.product)
    encode_head(product, step.product, a, b, c, c, outs, 1, 0)
    step.product.a_item = 0
    step.product.length = PRODUCT_WORDS
    copy_places(piece, step, x, result)
    step.scratch = step.product.scratch + step.product.lanes * (step.product.deep * WORD + LINE)
    return STEP_WORDS


def place_matrix(matrix: Matrix, window: WindowWords, batch: Array[i64]) -> int:
    """Where a matrix begins; there is one."""
    matrix.slot = window.slot
    matrix.bytes = window.offset * window.item
    matrix.item = window.item
    matrix.batch = batch
    return 0


def fits(piece: ByteConvPiece, x: WindowWords, result: WindowWords) -> int:
    """Whether all windows lie inside of the images."""
    down = (result.numbers[1] - 1) * piece.stride_y + (piece.kernel_y - 1) * piece.dilation_y
    across = (result.numbers[2] - 1) * piece.stride_x + (piece.kernel_x - 1) * piece.dilation_x
    return x.numbers[0] == result.numbers[0] and down < x.numbers[1] and across < x.numbers[2]


def copy_places(piece: ByteConvPiece, step: ByteConvStep, x: WindowWords, result: WindowWords) -> int:
    """Where the elements of rows are."""
    channels = x.numbers[3]
    line = channels * x.numbers[2]
    step.image = line * x.numbers[1]
    step.down = piece.stride_y * line
    step.across = piece.stride_x * channels
    step.out_y = result.numbers[1]
    step.out_x = result.numbers[2]
    step.apart_y = piece.dilation_y * line
    step.apart_x = piece.dilation_x * channels
    if piece.dilation_x == 1:
        step.wide = 1
        step.run = piece.kernel_x * channels
    else:
        step.wide = piece.kernel_x
        step.run = channels
    return 0
