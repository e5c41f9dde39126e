"""Native bytecode encoder of copies: a strided copy between windows of one shape and dtype, in as few dims as its
strides allow."""
from __future__ import annotations

from anyshape.backend.cpu.bytecode.format import COPY, CopyDim, CopyStepWords
from anyshape.backend.cpu.bytecode.template import MOST_DIMS, CopyPiece, WindowWords
from anyshape.backend.cpu.native.records import Array, array_at, i64, words, words_of
from anyshape.backend.cpu.routines.encoding.product import next_window

COPY_DIM, COPY_WORDS = map(words_of, (CopyDim, CopyStepWords))


def encode_copy(piece: CopyPiece, out: Array[i64]) -> int:
    """The words of a copy; none when there is nothing to copy."""
    source = WindowWords(piece.windows)
    target = next_window(source)
    item = target.item
    rank = target.rank
    room = words(COPY_DIM * (MOST_DIMS + 1))
    dims = array_at(CopyDim, room)
    count = 0
    for i in range(rank):
        size = target.numbers[i]
        if size == 0:
            return 0
        if size != 1:
            put_dim(dims, count, size, target.numbers[rank + i] * item, source.numbers[rank + i] * item)
            count += 1
    count = merged(dims, count)
    if count == 0:
        put_dim(dims, 0, 1, item, item)
        count = 1
    step = CopyStepWords(out)
    step.op = COPY
    step.number = piece.number
    step.item = item
    step.target.slot = target.slot
    step.target.bytes = target.offset * item
    step.source.slot = source.slot
    step.source.bytes = source.offset * item
    step.rank = count - 1
    outer = 1
    for i in range(count - 1):
        dim = dims[i]
        outer *= dim.size
        put_dim(step.dims, i, dim.size, dim.target, dim.source)
    step.outer = outer
    inner = dims[count - 1]
    step.inner.size = inner.size
    step.inner.target = inner.target
    step.inner.source = inner.source
    step.length = COPY_WORDS + COPY_DIM * (count - 1)
    return step.length


def put_dim(dims: Array[CopyDim], at: int, size: int, target: int, source: int) -> int:
    """Writes a dim."""
    dim = dims[at]
    dim.size = size
    dim.target = target
    dim.source = source
    return 0


def distance(stride: int) -> int:
    """How far apart neighbours of a dim are."""
    return stride if stride >= 0 else 0 - stride


def before(target: int, source: int, dim: CopyDim) -> int:
    """Whether a dim of such strides is an outer one of another."""
    if distance(target) != distance(dim.target):
        return distance(target) > distance(dim.target)
    return distance(source) > distance(dim.source)


def merged(dims: Array[CopyDim], count: int) -> int:
    """Sorts dims from the outermost to the innermost, and makes one of those that follow each other without a gap. How
    many there are then."""
    for i in range(count):
        size = dims[i].size
        target = dims[i].target
        source = dims[i].source
        at = i
        while at > 0 and before(target, source, dims[at - 1]):
            put_dim(dims, at, dims[at - 1].size, dims[at - 1].target, dims[at - 1].source)
            at -= 1
        put_dim(dims, at, size, target, source)
    left = 0
    for i in range(count):
        dim = dims[i]
        size = dim.size
        if left > 0 and dims[left - 1].target == size * dim.target and dims[left - 1].source == size * dim.source:
            left -= 1
            size *= dims[left].size
        put_dim(dims, left, size, dim.target, dim.source)
        left += 1
    return left


