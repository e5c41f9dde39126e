"""Memory pools of a device with streams (a stream-ordered caching allocator): free blocks by the stream that used them
last.

A call gives its blocks back when its work is issued, long before that is done. On the same stream the next call may
have them at once: its work runs behind. Another stream gets a block only when the mark has been passed that was set as
the block was given back:

    stream 1   take A   work on A   give A, mark m   take A   ...     at once
    stream 2                                         take B   ...     m is not passed: memory of its own
    stream 2                                                     take A     m is passed

The device's allocator keeps to the same (`Streams.allocate`), so what goes back to it needs no wait here. The CPU has
one stream, in which the host's order is all there is: runtime/memory/pools.py.
"""
from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from anyshape.backend.interface import Streams
from anyshape.base.errors import DeviceError
from anyshape.runtime.driver.usual import usual_driver
from anyshape.runtime.memory.pools import IDLE_SECONDS, WINDOW, Block, Pool, SegmentedBlock


class DeviceBlock(Block):
    """One piece of a device's memory. stream: whose work used it last. mark: behind that work, once it is free."""

    __slots__ = ("mark", "stream", "streams")

    def __init__(self, bytes_: int, streams: Streams, stream: int, gone: Callable[[int], None] | None = None) -> None:
        self.gone = gone
        self.bytes = bytes_
        self.driver = usual_driver()
        self.streams = streams
        self.stream = stream
        self.mark: Any = None
        self.tensor = streams.allocate(bytes_, stream)
        self.address = self.tensor.data_ptr()
        self.views = weakref.WeakKeyDictionary()
        self.flat = {}

    def move(self, stream: int) -> None:
        """Work of another stream uses it from now on; what it was used for is ordered before that already."""
        self.streams.uses(self.tensor, stream)
        self.stream = stream

    def follow(self, stream: int) -> None:
        """Another stream uses it from now on, behind the work so far of the one that used it last."""
        if stream != self.stream and self.bytes:
            self.streams.wait(stream, self.streams.mark(self.stream))
            self.move(stream)


class StreamPool(Pool):
    """Free blocks of one kind, of one device, by the stream that used each last. Thread-safe."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self.streams = streams
        self.empty: Block = DeviceBlock(0, streams, streams.current())

    def take(self, bytes_: int) -> Block:
        """A block of at least `bytes_` bytes, for work on the current stream.

        Raises:
            DeviceError: there is not enough memory.
        """
        self.used = now = time.monotonic()
        if bytes_ == 0:
            return self.empty
        stream = self.streams.current()
        with self.lock:
            self.takes += 1
            self.need = max(self.need, bytes_)
            if self.takes % WINDOW == 0 or now - self.begun > IDLE_SECONDS:
                self._trim()
            own = [block for block in self.free if isinstance(block, DeviceBlock) and block.stream == stream]
            found = self._fitting(own, bytes_) or self._passed(stream, bytes_)
            if found is None and own:  # makes room for its successor; no variable may hold it while that is made
                self._drop(max(own, key=_bytes))
            own.clear()
        return self._new(bytes_) if found is None else found

    def give(self, block: Block) -> None:
        """Gives a block back, when the work that uses it is issued."""
        if isinstance(block, DeviceBlock) and block is not self.empty and block.gone is not None:
            block.mark = self.streams.mark(block.stream)
            self.free.append(block)

    def copy(self, target: int, source: int, bytes_: int) -> None:
        """See `Pool`. On the current stream."""
        self.streams.copy(target, source, bytes_, self.streams.current())

    def resident(self) -> int:
        """See `Pool`."""
        return self.streams.resident()

    def _fitting(self, blocks: list[DeviceBlock], bytes_: int) -> DeviceBlock | None:
        """The smallest that is large enough, taken out of the free ones."""
        for block in sorted(blocks, key=_bytes):
            if block.bytes >= bytes_ and self._drop(block):
                return block
        return None

    def _passed(self, stream: int, bytes_: int) -> DeviceBlock | None:
        """A block of another stream whose work on it is done."""
        found = self._fitting([block for block in self.free if isinstance(block, DeviceBlock)
                               and block.bytes >= bytes_ and self.streams.passed(block.mark)], bytes_)
        if found is not None:
            found.move(stream)
        return found

    def _made(self, size: int) -> Block:
        stream = self.streams.current()
        try:
            return DeviceBlock(size, self.streams, stream, self._gone)
        except RuntimeError:
            self.release_idle()  # of other streams, too
        return DeviceBlock(size, self.streams, stream, self._gone)

    def _no_memory(self, size: int, why: str) -> DeviceError:
        """See `Pool`. Such a call runs as PyTorch, if nothing of it has run."""
        return DeviceError.no_memory(f"there is none for an arena of {size} bytes: {why}")


def follow(kept: Block | SegmentedBlock, stream: int) -> None:
    """A backward begins on a stream, perhaps another one than its forward's."""
    for block in kept.blocks if isinstance(kept, SegmentedBlock) else (kept,):
        if isinstance(block, DeviceBlock):
            block.follow(stream)


def _bytes(block: Block) -> int:
    return block.bytes
