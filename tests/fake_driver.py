"""A fake driver of GPUs on the host's memory, in plain Python: the functions of driver/functions.py as C functions.

Work on streams is put off until somebody waits, and then done in an order that events allow: as issued, the last
stream first, or at random. Fresh memory is NaN, memory that was given back is poisoned, and margins around each piece
of memory are looked at. A missing wait, a use after a free and a write out of bounds give wrong numbers or an alarm.
"""
from __future__ import annotations

import ctypes
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from anyshape.backend.triton.driver.functions import (
    NOT_READY,
    OK,
    OUT_OF_MEMORY,
    SHARED_BYTES,
    SHARED_USUAL,
    SIGNATURES,
)

ORDERS = ("as issued", "last stream first", *map(str, range(6)))
MARGIN, POISON = 64, 0xFF  # bytes on both sides; float NaN, and an odd index
INVALID, DEADLOCK = 1, 702
MOST_THREADS, MOST_GRID, MOST_SHARED = 1024, 65535, 227 << 10
PARAMETER = {"i32": ctypes.c_int32}
Mark = tuple[int, int]  # a stream, and how much of its work lies before
Body = Callable[[tuple[int, int, int], list[int]], None]


@dataclass(eq=False)
class Piece:
    """A piece of device memory. stream: whose work used it last."""

    memory: Any
    address: int
    bytes: int
    stream: int = 0
    others: tuple[int, ...] = ()
    asked: int = 0  # bytes, which are fewer


