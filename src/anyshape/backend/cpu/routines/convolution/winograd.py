"""Winograd convolution of rows by the weights of their group, in the native subset: see
backend/cpu/microkernels/winograd_conv.py.

Weights are transformed once for each group, inputs for each strip of tiles: two lines of two vectors of results.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import CallBlock, Functions, GroupedConvStep
from anyshape.backend.cpu.native.records import (
    Struct,
    array_at,
    call_void,
    copy_bytes,
    fill_zero,
    i64,
    load64,
    minimum,
    store64,
)
from anyshape.backend.cpu.routines.blas_gemm import address


class GroupedConvWork(Struct):
    """What the threads of a step share."""

    functions: Functions
    block: CallBlock
    step: GroupedConvStep


def block_height(left: int, blocks: int) -> int:
    """Channels of the next of so many blocks, which have the channels that are left between them."""
    return (left + blocks - 1) // blocks


def transform_weights(data: GroupedConvWork, group: int, scratch: int) -> int:
    """A group's weights [channels of the result, channels, 3, 3], in blocks, and its biases."""
    step = data.step
    block = data.block
    outs = step.outs
    routine = array_at(i64, data.functions)[step.winograd]
    weight = address(block, step.weight) + group * outs * step.taps * 4
    if step.bias.slot >= 0:
        copy_bytes(scratch + step.biases, address(block, step.bias) + group * outs * 4, outs * 4)
    else:
        fill_zero(scratch + step.biases, outs * 4)
    target = scratch + step.factors
    far = outs * step.channels * 16
    out = 0
    for number in range(step.blocks):
        height = block_height(outs - out, step.blocks - number)
        for k in range(height):
            call_void(routine, weight, step.channels, target + k * 4, height * 4, far)
            weight += step.taps * 4
        target += height * step.channels * 16
        out += height
    return 0


def winograd_row(data: GroupedConvWork, scratch: int, result: int, other: int) -> int:
    """All channels of one row's result. other: 0, or bytes from where a number is written to the addend for it. Returns
    0; 1 where something was not finite, so that the result may be another than by definition."""
    step = data.step
    width = 2 * step.lanes
    each = step.area * 4
    functions = array_at(i64, data.functions)
    store64(scratch + step.flag, 0)
    for pair in range((step.out_y + 1) // 2):
        y = 2 * pair
        x = 0
        while x < step.out_x:
            call_void(functions[step.winograd + 1], scratch + step.input + y * step.line + x * 4, step.line,
                      step.high * step.line, step.channels, scratch + step.transformed)
            sum_tiles(data, scratch)
            call_void(functions[step.winograd + 2], scratch + step.sums, step.outs, scratch + step.biases,
                      result + (y * step.out_x + x) * 4, each, step.out_x * 4, minimum(step.out_x - x, width),
                      minimum(step.out_y - y, 2), other, step.least, scratch + step.flag)
            x += width
    return load64(scratch + step.flag)


def sum_tiles(data: GroupedConvWork, scratch: int) -> int:
    """The products of a strip of tiles, summed over channels: a point along the line after the other, so that the
    inputs of one stay near while all weights go by."""
    step = data.step
    functions = array_at(i64, data.functions)
    vector = step.lanes * 4
    sums = scratch + step.sums
    inputs = scratch + step.transformed
    factors = scratch + step.factors
    far = step.outs * vector
    for _ in range(4):
        out = 0
        for number in range(step.blocks):
            height = block_height(step.outs - out, step.blocks - number)
            call_void(functions[step.winograd + 2 + height], inputs, step.channels, factors, sums + out * vector, far)
            factors += height * step.channels * 16
            out += height
        inputs += step.channels * 4 * vector
        sums += 2 * far
    return 0
