"""The subset of Python that becomes native code (backend/cpu/native/compiler.py): what LLVM makes of it is what Python
says."""
from __future__ import annotations

import ctypes
import inspect
import itertools
from typing import Annotated, Any

import numpy
import pytest

from anyshape.backend.cpu.bytecode import format
from anyshape.backend.cpu.llvm import jit
from anyshape.backend.cpu.machine import target as limits
from anyshape.backend.cpu.native.compiler import translate
from anyshape.backend.cpu.native.records import (
    Array,
    Inline,
    Nested,
    Struct,
    address_of,
    array_at,
    call,
    i64,
    load64,
    new,
    size_of,
    tail,
    words,
    words_of,
)
from anyshape.backend.cpu.routines.blas_gemm import CopyWork, copy_range, copy_run
from anyshape.backend.cpu.routines.offset_assignment import search

NUMBERS = (-65, -64, -7, -1, 0, 1, 3, 7, 64, 65)


class Pair(Struct):
    left: i64
    right: i64


class Shape(Struct):
    count: i64
    pairs: Array[Pair]
    own: Nested[Pair]
    three: Annotated[Array[i64], Inline(3)]
    more: Annotated[Array[Pair], Inline(0)]


def arithmetic(a: int, b: int, out: Array[i64]) -> int:
    out[0] = a // b if b != 0 else -1
    out[1] = a % b if b != 0 else -1
    out[2] = a // 8
    out[3] = a % 8
    out[4] = a // 7
    out[5] = a % 7
    out[6] = b != 0 and a // b > 0
    out[7] = a or b
    out[8] = a and b
    out[9] = not a
    last = 100
    for i in range(a, b):
        last = i
        i += 5
    out[10] = last
    return 0


def guarded(address: int) -> int:
    """Reads an address only where there is one."""
    if address != 0 and load64(address) > 5:
        return 1
    return load64(address) if address != 0 else -1


def records(shape: Shape, out: Array[i64]) -> int:
    shape.own.left += 3
    shape.own.right = shape.own.left * 2
    total = 0
    for i in range(shape.count):
        pair = shape.pairs[i]
        pair.right += i
        total += pair.left * pair.right
    later = tail(shape.pairs, 1)
    later[0].left = 9
    shape.three[2] = total
    room = new(Pair)
    room.left = shape.more[1].right
    out[0] = room.left + room.right
    out[1] = size_of(Shape) + Shape.own
    out[2] = call(added, shape.own, total)
    return total


def added(pair: Pair, number: int) -> int:
    return pair.left + number


def wrong_field(pair: Pair) -> int:
    return pair.middle  # type: ignore[attr-defined,no-any-return]


def wrong_order(shape: Shape) -> int:
    return shape.own >= 0  # type: ignore[operator]


def wrong_record(shape: Shape) -> int:
    return added(shape, 1)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiled() -> Any:
    names = ("arithmetic", "guarded", "records", "search")
    return jit.load(translate(arithmetic, guarded, records, search), names, limits.host())


def native(compiled: Any, function: Any) -> Any:
    types = [ctypes.c_int64] * len(inspect.signature(function).parameters)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *types)(compiled.address[function.__name__])


def test_numbers_are_those_of_python(compiled: Any) -> None:
    """Quotients and remainders of both signs, operands that decide, a loop whose variable its body changes."""
    run = native(compiled, arithmetic)
    for a in NUMBERS:
        for b in NUMBERS:
            one, other = words(11), words(11)
            arithmetic(a, b, one)
            run(a, b, other)
            assert [one[i] for i in range(11)] == [other[i] for i in range(11)], (a, b)


def test_what_a_condition_guards_is_not_looked_at(compiled: Any) -> None:
    value = words(1)
    for content in (3, 8):
        value[0] = content
        for address in (0, value):
            assert native(compiled, guarded)(address) == guarded(address)


def test_records(compiled: Any) -> None:
    """Fields, arrays and nested records lie where Python sees them."""
    found = []
    for run in (records, native(compiled, records)):
        memory, out, pairs = words(words_of(Shape) + 4), words(3), words(4)
        for i in range(4):
            pairs[i] = 2 + i
        shape = Shape(memory)
        shape.count, shape.pairs = 2, pairs  # type: ignore[assignment]
        shape.own.left = 4
        shape.more[1].right = 11
        total = run(shape, out)
        assert shape.three[2] == total
        found.append([total, *(out[i] for i in range(3)), *(memory[i] for i in (0, 2, 3, 6)),
                      *(pairs[i] for i in range(4))])
    assert found[0] == found[1]


