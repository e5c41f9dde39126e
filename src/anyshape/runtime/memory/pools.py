"""Memory pools (a caching allocator): blocks taken through the host's allocator, used again by every program, given
back when idle.

There are two pools: temporary blocks are free again when the call returns, kept blocks hold saved values until the
backward program has run. A call takes one block of each kind at most.
"""
from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from anyshape.base import counters
from anyshape.base.align import LARGE_PAGE, align
from anyshape.base.errors import AnyShapeError
from anyshape.runtime.driver.interface import HostDriver
from anyshape.runtime.driver.usual import usual_driver
from anyshape.runtime.memory import huge_pages
from anyshape.runtime.memory.huge_pages import DetachedPages, detach, prefer_large

if TYPE_CHECKING:
    from anyshape.runtime.memory.offload_store import Reservation
    from anyshape.runtime.memory.tape import Tape

PAGE = 4096  # blocks are whole pages
WINDOW = 256  # takes over which the need is observed
IDLE_SECONDS = 60.0  # without a take after which what is free goes back; the longest window, too
IDLE_FACTOR = 4  # a free block this much larger than any need of the last window is given back
SMALL = 1 << 20  # bytes not worth giving back
VIEWS = 64  # records whose views of a block are remembered


def whole(bytes_: int) -> int:
    """The bytes of a block for so many."""
    return align(bytes_, PAGE)


