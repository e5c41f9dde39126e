"""The offload store: a file in a folder where values wait outside of memory, and a thread that copies into it and back
beside the calls.

    space = store.reserve(bytes_)               before the call: there is room for all that it will move out
    space.put(0, address, n, owner).wait()      forward, after the last use; from then on the memory is free
    space.get(0, address, n, owner).wait()      backward, before the first use
    space.release()

A store of a device with streams has the same four (runtime/memory/pinned_store.py): pinned memory in place of the file,
side streams in place of the thread, and what waits is the device's stream.

The file has no name and goes with the process. It is read and written, not mapped: a mapped file that somebody cuts
short, or that a full disk cannot hold, kills the process with a signal, where reading and writing say what is wrong.
Its blocks are allocated before a call begins, so a full disk is known before anything has run. What is written lies in
the kernel's page cache first. That is no memory of the process; the kernel is asked to write it at once, and takes the
pages back when it needs them. So a folder in memory (tmpfs) saves nothing.
"""
from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from anyshape.base.align import align
from anyshape.base.errors import ConfigError, StoreError

PAGE = 4096  # spaces are whole pages of the file
PIECE = 4 << 20  # bytes copied between two looks at whether anybody still wants them
LEAST = 64 << 10  # bytes of a copy that says something about speed
PROBE = 8 << 20  # bytes copied to learn how fast that is, before anything else was
EACH = 1e-4  # seconds that one move takes whatever its size: two calls from native code, four of the system
BESIDE = 0.25  # what a second of copying on a core that has nothing else to do costs those that compute: memory traffic
MEMORY = 0.9  # what the latest copies weigh in the estimate of speed

Piece = tuple[int, int]  # first byte in the file, bytes


class PendingCopy(Protocol):
    """A copy that was begun. unwanted: nobody waits for it any more."""

    unwanted: bool

    def wait(self) -> None:
        """From here on it is done."""

    def end(self) -> None:
        """From here on nobody touches the memory any more, done or not."""


class Reservation(Protocol):
    """The place of one forward's values in a store."""

    def put(self, at: int, address: int, bytes_: int, owner: object) -> PendingCopy:
        """Begins to copy `bytes_` bytes from `address` to `at`."""

    def get(self, at: int, address: int, bytes_: int, owner: object) -> PendingCopy:
        """Begins to copy them back."""

    def release(self) -> None:
        """Gives the place back; a second time it does nothing."""


class Store(Protocol):
    """Where values wait. limit: bytes that it may hold; 0: as many as there are. each: seconds that moving a value out
    and back takes, whatever its size."""

    limit: int
    each: float

    def reserve(self, bytes_: int) -> Reservation:
        """Room for so many bytes; StoreError: there is none."""

    def works(self) -> bool:
        """Whether something can be moved out."""

    def seconds(self, bytes_: float, out: bool) -> float:
        """What copying so many bytes takes, as the latest copies did."""

    def share(self, threads: int) -> float:
        """What a second of copying costs those that compute meanwhile, so many threads."""


class File:
    """A file without a name, grown as needed. free: the pieces that nobody has, in order; given: back, not yet in
    there."""

    def __init__(self, folder: str) -> None:
        try:
            import tempfile  # for files only
            with tempfile.TemporaryFile(dir=folder, prefix="anyshape-", buffering=0) as file:
                self.number = os.dup(file.fileno())
        except OSError as error:
            raise StoreError(f"there can be no file in {folder}", why=str(error),
                             do="set memory_store to a folder that can be written") from error
        weakref.finalize(self, os.close, self.number).atexit = False
        self.folder = folder
        self.size = 0
        self.error: str | None = None  # of the disk: nothing new is put there
        self.free: list[Piece] = []
        self.given: collections.deque[Piece] = collections.deque()

    def whole(self) -> bool:
        """Whether nobody has cut it short."""
        return os.fstat(self.number).st_size >= self.size

    def take(self, bytes_: int) -> list[Piece]:
        """Pieces of so many bytes together, a multiple of pages, whose blocks are there.

        Raises:
            StoreError: the disk is full.
        """
        self._tidy()
        more = bytes_ - sum(size for _, size in self.free)
        if more > 0:
            try:
                os.posix_fallocate(self.number, self.size, more)
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.number, self.size)  # what was found before there was no more
                raise StoreError(f"there is no room for {more} more bytes in {self.folder}", why=str(error),
                                 do="make room there, or set memory_store to another folder") from error
            self.given.append((self.size, more))
            self.size += more
            self._tidy()
        taken = []
        while bytes_:
            start, size = self.free.pop(0)
            if size > bytes_:
                self.free.insert(0, (start + bytes_, size - bytes_))
                size = bytes_
            taken.append((start, size))
            bytes_ -= size
        return taken

    def _tidy(self) -> None:
        """Joins what was given back with its neighbours."""
        pieces = self.free
        while self.given:
            pieces.append(self.given.popleft())
        self.free = []
        for start, size in sorted(pieces):
            if self.free and sum(self.free[-1]) == start:
                self.free[-1] = self.free[-1][0], self.free[-1][1] + size
            else:
                self.free.append((start, size))