def test_what_is_no_such_record_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"has no such field: pair\.middle"):
        translate(wrong_field)
    with pytest.raises(AssertionError, match=r"in place of .*Pair"):
        translate(wrong_record)
    with pytest.raises(AssertionError, match="name one of its fields"):
        translate(wrong_order)


def test_an_encoder_takes_every_field() -> None:
    """What is encoded is what a record at that address reads; a field that is left out is an error."""
    encode = format.CopyStepWords.encoder()
    step = encode(op=format.COPY, length=0, number=3, item=4, target=(5, 6), source=(7, 8), outer=9, rank=1,
                  inner=(10, 11, 12), dims=(13, 14, 15))
    memory = (ctypes.c_int64 * len(step))(*step)
    seen = format.CopyStepWords(ctypes.addressof(memory))
    assert (seen.item, seen.source.slot, seen.inner.source, seen.dims[0].target) == (4, 7, 12, 14)
    assert step[format.CopyStepWords.index("target.bytes")] == 6
    with pytest.raises(TypeError, match="outer"):
        encode(op=0, length=0, number=3, item=4, target=(5, 6), source=(7, 8), rank=0, inner=(1, 1, 1), dims=())
    assert words_of(format.PackedProduct) == words_of(format.LibraryProduct) == format.MATMUL_DIMS


def test_routines_run_as_python(compiled: Any) -> None:
    """A search for offsets gives the same layout stepped through as compiled; a strided copy moves its elements."""
    sizes, firsts, lasts = (64, 128, 64, 192, 64), (0, 1, 2, 3, 4), (2, 3, 4, 4, 5)
    count = len(sizes)
    found = []
    for run in (search, native(compiled, search)):
        columns, room = words(4 * count), words(1 + 9 * count)
        for i in range(count):
            columns[i], columns[count + i], columns[2 * count + i] = sizes[i], firsts[i], lasts[i]
        top = run(count, 0, columns, 0, 320, 320, 1 << 40, room, array_at(int, 0), array_at(int, 0), 1)
        found.append((top, [room[i] for i in range(1 + count)]))
    assert found[0] == found[1] and found[0][1][0] == 1
    source, target = words(6), words(3)
    for i in range(6):
        source[i] = i
    copy_run(target, source, 3, 8, 16, 8)
    assert [target[i] for i in range(3)] == [0, 2, 4]
    assert call(address_of(added), Pair(source), 4) == 4


@pytest.mark.parametrize("images, pixels, channels", [(2, 5, 3), (1, 1030, 3), (3, 2, 17), (2, 1, 1)])
def test_copies_with_channels_last_in_any_shares(images: int, pixels: int, channels: int) -> None:
    """Few channels go across a block of pixels: whoever copies which part of the pixels, each element comes once."""
    size = images * pixels * channels
    step = format.CopyStepWords.encoder()(
        op=format.COPY, length=0, number=0, item=8, target=(0, 0), source=(1, 0), outer=images * pixels, rank=2,
        inner=(channels, 8, 8 * pixels),
        dims=(images, 8 * channels * pixels, 8 * channels * pixels, pixels, 8 * channels, 8))
    work, source, target = new(CopyWork), (ctypes.c_int64 * size)(*range(size)), (ctypes.c_int64 * size)()
    kept = (ctypes.c_int64 * len(step))(*step)
    work.step = format.CopyStepWords(ctypes.addressof(kept))
    block = words(words_of(format.CallBlock) + 2)
    work.block = format.CallBlock(block)
    for slot, memory in enumerate((target, source)):
        work.block.slots[slot] = ctypes.addressof(memory)
    ends = sorted({0, 1, images * pixels // 2, images * pixels // 2 + 1, images * pixels})
    for begin, end in itertools.pairwise(one for one in ends if one <= images * pixels):
        copy_range(work, begin, end)
    at = numpy.arange(size).reshape(images, channels, pixels).transpose(0, 2, 1)
    assert [*target] == at.ravel().tolist()