class Block:
    """One piece of memory; `views` remembers tensors over it by record, as long as there are both.

    gone: told the number of bytes when nobody has the block any more; None afterwards.
    """

    __slots__ = ("__weakref__", "address", "bytes", "driver", "flat", "gone", "tensor", "views")

    def __init__(self, bytes_: int, gone: Callable[[int], None] | None = None,
                 driver: HostDriver | None = None) -> None:
        self.gone = gone
        self.bytes = bytes_
        self.driver = usual_driver() if driver is None else driver
        self.tensor, self.address = self.driver.empty(bytes_)
        prefer_large(self.address, bytes_)
        self.views: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.flat: dict[Any, Any] = {}

    def __del__(self) -> None:
        if self.gone is not None and hasattr(self, "flat"):
            gone, self.gone = self.gone, None
            gone(self.bytes)

    def window(self, dtype: Any, byte: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """An array over the block that starts at `byte`; strides in elements. dtype: as the driver has it."""
        flat = self.flat.get(dtype)
        if flat is None:
            flat = self.flat[dtype] = self.driver.flat(self.tensor, dtype)
        return self.driver.part(flat, byte // dtype.itemsize, shape, strides)

    def release(self) -> None:
        """Gives the memory back to the host, though somebody may still have the block."""
        gone, self.gone = self.gone, None
        self.tensor, _ = self.driver.empty(0)
        self.views.clear()
        self.flat.clear()
        if gone is not None:
            gone(self.bytes)

    def remember(self, record: Any, views: Any) -> None:
        """Keeps `views` for the next call with this record."""
        if len(self.views) >= VIEWS:
            self.views.clear()
        self.views[record] = views


def _nothing() -> None:
    """Nobody wants to know."""


def _bytes(block: Block) -> int:
    return block.bytes


class Pool:
    """Free blocks of one kind. `take` prefers the smallest that fits; thread-safe.

    What is held is counted by looking at the blocks that exist: Ctrl-C may come between taking one and noting where it
    is, or as the first thing of the `__del__` that would tell.
    """

    def __init__(self, driver: HostDriver | None = None) -> None:
        self.driver = usual_driver() if driver is None else driver
        self.lock = threading.RLock()  # a block may go while the thread is in here
        self.free: list[Block] = []
        self.empty = Block(0, driver=self.driver)
        self.blocks: list[weakref.ref[Block]] = []  # all, taken or free, and some that are gone
        self.noted = 0  # bytes of them, as far as they have said that they are gone
        self.peak = 0
        self.takes = 0
        self.need = 0  # most bytes taken at once in this window
        self.used = self.begun = time.monotonic()  # the last take, and the beginning of this window
        self.grown: Callable[[], None] = _nothing  # called after a block was made (runtime/memory/idle_release.py)

    def take(self, bytes_: int) -> Block:
        """A block of at least `bytes_` bytes, aligned to 64.

        Raises:
            AnyShapeError: there is not enough memory.
        """
        self.used = now = time.monotonic()
        if bytes_ == 0:
            return self.empty
        with self.lock:
            self.takes += 1
            if bytes_ > self.need:
                self.need = bytes_
            if self.takes % WINDOW == 0 or now - self.begun > IDLE_SECONDS:
                self._trim()
            # others give blocks back meanwhile, at the end; and what idles may go, by another thread
            free = self.free
            first = free[0] if len(free) == 1 else None
            best = first if first is not None and first.bytes >= bytes_ else min(
                (block for block in free if block.bytes >= bytes_), key=_bytes, default=None)
            if best is not None:
                try:
                    free.remove(best)
                    return best
                except ValueError:
                    pass
            best = first = None
            # a block that is too small makes room for its successor, so that there are never more blocks than calls,
            # and leaves its pages to it; no variable may hold it while that is made
            pages = self._dismantle(max(free, key=_bytes, default=self.empty))
        try:
            block = self._new(bytes_)
            if pages is not None:
                pages.attach(block.address, block.bytes)
            return block
        finally:
            pages = None  # who holds an error of this frame holds no memory

    def block_bytes(self, bytes_: int) -> int:
        """The bytes of a block for so many."""
        return whole(bytes_) if bytes_ < self.driver.large_from else align(bytes_, LARGE_PAGE)

    def fresh(self, bytes_: int) -> Block:
        """A block of its own, for one who releases it himself.

        Raises:
            AnyShapeError: there is not enough memory.
        """
        return self._new(bytes_) if bytes_ else self.empty

    def give(self, block: Block) -> None:
        """Gives a block back. One that was released meanwhile is none any more."""
        if block is not self.empty and block.gone is not None:
            self.free.append(block)  # one step of the interpreter: no lock

    def copy(self, target: int, source: int, bytes_: int) -> None:
        """Copies from block to block, by address."""
        ctypes.memmove(target, source, bytes_)

    def resident(self) -> int:
        """Bytes that the process has where blocks are."""
        return huge_pages.resident()

    def idle_after(self, bytes_: int) -> int:
        """Bytes of blocks that nobody uses after a `take` of `bytes_`, and by which the block is larger than that."""
        with self.lock:
            free = sum(block.bytes for block in self.free)
            if bytes_ == 0:
                return free
            if any(block.bytes >= bytes_ for block in self.free):
                return free - bytes_
            return free - max(map(_bytes, self.free), default=0)

    def release_idle(self) -> int:
        """Gives every free block back to torch; returns their bytes. May be called at any time, from any thread."""
        found = 0
        with self.lock:
            while self.free:
                try:
                    found += self.free.pop().bytes
                except IndexError:  # this thread came here once more, from a finaliser
                    break
        return found

    def _new(self, bytes_: int) -> Block:
        size = self.block_bytes(bytes_)
        try:
            block = self._made(size)
        except RuntimeError as error:
            self.release_idle()
            raise self._no_memory(size, str(error).split("\n")[0]) from error
        with self.lock:
            self.blocks.append(weakref.ref(block))
            self.noted += size
            self.peak = max(self.peak, self.noted)
        counters.arena_changed(size)
        self.grown()
        return block

    def _no_memory(self, size: int, why: str) -> AnyShapeError:
        """What is said where there is none for a block."""
        return AnyShapeError(f"there is no memory for an arena of {size} bytes", why=why,
                             do="run with smaller sizes, or keep fewer forward passes waiting for their backward")

    def _made(self, size: int) -> Block:
        """A block of whole pages; RuntimeError: there is no memory."""
        return Block(size, self._gone, self.driver)

    def _dismantle(self, block: Block) -> DetachedPages | None:
        """Takes a block out of the free ones, if it is there still, and its pages out of the block."""
        return detach(block.address, block.bytes) if self._drop(block) else None

    def _drop(self, block: Block) -> bool:
        """Takes a block out of the free ones, if it is there still."""
        try:
            self.free.remove(block)
        except ValueError:
            return False
        return True

    @property
    def held(self) -> int:
        """Bytes of all blocks, taken or free."""
        found = [one() for one in self.blocks]
        return sum(block.bytes for block in found if block is not None and block.gone is not None)

    def _gone(self, bytes_: int) -> None:
        with self.lock:
            self.noted -= bytes_
        counters.arena_changed(-bytes_)

    def _trim(self) -> None:
        limit = max(IDLE_FACTOR * self.need, SMALL)
        for block in [b for b in self.free if b.bytes > limit]:
            self._drop(block)
        self.need = 0
        self.begun = self.used
        self.blocks = [one for one in self.blocks if one() is not None]
        lost, self.noted = self.noted - self.held, self.held
        if lost:
            counters.arena_changed(-lost)


class SegmentedBlock:
    """A kept block in pieces of memory of their own, so that each can go before the others; used like a `Block`.
    space: where values that are moved out meanwhile have their place."""

    def __init__(self, pool: Pool, sizes: Sequence[int], space: Reservation | None = None) -> None:
        self.space = space
        self.starts = [0, *itertools.accumulate(sizes)]
        self.blocks: list[Block | None] = [pool.fresh(size) if size else None for size in sizes]
        self.addresses = [0 if block is None else block.address for block in self.blocks]
        self.address = 0
        self.pinned = False  # the backward runs again: nothing goes

    def free(self, number: int) -> None:
        """Gives one piece back to torch."""
        if not self.pinned:
            self.blocks[number] = None

    def window(self, dtype: Any, byte: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """A tensor that starts at `byte` of the whole; strides in elements."""
        number = bisect.bisect_right(self.starts, byte) - 1
        block = self.blocks[number]
        assert block is not None, "a step reads what was given back"
        return block.window(dtype, byte - self.starts[number], shape, strides)


class PhasedBlock:
    """A piece of a call's own memory that others follow. sizes: of all; where one is 0, there is none."""

    def __init__(self, pool: Pool, sizes: Sequence[int]) -> None:
        self.pool = pool
        self.sizes = sizes
        self.number = 0
        self.block = pool.take(sizes[0])

    def turn(self) -> None:
        """Gives the piece back to torch and takes the next one."""
        self.release()
        self.number += 1
        self.block = self.pool.take(self.sizes[self.number])

    def release(self) -> None:
        """Gives back what is there; a second time it does nothing."""
        block, self.block = self.block, self.pool.empty
        if block is not self.pool.empty:
            block.release()


class LiveTapes:
    """The kept blocks of tapes whose backward has not run, of several programs that share one limit, the oldest first.
    lock: held by who decides what they keep."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.known: tuple[weakref.ref[TapeMemory], ...] = ()  # replaced, never changed: who reads it needs no lock

    @property
    def tapes(self) -> list[TapeMemory]:
        """Those that keep something."""
        found = (one() for one in self.known)
        return [tape_memory for tape_memory in found if tape_memory is not None and tape_memory.held is not None]

    @property
    def bytes(self) -> int:
        """What they keep together."""
        return sum(tape_memory.bytes for tape_memory in self.tapes)

    def add(self, tape_memory: TapeMemory) -> int:
        """One more; returns how many there were."""
        with self.lock:
            before = self.tapes
            self.known = (*map(weakref.ref, before), weakref.ref(tape_memory))
        return len(before)


class BudgetPolicy(Protocol):
    """What decides, under a limit, which saved tensors a call keeps: runtime/budget/arbitration.py."""

    held: LiveTapes

    def fit(self, record: Any) -> tuple[Any, Any]:
        """The record of a call at the same sizes that fits, and its place in the offload store; LimitError: none."""

    def begin(self, tape_memory: TapeMemory) -> None:
        """A backward begins; LimitError: there is no room for it."""

    def choose(self, values: dict[str, int]) -> Any:
        """What a call at these sizes keeps."""


class TapeMemory:
    """The kept block of one forward run, owned by its tape; see runtime/memory/tape.py.

    record: the forward's sizes and layout. limit: of the forward; None: there is none. bytes: what is kept, there
    and outside. number: how many tapes there were before it. tape: set when there is one. begun: a backward has begun,
    so that nothing may change. beside: the most bytes that later calls and what else was held took meanwhile.
    """

    __slots__ = ("__weakref__", "_blocks", "begun", "beside", "bytes", "held", "limit", "number", "pool", "record",
                 "tape")

    def __init__(self, pool: Pool, block: Block | SegmentedBlock, record: Any,
                 limit: BudgetPolicy | None = None) -> None:
        self.pool = pool
        self._blocks = [block]
        self.record = record
        self.limit = limit
        self.tape: weakref.ref[Tape] | None = None
        self.begun = False
        self.beside = 0
        self.bytes = record.outside + (block.bytes if isinstance(block, Block) else sum(record.chunks))
        self.held = None if limit is None else limit.held
        self.number = 0 if self.held is None else self.held.add(self)

    @property
    def block(self) -> Block | SegmentedBlock:
        """What is kept; the pool's empty block where it was taken."""
        return next(iter(self._blocks), self.pool.empty)

    def taken(self) -> Block | SegmentedBlock | None:
        """The same, which is the caller's from now on. Of two threads, one gets it, and the other None."""
        try:
            return self._blocks.pop()  # one step of the interpreter
        except IndexError:
            return None

    def put(self, block: Block | SegmentedBlock) -> None:
        """Gives what was taken back, or what has its place; who has released it meanwhile no longer wants it."""
        self._blocks.append(block)
        if self.held is None:
            self.release()

    def holds(self, tensor: Any) -> bool:
        """Whether the tensor lies in the block."""
        blocks = self.block.blocks if isinstance(self.block, SegmentedBlock) else [self.block]
        return any(block is not None and self.pool.driver.shares(tensor, block.tensor)
                   for block in blocks)

    def release(self) -> None:
        """Gives the block back to the pool; a second time it does nothing."""
        self.held = None  # no lock: the collector of garbage may call this anywhere
        block = self.taken()
        if isinstance(block, Block):
            self.pool.give(block)
        elif block is not None and block.space is not None:
            block.space.release()
