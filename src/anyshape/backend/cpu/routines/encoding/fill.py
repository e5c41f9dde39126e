"""Native bytecode encoder of a plan: fills its template (backend/cpu/bytecode/template.py) with the values of its
formulas at given sizes, piece by piece.

Each routine writes words to `out` and returns how many; below 0, the autotuner has to answer a question first
(backend/cpu/routines/encoding/product.py), and what has been written is of no use.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import BANDS as BANDS_OP
from anyshape.backend.cpu.bytecode.format import (
    END,
    KERNEL,
    MATMUL,
    MATMUL_DIMS,
    NO_REGIME,
    PRODUCT,
    SERIES_HEAD,
    PackedProduct,
    SeriesStep,
    StepHead,
)
from anyshape.backend.cpu.bytecode.format import SERIES as SERIES_OP
from anyshape.backend.cpu.bytecode.template import (
    ATTENTION,
    BANDS,
    BYTE_CONV,
    COPY,
    FINISHED,
    GIVEN,
    GROUPED,
    JOINED,
    MOST_BODY,
    MOST_KERNEL,
    REGIMES,
    WORDS,
    AttentionPiece,
    BandsPiece,
    ByteConvPiece,
    CopyPiece,
    DirectConvPiece,
    FinishedPiece,
    GroupedPiece,
    JoinedPiece,
    Piece,
    ProductPiece,
    RegimesPiece,
)
from anyshape.backend.cpu.bytecode.template import PRODUCT as PRODUCT_PIECE
from anyshape.backend.cpu.native.records import Array, array_at, copy_bytes, i64, maximum, tail, words
from anyshape.backend.cpu.routines.encoding.attention import encode_attention
from anyshape.backend.cpu.routines.encoding.bands import encode_bands
from anyshape.backend.cpu.routines.encoding.byte_conv import encode_byte_conv
from anyshape.backend.cpu.routines.encoding.copy import encode_copy
from anyshape.backend.cpu.routines.encoding.direct_conv import encode_direct_conv
from anyshape.backend.cpu.routines.encoding.grouped import encode_grouped
from anyshape.backend.cpu.routines.encoding.product import encode_product


def fill_template(template: Piece, pieces: int, values: Array[i64], out: Array[i64]) -> int:
    """The words of a plan's steps and their end."""
    count = fill_pieces(template, pieces, values, out)
    if count < 0:
        return count
    out[count] = END
    return count + 1


def fill_pieces(piece: Piece, pieces: int, values: Array[i64], out: Array[i64]) -> int:
    """The words of pieces that follow each other."""
    count = 0
    for _ in range(pieces):
        more = fill_piece(piece, values, tail(out, count))
        if more < 0:
            return more
        count += more
        piece = Piece(next_piece(piece))
    return count


def next_piece(piece: Piece) -> int:
    """What follows a piece."""
    return piece + 8 * piece.length


def body_of(piece: Piece) -> int:
    """The body of a piece."""
    return tail(piece.more, piece.patches)


def fill_piece(piece: Piece, values: Array[i64], out: Array[i64]) -> int:
    """The words of a piece."""
    kind = piece.kind
    if kind == WORDS:
        return patched(piece, values, out)
    if kind == REGIMES:
        return fill_regimes(RegimesPiece(body_of(piece)), values, out)
    if kind == GIVEN:
        return fill_given(piece, values, out)
    if kind == JOINED:
        return fill_joined(JoinedPiece(body_of(piece)), values, out)
    if kind == FINISHED:
        return fill_finished(FinishedPiece(body_of(piece)), values, out)
    if kind == BANDS:
        return fill_bands(BandsPiece(body_of(piece)), values, out)
    return fill_step(piece, values, out)


def patched(piece: Piece, values: Array[i64], out: Array[i64]) -> int:
    """The body of a piece, with its values."""
    copy_bytes(out, body_of(piece), 8 * piece.room)
    for k in range(piece.patches):
        patch = piece.more[k]
        out[patch.at] = values[patch.value]
    return piece.room


def fill_given(piece: Piece, values: Array[i64], out: Array[i64]) -> int:
    """Words that lie elsewhere: their address, and how many."""
    place = words(2)
    patched(piece, values, place)
    copy_bytes(out, place[0], 8 * place[1])
    return place[1]


