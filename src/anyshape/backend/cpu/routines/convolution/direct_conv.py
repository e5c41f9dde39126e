"""Direct convolution, channels last, in the native subset; see ops/convolution.py and
backend/cpu/routines/encoding/direct_conv.py.

    for each band of lines of each image, for each panel of channels that is this thread's:
        the band with its padding into the thread's scratch;  the panel's weights, once;  tiles of positions

Tiles are backend/cpu/microkernels/direct_conv_last.py. Weights are brought into panels in every call, by squares of
vectors that are turned (backend/cpu/microkernels/gemm.py): reading them to see whether they are still the same takes
nearly as long, and so nothing is kept from call to call. Where there is no padding, tiles read the images themselves.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import PARALLEL_FLOPS, WIDE_TILES, CallBlock, DirectConvStep, Functions
from anyshape.backend.cpu.native.records import Struct, array_at, call_void, copy_bytes, fill_zero, i64, minimum, new
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.threads import parallel_for, share


class DirectConvWork(Struct):
    """What the threads of a step share."""

    functions: Functions
    block: CallBlock
    step: DirectConvStep


def run_direct_conv(block: CallBlock, step: DirectConvStep) -> int:
    """All images."""
    data = new(DirectConvWork)
    data.functions = block.functions
    data.block = block
    data.step = step
    units = step.images * step.bands * step.panels
    work = step.images * step.outs * step.taps * step.out_y * step.out_x
    return parallel_for(block, direct_conv_range, data, minimum(minimum(block.threads, units), work // PARALLEL_FLOPS))


def direct_conv_range(data: DirectConvWork, number: int, team: int) -> int:
    """The equal part of all panels of all bands that is thread `number`'s of `team`."""
    block = data.block
    step = data.step
    panels = step.panels
    units = step.images * step.bands * panels
    begin = share(units, number, team)
    end = share(units, number + 1, team)
    scratch = block.scratch + number * block.program.scratch
    if begin >= end:
        return 0
    place_window(step, scratch)
    place_positions(step, scratch + step.places)
    images = address(block, step.x)
    source = images
    last = -1
    for unit in range(begin, end):
        item = unit // panels
        panel = unit % panels
        image = item // step.bands
        first = item % step.bands * step.lines
        if item != last:
            source = images + image * step.size_y * step.wide
            if step.padded != 0:
                place_band(step, source, first * step.stride_y - step.padding_y, scratch + step.input)
                source = scratch + step.input
            else:
                source += first * step.stride_y * step.wide
            last = item
        if unit - begin < panels:
            pack_panel(data, panel, scratch + step.weights + panel * step.panel_bytes)
        convolve_band(data, scratch, source, image, first, panel)
    return 0


def place_window(step: DirectConvStep, scratch: int) -> int:
    """The offset of each tap, in bytes from the place of a position's first one, in the order of the weights."""
    offsets = array_at(i64, scratch)
    pixel = step.channels * 4
    area = step.kernel_y * step.kernel_x
    tap = 0
    for y in range(step.kernel_y):
        for x in range(step.kernel_x):
            start = y * step.dilation_y * step.line + x * step.dilation_x * pixel
            place = tap * step.channels if step.weights_last != 0 else tap
            apart = 1 if step.weights_last != 0 else area
            for channel in range(step.channels):
                offsets[place] = start + channel * 4
                place += apart
            tap += 1
    return 0


def place_positions(step: DirectConvStep, target: int) -> int:
    """The offset of each position of a band, in bytes from the first one's."""
    places = array_at(i64, target)
    across = step.stride_x * step.channels * 4
    position = 0
    for y in range(step.lines):
        for x in range(step.out_x):
            places[position] = y * step.stride_y * step.line + x * across
            position += 1
    return 0


def place_band(step: DirectConvStep, source: int, first: int, target: int) -> int:
    """The lines of an image that the windows of a band meet, from line `first` on, with zeros where there are none."""
    margin = step.padding_x * step.channels * 4
    for y in range(step.band_lines):
        line = target + y * step.line
        at = first + y
        if at < 0 or at >= step.size_y:
            fill_zero(line, step.line)
        else:
            fill_zero(line, margin)
            copy_bytes(line + margin, source + at * step.wide, step.wide)
            fill_zero(line + margin + step.wide, step.line - margin - step.wide)
    return 0


def pack_panel(data: DirectConvWork, panel: int, target: int) -> int:
    """A panel of weights: biases, then of each tap one per channel, then factors and shifts of channels."""
    block = data.block
    step = data.step
    lanes = step.lanes
    first = panel * 2 * lanes
    count = minimum(step.outs - first, 2 * lanes)
    vectors = 2 if count > lanes else 1
    fill_zero(target, vectors * lanes * 4)
    if step.bias.slot >= 0:
        copy_bytes(target, address(block, step.bias) + first * 4, count * 4)
    if step.factors.slot >= 0:
        scales = target + step.scales
        fill_zero(scales, 2 * vectors * lanes * 4)
        copy_bytes(scales, address(block, step.factors) + first * 4, count * 4)
        if step.shifts.slot >= 0:
            copy_bytes(scales + vectors * lanes * 4, address(block, step.shifts) + first * 4, count * 4)
    turn = array_at(i64, data.functions)[step.turn]
    source = address(block, step.weight) + first * step.taps * 4
    width = vectors * lanes * 4
    for vector in range(vectors):
        before = vector * lanes
        call_void(turn, source + before * step.taps * 4, step.taps * 4, 4, minimum(lanes, count - before), step.taps,
                  target + width + before * 4, width)
    return 0


def convolve_band(data: DirectConvWork, scratch: int, source: int, image: int, first: int, panel: int) -> int:
    """The positions of a band by the channels of a panel."""
    step = data.step
    block = data.block
    lanes = step.lanes
    grain = step.grain
    outs = step.outs
    channels = minimum(outs - panel * 2 * lanes, 2 * lanes)
    vectors = 2 if channels > lanes else 1
    positions = minimum(step.lines, step.out_y - first) * step.out_x
    weights = scratch + step.weights + panel * step.panel_bytes
    scales = 0
    if step.factors.slot >= 0:
        scales = weights + step.scales
    result = address(block, step.result)
    other = 0
    if step.addend.slot >= 0:
        other = address(block, step.addend) - result
    result += ((image * step.out_y + first) * step.out_x * outs + panel * 2 * lanes) * 4
    entries = array_at(i64, data.functions)
    place = scratch + step.places
    done = 0
    while done < positions:
        thirds = minimum(WIDE_TILES if vectors == 2 else 3, (positions - done + grain - 1) // grain)
        height = thirds * grain
        if positions - done < height:
            place = last_places(place, scratch + step.places + step.lines * step.out_x * 8, positions - done, height)
        call_void(entries[step.function + (3 - thirds) * 2 + vectors - 1], source, scratch, step.taps, place, weights,
                  scales, result, outs * 4, minimum(height, positions - done), channels, other, step.least)
        result += height * outs * 4
        place += height * 8
        done += height
    return 0


def last_places(source: int, target: int, count: int, height: int) -> int:
    """The offsets of a tile of fewer positions than it has room for: the others read where the first one does."""
    copy_bytes(target, source, count * 8)
    places = array_at(i64, target)
    for more in range(count, height):
        places[more] = places[0]
    return target
