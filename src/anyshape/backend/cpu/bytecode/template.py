"""Bytecode template of a plan: what its words are but for sizes, made once per plan. At each new shape a native routine
(backend/cpu/routines/encoding) fills it with the values of the plan's formulas:

    WORDS    a kernel's words; sizes and bytes are patched          -->  those words
    PRODUCT  dtype, slots, and windows (sizes, strides, offset)     -->  MATMUL, ...  or  PRODUCT, ...  or  CALL, ...
    GIVEN    what Python encoded at these sizes                     -->  its words

A piece is a head, its patches, and a body of so many words. The bodies of JOINED, FINISHED and BANDS are pieces.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.microkernels.tables import gemv
from anyshape.backend.cpu.native.records import Array, Inline, Struct, i64, words_of

# kinds of pieces
(WORDS, REGIMES, GIVEN, PRODUCT, ATTENTION, COPY, DIRECT_CONV, JOINED, FINISHED, BANDS, GROUPED,
 BYTE_CONV) = range(12)
MOST_BODY = 320  # words of the body of a piece that is patched before it is encoded
MOST_KERNEL = 1024  # of a kernel that reads a product in bands; others are steps by themselves
MOST_DIMS = 12  # dims of its windows: those of more are PyTorch's
# questions to the autotuner (backend/cpu/autotune.py), which measures when a program first asks: in the order of
# `Kind.answers`
FULL, FEW, MANY, THIN_ONES, OF_ATTENTION, OF_DTYPE = range(6)
QUESTIONS = 6
OVER_PANELS = 2 * 2  # behind "dot" and "spread", and of each the one that reads a wide matrix
THIN_WAYS = OVER_PANELS + 1
THIN_COUNTS = gemv.PLACES + 1


class Kind(Struct):
    """What is known of products of a dtype on a machine: what a routine needs of `Products`."""

    number: i64
    answers: Annotated[Array[i64], Inline(QUESTIONS)]  # 0 or 1; -1: nobody has asked yet
    item: i64  # bytes per element of the result
    f32: i64  # 1: it is, or products of 8-bit numbers in i32: sums lie in the result
    f64: i64
    library: i64  # 1: the dtype is one that BLAS has, and there is BLAS; half precision: 0
    half: i64  # 1: BLAS has no such dtype
    product: i64  # entries of BLAS's product, of that of many matrices (0: there is none), and of our first routine
    many: i64
    packed: i64
    one: i64  # the bits of 1
    lanes: i64  # of a vector of f32
    grain: i64  # rows of the smallest panel
    per_word: i64  # elements in a word
    tiles: i64  # 1: whole tiles are multiplied
    our_rows: i64  # from so many on, products of f32 may be ours; columns, terms of a sum
    our_columns: i64
    our_inner: i64
    most_vectors: i64  # that some routine multiplies a matrix with, and of each way
    most_dot: i64
    most_spread: i64
    thin: Annotated[Array[i64], Inline(THIN_WAYS * THIN_COUNTS)]  # their entries, by way and number of vectors


class Patch(Struct):
    """A word of a body that is a value."""

    at: i64
    value: i64


class Piece(Struct):
    """The head of a piece of a template: how long it is, its patches, and the words of its body."""

    kind: i64
    length: i64  # words from here to the next piece
    patches: i64  # how many
    room: i64  # words of the body
    more: Annotated[Array[Patch], Inline(0)]  # the body follows


class WindowWords(Struct):
    """What a step reads or writes of a buffer."""

    slot: i64
    item: i64  # bytes per element
    rank: i64
    offset: i64  # in elements
    numbers: Annotated[Array[i64], Inline(0)]  # sizes, then strides


class ProductPiece(Struct):
    """A product: c = alpha * (a @ b) + beta * addend."""

    kind: Kind
    number: i64
    alpha: i64  # the bits of the scalars
    beta: i64
    scaled: i64  # 1: alpha is not 1; beta is not 1
    weighted: i64
    addend: i64  # 1: there is one
    panels: i64  # 1: b is prepacked (ops/matmul.py)
    windows: Annotated[Array[i64], Inline(0)]  # of a, b, c, and the addend


class GroupedPiece(Struct):
    """Products of groups of rows (ops/matmul.py)."""

    kind: Kind
    number: i64
    of_terms: i64  # 1: groups of terms of a sum; 0: of rows
    order: i64  # 1: rows are gathered in an order
    windows: Annotated[Array[i64], Inline(0)]  # of x, y, ends, the order, and the result


class CopyPiece(Struct):
    """A copy."""

    number: i64
    windows: Annotated[Array[i64], Inline(0)]  # of source and target


class AttentionPiece(Struct):
    """Attention, forward or backward."""

    kind: Kind
    number: i64
    backward: i64
    causal: i64
    scale: i64  # the bits of the factor
    wide: i64  # bytes per element of scores
    weigh: i64  # entry of the routine for rows of scores
    there: Annotated[Array[i64], Inline(len(host.OPERANDS))]  # 1: there is this operand; their windows follow
    windows: Annotated[Array[i64], Inline(0)]


class DirectConvPiece(Struct):
    """A direct convolution."""

    number: i64
    count: i64  # of windows
    bias: i64  # 1: there is one; factors, shifts, an addend
    factors: i64
    shifts: i64
    addend: i64
    least: i64  # the bits of what the result is at least
    stride_y: i64
    stride_x: i64
    padding_y: i64
    padding_x: i64
    dilation_y: i64
    dilation_x: i64
    lanes: i64  # of a vector of f32
    grain: i64  # positions of the smallest tile
    turn: i64  # entry of what turns squares
    windows: Annotated[Array[i64], Inline(0)]


class ByteConvPiece(Struct):
    """A convolution of 8-bit numbers."""

    kind: Kind
    number: i64
    kernel_y: i64
    kernel_x: i64
    stride_y: i64
    stride_x: i64
    dilation_y: i64
    dilation_x: i64
    windows: Annotated[Array[i64], Inline(0)]  # of x, w and the result


class RegimesPiece(Struct):
    """Versions of a kernel: the first whose conditions are all at least 0 is taken."""

    number: i64
    count: i64
    regimes: Annotated[Array[i64], Inline(0)]  # of each: number of conditions, their values, a piece


class FinishedPiece(Struct):
    """Products, and the kernels that follow them from step `number` on, as one step where the last one can be."""

    number: i64
    products: i64  # how many pieces; 0: there are kernels only
    kernels: i64
    pieces: Annotated[Array[i64], Inline(0)]


class BandsPiece(Struct):
    """A product and the flat kernel that reads its result, for so many rows after the others."""

    number: i64
    rows: i64  # of a band
    columns: i64
    params: i64  # of the kernel
    steps: Annotated[Array[i64], Inline(0)]  # bytes that each goes on from row to row; the product and the kernel


class JoinedPiece(Struct):
    """Products that may run side by side."""

    count: i64
    pieces: Annotated[Array[i64], Inline(0)]


NO_PRODUCT = -(1 << 62)  # in place of how many words there are: the host has no such product

Word = int | str  # a number, or the name of a value in the plan's size function


class Names:
    """The values that patches name, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def of(self, name: str) -> int:
        """The number of a value."""
        return self.index.setdefault(name, len(self.index))


