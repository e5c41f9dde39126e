"""Grouped convolution of rows by the weights of their group, whose ends are data, in the native subset; see
ops/convolution.py and backend/cpu/bytecode/encode_grouped_conv.py.

    for each group, in order: its weights into panels;  for each of its rows that is this thread's:
        the row with its padding into the thread's scratch;  for each panel, each line of the result: tiles

Tiles are backend/cpu/microkernels/direct_conv.py; or the row is done by Winograd's algorithm (winograd.py).
Every row costs the same, so a thread has an equal part of the rows. Where rows are gathered or results scattered, a row
is read and written where the order of a route says: it is copied into the scratch in any case.
Where a window moves by more than one position along a line, positions that a tap meets one after another are laid side
by side: those of the same remainder (phase). All is in terms of three dims, the first ones of size 1 where there are
fewer.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import CallBlock, GroupedConvStep
from anyshape.backend.cpu.native.records import (
    array_at,
    call_void,
    fill_zero,
    i64,
    load32,
    load64,
    maximum,
    minimum,
    store32,
)
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.convolution.winograd import GroupedConvWork, transform_weights, winograd_row
from anyshape.backend.cpu.routines.route_plan import placed


def group_end(block: CallBlock, step: GroupedConvStep, group: int) -> int:
    """Where a group ends, of the rows that there are."""
    at = address(block, step.ends) + group * step.end_step
    end = 0
    if step.end_item == 8:
        end = load64(at)
    else:
        end = load32(at)
        end -= end >> 31 << 32
    return minimum(maximum(end, 0), step.size)


def convolve_rows(data: GroupedConvWork, low: int, high: int, scratch: int) -> int:
    """The rows low to high, of all groups; zeros past the last one. scratch: the thread's."""
    block = data.block
    step = data.step
    place_taps(step, scratch)
    fill_zero(scratch + step.input, step.input_bytes)
    result = address(block, step.result)
    rows = address(block, step.rows)
    addend = 0
    if step.addend.slot >= 0:
        addend = address(block, step.addend)
    sources = order_of(block, step, step.gathered)
    targets = order_of(block, step, step.scattered)
    bytes_of_row = step.outs * step.area * 4
    begin = 0
    reached = 0
    for group in range(step.count):
        end = group_end(block, step, group)
        reached = maximum(reached, end)
        first = maximum(begin, low)
        last = minimum(end, high)
        if first < last:
            packed = 0
            if step.winograd != 0:
                transform_weights(data, group, scratch)
            for row in range(first, last):
                place_row(data, rows + placed(sources, row) * step.row, scratch + step.input)
                target = result + placed(targets, row) * bytes_of_row
                other = 0 if addend == 0 else addend + row * bytes_of_row - target
                # the addend is never where the result is, so that a row can be done again
                if step.winograd == 0 or winograd_row(data, scratch, target, other) != 0:
                    if packed == 0:
                        pack_group(block, step, group, scratch + step.panels)
                    packed = 1
                    convolve_row(data, scratch, target, other)
        begin = end
    for row in range(maximum(low, reached), high):
        target = result + placed(targets, row) * bytes_of_row
        fill_rest(step, target, 0 if addend == 0 else addend + row * bytes_of_row)
    return 0


def order_of(block: CallBlock, step: GroupedConvStep, wanted: int) -> int:
    """Where the order of the rows lies, if it is wanted; else 0."""
    return address(block, step.order) if wanted != 0 else 0


def fill_rest(step: GroupedConvStep, target: int, addend: int) -> int:
    """A row of no group: zeros, or what is added to them."""
    count = step.outs * step.area
    if addend == 0:
        fill_zero(target, count * 4)
        return 0
    for number in range(count):
        value = load32(addend + number * 4)
        # -0.0 and 0.0 are 0.0; a number is below zero where its sign is set, unless it is a NaN
        if value == 2147483648 or (step.least == 0 and value > 2147483648 and value <= 4286578688):
            value = 0
        store32(target + number * 4, value)
    return 0