class Speed:
    """Bytes and seconds of copies in one direction, the latest ones first of all."""

    def __init__(self) -> None:
        self.bytes = self.seconds = 0.0

    def add(self, bytes_: int, seconds: float) -> None:
        """Notes one more copy."""
        self.bytes, self.seconds = self.bytes * MEMORY + bytes_, self.seconds * MEMORY + seconds

    def of(self, bytes_: float) -> float:
        """Seconds that so many bytes take."""
        return bytes_ * self.seconds / max(self.bytes, 1.0)


class CopyRequest:
    """One copy that is asked for: from `address` into the `pieces` of a file, or back. `owner` of the memory at
    `address` stays until it is done."""

    def __init__(self, file: File, pieces: Sequence[Piece], address: int, out: bool, owner: object,
                 speed: Speed) -> None:
        self.file = file
        self.pieces = pieces
        self.address = address
        self.out = out
        self.owner: object = owner
        self.speed = speed
        self.unwanted = False
        self.error: StoreError | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        """Returns when the copy is done.

        Raises:
            StoreError: it failed.
        """
        self.done.wait()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Returns when nobody touches the memory any more, done or not."""
        self.unwanted = True
        self.done.wait()

    def run(self) -> None:
        """Copies; called by the store's thread."""
        try:
            begin = time.perf_counter()
            bytes_ = sum(size for _, size in self.pieces)
            if self._copied() and bytes_ >= LEAST:
                self.speed.add(bytes_, time.perf_counter() - begin)
        except OSError as error:
            if error.errno is not None:
                self.file.error = str(error)
            self.error = StoreError(f"a value could not be moved {'out to' if self.out else 'back from'} "
                                    f"{self.file.folder}", why=str(error),
                                    do="look after that disk, or leave memory_store out")
        finally:
            self.owner = None
            self.done.set()

    def _copied(self) -> bool:
        address = self.address
        for start, size in self.pieces:
            memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            at = 0
            while at < size:
                if self.unwanted:
                    return False
                part = memory[at:at + PIECE]
                if self.out:
                    moved = os.pwrite(self.file.number, part, start + at)
                else:
                    moved = os.preadv(self.file.number, [part], start + at)
                if moved == 0:
                    raise OSError("the file ends before the value does: somebody has cut it short")
                at += moved
            if self.out:
                os.posix_fadvise(self.file.number, start, size, os.POSIX_FADV_DONTNEED)  # begins to write it to disk
            address += size
        return True


class StoreReservation:
    """The place of one forward's values in a store; `put` and `get` say where in it, in bytes."""

    def __init__(self, store: HostStore, file: File, pieces: list[Piece]) -> None:
        self.store = store
        self.file = file
        self.pieces = pieces
        self.process = os.getpid()

    def put(self, at: int, address: int, bytes_: int, owner: object) -> CopyRequest:
        """Begins to copy `bytes_` bytes from `address` to `at`; `owner` keeps that memory alive."""
        return self._ticket(at, address, bytes_, True, owner)

    def get(self, at: int, address: int, bytes_: int, owner: object) -> CopyRequest:
        """Begins to copy them back.

        Raises:
            StoreError: this process is a fork of the one that has moved them out.
        """
        return self._ticket(at, address, bytes_, False, owner)

    def _ticket(self, at: int, address: int, bytes_: int, out: bool, owner: object) -> CopyRequest:
        if os.getpid() != self.process:
            raise StoreError("a value that was moved out cannot be read in a forked process",
                             why="the process that has moved it out may write over it meanwhile",
                             do="call the model in the process that calls its backward")
        ticket = CopyRequest(self.file, cut(self.pieces, at, bytes_), address, out, owner, self.store.speeds[out])
        self.store.ask(ticket)
        return ticket

    def release(self) -> None:
        """Gives the place back; a second time it does nothing."""
        pieces, self.pieces = self.pieces, []
        if pieces and os.getpid() == self.process:
            self.file.given.extend(pieces)  # no lock: this may be called while the thread is anywhere
            self.store.gone.append(sum(size for _, size in pieces))

    def __del__(self) -> None:
        if getattr(self, "pieces", None):
            self.release()


def cut(pieces: Sequence[Piece], at: int, bytes_: int) -> list[Piece]:
    """The part of `pieces`, one after another, from byte `at` on."""
    found = []
    for start, size in pieces:
        begin, end = max(at, 0), min(at + bytes_, size)
        if begin < end:
            found.append((start + begin, end - begin))
        at -= size
    return found


