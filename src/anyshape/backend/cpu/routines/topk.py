"""Top-k selection of lines, in the native subset; see ops/routing.py.

    a line's elements -> keys, whole numbers in the same order -> the k + 1 largest, in order -> values, indices

Where two of these are equal, which ones PyTorch gives, and in which order, follows from the algorithms that it calls:
`std::partial_sort` where 64 k is at most the length of a line, else `std::nth_element` and `std::sort`, of libstdc++
(bits/stl_algo.h, bits/stl_heap.h; Musser, "Introspective Sorting and Selection Algorithms", 1997). For such a line they
are done step by step, on the same sequence.
"""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import TOPK_COUNT, TOPK_MOST, CallBlock, TopkStep
from anyshape.backend.cpu.native.records import (
    Array,
    Struct,
    copy_bytes,
    i64,
    load8,
    load16,
    load32,
    load64,
    minimum,
    new,
    store64,
    words,
)
from anyshape.backend.cpu.routines.blas_gemm import address
from anyshape.backend.cpu.routines.threads import parallel_for, share

WORK = 65536  # elements that are worth one more thread
LAST = 9223372036854775807
SMALLEST = -9223372036854775808  # below all keys but perhaps whole numbers of 64 bits


class TopkWork(Struct):
    """What the threads of a step share."""

    block: CallBlock
    step: TopkStep


