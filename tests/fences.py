"""Memory with pages that nobody may touch right behind it, or right in front of it: who reads or writes beyond his own
dies at once. `pytest --fenced` runs any tests so; tests/test_bounds.py runs programs so, in a process of its own.

Fenced are, in every call of a compiled program: its results, its inputs (copies, given back where the program writes
them), every value in the arena, and the scratch of every thread. No two values of the arena share memory, whatever
their lifetimes, and all of it comes filled with NaNs. What is kept for a backward is not taken apart. Products that may
pack their rows over themselves do, every second time.

    piece at its end     .... | nobody |         [xxxxxxxx] | nobody |       every other piece is at its beginning
"""
from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import os
from typing import Any

import torch

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.native_routines import NativeRoutines
from anyshape.plan.ir.program import Plan
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.call.program import written_names
from anyshape.runtime.memory.pools import Block, Pool
from anyshape.runtime.specialize.saved_policy import SavedLayout
from anyshape.runtime.specialize.specialization import Specialization, Specializer
from anyshape.sym.expr import evaluate
from anyshape.torch_compat.versions import api

PAGE = mmap.PAGESIZE
NOBODY, POISON = 0, 0xFF  # the protection of a fence; bytes of NaNs
MOST = 2000  # pieces, and arenas, that are kept for the next use: the system has so many mappings only
TRACE = os.environ.get("ANYSHAPE_FENCE_TRACE")  # a file that says which plan runs
_library = ctypes.CDLL(None, use_errno=True)
_library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_turns = itertools.count()


def pages(bytes_: int) -> int:
    """Bytes of the whole pages that hold so many."""
    return -(-bytes_ // PAGE) * PAGE


class Piece:
    """So many bytes between two fences; they end at the second one, or begin at the first."""

    def __init__(self, bytes_: int, ends: bool) -> None:
        self.bytes = bytes_
        self.map = mmap.mmap(-1, pages(bytes_) + 2 * PAGE)
        self.begin = PAGE + (pages(bytes_) - bytes_ if ends else 0)
        base = address_of(self.map)
        fence(base)
        fence(base + PAGE + pages(bytes_))
        self.address = base + self.begin

    def tensor(self, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes, which lives as long as somebody has it."""
        flat = torch.frombuffer(self.map, dtype=dtype, count=self.bytes // dtype.itemsize, offset=self.begin)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, sizes, strides)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def fence(address: int) -> None:
    assert _library.mprotect(address, PAGE, NOBODY) == 0, os.strerror(ctypes.get_errno())


def span(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes from the first element to the end of the last."""
    if 0 in sizes:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))) * dtype.itemsize