class HostStore:
    """A file where values wait between forward and backward, copied by a thread of its own. Threads may share one.

    Args:
        folder: where the file is.
        limit: bytes that it may hold; 0: as many as the disk has.
    """

    each = EACH

    def __init__(self, folder: str, limit: int = 0) -> None:
        self.folder = folder
        self.limit = limit
        self.moved = 0  # bytes asked for, in both directions
        self.speeds = (Speed(), Speed())  # back, out
        self._begin()

    def _begin(self) -> None:
        """An empty store of this process."""
        self.process = os.getpid()
        self.lock = threading.Lock()
        self.taken = 0
        self.gone: collections.deque[int] = collections.deque()  # bytes given back since `taken` was counted
        self.file: File | None = None
        self.jobs: queue.SimpleQueue[CopyRequest | None] = queue.SimpleQueue()
        self.worker: threading.Thread | None = None
        self.ends = weakref.finalize(self, _end, self.jobs, [])

    @property
    def used(self) -> int:
        """Bytes that spaces hold."""
        with self.lock:
            return self._used()

    def _used(self) -> int:
        while self.gone:
            self.taken -= self.gone.popleft()
        return self.taken

    def reserve(self, bytes_: int) -> StoreReservation:
        """Room for so many bytes, whose blocks are on the disk.

        Raises:
            StoreError: there is none.
        """
        wanted = align(bytes_, PAGE)
        if os.getpid() != self.process:
            self.ends.detach()  # the thread and the file are the parent's
            self._begin()
        with self.lock:
            if self.limit and self._used() + wanted > self.limit:
                raise StoreError(f"there is no room for {wanted} bytes in {self.folder}",
                                 why=f"memory_store_limit is {self.limit}, and {self.taken} are taken",
                                 do="set a higher memory_store_limit")
            if self.file is not None and self.file.error is not None:
                raise StoreError(f"{self.folder} is not used any more", why=self.file.error,
                                 do="look after that disk, and start again")
            if self.file is None or not self.file.whole():
                self.file = File(self.folder)  # who has values in one that was cut short reads what is left of them
            pieces = self.file.take(wanted)
            self.taken += wanted
            return StoreReservation(self, self.file, pieces)

    def ask(self, ticket: CopyRequest) -> None:
        """Gives a copy to the thread, which does one after another."""
        with self.lock:
            if self.worker is None or not self.worker.is_alive():
                self.worker = threading.Thread(target=_work, args=(self.jobs,), name="anyshape store", daemon=True)
                self.worker.start()
                self.ends.detach()
                self.ends = weakref.finalize(self, _end, self.jobs, [self.worker])
            self.moved += sum(size for _, size in ticket.pieces)
        self.jobs.put(ticket)

    def works(self) -> bool:
        """Whether something can be moved out; tried with a copy if nothing has been yet."""
        if 0 < self.limit < LEAST:
            return False
        if not all(speed.bytes for speed in self.speeds):
            size = min(PROBE, self.limit // PAGE * PAGE or PROBE)
            memory = (ctypes.c_char * size)()
            try:
                space = self.reserve(size)
                for copy in (space.put, space.get):
                    copy(0, ctypes.addressof(memory), size, memory).wait()
                space.release()
            except StoreError:
                return False
        return self.file is None or self.file.error is None

    def share(self, threads: int) -> float:
        """See `Store`."""
        return BESIDE if threads < (os.cpu_count() or 1) else 1.0

    def seconds(self, bytes_: float, out: bool) -> float:
        """What copying so many bytes takes, as the latest copies did."""
        return self.speeds[out].of(bytes_)

    def close(self) -> None:
        """Ends the thread. Another copy would begin another one."""
        self.ends()


def _work(jobs: queue.SimpleQueue[CopyRequest | None]) -> None:
    while True:
        ticket = jobs.get()
        if ticket is None:
            return
        ticket.run()
        del ticket


def _end(jobs: queue.SimpleQueue[CopyRequest | None], workers: list[threading.Thread]) -> None:
    """Ends a store's thread."""
    for worker in workers:
        jobs.put(None)
        if worker is not threading.current_thread():
            worker.join()


class Stores:
    """The stores of a process by folder and limit; each is there as long as somebody uses it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: weakref.WeakValueDictionary[tuple[str, int], HostStore] = weakref.WeakValueDictionary()

    def at(self, folder: str, limit: int) -> HostStore | None:
        """The store in a folder; without one there is none."""
        if not folder:
            return None
        key = os.path.realpath(os.path.expanduser(folder)), limit
        with self.lock:
            store = self.known.get(key)
            if store is None:
                store = self.known[key] = HostStore(*key)
            return store


def check_folder(folder: str) -> None:
    """Raises ConfigError where `folder` can be no store's."""
    if not folder:
        return
    folder = os.path.expanduser(folder)
    if not os.path.isdir(folder):
        raise ConfigError(f"memory_store names no folder: {folder}", why="values are moved out to a file in it",
                          do="make it, or name another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"memory_store names a folder that cannot be written: {folder}",
                          why="values are moved out to a file in it", do="change its mode, or name another one")


