"""Grouped GEMM: products of groups of rows, whose ends are data, in the native subset; see
backend/cpu/routines/encoding/grouped.py and ops/matmul.py.

    for each group, in order: count its rows; the part of its columns and rows that is this thread's:
        few rows: backend/cpu/microkernels/gemv.py; others: packed panels, or the library

Where rows are gathered (ops/matmul.py), panels are packed from the rows where they lie; few rows are places anyway; the
library gets some rows at a time, side by side.

All groups are one piece of work for the threads: a thread takes what lies between two marks of the sum of the groups'
costs, so that it packs the rows and reads the weights of few groups. A group costs its rows and the reading of its
weights.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import (
    ALONG_ROWS,
    ALONG_TERMS,
    GROUPED_READ,
    PARALLEL_FLOPS,
    CallBlock,
    Functions,
    GroupedStep,
    LibraryProduct,
    PackedProduct,
    ProductStep,
)
from anyshape.backend.cpu.native.records import (
    Struct,
    array_at,
    call_void,
    copy_bytes,
    fill_zero,
    i64,
    maximum,
    minimum,
    new,
    size_of,
    words,
)
from anyshape.backend.cpu.routines.blas_gemm import LibraryWork, address, entry_of, matmul_range
from anyshape.backend.cpu.routines.packed_gemm import PackedWork, copy_elements, packed_range, parts
from anyshape.backend.cpu.routines.route_plan import check_order, end_of, placed
from anyshape.backend.cpu.routines.threads import parallel_for, share


class GroupedWork(Struct):
    """What the threads of a step share; `total`: the sum of the groups' costs."""

    functions: Functions
    block: CallBlock
    step: GroupedStep
    total: i64


