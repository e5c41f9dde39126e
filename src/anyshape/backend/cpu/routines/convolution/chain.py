"""Chains of grouped convolutions, in the native subset: consecutive steps over the same groups of rows go through the
rows together, some at a time, so that what one writes is still in the caches when the next one reads it.

    conv a -> b;  conv b -> c        for some rows at a time:  b[rows] = conv a[rows];  c[rows] = conv b[rows]

A row of a result depends on that row alone. Steps are chained where memory allows another order: what two of them read
and write is apart, or lies row by row at the same places. Of rows that are gathered or scattered that has to be apart.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import GROUPED_CONV, PARALLEL_FLOPS, CallBlock, GroupedConvStep, Place
from anyshape.backend.cpu.native.records import Struct, i64, minimum, new
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.convolution.grouped_conv import convolve_rows
from anyshape.backend.cpu.routines.convolution.winograd import GroupedConvWork
from anyshape.backend.cpu.routines.route_plan import check_order
from anyshape.backend.cpu.routines.threads import parallel_for, share

MOST = 64  # steps of a chain: finding it takes the square of them


class ChainWork(Struct):
    """What the threads of a chain share."""

    block: CallBlock
    first: GroupedConvStep
    count: i64  # steps
    rows: i64  # at a time


def run_grouped_convs(block: CallBlock, step: GroupedConvStep) -> int:
    """A step and those after it that are chained to it; how many these are. Where somebody measures, one."""
    data = new(ChainWork)
    data.block = block
    data.first = step
    count = 0
    work = 0
    rows = step.size
    one = step
    while one.op == GROUPED_CONV and (count == 0 or (count < MOST and block.times == 0
                                                     and is_chained(block, step, count, one) != 0)):
        if one.order.slot >= 0:
            cells = one.size if one.gathered == 0 else one.cells
            if one.scattered != 0:
                cells = minimum(cells, one.size)
            check_order(block, address(block, one.order), one.size, cells)
        work += one.size * one.outs * one.taps * one.area
        rows = minimum(rows, one.near)
        count += 1
        one = GroupedConvStep(one + 8 * one.length)
    if block.status != 0:
        return count
    data.count = count
    data.rows = step.size if count == 1 else rows
    threads = minimum(minimum(block.threads, step.size), work // PARALLEL_FLOPS)
    parallel_for(block, chain_range, data, threads)
    return count


def chain_range(data: ChainWork, number: int, team: int) -> int:
    """The equal part of the rows that is thread `number`'s of `team`, by all steps."""
    block = data.block
    size = data.first.size
    low = share(size, number, team)
    high = share(size, number + 1, team)
    own = new(GroupedConvWork)
    own.functions = block.functions
    own.block = block
    while low < high:
        stop = minimum(low + data.rows, high)
        step = data.first
        for _ in range(data.count):
            own.step = step
            convolve_rows(own, low, stop, block.scratch + number * block.program.scratch)
            step = GroupedConvStep(step + 8 * step.length)
        low = stop
    return 0


def is_chained(block: CallBlock, first: GroupedConvStep, count: int, step: GroupedConvStep) -> int:
    """1 where a step has the rows and groups of the first of a chain, and may run together with all `count` of it."""
    if step.size != first.size or step.count != first.count or step.end_item != first.end_item:
        return 0
    if step.end_step != first.end_step or address(block, step.ends) != address(block, first.ends):
        return 0
    one = first
    for _ in range(count):
        if writes_over(block, step, one) != 0 or writes_over(block, one, step) != 0:
            return 0
        one = GroupedConvStep(one + 8 * one.length)
    return 1


def writes_over(block: CallBlock, writer: GroupedConvStep, reader: GroupedConvStep) -> int:
    """1 where the result of one step lies over something of another, other than row by row."""
    result = address(block, writer.result)
    row = writer.outs * writer.area * 4
    bytes_ = writer.size * row
    other = reader.outs * reader.area * 4
    weights = reader.count * reader.outs * 4
    source = reader.channels * reader.volume * 4
    moved = writer.scattered
    if moved + reader.gathered != 0 or reader.row != source:
        clashes = lies_over(block, result, bytes_, reader.rows, (reader.cells - 1) * reader.row + source)
    else:
        clashes = rows_clash(block, result, row, reader.rows, source, reader.size, 0)
    clashes += rows_clash(block, result, row, reader.result, other, reader.size, moved + reader.scattered)
    clashes += rows_clash(block, result, row, reader.addend, other, reader.size, moved)
    clashes += lies_over(block, result, bytes_, reader.order, 8 * reader.size)
    clashes += lies_over(block, result, bytes_, reader.weight, weights * reader.taps)
    clashes += lies_over(block, result, bytes_, reader.bias, weights)
    clashes += lies_over(block, result, bytes_, reader.ends, reader.count * reader.end_step)
    return minimum(clashes, 1)


def rows_clash(block: CallBlock, result: int, row: int, place: Place, other: int, size: int, moved: int) -> int:
    """1 where `size` rows of `row` bytes at `result` lie over those of `other` bytes at a place, not each over its
    own, where none is moved."""
    if moved == 0 and place.slot >= 0 and address(block, place) == result and row == other:
        return 0
    return lies_over(block, result, row * size, place, other * size)


def lies_over(block: CallBlock, result: int, bytes_: int, place: Place, others: int) -> int:
    """1 where some of the bytes at `result` are among those at a place; a slot of -1 is no place."""
    if place.slot < 0:
        return 0
    begin = address(block, place)
    return 1 if begin < result + bytes_ and result < begin + others else 0
