"""Counting sort of the choices of cells by branch, and the group of each row, in the native subset; see ops/routing.py.

    count the choices of each branch  ->  where each branch begins  ->  the place of each choice, in order

One thread does it: two passes over a few bytes for each choice. While places are given, the end of a branch is where
its next choice goes.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import CallBlock, EndsStep, RoutePlanStep, SegmentStep
from anyshape.backend.cpu.native.records import array_at, fill_zero, i64, load32, load64, maximum, minimum, store32
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.ir.op import INDEX, ROUTE


def run_route_plan(block: CallBlock, step: RoutePlanStep) -> int:
    """The order, its inverse and the ends; a choice of no branch is the call's status, and nothing else is done."""
    ends = address(block, step.ends)
    branches = step.branches
    fill_zero(ends, 4 * branches)
    ids = address(block, step.ids)
    choices = step.choices
    for cell in range(step.cells):
        at = ids + cell * step.cell
        for _ in range(choices):
            branch = load64(at)
            if branch >= 0:
                if branch >= branches:
                    block.status = ROUTE
                    return 0
                store32(ends + 4 * branch, load32(ends + 4 * branch) + 1)
            elif branch < -1:
                block.status = ROUTE
                return 0
            at += step.choice
    begin = 0
    for number in range(branches):
        count = load32(ends + 4 * number)
        store32(ends + 4 * number, begin)
        begin += count
    order = array_at(i64, address(block, step.order))
    inverse = array_at(i64, address(block, step.inverse))
    one = 0
    for cell in range(step.cells):
        at = ids + cell * step.cell
        for _ in range(choices):
            branch = load64(at)
            place = begin
            if branch >= 0:
                place = load32(ends + 4 * branch)
                store32(ends + 4 * branch, place + 1)
            else:
                begin += 1
            order[place] = one
            inverse[one] = place
            one += 1
            at += step.choice
    return 0


def run_segments(block: CallBlock, step: SegmentStep) -> int:
    """The number of each row's group; that of the rows behind is the number of groups."""
    result = array_at(i64, address(block, step.result))
    size = step.size
    reached = 0
    begin = 0
    for group in range(step.count):
        end = end_of(block, step, group)
        for row in range(begin, end):
            result[row] = group
        reached = maximum(reached, end)
        begin = end
    for row in range(reached, size):
        result[row] = step.count
    return 0


def check_order(block: CallBlock, order: int, size: int, most: int) -> int:
    """Whether `size` rows have a place in an order, of so many; else that is the call's status."""
    wrong = 0
    for row in range(size):
        place = load64(order + 8 * row)
        if place < 0 or place >= most:
            wrong = 1
    if wrong != 0:
        block.status = INDEX
    return wrong


def placed(order: int, row: int) -> int:
    """The place of a row in an order; 0: as they lie."""
    return row if order == 0 else load64(order + 8 * row)


def end_of(block: CallBlock, step: EndsStep, group: int) -> int:
    """Where a group ends, as Python's slices take it."""
    at = address(block, step.ends) + group * step.end_step
    size = step.size
    end = 0
    if step.end_item == 8:
        end = load64(at)
    else:
        end = load32(at)
        end -= end >> 31 << 32
    if end < 0:
        end += size
    return minimum(maximum(end, 0), size)
