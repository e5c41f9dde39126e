"""The offload store of a device with streams: pinned memory of the host, and a side stream each way, so that copies run
beside kernels.

    space = store.reserve(bytes_)          before the call
    copy = space.put(0, address, n, ...)   the side stream "out" waits for what the call's stream has to do by now
    copy.wait()                            what comes to the call's stream now runs behind the copy; nobody waits here
    space.get(0, address, n, ...)          the side stream "back" waits for the same, and for the copy out
    space.release()

A place is used again behind the copies of whoever had it: the next `put` there waits for them on its stream.
"""
from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Any

from anyshape.backend.interface import Streams
from anyshape.base.align import align
from anyshape.base.errors import StoreError
from anyshape.runtime.memory.offload_store import LEAST, Speed

PAGE = 1 << 16  # bytes that places are multiples of
ROOMY = 2  # a free place this much larger than what is asked for is left to others
PROBE = 8 << 20  # bytes copied to learn how fast that is
# assumed, not measured on a device: seconds that one move takes whatever its size, for ten calls of the driver; and
# what a second of copying costs kernels beside it, for memory traffic of an engine of the device's own
EACH, BESIDE = 2e-5, 0.02


class DeviceCopy:
    """One copy on a side stream. done: behind it."""

    def __init__(self, streams: Streams, done: Any) -> None:
        self.streams = streams
        self.done = done
        self.unwanted = False  # once issued, it runs

    def wait(self) -> None:
        """What comes to the current stream from now on runs behind it."""
        self.streams.wait(self.streams.current(), self.done)

    def end(self) -> None:
        """The same: memory that is given back is used again on this stream only, or behind its marks."""
        self.wait()


class _Place:
    """A piece of pinned memory. last: marks behind the copies of who had it."""

    def __init__(self, memory: Any, bytes_: int) -> None:
        self.memory = memory
        self.bytes = bytes_
        self.last: list[Any] = []


class PinnedReservation:
    """The place of one forward's values in a store; `put` and `get` say where in it, in bytes."""

    def __init__(self, store: PinnedStore, place: _Place) -> None:
        self.store = store
        self.place = [place]
        self.before = place.last  # copies of who had the place
        self.copies: list[Any] = []

    def put(self, at: int, address: int, bytes_: int, _owner: object) -> DeviceCopy:
        """Begins to copy `bytes_` bytes from `address` of the device to `at`."""
        return self._copied("out", self.before, at, address, bytes_)

    def get(self, at: int, address: int, bytes_: int, _owner: object) -> DeviceCopy:
        """Begins to copy them back."""
        return self._copied("back", self.copies, at, address, bytes_)

    def _copied(self, way: str, behind: list[Any], at: int, address: int, bytes_: int) -> DeviceCopy:
        streams, host = self.store.streams, self.place[0].memory.address + at
        side = streams.side(way)
        for mark in (*behind, streams.mark(streams.current())):
            streams.wait(side, mark)
        if way == "out":
            streams.copy(host, address, bytes_, side, to_host=True)
        else:
            streams.copy(address, host, bytes_, side, to_host=False)
        self.store.moved += bytes_
        done = streams.mark(side)
        self.copies.append(done)
        return DeviceCopy(streams, done)

    def release(self) -> None:
        """Gives the place back; a second time it does nothing. Who releases it calls no driver."""
        with contextlib.suppress(IndexError):
            place = self.place.pop()
            place.last = self.copies
            self.store.given.append(place)  # no lock: this may be called anywhere

    def __del__(self) -> None:
        self.release()


class PinnedStore:
    """Pinned memory of the host where values of a device wait between forward and backward. Threads may share one.

    Args:
        limit: bytes that it may hold; 0: as many as the host has.
    """

    each = EACH

    def __init__(self, streams: Streams, limit: int = 0) -> None:
        self.streams = streams
        self.limit = limit
        self.moved = 0  # bytes asked for, in both directions
        self.lock = threading.Lock()
        self.held = 0  # bytes of all places
        self.free: list[_Place] = []
        self.given: collections.deque[_Place] = collections.deque()
        self.speeds = (Speed(), Speed())  # back, out
        self._measure()

    @property
    def used(self) -> int:
        """Bytes that spaces hold."""
        with self.lock:
            self._tidy()
            return self.held - sum(place.bytes for place in self.free)

    def reserve(self, bytes_: int) -> PinnedReservation:
        """Room for so many bytes.

        Raises:
            StoreError: there is none.
        """
        wanted = align(max(bytes_, 1), PAGE)
        with self.lock:
            self._tidy()
            fitting = [place for place in self.free if wanted <= place.bytes <= ROOMY * wanted]
            if fitting:
                place = min(fitting, key=lambda one: one.bytes)
                self.free.remove(place)
                return PinnedReservation(self, place)
            if self.limit and self.held + wanted > self.limit:
                self._shrink()
            if self.limit and self.held + wanted > self.limit:
                raise StoreError(f"there is no room for {wanted} bytes in pinned memory",
                                 why=f"memory_store_limit is {self.limit}, and {self.held} are taken",
                                 do="set a higher memory_store_limit")
            try:
                place = _Place(self.streams.pinned(wanted), wanted)
            except RuntimeError as error:
                raise StoreError(f"there is no room for {wanted} bytes in pinned memory", why=str(error),
                                 do="free memory of the host, or set a lower memory_store_limit") from error
            self.held += wanted
        return PinnedReservation(self, place)

    def _tidy(self) -> None:
        while self.given:
            self.free.append(self.given.popleft())

    def _shrink(self) -> None:
        """Gives free places back to the host whose copies are done."""
        for place in [one for one in self.free if all(map(self.streams.passed, one.last))]:
            self.free.remove(place)
            self.held -= place.bytes

    def works(self) -> bool:
        """Whether something can be moved out."""
        return not 0 < self.limit < LEAST

    def seconds(self, bytes_: float, out: bool) -> float:
        """What copying so many bytes takes, as was measured when the store was made."""
        return self.speeds[out].of(bytes_)

    def share(self, threads: int) -> float:
        """See `Store`. No thread copies."""
        return BESIDE

    def _measure(self) -> None:
        """Copies twice in each direction: the first time finds pages and the driver cold."""
        streams = self.streams
        stream = streams.current()
        try:
            memory, host = streams.allocate(PROBE, stream), streams.pinned(PROBE)
        except RuntimeError:  # no memory now: one of each, so that moving costs something
            for speed in self.speeds:
                speed.add(PROBE, PROBE / 1e9)
            return
        for out in (True, False) * 2:
            streams.synchronize(stream)
            begin = time.perf_counter()
            source, target = (memory.data_ptr(), host.address)[::1 if out else -1]
            streams.copy(target, source, PROBE, stream, to_host=out)
            streams.synchronize(stream)
            self.speeds[out].add(PROBE, time.perf_counter() - begin)


class PinnedStores:
    """The stores of a device by their limit."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.lock = threading.Lock()
        self.known: dict[int, PinnedStore] = {}

    def at(self, _folder: str, limit: int) -> PinnedStore:
        """The store with such a limit; a folder is the CPU's."""
        with self.lock:
            if limit not in self.known:
                self.known[limit] = PinnedStore(self.streams, limit)
            return self.known[limit]
