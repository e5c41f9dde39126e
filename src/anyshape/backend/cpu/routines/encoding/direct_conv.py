"""Native bytecode encoder of direct convolutions, channels last: the words that the host reads
(backend/cpu/routines/convolution/direct_conv.py), or a call of PyTorch.

    direct_conv(x [N, H, W, C], weight [O, C, KH, KW], bias [O], factors [O], shifts [O], addend)
        -->  DIRECT_CONV, ..., slots and bytes, sizes, lines of a band, and where scratch is
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import CONV_LAST, DIRECT_CONV, DirectConvStep, Place
from anyshape.backend.cpu.bytecode.template import DirectConvPiece, WindowWords
from anyshape.backend.cpu.native.records import Array, i64, maximum, minimum, words_of
from anyshape.backend.cpu.routines.encoding.product import encode_call, next_window, rounded

CONV_WORDS = words_of(DirectConvStep)
BAND = 192 << 10  # bytes of a band's input, which stay in a near cache while the panels of weights go by
POSITIONS = 1024  # of a band, at most: their offsets do, too


def encode_direct_conv(piece: DirectConvPiece, out: Array[i64]) -> int:
    """The words of a convolution; none when there is nothing to compute. Windows: x, weight, what else there is of the
    operands, and the result."""
    step = DirectConvStep(out)
    x = WindowWords(piece.windows)
    weight = next_window(x)
    result = last_window(x, piece.count)
    if is_empty(result):
        return 0
    if is_empty(x) or is_empty(weight) or not operands_are_dense(x, piece.count):
        return encode_call(piece.number, out)
    outs = weight.numbers[0]
    channels = weight.numbers[1]
    kernel_y = weight.numbers[2]
    kernel_x = weight.numbers[3]
    taps = channels * kernel_y * kernel_x
    weights_last = 0
    if not is_dense(weight):
        weights_last = 1
        if not channels_last(weight):
            return encode_call(piece.number, out)
    out_y = result.numbers[1]
    out_x = result.numbers[2]
    lanes = piece.lanes
    padded = piece.padding_y > 0 or piece.padding_x > 0
    wide = 4 * channels * x.numbers[2]
    line = wide + 8 * channels * piece.padding_x
    reach = (kernel_y - 1) * piece.dilation_y + 1
    lines = minimum(out_y, minimum((BAND // line - reach) // piece.stride_y + 1, POSITIONS // out_x))
    lines = maximum(1, lines)
    step.bands = (out_y + lines - 1) // lines
    lines = (out_y + step.bands - 1) // step.bands  # bands of equal heights
    step.op = DIRECT_CONV
    step.length = CONV_WORDS
    step.number = piece.number
    step.kernel_y = kernel_y
    step.kernel_x = kernel_x
    place_operands(piece, step, x)
    copy_settings(piece, step)
    step.images = x.numbers[0]
    step.channels = channels
    step.outs = outs
    step.taps = taps
    step.size_y = x.numbers[1]
    step.out_y = out_y
    step.out_x = out_x
    step.wide = wide
    step.line = line
    step.lines = lines
    step.band_lines = (lines - 1) * piece.stride_y + reach
    step.padded = padded
    step.weights_last = weights_last
    step.panels = (outs + 2 * lanes - 1) // (2 * lanes)
    step.panel_bytes = 4 * (rounded(taps, lanes) + 3) * 2 * lanes
    step.scales = 4 * (rounded(taps, lanes) + 1) * 2 * lanes
    step.places = rounded(8 * taps, 64)
    step.weights = rounded(step.places + 8 * (lines * out_x + 3 * piece.grain), 64)
    step.input = step.weights + step.panels * step.panel_bytes
    step.scratch = step.input + (step.band_lines * line if padded else 0)
    return CONV_WORDS


def copy_settings(piece: DirectConvPiece, step: DirectConvStep) -> int:
    """What does not depend on sizes."""
    step.least = piece.least
    step.stride_y = piece.stride_y
    step.stride_x = piece.stride_x
    step.padding_y = piece.padding_y
    step.padding_x = piece.padding_x
    step.dilation_y = piece.dilation_y
    step.dilation_x = piece.dilation_x
    step.lanes = piece.lanes
    step.grain = piece.grain
    step.function = CONV_LAST
    step.turn = piece.turn
    return 0


def last_window(window: WindowWords, count: int) -> WindowWords:
    """The last of so many windows."""
    for _ in range(count - 1):
        window = next_window(window)
    return window


def is_empty(window: WindowWords) -> int:
    """Whether a size is 0."""
    for i in range(window.rank):
        if window.numbers[i] == 0:
            return 1
    return 0


def is_dense(window: WindowWords) -> int:
    """Whether the strides are those of a dense tensor, but for dims of size 1."""
    rank = window.rank
    dense = 1
    for k in range(rank):
        i = rank - 1 - k
        size = window.numbers[i]
        if size != 1 and window.numbers[rank + i] != dense:
            return 0
        dense *= size
    return 1


def channels_last(weight: WindowWords) -> int:
    """Whether the channels of a place of the window are neighbours, but for dims of size 1."""
    sizes = weight.numbers
    channels = sizes[1]
    row = sizes[3] * channels
    return ((sizes[0] == 1 or sizes[4] == row * sizes[2]) and (channels == 1 or sizes[5] == 1)
            and (sizes[2] == 1 or sizes[6] == row) and (sizes[3] == 1 or sizes[7] == channels))


def operands_are_dense(window: WindowWords, count: int) -> int:
    """Whether all but the weight are dense."""
    for k in range(count):
        if k != 1 and not is_dense(window):
            return 0
        window = next_window(window)
    return 1


def place_operands(piece: DirectConvPiece, step: DirectConvStep, window: WindowWords) -> int:
    """Where the operands are; those that are not there have the slot -1."""
    put_place(step.x, window)
    window = next_window(window)
    put_place(step.weight, window)
    step.bias.slot = -1
    step.bias.bytes = 0
    step.factors.slot = -1
    step.factors.bytes = 0
    step.shifts.slot = -1
    step.shifts.bytes = 0
    step.addend.slot = -1
    step.addend.bytes = 0
    if piece.bias:
        window = next_window(window)
        put_place(step.bias, window)
    if piece.factors:
        window = next_window(window)
        put_place(step.factors, window)
    if piece.shifts:
        window = next_window(window)
        put_place(step.shifts, window)
    if piece.addend:
        window = next_window(window)
        put_place(step.addend, window)
    put_place(step.result, next_window(window))
    return 0


def put_place(place: Place, window: WindowWords) -> int:
    """Where a window begins."""
    place.slot = window.slot
    place.bytes = window.offset * window.item
    return 0