def run_topk(block: CallBlock, step: TopkStep) -> int:
    """All lines."""
    data = new(TopkWork)
    data.block = block
    data.step = step
    return parallel_for(block, topk_range, data, minimum(block.threads, step.lines * step.count // WORK))


def topk_range(data: TopkWork, number: int, team: int) -> int:
    """The lines of one thread."""
    step = data.step
    block = data.block
    count = step.count
    k = step.k
    item = step.item
    keys = words(TOPK_COUNT)
    queue = words(TOPK_COUNT)
    best = words(TOPK_MOST + 1)
    element = step.element
    wanted = minimum(k + 1, count)
    floats = 1 if item == 4 and step.infinity != 0 else 0
    source = address(block, step.x)
    values = address(block, step.values)
    indices = address(block, step.indices)
    for line in range(share(step.lines, number, team), share(step.lines, number + 1, team)):
        begin = source + line * step.line
        tied = 0
        if floats != 0:
            tied = largest_floats(begin, element, count, wanted, best, queue)
        else:
            tied = largest(step, begin, wanted, best, queue)
        if tied != 0:
            for position in range(count):
                keys[position] = key_of(step, begin + position * element)
                queue[position] = position
            if k * 64 <= count:
                partial_sort(keys, queue, k, count)
            else:
                nth_element(keys, queue, k - 1, count)
                insertion_sort(keys, queue, 0, k - 1)
        for chosen in range(k):
            place = queue[chosen]
            copy_element(values + (line * k + chosen) * item, begin + place * element, item)
            store64(indices + (line * k + chosen) * 8, place)
    return 0


def copy_element(target: int, source: int, item: int) -> int:
    """One element of `item` bytes."""
    if item == 4:
        copy_bytes(target, source, 4)
    else:
        copy_bytes(target, source, item)
    return 0


def largest(step: TopkStep, begin: int, wanted: int, best: Array[i64], queue: Array[i64]) -> int:
    """The places of the largest elements of a line, so many, and their keys; whether two of these are equal."""
    low = SMALLEST
    found = 0
    for position in range(step.count):
        key = key_of(step, begin + position * step.element)
        if found < wanted or key > low:
            found = minimum(found + 1, wanted)
            low = insert(best, queue, found, key, position)
    return repeated(best, found)


def largest_floats(at: int, element: int, count: int, wanted: int, best: Array[i64], queue: Array[i64]) -> int:
    """The same of f32, of which elements are `element` bytes apart."""
    low = SMALLEST
    found = 0
    for position in range(count):
        bits = load32(at)
        size = bits & 2147483647
        key = LAST if size > 2139095040 else size if bits == size else 0 - size
        at += element
        if key > low:
            found = minimum(found + 1, wanted)
            last = insert(best, queue, found, key, position)
            low = last if found == wanted else SMALLEST
    return repeated(best, found)


def insert(best: Array[i64], queue: Array[i64], found: int, key: int, position: int) -> int:
    """Puts a key, and the place that it is of, among those that were found, in place of the last one; the last key."""
    at = found - 1
    while at > 0 and best[at - 1] < key:
        best[at] = best[at - 1]
        queue[at] = queue[at - 1]
        at -= 1
    best[at] = key
    queue[at] = position
    return best[found - 1]


def repeated(best: Array[i64], found: int) -> int:
    """Whether two keys that follow each other are equal."""
    for position in range(1, found):
        if best[position] == best[position - 1]:
            return 1
    return 0


def key_of(step: TopkStep, place: int) -> int:
    """A whole number for an element: equal where elements are equal, larger where one is larger; for all NaN the
    largest."""
    item = step.item
    bits = 0
    if item == 4:
        bits = load32(place)
        bits -= bits >> 31 << 32
    elif item == 8:
        bits = load64(place)
    elif item == 2:
        bits = load16(place)
        bits -= bits >> 15 << 16
    else:
        bits = load8(place)
        if step.unsigned == 0:
            bits -= bits >> 7 << 8
    infinity = step.infinity
    if infinity != 0:
        low = 8 * item - 1
        size = bits & ((1 << low) - 1) if item < 8 else bits & LAST
        if size > infinity:
            return LAST
        return 0 - size if bits < 0 else size
    return bits


# ---- the algorithms of libstdc++ on places, by their keys, larger ones first


def exchange(queue: Array[i64], one: int, other: int) -> int:
    """std::iter_swap."""
    kept = queue[one]
    queue[one] = queue[other]
    queue[other] = kept
    return 0


def nth_element(keys: Array[i64], queue: Array[i64], nth: int, count: int) -> int:
    """std::nth_element: std::__introselect."""
    first = 0
    last = count
    limit = 0
    length = count
    while length > 1:
        length = length >> 1
        limit += 2
    while last - first > 3:
        if limit == 0:
            heap_select(keys, queue, first, nth + 1, last)
            exchange(queue, first, nth)
            return 0
        limit -= 1
        cut = partition(keys, queue, first, last)
        if cut <= nth:
            first = cut
        else:
            last = cut
    insertion_sort(keys, queue, first, last)
    return 0


def partition(keys: Array[i64], queue: Array[i64], first: int, last: int) -> int:
    """std::__unguarded_partition_pivot."""
    one = keys[queue[first + 1]]
    two = first + (last - first) // 2
    middle = keys[queue[two]]
    end = keys[queue[last - 1]]
    if one > middle:
        if middle > end:
            exchange(queue, first, two)
        elif one > end:
            exchange(queue, first, last - 1)
        else:
            exchange(queue, first, first + 1)
    elif one > end:
        exchange(queue, first, first + 1)
    elif middle > end:
        exchange(queue, first, last - 1)
    else:
        exchange(queue, first, two)
    pivot = keys[queue[first]]
    low = first + 1
    high = last
    while True:
        while keys[queue[low]] > pivot:
            low += 1
        high -= 1
        while pivot > keys[queue[high]]:
            high -= 1
        if low >= high:
            return low
        exchange(queue, low, high)
        low += 1
    return low


def insertion_sort(keys: Array[i64], queue: Array[i64], first: int, last: int) -> int:
    """std::__insertion_sort, which std::sort is for at most 16 elements."""
    for position in range(first + 1, last):
        value = queue[position]
        at = position
        if keys[value] > keys[queue[first]]:
            while at > first:
                queue[at] = queue[at - 1]
                at -= 1
        else:
            while keys[value] > keys[queue[at - 1]]:
                queue[at] = queue[at - 1]
                at -= 1
        queue[at] = value
    return 0


def partial_sort(keys: Array[i64], queue: Array[i64], k: int, count: int) -> int:
    """std::partial_sort: std::__heap_select, then std::__sort_heap."""
    heap_select(keys, queue, 0, k, count)
    last = k
    while last > 1:
        last -= 1
        pop_heap(keys, queue, 0, last, last)
    return 0


def heap_select(keys: Array[i64], queue: Array[i64], first: int, middle: int, last: int) -> int:
    """std::__heap_select, which begins with std::__make_heap."""
    length = middle - first
    if length > 1:
        parent = (length - 2) // 2
        while parent >= 0:
            adjust_heap(keys, queue, first, parent, length, queue[first + parent])
            parent -= 1
    for position in range(middle, last):
        if keys[queue[position]] > keys[queue[first]]:
            pop_heap(keys, queue, first, middle, position)
    return 0


def pop_heap(keys: Array[i64], queue: Array[i64], first: int, last: int, result: int) -> int:
    """std::__pop_heap."""
    value = queue[result]
    queue[result] = queue[first]
    return adjust_heap(keys, queue, first, 0, last - first, value)


def adjust_heap(keys: Array[i64], queue: Array[i64], first: int, start: int, length: int, value: int) -> int:
    """std::__adjust_heap, which ends with std::__push_heap."""
    hole = start
    child = start
    while child < (length - 1) // 2:
        child = 2 * (child + 1)
        if keys[queue[first + child]] > keys[queue[first + child - 1]]:
            child -= 1
        queue[first + hole] = queue[first + child]
        hole = child
    if (length & 1) == 0 and child == (length - 2) // 2:
        child = 2 * (child + 1)
        queue[first + hole] = queue[first + child - 1]
        hole = child - 1
    parent = (hole - 1) // 2
    while hole > start and keys[queue[first + parent]] > keys[value]:
        queue[first + hole] = queue[first + parent]
        hole = parent
        parent = (hole - 1) // 2
    queue[first + hole] = value
    return 0