def empty(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor between fences, full of NaNs."""
    bytes_ = span(tuple(sizes), tuple(strides), dtype)
    if bytes_ == 0:
        return torch.empty_strided(sizes, strides, dtype=dtype)
    piece = Piece(bytes_, next(_turns) % 3 > 0)
    ctypes.memset(piece.address, POISON, bytes_)
    return piece.tensor(tuple(sizes), tuple(strides), dtype)


def fenced(tensor: torch.Tensor) -> torch.Tensor:
    """A copy between fences, with the same strides."""
    copy = empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return copy.copy_(tensor).requires_grad_(tensor.requires_grad)


@dataclasses.dataclass(slots=True)
class Laid:
    """A record's arena: where in the temporary block the fences are, and (begin, bytes) of what lies between; bytes of
    it all; bytes of a thread's scratch, and from one to the next."""

    record: Specialization
    plan: Plan
    inputs: list[tuple[int, int, bool]]  # slot, bytes, is it written
    fences: list[int]
    pieces: list[tuple[int, int]]
    bytes: int
    scratch: int
    stride: int


_laid: dict[int, Laid] = {}  # by the address of the record's program
_free: dict[tuple[int, int], list[_Arena]] = {}  # by record and number of threads
_copies: dict[tuple[int, bool], list[Piece]] = {}  # by size and place


class _Arena(Block):
    """The temporary block of a record."""

    __slots__ = ("base", "key", "map")

    def __init__(self, laid: Laid, threads: int, key: tuple[int, int]) -> None:
        self.key = key
        self.gone = None
        self.base = laid.bytes  # where scratch begins
        self.bytes = laid.bytes + threads * laid.stride + PAGE
        self.map = mmap.mmap(-1, self.bytes)
        self.address = address_of(self.map)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.views = {}
        self.flat = {}
        for at in (*laid.fences, *(laid.bytes + i * laid.stride for i in range(threads + 1))):
            fence(self.address + at)

    def window(self, dtype: torch.dtype, byte: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """A tensor with a storage of its own: some operators of PyTorch copy a storage from its beginning."""
        bytes_ = span(shape, strides, dtype)
        if bytes_ == 0:
            return torch.empty_strided(shape, strides, dtype=dtype)
        flat = torch.frombuffer(self.map, dtype=dtype, count=bytes_ // dtype.itemsize, offset=byte)
        return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)

    def release(self) -> None:
        pass


def install() -> None:
    """Fences everything from now on; programs that were made before stay as they are."""
    make, init, give, start = Specializer.make, Specializer.__init__, Pool.give, NativeRoutines.__init__

    def without_room(records: Specializer, *args: Any) -> None:
        init(records, *args)
        records.reused_output, records.taken = None, -1

    def made(records: Specializer, values: dict[str, int], *policy: Any) -> Specialization:
        return _lay_out(records, make(records, values, *policy))

    def give_fenced(pool: Pool, block: Block) -> None:
        if isinstance(block, _Arena):
            if len(_free) > MOST // 50:
                _free.clear()
            _free.setdefault(block.key, []).append(block)
        else:
            give(pool, block)

    def above(_executable: Executable, record: Specialization, scratch: int) -> tuple[Block, int, Block | None]:
        laid = _laid[record.payload.address]
        threads = scratch // laid.stride
        key = (record.payload.address, threads)
        free = _free.get(key)
        block = free.pop() if free else _Arena(laid, threads, key)
        first = laid.bytes + PAGE + pages(laid.scratch) - laid.scratch
        scratches = [(first + i * laid.stride, laid.scratch) for i in range(threads)]
        for begin, bytes_ in (*laid.pieces, *scratches):
            ctypes.memset(block.address + begin, POISON, bytes_)
        return block, block.address + first, None

    def started(routines: NativeRoutines, *args: Any) -> None:
        start(routines, *args)
        native = routines.run_plan
        routines.run_plan = lambda block: _run(native, block)  # type: ignore[assignment]

    # every value of the arena has memory of its own, so that nothing is gained by giving some of it back
    SavedLayout._in_phases = lambda *args: None  # type: ignore[method-assign]
    Specializer.__init__, Specializer.make = without_room, made  # type: ignore[method-assign,assignment]
    Pool.give, Executable._above = give_fenced, above  # type: ignore[method-assign,assignment]
    NativeRoutines.__init__ = started  # type: ignore[method-assign,assignment]
    api.allocator = lambda: empty  # type: ignore[assignment,return-value]


def _lay_out(records: Specializer, record: Specialization) -> Specialization:
    """The record with every value of the arena, and every thread's scratch, between fences."""
    payload, plan = record.payload, records.plan
    program = payload.words
    offsets = dict(record.offsets)
    fences, pieces, at = [], [], 0
    names = [record_name for record_name, buffer in records.homes.items() if buffer.is_temp]
    for name in names:
        bytes_ = evaluate(records.homes[name].bytes, record.values)
        fences.append(at)
        begin = at + PAGE + (pages(bytes_) - bytes_ if next(_turns) % 3 else 0)
        offsets[name] = record.kept + begin
        pieces.append((begin, bytes_))
        at += PAGE + pages(bytes_)
    slots = {records.layout.slots[name]: offset for name, offset in offsets.items()}
    for i in range(program[host.ProgramHead.index("placed")]):
        program[host.HEAD_WORDS + 2 * i + 1] = slots[program[host.HEAD_WORDS + 2 * i]]
    word = program[host.HEAD_FIRST]
    while program[word] != host.END:
        length = program[word + 1]
        if records.runner._dies(program, word) and next(_turns) % 2:
            program[word] = host.OVER
        word += length
    scratch = program[host.HEAD_SCRATCH]
    stride = program[host.HEAD_SCRATCH] = pages(scratch) + PAGE
    written = written_names(plan)
    inputs = []
    for buffer in plan.buffers:
        if buffer.is_parameter and buffer.name not in records.homes:
            position = plan.parameter_number(buffer)
            view = record.inputs[position]
            kind = plan.inputs[position]
            if view is not None and not isinstance(kind, str):
                item = span((1,), (1,), records_dtype(kind.dtype))
                bytes_ = 0 if 0 in view[0] else item * (1 + sum((n - 1) * s for n, s in zip(*view[:2], strict=True)))
                inputs.append((records.layout.slots[buffer.name], bytes_, buffer.name in written))
    record = dataclasses.replace(record, offsets=offsets, temporary=at,
                                 payload=dataclasses.replace(payload, scratch=stride), scratch=stride, spare=-1,
                                 reused_output=-1, given=-1)
    _laid[record.payload.address] = Laid(record, plan, inputs, fences, pieces, at, scratch, stride)
    return record


def records_dtype(name: str) -> torch.dtype:
    from anyshape.torch_compat.dtypes import TORCH_DTYPES
    return TORCH_DTYPES[name]


def _run(native: Any, block: int) -> int:
    """`run_plan` on copies of the inputs between fences."""
    words = (ctypes.c_int64 * (host.SLOTS + 1)).from_address(block)
    laid = _laid.get(words[host.PROGRAM])
    if laid is None:
        return int(native(block))
    if TRACE:
        with open(TRACE, "w") as file:
            file.write(f"{laid.plan.name} {laid.record.values}\n")
    slots = (ctypes.c_int64 * (host.SLOTS + len(laid.record.payload.block))).from_address(block)
    given = [(slot, slots[host.SLOTS + slot], bytes_, written) for slot, bytes_, written in laid.inputs if bytes_]
    if any(written for *_, written in given) and (laid.record.payload.calls or _meet(given)):
        given = []
    used = []
    for slot, address, bytes_, written in given:
        ends = next(_turns) % 3 > 0
        free = _copies.setdefault((bytes_, ends), [])
        piece = free.pop() if free else Piece(bytes_, ends)
        ctypes.memmove(piece.address, address, bytes_)
        slots[host.SLOTS + slot] = piece.address
        used.append((piece, address, bytes_, written, free))
    code = int(native(block))
    for piece, address, bytes_, written, free in used:
        if written:
            ctypes.memmove(address, piece.address, bytes_)
        if bytes_ < 1 << 22:
            free.append(piece)
    if len(_copies) > MOST:
        _copies.clear()
    return code


def _meet(given: list[tuple[int, int, int, bool]]) -> bool:
    """Do two inputs share memory?"""
    ordered = sorted((address, address + bytes_) for _, address, bytes_, _ in given)
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ordered))