class FakeDriver:
    """See the head of this file. order: one of ORDERS; a number is a seed. limit: bytes of device memory."""

    def __init__(self, order: str = "as issued", limit: int = 1 << 40) -> None:
        self.set(order)
        self.limit = limit
        self.works: dict[int, list[Callable[[], None] | Mark]] = {0: []}
        self.done: dict[int, int] = {}
        self.issued: list[int] = []  # the stream of each work that is not done, in order
        self.stream = 0
        self.reads = False  # whether the host reads what a call gives as soon as it returns
        self.numbers = iter(range(1001, 1 << 60))
        self.events: dict[int, Mark] = {}
        self.bodies: dict[str, tuple[Body, tuple[str, ...]]] = {}
        self.handles: dict[int, Any] = {}
        self.shared: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.alarms: list[str] = []
        self.fails: dict[str, int] = {}  # function -> the error that it returns from now on
        self.free: list[Piece] = []
        self.waiting: list[tuple[Piece, list[Mark]]] = []
        self.live = self.peak = 0
        self.captured: dict[int, list[Callable[[], None] | Mark]] = {}  # by the stream that is captured
        self.kept: list[Any] = []  # the host's pinned memory, and C functions
        self.addresses = {name: self._function(name) for name in SIGNATURES}

    def set(self, order: str) -> None:
        self.order = order
        self.random = random.Random(order)

    def _function(self, name: str) -> int:
        def run(*arguments: Any) -> int:
            self.counts[name] += 1
            try:
                return self.fails[name] if name in self.fails else getattr(self, name)(*arguments) or OK
            except BaseException as error:  # ctypes would print it
                self.alarms.append(f"{name}: {error!r}")
                return INVALID

        function = ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name].arguments)(run)
        self.kept.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    # --- what tests use

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Inside, `stream` is the current one."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def new_stream(self) -> int:
        handle = next(self.numbers)
        self.works[handle] = []
        return handle

    def register(self, name: str, body: Body, kinds: Sequence[str]) -> bytes:
        """The image of a kernel whose machine code is a function of the host: body(grid, params)."""
        self.bodies[name] = body, tuple(kinds)
        return f"FAKE {name}".encode() + b"\0"

    def everything(self) -> None:
        """All work is done."""
        for stream in list(self.works):
            assert self.synchronize_stream(stream) == OK

    # --- orders of work

    def issue(self, stream: int | None, work: Callable[[], None] | Mark) -> None:
        stream = stream or 0
        assert stream in self.works, f"no stream {stream}"
        if stream in self.captured:
            self.captured[stream].append(work)
            return
        self.works[stream].append(work)
        self.issued.append(stream)

    def position(self, stream: int) -> Mark:
        return stream, len(self.works[stream])

    def is_done(self, mark: Mark) -> bool:
        return self.done.get(mark[0], 0) >= mark[1]

    def until(self, mark: Mark) -> int:
        while not self.is_done(mark):
            ready = [one for one in sorted(self.works) if self._ready(one)]
            if not ready:
                return DEADLOCK
            if self.order == "as issued":
                ready = [next(one for one in self.issued if one in ready)]
            chosen = self.random.choice(ready) if self.order.isdigit() else ready[-1]
            work = self.works[chosen][self.done.get(chosen, 0)]
            self.issued.remove(chosen)
            self.done[chosen] = self.done.get(chosen, 0) + 1
            if callable(work):
                try:
                    work()
                except BaseException:
                    self._lose()
                    raise
        return OK

    def _lose(self) -> None:
        """Nothing is left to do: of a test that fails here, whoever holds memory gives it back."""
        self.done = {stream: len(works) for stream, works in self.works.items()}
        self.issued.clear()

    def _ready(self, stream: int) -> bool:
        if self.is_done(self.position(stream)):
            return False
        work = self.works[stream][self.done.get(stream, 0)]
        return callable(work) or self.is_done(work)

    # --- memory, as a caching allocator gives it

    def take(self, bytes_: int, stream: int) -> Piece:
        """Memory for work on a stream; RuntimeError: there is none."""
        self._settle()
        size = -(-max(bytes_, 1) // 512) * 512
        piece = next((one for one in self.free if one.bytes == size and one.stream == stream), None)
        if piece is not None:
            self.free.remove(piece)
            self.issue(stream, partial(self._look, piece))
        else:
            if self.live + size > self.limit:
                raise RuntimeError(f"out of memory: {size} bytes")
            memory = (ctypes.c_uint8 * (size + 2 * MARGIN + 64))()
            ctypes.memset(memory, POISON, len(memory))
            first = ctypes.addressof(memory) + MARGIN
            piece = Piece(memory, first + -first % 64, size, stream)
        piece.asked = bytes_
        self.live += bytes_
        self.peak = max(self.peak, self.live)
        return piece

    def give(self, piece: Piece) -> None:
        """Nobody has it any more: poisoned in the order of its stream."""
        self.live -= piece.asked
        marks = [self.position(stream) for stream in piece.others]
        piece.others = ()
        self.waiting.append((piece, marks))
        self._settle()

    def _settle(self) -> None:
        for entry in tuple(self.waiting):
            if all(map(self.is_done, entry[1])):
                self.waiting.remove(entry)
                self.issue(entry[0].stream, partial(self._poison, entry[0]))
                self.free.append(entry[0])

    def _bytes(self, piece: Piece) -> torch.Tensor:
        return torch.frombuffer(piece.memory, dtype=torch.uint8)

    def _poison(self, piece: Piece) -> None:
        begin = piece.address - ctypes.addressof(piece.memory)
        memory = self._bytes(piece)
        margins = torch.cat((memory[:begin], memory[begin + piece.bytes:]))
        if not bool((margins == POISON).all()):
            self.alarms.append(f"a write outside of {piece.bytes} bytes")
        memory.fill_(POISON)

    def _look(self, piece: Piece) -> None:
        if not bool((self._bytes(piece) == POISON).all()):
            self.alarms.append(f"a write to {piece.bytes} bytes that were given back")

    # --- the driver's functions

    def _put(self, pointer: int, value: int) -> None:
        ctypes.c_uint64.from_address(pointer).value = value

    def _put_int(self, pointer: int, value: int) -> None:
        ctypes.c_int32.from_address(pointer).value = value

    def init(self, flags: int) -> None: ...

    def version(self, pointer: int) -> None:
        self._put_int(pointer, 13000)

    def error_text(self, code: int, pointer: int) -> None:
        texts = {OUT_OF_MEMORY: b"out of memory", DEADLOCK: b"deadlock between streams"}
        self.kept.append(ctypes.c_char_p(texts.get(code, b"error of the fake driver")))
        self._put(pointer, ctypes.cast(self.kept[-1], ctypes.c_void_p).value or 0)

    def device_count(self, pointer: int) -> None:
        self._put_int(pointer, 1)

    def device(self, pointer: int, number: int) -> None:
        self._put_int(pointer, number)

    def device_name(self, pointer: int, size: int, device: int) -> None:
        ctypes.memmove(pointer, b"fake\0", 5)

    def device_attribute(self, pointer: int, attribute: int, device: int) -> None:
        known = {75: 9, 76: 0, 16: 132, 10: 32, 97: MOST_SHARED, 39: 2048, 12: 65536, 38: 50 << 20}
        self._put_int(pointer, known[attribute])

    def device_memory(self, pointer: int, device: int) -> None:
        self._put(pointer, self.limit)

    def retain_context(self, pointer: int, device: int) -> None:
        self._put(pointer, 77 + device)

    def push_context(self, context: int) -> int:
        return OK if context == 77 else INVALID

    def pop_context(self, pointer: int) -> None:
        self._put(pointer, 77)

    def memory_info(self, free: int, total: int) -> None:
        self._put(free, self.limit - self.live)
        self._put(total, self.limit)

    def allocate_host(self, pointer: int, bytes_: int, flags: int) -> None:
        memory = (ctypes.c_uint8 * bytes_)()
        ctypes.memset(memory, POISON, bytes_)
        self.handles[ctypes.addressof(memory)] = memory
        self._put(pointer, ctypes.addressof(memory))

    def free_host(self, address: int) -> None:
        self.everything()
        del self.handles[address]

    def load_module(self, pointer: int, image: int) -> None:
        name = ctypes.string_at(image).decode()
        assert name.startswith("FAKE ") and name[5:] in self.bodies, name
        handle = next(self.numbers)
        self.handles[handle] = name[5:]
        self._put(pointer, handle)

    def get_function(self, pointer: int, module: int, entry: bytes) -> int:
        if entry.decode() != self.handles[module]:
            return INVALID
        self._put(pointer, module)
        return OK

    def set_function_attribute(self, function: int, attribute: int, value: int) -> int:
        if attribute != SHARED_BYTES or value > MOST_SHARED:
            return INVALID
        self.shared[function] = value
        return OK

    def launch(self, function: int, *arguments: int) -> int:
        x, y, z, threads, second, third, shared, stream, places, _ = arguments
        body, kinds = self.bodies[self.handles[function]]
        good = 0 < x < 1 << 31 and 0 < y <= MOST_GRID and 0 < z <= MOST_GRID and second == third == 1
        if not good or not 0 < threads <= MOST_THREADS or shared > max(SHARED_USUAL, self.shared[function]):
            return INVALID
        addresses = (ctypes.c_uint64 * len(kinds)).from_address(places)
        values = [PARAMETER.get(kind, ctypes.c_int64).from_address(address).value
                  for kind, address in zip(kinds, addresses, strict=True)]
        self.issue(stream, lambda: body((x, y, z), values))
        return OK

    def copy(self, target: int, source: int, bytes_: int, stream: int | None) -> None:
        self.issue(stream, lambda: ctypes.memmove(target, source, bytes_) and None)

    copy_to_host = copy_to_device = copy

    def create_stream(self, pointer: int, flags: int) -> None:
        self._put(pointer, self.new_stream())

    def destroy_stream(self, stream: int) -> None:
        self.synchronize_stream(stream)
        del self.works[stream]

    def synchronize_stream(self, stream: int | None) -> int:
        if stream in self.captured:
            return INVALID
        return self.until(self.position(stream or 0))

    def wait_event(self, stream: int | None, event: int, flags: int) -> None:
        self.issue(stream, self.events[event])

    def begin_capture(self, stream: int, mode: int) -> int:
        if stream in self.captured or stream not in self.works or not stream:
            return INVALID
        self.captured[stream] = []
        return OK

    def end_capture(self, stream: int, pointer: int) -> None:
        handle = next(self.numbers)
        self.handles[handle] = self.captured.pop(stream)
        self._put(pointer, handle)

    def instantiate_graph(self, pointer: int, graph: int, flags: int) -> None:
        handle = next(self.numbers)
        self.handles[handle] = tuple(self.handles[graph])
        self._put(pointer, handle)

    def launch_graph(self, graph: int, stream: int | None) -> None:
        for work in self.handles[graph]:
            self.issue(stream, work)

    def destroy_graph(self, graph: int) -> None:
        del self.handles[graph]

    destroy_graph_exec = destroy_graph

    def create_event(self, pointer: int, flags: int) -> None:
        handle = next(self.numbers)
        self.events[handle] = (0, 0)
        self._put(pointer, handle)

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record_event(self, event: int, stream: int | None) -> None:
        assert stream not in self.captured, "an event of a capture tells nothing outside of it"
        self.events[event] = self.position(stream or 0)

    def query_event(self, event: int) -> int:
        return OK if self.is_done(self.events[event]) else NOT_READY

    def synchronize_event(self, event: int) -> int:
        return self.until(self.events[event])


class FakeMemory:
    """The fake's memory as PyTorch's tensors: given back in the order of streams, as its caching allocators do."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.pieces: dict[int, Piece] = {}  # by the address of their storage

    def current(self) -> int:
        return self.driver.stream

    def captured(self, stream: int) -> Any:
        return self.driver.on(stream)

    def allocate(self, bytes_: int, stream: int) -> torch.Tensor:
        piece = self.driver.take(bytes_, stream)
        held = (ctypes.c_uint8 * max(bytes_, 1)).from_address(piece.address)
        self.pieces[piece.address] = piece
        weakref.finalize(held, self._give, piece).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)[:bytes_]

    def _give(self, piece: Piece) -> None:
        self.pieces.pop(piece.address, None)
        self.driver.give(piece)

    def uses(self, memory: torch.Tensor, stream: int) -> None:
        piece = self.pieces[memory.untyped_storage().data_ptr()]
        if stream != piece.stream:
            piece.others = (*piece.others, stream)

    def resident(self) -> int:
        return self.driver.live

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of PyTorch's, on the current stream."""
        elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat = self.allocate(elements * dtype.itemsize, self.current())
        if not elements:
            return torch.empty_strided(shape, strides, dtype=dtype)
        return flat.view(dtype).as_strided(tuple(shape), tuple(strides))