def fill_step(piece: Piece, values: Array[i64], out: Array[i64]) -> int:
    """The words of a step of several sizes, whose sizes say which routine does it."""
    body = words(MOST_BODY)
    patched(piece, values, body)
    kind = piece.kind
    if kind == PRODUCT_PIECE:
        return encode_product(ProductPiece(body), out)
    if kind == ATTENTION:
        return encode_attention(AttentionPiece(body), out)
    if kind == GROUPED:
        return encode_grouped(GroupedPiece(body), out)
    if kind == COPY:
        return encode_copy(CopyPiece(body), out)
    if kind == BYTE_CONV:
        return encode_byte_conv(ByteConvPiece(body), out)
    return encode_direct_conv(DirectConvPiece(body), out)


def fill_regimes(piece: RegimesPiece, values: Array[i64], out: Array[i64]) -> int:
    """The words of the first version of a kernel whose conditions hold."""
    regime = piece.regimes
    for _ in range(piece.count):
        conditions = regime[0]
        holds = 1
        for k in range(conditions):
            if values[regime[1 + k]] < 0:
                holds = 0
        version = Piece(tail(regime, 1 + conditions))
        if holds:
            return patched(version, values, out)
        regime = array_at(i64, next_piece(version))
    out[0] = NO_REGIME
    out[1] = piece.number
    return 2


def fill_joined(piece: JoinedPiece, values: Array[i64], out: Array[i64]) -> int:
    """Products that may run side by side, as one step, whose length says how many there are, if all are single ones
    from panels and have the same rows; as they are otherwise."""
    one = Piece(piece.pieces)
    count = 0
    alike = 1
    scratch = 0
    for _ in range(piece.count):
        product = tail(out, count)
        more = fill_piece(one, values, product)
        if more < 0:
            return more
        if more != MATMUL_DIMS or product[0] != PRODUCT:
            alike = 0
        else:
            alike = alike and agree(PackedProduct(product), PackedProduct(out))
            scratch = maximum(scratch, PackedProduct(product).scratch)
        count += more
        one = Piece(next_piece(one))
    if alike and count > 0:
        step = PackedProduct(out)
        step.length = count
        step.scratch = scratch
    return count


def agree(one: PackedProduct, other: PackedProduct) -> int:
    """Whether products may be joined: what is said of their rows, and how the work is cut."""
    return (one.function == other.function and one.n == other.n and one.k == other.k and one.b_lane == other.b_lane
            and one.b_inner == other.b_inner and one.item == other.item and one.b.slot == other.b.slot
            and one.b.bytes == other.b.bytes and one.rows == other.rows and one.deep == other.deep
            and one.b_item == other.b_item)


def fill_finished(piece: FinishedPiece, values: Array[i64], out: Array[i64]) -> int:
    """The words of products and of the kernels that follow: the last product, if it is the host's, and the kernels are
    one step; kernels alone are one where there are several."""
    first = Piece(piece.pieces)
    count = fill_pieces(first, piece.products, values, out)
    if count < 0:
        return count
    last = count
    at = 0
    while at < count:
        last = at
        at += out[at + 1]
    for _ in range(piece.products):
        first = Piece(next_piece(first))
    more = fill_pieces(first, piece.kernels, values, tail(out, count))
    if more < 0:
        return more
    kernels = count_kernels(tail(out, count), more)
    number = piece.number
    if kernels > 0 and last < count and (out[last] == PRODUCT or out[last] == MATMUL):
        number = out[last + 2]
    else:
        last = count
        if kernels < 2:
            return count + more
    length = count + more - last
    k = count + more - 1
    while k >= last:
        out[k + SERIES_HEAD] = out[k]
        k -= 1
    step = SeriesStep(tail(out, last))
    step.op = SERIES_OP
    step.length = SERIES_HEAD
    step.number = number
    step.words = length
    return count + more + SERIES_HEAD


def fill_bands(piece: BandsPiece, values: Array[i64], out: Array[i64]) -> int:
    """The words of a product and a kernel in bands; where no version of the kernel fits, of that alone."""
    product = Piece(tail(piece.steps, piece.params))
    version = Piece(next_piece(product))
    body = words(MOST_BODY)
    kernel = words(MOST_KERNEL)
    patched(product, values, body)
    length = fill_piece(version, values, kernel)
    if kernel[0] != KERNEL:
        copy_bytes(out, kernel, 8 * length)
        return length
    count = encode_bands(piece, ProductPiece(body), kernel, length, tail(out, SERIES_HEAD))
    if count < 0:
        return count
    step = SeriesStep(out)
    step.op = BANDS_OP
    step.length = SERIES_HEAD
    step.number = piece.number
    step.words = count
    return SERIES_HEAD + count


def count_kernels(steps: Array[i64], length: int) -> int:
    """How many kernel steps there are; 0 where no version of one fits."""
    at = 0
    count = 0
    while at < length:
        step = StepHead(tail(steps, at))
        if step.op != KERNEL:
            return 0
        count += 1
        at += step.length
    return count