def place_taps(step: GroupedConvStep, scratch: int) -> int:
    """The offset of each tap, in bytes from the place of a result's first one."""
    offsets = array_at(i64, scratch)
    tap = 0
    for channel in range(step.channels):
        for z in range(step.kernel_z):
            for y in range(step.kernel_y):
                for x in range(step.kernel_x):
                    line = (channel * step.deep + z * step.dilation_z) * step.high + y * step.dilation_y
                    along = x * step.dilation_x
                    offsets[tap] = line * step.line + (
                        along % step.stride_x * step.phase + along // step.stride_x) * 4
                    tap += 1
    return 0


def pack_group(block: CallBlock, step: GroupedConvStep, group: int, panels: int) -> int:
    """A group's weights [channels of the result, taps] as panels: biases, then of each tap one per channel."""
    taps = step.taps
    outs = step.outs
    source = address(block, step.weight) + group * outs * taps * 4
    bias = 0
    if step.bias.slot >= 0:
        bias = address(block, step.bias) + group * outs * 4
    target = panels
    out = 0
    while out < outs:
        height = panel_height(step, outs - out)
        count = minimum(height, outs - out)
        if count < height:
            fill_zero(target, (taps + 1) * height * 4)
        for i in range(count):
            place = target + i * 4
            if bias != 0:
                store32(place, load32(bias + (out + i) * 4))
            else:
                store32(place, 0)
            weight = source + (out + i) * taps * 4
            for _ in range(taps):
                place += height * 4
                store32(place, load32(weight))
                weight += 4
        target += (taps + 1) * height * 4
        out += height
    return 0


def panel_height(step: GroupedConvStep, outs: int) -> int:
    """Channels of the next panel, where so many are left."""
    grain = step.grain
    return minimum((outs + grain - 1) // grain, 3) * grain


def place_row(data: GroupedConvWork, source: int, target: int) -> int:
    """One row [channels, z, y, x] into the scratch, whose margins are zero."""
    step = data.step
    wide = step.wide
    place = array_at(i64, data.functions)[step.function + 6]
    stride = step.stride_x
    for channel in range(step.channels):
        for z in range(step.size_z):
            plane = (channel * step.deep + z + step.padding_z) * step.high + step.padding_y
            line = target + plane * step.line
            if stride == 1:
                call_void(place, source, line + step.padding_x * 4, step.size_y, wide, step.line)
                source += step.size_y * wide * 4
            else:
                for _ in range(step.size_y):
                    for x in range(wide):
                        along = x + step.padding_x
                        store32(line + (along % stride * step.phase + along // stride) * 4, load32(source + x * 4))
                    source += wide * 4
                    line += step.line
    return 0


def convolve_row(data: GroupedConvWork, scratch: int, result: int, other: int) -> int:
    """All channels of one row's result, by tiles of two vectors of positions, or one. other: 0, or bytes from where a
    number is written to the addend for it."""
    step = data.step
    lanes = step.lanes
    outs = step.outs
    taps = step.taps
    each = step.area * 4
    panel = scratch + step.panels
    out = 0
    while out < outs:
        height = panel_height(step, outs - out)
        entry = step.function + (3 - height // step.grain) * 2
        one = array_at(i64, data.functions)[entry]
        two = array_at(i64, data.functions)[entry + 1]
        target = result + out * each
        for z in range(step.out_z):
            for y in range(step.out_y):
                line = scratch + step.input + (z * step.stride_z * step.high + y * step.stride_y) * step.line
                x = 0
                while x < step.out_x:
                    count = minimum(step.out_x - x, 2 * lanes)
                    call_void(two if count > lanes else one, line + x * 4, scratch, taps, panel, target, each,
                              outs - out, count, other, step.least)
                    target += count * 4
                    x += count
        panel += (taps + 1) * height * 4
        out += height
    return 0
