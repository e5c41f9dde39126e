"""Native bytecode encoder of attention steps: the words that the host reads (backend/cpu/routines/attention.py), or a
call of PyTorch."""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ATTENTION,
    GRADIENT,
    MASK,
    OPERANDS,
    PACKED_PAD,
    PRODUCTS,
    SUMS,
    VALUE,
    AttentionStep,
    Operand,
)
from anyshape.backend.cpu.bytecode.template import (
    OF_ATTENTION,
    THIN_COUNTS,
    AttentionPiece,
    Kind,
    WindowWords,
)
from anyshape.backend.cpu.microkernels.tables import gemv
from anyshape.backend.cpu.native.records import Array, Struct, fill_zero, i64, maximum, minimum, new, size_of, words_of
from anyshape.backend.cpu.routines.encoding.product import ask, encode_call, next_window, rounded

ROWS = 64  # of a tile of scores: with more, products gain little
HALF_ROWS = 72  # the same where products are made of panels of 12 rows, or 6
FEWEST = 32
SCORES = 1 << 20  # bytes of a tile of scores, which then has fewer rows: about what the second cache holds
CAUSAL_TILES = 8  # at least so many tiles of a causal square: what lies beyond the diagonal in a tile is in vain
FEW = max(gemv.COUNTS["spread"])  # rows that are multiplied as vectors
COUNT = len(OPERANDS)
ATTENTION_WORDS = words_of(AttentionStep)
LARGEST = 1 << 30
SET = 1024  # rows of scores as far apart as multiples of it would share sets of the cache


