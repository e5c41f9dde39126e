"""The file as the lower tier: the weights of all branches, one contiguous range a branch, read and never mapped.

The file has no name and goes with the process; nobody else writes it. Its blocks are allocated before anything is
written, so a full disk is known before the model is touched. What is written or read lies in the kernel's page cache,
which is no memory of the process and goes when it is needed; a folder in memory (tmpfs) saves nothing. A mapped file
that is cut short kills the process with a signal, where reading says what is wrong.

`runtime/memory/offload_store.py` is the same idea for values of a call: it reserves and frees pieces, writes in every
call, and its thread copies in the order of requests. Here all is written once and read often, in an order that
predictions change, into memory that is shared between calls. `route` imports nothing of the compiler, so it is a second
one.
"""
from __future__ import annotations

import contextlib
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Sequence

import numpy as np

from anyshape.base.align import align
from anyshape.base.errors import StoreError
from anyshape.route.store.tiers import BranchBytes

PAGE = 4096  # ranges begin at multiples of it
MEMORY = 0.9  # what earlier reads weigh in the estimate of speed


class BranchFile:
    """The weights of all branches in a file without a name. Reads of several threads may run at once.

    Args:
        folder: where the file is; the system's folder of temporary files where left out.

    Raises:
        StoreError: no file can be made there, or the disk is full.
    """

    def __init__(self, branches: Sequence[BranchBytes], folder: str | None = None) -> None:
        self.folder = tempfile.gettempdir() if folder is None else os.path.expanduser(folder)
        self.branches = tuple(branches)
        starts = np.cumsum([0, *(align(one.size, PAGE) for one in branches)])
        self.starts, size = [int(start) for start in starts[:-1]], int(starts[-1])
        self.checksums: list[int | None] = [None] * len(self.branches)
        self.bytes = self.seconds = 0.0  # of the latest reads
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="anyshape-", buffering=0) as file:
                self.number = os.dup(file.fileno())
        except OSError as error:
            raise StoreError(f"there can be no file for branches' weights in {self.folder}", why=str(error),
                             do="name a folder that can be written") from error
        self.close = weakref.finalize(self, os.close, self.number)
        self.close.atexit = False
        try:
            if size:
                os.posix_fallocate(self.number, 0, size)
        except OSError as error:
            self.close()
            raise StoreError(f"there is no room for {size} bytes of branches' weights in {self.folder}", why=str(error),
                             do="make room there, or name another folder") from error

    def write(self, branch: int, parts: Sequence[memoryview]) -> None:
        """Writes the bytes of a branch. Raises StoreError."""
        at = self.starts[branch]
        try:
            for part in parts:
                done = 0
                while done < len(part):
                    done += os.pwrite(self.number, part[done:], at + done)
                at += len(part)
            with contextlib.suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(self.number, self.starts[branch], at - self.starts[branch], os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(branch, "written", str(error)) from error
        self.checksums[branch] = checksum(parts)

    def read(self, branch: int, into: Sequence[memoryview]) -> None:
        """Raises StoreError where the disk fails, the file was cut short, or the bytes are not those written."""
        begin = time.perf_counter()
        at, size = self.starts[branch], self.branches[branch].size
        wanted = [part for part in into if len(part)]
        try:
            while wanted:
                moved = os.preadv(self.number, wanted[:512], at)
                if moved == 0:
                    raise self._error(branch, "read", "the file ends before they do: somebody has cut it short")
                at += moved
                while wanted and moved >= len(wanted[0]):
                    moved -= len(wanted.pop(0))
                if moved:
                    wanted[0] = wanted[0][moved:]
        except OSError as error:
            raise self._error(branch, "read", str(error)) from error
        if checksum(into) != self.checksums[branch]:
            raise self._error(branch, "read", "their checksum is not that of what was written")
        self.bytes, self.seconds = self.bytes * MEMORY + size, self.seconds * MEMORY + time.perf_counter() - begin

    def rate(self) -> float:
        """Bytes a second of the latest reads; 0 before the first."""
        return self.bytes / self.seconds if self.seconds else 0.0

    def _error(self, branch: int, done: str, why: str) -> StoreError:
        return StoreError(f"the weights of {self.branches[branch].name} could not be {done}",
                          where=self.folder, why=why, do="look after that disk, and apply the plan again")


def checksum(parts: Sequence[memoryview]) -> int:
    """The CRC-32 of the sums of the words of each page: a flipped bit, a lost page and two exchanged ones change it. It
    takes a tenth of the time of reading from the page cache, where the CRC of the bytes takes ten times as long."""
    found = 0
    for part in parts:
        whole = len(part) // PAGE * PAGE
        words = np.frombuffer(part[:whole], np.uint64).reshape(-1, PAGE // 8)
        found = zlib.crc32(words.sum(1, dtype=np.uint64).tobytes(), found)
        found = zlib.crc32(part[whole:], found)
    return found