def piece(names: Names, kind: int, body: Sequence[Word]) -> list[int]:
    """The words of a piece. body: numbers, also as text, and names of values."""
    numbers: list[Any] = [*body]
    patches: list[int] = []
    for at in [at for at, word in enumerate(body) if type(word) is str]:  # few are texts: pieces stand in others
        word = str(body[at])
        if word.isidentifier():
            patches += [at, names.of(word)]
            numbers[at] = 0
        else:
            numbers[at] = int(word)
    head = words_of(Piece)
    return [kind, head + len(patches) + len(numbers), len(patches) // 2, len(numbers), *patches, *numbers]


def window_words(slot: int, item: int, offset: Word, shape: Sequence[Word], strides: Sequence[Word]) -> list[Word]:
    """The words of a `WindowWords`."""
    return [slot, item, len(shape), offset, *shape, *strides]


def most_words(kind: int, body: Sequence[Word]) -> int:
    """Words that a piece becomes, at most."""
    if kind == PRODUCT:
        return max(words_of(host.LibraryProduct), words_of(host.PackedProduct)) + MOST_DIMS * words_of(host.Dim)
    if kind == GROUPED:
        return words_of(host.GroupedStep)
    if kind == COPY:
        return words_of(host.CopyStepWords) + MOST_DIMS * words_of(host.CopyDim)
    if kind == ATTENTION:
        return words_of(host.AttentionStep)
    if kind == BYTE_CONV:
        return words_of(host.ByteConvStep)
    return words_of(host.DirectConvStep) if kind == DIRECT_CONV else len(body)