def encode_attention(piece: AttentionPiece, out: Array[i64]) -> int:
    """The words of a step."""
    kind = piece.kind
    step = AttentionStep(out)
    queries = WindowWords(piece.windows)
    keys = next_window(queries)
    batch = queries.numbers[0]
    heads = queries.numbers[1]
    rows = queries.numbers[2]
    depth = queries.numbers[3]
    groups = keys.numbers[1]
    columns = keys.numbers[2]
    half = kind.half or (kind.f32 and not kind.library)
    if not half and kind.f32 and rows >= kind.our_rows:
        half = ask(kind, OF_ATTENTION)
        if half < 0:
            return half
    if heads == 0 or groups == 0 or depth == 0 or maximum(rows, maximum(columns, depth)) >= LARGEST:
        return encode_call(piece.number, out)
    if not take_operands(piece, step, columns):
        return encode_call(piece.number, out)
    most = HALF_ROWS if half else ROWS
    tile = minimum(most, SCORES // (piece.wide * maximum(columns, 1)))
    tile = minimum(tile, columns // CAUSAL_TILES if piece.causal else most)
    tile = maximum(tile, FEWEST)
    if half:  # whole panels
        tile = rounded(tile, 3 * kind.grain)
    tile = maximum(minimum(tile, rows), 1)
    # rows of scores begin at different places of the cache's lines
    apart = rounded(columns * piece.wide, 64)
    if apart % SET == 0:
        apart += 64
    step.op = ATTENTION
    step.length = ATTENTION_WORDS
    step.number = piece.number
    step.product = kind.packed if half else kind.product
    step.weigh = piece.weigh
    step.backward = piece.backward
    step.batch = batch
    step.groups = groups
    step.share = heads // groups
    step.rows = rows
    step.columns = columns
    step.depth = depth
    step.causal = piece.causal
    step.item = kind.item
    step.scale = piece.scale
    step.one = kind.one
    step.zero = 0
    step.tile = tile
    step.step = apart
    few = rows > 0 and rows <= FEW and not piece.backward and not half
    step.dot = kind.thin[rows] if few else 0
    step.spread = kind.thin[2 * THIN_COUNTS + rows] if few else 0
    place_panels(kind, step, half)
    return ATTENTION_WORDS


def take_operands(piece: AttentionPiece, step: AttentionStep, columns: int) -> int:
    """Where the operands are; those that are not there have the slot -1. 0 when the host cannot take their strides."""
    window = WindowWords(piece.windows)
    for role in range(COUNT):
        operand = step.operands[role]
        if piece.there[role]:
            if not take_operand(operand, role, window, columns):
                return 0
            window = next_window(window)
        else:
            fill_zero(operand, size_of(Operand))
            operand.place.slot = -1
    return 1


def take_operand(operand: Operand, role: int, window: WindowWords, columns: int) -> int:
    """Bytes from batch to batch, from head to head and from row to row; 0 when the elements of a row are not next to
    each other, or rows lie in each other."""
    item = window.item
    operand.place.slot = window.slot
    operand.place.bytes = window.offset * item
    sizes = window.numbers
    of_rows_alone = role == SUMS
    if of_rows_alone or role == PRODUCTS:  # a number for each row
        operand.batch = sizes[3] * item
        operand.head = sizes[4] * item
        operand.row = sizes[5] * item
        return 1
    last = sizes[7]
    if role == MASK:
        operand.batch = 0 if sizes[0] == 1 else sizes[4] * item
        operand.head = 0 if sizes[1] == 1 else sizes[5] * item
        operand.row = 0 if sizes[2] == 1 else sizes[6] * item
        return sizes[3] == columns and (last == 1 or sizes[3] <= 1)
    heads_first = role <= VALUE or role == GRADIENT  # of queries, keys and values; [B, M, H, D] of results
    count = sizes[2] if heads_first else sizes[1]
    row = sizes[6] if heads_first else sizes[5]
    if sizes[3] > 1 and last != 1:
        return 0
    if count <= 1:
        row = sizes[3]
    operand.batch = sizes[4] * item
    operand.head = (sizes[5] if heads_first else sizes[6]) * item
    operand.row = row * item
    return row >= sizes[3]


class Panels(Struct):
    """How panels are packed: lanes of a vector, rows of the smallest panel, elements in a word."""

    lanes: i64
    grain: i64
    per_word: i64


def packed_bytes(panels: Panels, size: int, count: int, top: int, least: int) -> int:
    """Bytes of panels of `size` lanes by `count` elements, of at least and at most so many lanes each."""
    terms = (count + panels.per_word - 1) // panels.per_word
    return 4 * rounded(size, least) * rounded(terms, panels.lanes) + PACKED_PAD * ((size + top - 1) // top)


def of_columns(panels: Panels, size: int, count: int) -> int:
    """Bytes of panels of columns."""
    return packed_bytes(panels, size, count, 2 * panels.lanes, panels.lanes)


def of_rows(panels: Panels, size: int, count: int) -> int:
    """Bytes of panels of rows."""
    return packed_bytes(panels, size, count, 3 * panels.grain, panels.grain)


def place_panels(kind: Kind, step: AttentionStep, half: int) -> int:
    """Where in a thread's scratch is what products by packed panels need, and how much it is; without them it is the
    scores alone."""
    backward = step.backward
    scores = step.tile * step.step
    panels = new(Panels)
    panels.lanes = kind.lanes
    panels.grain = kind.grain
    panels.per_word = kind.per_word
    tile = step.tile
    columns = step.columns
    depth = step.depth
    gradients = rounded(tile, kind.grain) * step.step
    keys = 4 * rounded(columns, kind.grain) * rounded(depth, kind.lanes) * backward
    sums = 4 * rounded(tile, kind.grain) * rounded(depth, kind.lanes)
    if backward:
        sums = 4 * 3 * kind.grain * 2 * kind.lanes
    row_panels = maximum(of_rows(panels, tile, depth), of_rows(panels, tile, columns))
    row_panels = maximum(row_panels, of_rows(panels, columns, tile) * backward)
    step.lanes = kind.lanes if half else 0
    step.grain = kind.grain if half else 0
    step.per_word = kind.per_word if half else 0
    at = rounded(gradients, 64)
    step.gradients = at
    at = rounded(at + gradients * backward, 64)
    step.keys = at
    at = rounded(at + of_columns(panels, columns, depth), 64)
    step.values = at
    values = of_columns(panels, columns, depth) if backward else of_columns(panels, depth, columns)
    at = rounded(at + values, 64)
    step.keys_again = at
    at = rounded(at + of_columns(panels, depth, columns) * backward, 64)
    step.row_panels = at
    at = rounded(at + row_panels, 64)
    step.column_panels = at
    at = rounded(at + of_columns(panels, depth, tile) * backward, 64)
    step.dkeys = at
    at = rounded(at + keys, 64)
    step.dvalues = at
    at = rounded(at + keys, 64)
    step.sums = at
    at = rounded(at + sums, 64)
    step.factors = at
    at = rounded(at + (0 if backward else 8 * (tile + 1)), 64)
    step.scratch = at
    if not half:
        step.scratch = scores * (1 + backward)
        step.gradients = 0
        step.keys = 0
        step.values = 0
        step.keys_again = 0
        step.row_panels = 0
        step.column_panels = 0
        step.dkeys = 0
        step.dvalues = 0
        step.sums = 0
        step.factors = 0
    return 0