def run_grouped(block: CallBlock, step: GroupedStep) -> int:
    """All groups, and zeros past the last one."""
    plain = step.library
    rows = step.along == ALONG_ROWS
    size = step.size
    total = 0
    reached = 0
    begin = 0
    falls = 0
    for group in range(step.count):
        end = end_of(block, step, group)
        total += cost_of(step, end - begin)
        if end < begin:
            falls = 1
        reached = maximum(reached, end)
        begin = end
    if rows != 0:
        if plain.k == 0:
            reached = 0
        if step.order.slot >= 0 and check_order(block, address(block, step.order), size, step.cells) != 0:
            return 0
        line = plain.ldc * plain.item
        fill_zero(address(block, plain.c) + reached * line, (size - reached) * line)
        if reached == 0:
            return 0
    other = plain.k if rows != 0 else plain.n
    threads = minimum(block.threads, total * other * plain.m // PARALLEL_FLOPS)
    data = new(GroupedWork)
    data.functions = block.functions
    data.block = block
    data.step = step
    data.total = total
    # groups that lie on each other are written in order
    return parallel_for(block, grouped_range, data, 1 if falls != 0 else threads)


def order_from(block: CallBlock, step: GroupedStep, row: int) -> int:
    """Where the order of the rows from one on lies; 0: there is none."""
    return address(block, step.order) + 8 * row if step.order.slot >= 0 else 0


def cost_of(step: GroupedStep, count: int) -> int:
    """Of a group of `count` elements, in rows; one without rows has no result, a product over nothing has one."""
    cost = maximum(count, 0) + GROUPED_READ
    return 0 if count <= 0 and step.along == ALONG_ROWS else cost


def grouped_range(data: GroupedWork, number: int, team: int) -> int:
    """The share of thread `number` of `team`: of each group the units (panels of columns of a block of rows) whose cost
    lies between two marks."""
    block = data.block
    step = data.step
    low = share(data.total, number, team)
    high = share(data.total, number + 1, team)
    begin = 0
    before = 0
    for group in range(step.count):
        end = end_of(block, step, group)
        count = maximum(end - begin, 0)
        cost = cost_of(step, count)
        if cost > 0 and before < high and before + cost > low:
            ours = step.ours != 0 and count > step.most_few
            panels = parts(step.library.m, step.wide)
            blocks = 1
            if ours != 0:
                product = step.panels
                rows = count if step.along == ALONG_ROWS else product.n
                blocks = parts(rows, product.rows)
                while blocks * 3 * product.grain < rows and blocks * panels < team:
                    blocks += 1
                blocks = parts(rows, height(product, rows, blocks))
            units = panels * blocks
            first = maximum(low - before, 0) * units // cost
            last = minimum(high - before, cost) * units // cost
            if first < last:
                group_range(data, number, group, begin, count, ours, first, last, panels, blocks)
        before += cost
        begin = end
    return 0


def height(product: PackedProduct, rows: int, blocks: int) -> int:
    """Rows of a block, whole panels, where there are at most so many blocks."""
    high = 3 * product.grain
    return parts(parts(rows, blocks), high) * high


def group_range(data: GroupedWork, number: int, group: int, begin: int, count: int, ours: int, first: int, last: int,
                panels: int, blocks: int) -> int:
    """The units first..last-1 of a group of `count` elements from `begin` on."""
    block = data.block
    step = data.step
    along = step.along
    if count == 0:
        if along == ALONG_TERMS:
            clear_group(block, step, group, first, last, panels * blocks)
        return 0
    if ours != 0:
        packed = new(PackedProduct)
        copy_bytes(packed, step.panels, size_of(PackedProduct))
        of_group(step, packed, group, begin, count)
        panel_work = new(PackedWork)
        panel_work.functions = data.functions
        panel_work.block = block
        panel_work.step = packed
        panel_work.panels = panels
        panel_work.high = height(packed, packed.n, blocks)
        panel_work.blocks = blocks
        panel_work.members = 1
        panel_work.sources = order_from(block, step, begin)
        packed_range(panel_work, first, last, number)
        return 0
    product = new(LibraryProduct)
    copy_bytes(product, step.library, size_of(LibraryProduct))
    of_group(step, product, group, begin, count)
    work = new(LibraryWork)
    work.functions = data.functions
    work.block = block
    work.step = product
    from_column = first * step.wide
    to_column = minimum(last * step.wide, product.m)
    if step.order.slot >= 0:
        multiply_gathered(data, work, number, begin, count, from_column, to_column)
        return 0
    if along == ALONG_ROWS and count <= step.most_few:
        product.thin.function = step.thin[count - 1]
        product.thin.count = count
    else:
        product.thin.function = 0
        product.m = to_column - from_column
        product.a.bytes += from_column * step.lane
        product.c.bytes += from_column * product.item
    matmul_range(work, 0, 1, from_column, to_column)
    return 0


def multiply_gathered(data: GroupedWork, work: LibraryWork, number: int, begin: int, count: int, first: int,
                      last: int) -> int:
    """The columns first..last-1 of a group whose rows are gathered: few rows, or by the library, some rows at a time in
    a thread's scratch."""
    block = data.block
    step = data.step
    product = work.step
    sources = order_from(block, step, begin)
    rows = address(block, product.b)
    if count <= step.most_few:
        few_gathered(data, product, step.thin[count - 1], rows, sources, count, first, last)
        return 0
    scratch = block.scratch + number * block.program.scratch
    item = product.item
    product.thin.function = 0
    product.m = last - first
    product.a.bytes += first * step.lane
    product.b.bytes = scratch - block.slots[product.b.slot]
    product.c.bytes += first * item
    row = 0
    while row < count:
        product.n = minimum(step.rows, count - row)
        for i in range(product.n):
            copy_elements(scratch + i * step.apart, rows + placed(sources, row + i) * step.row, product.k, item,
                          step.element)
        matmul_range(work, 0, 1, first, last)
        product.c.bytes += product.n * step.c_along
        row += product.n
    return 0


def few_gathered(data: GroupedWork, product: LibraryProduct, function: int, rows: int, sources: int, count: int,
                 first: int, last: int) -> int:
    """The results first..last-1 of few rows that are gathered."""
    result = address(data.block, product.c)
    matrix = address(data.block, product.a)
    places = words(16)
    for i in range(8):
        row = minimum(i, count - 1)
        places[i] = rows + placed(sources, row) * data.step.row
        places[8 + i] = result + row * product.thin.result
    call_void(entry_of(data.functions, function)[0], matrix, product.thin.step, product.k, first, last, places,
              product.thin.element, product.thin.result_step, product + LibraryProduct.alpha)
    return 0


def of_group(step: GroupedStep, product: ProductStep, group: int, begin: int, count: int) -> int:
    """Makes a product of all elements one of a group of `count` elements from `begin` on."""
    array_at(i64, product)[step.along] = count
    product.a.bytes += group * step.a_group + begin * step.a_along
    product.b.bytes += group * step.b_group + begin * step.b_along
    product.c.bytes += group * step.c_group + begin * step.c_along
    return 0


def clear_group(block: CallBlock, step: GroupedStep, group: int, first: int, last: int, units: int) -> int:
    """Zeros in the parts first..last-1 of `units` of a group's result, a product over nothing."""
    product = step.library
    rows = product.n
    line = product.ldc * product.item
    begin = share(rows, first, units)
    place = address(block, product.c) + group * step.c_group
    fill_zero(place + begin * line, (share(rows, last, units) - begin) * line)
    return 0
