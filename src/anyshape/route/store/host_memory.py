"""Host memory as the upper tier: address space for the weights of every branch, pages for those that are in memory.

    address space   | branch 0 | branch 1 | branch 2 | branch 3 |      one tensor [4, ...], wherever its pages are
    pages           |    x     |          |    x     |          |      two branches' worth

This is virtual memory as the operating system has it, used by hand. Weights keep their place, so that modules, views of
them and compiled programs stay as they are, whatever is in memory: no table of slots, no rows that have to be permuted,
nothing that is traced again, and the same kernels, so the same bits. A branch that leaves for another one of its size
hands its pages on (mremap), which costs a hundredth of giving them back and asking for new ones.

The address space of what is not in memory reads as zeros. Nobody must read there: tensors over it are not parameters,
and the cache lets a branch run only while it is pinned.

Pages are counted: two branches that share one (a size that is no multiple of pages) share its cost.
"""
from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyshape.base.align import align
from anyshape.base.errors import StoreError
from anyshape.route.store.tiers import BranchBytes

PAGE = mmap.PAGESIZE
NO_RESERVE = 0x4000  # MAP_NORESERVE: address space is no promise of memory
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
FIXED = 0x10 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE  # MAP_FIXED
MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP: the pages go, the old addresses stay

Span = tuple[int, int]  # first page, page after the last


def supported() -> bool:
    """Whether the system has what this needs: anonymous pages that go when they are told to (Linux)."""
    return hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap, "MAP_ANONYMOUS") and hasattr(mmap, "MADV_NOHUGEPAGE")


class BranchMemory:
    """Address space for the weights of all branches, with pages for those that are in memory.

    Args:
        size: bytes of address space. branches: where the weights of each are in it.
    """

    def __init__(self, size: int, branches: Sequence[BranchBytes]) -> None:
        self.branches = tuple(branches)
        self.spans = tuple(_spans(one) for one in branches)
        pages = align(max(size, 1), PAGE) // PAGE
        try:
            self.map = mmap.mmap(-1, pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
        except OSError as error:
            raise StoreError(f"there is no address space for {pages * PAGE} bytes of weights", why=str(error),
                             do="look at the limit of address space (ulimit -v)") from error
        self.map.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would take memory that no branch has asked for
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.holders = np.zeros(pages, np.int32)  # branches in memory per page
        self.pages = 0
        sharers = np.zeros(pages, np.int32)
        for spans in self.spans:
            for span in spans:
                sharers[slice(*span)] += 1
        # pages that only this branch touches, and the few at borders that others touch as well
        self.own = [sum(int((sharers[slice(*span)] == 1).sum()) for span in spans) for spans in self.spans]
        self.shared = [_shared(spans, sharers) for spans in self.spans]
        self.libc = _libc()

    @property
    def held(self) -> int:
        return self.pages * PAGE

    def tensor(self, start: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor that begins at a byte of the address space."""
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 in shape:
            return torch.empty(list(shape), dtype=dtype)
        flat = self.bytes[start:start + count * dtype.itemsize].view(dtype)
        return flat.as_strided(list(shape), list(stride))

    def least(self, branches: Sequence[int]) -> int:
        shared = set[int]().union(*(self.shared[one] for one in branches))
        return (sum(self.own[one] for one in branches) + len(shared)) * PAGE

    def excess(self, leave: Sequence[int], enter: Sequence[int], limit: int) -> int:
        after = self.pages - sum(self.own[one] for one in leave) + sum(self.own[one] for one in enter)
        changed: dict[int, int] = {}  # how many branches more hold a shared page
        for way, branches in ((-1, leave), (1, enter)):
            for one in branches:
                for page in self.shared[one]:
                    changed[page] = changed.get(page, 0) + way
        for page, more in changed.items():
            before = int(self.holders[page])
            after += (before + more > 0) - (before > 0)
        return after * PAGE - limit

    def replace(self, leave: Sequence[int], enter: Sequence[int]) -> None:
        wanting = [span for one in enter for span in self.spans[one] if not self.holders[slice(*span)].any()]
        for one in leave:
            for span in self.spans[one]:
                pages = self.holders[slice(*span)]
                pages -= 1
                self.pages -= int((pages == 0).sum())
        for one in leave:
            for span in self.spans[one]:
                self._hand_on(span, wanting)
        for one in enter:
            for span in self.spans[one]:
                pages = self.holders[slice(*span)]
                self.pages += int((pages == 0).sum())
                pages += 1

    def _hand_on(self, span: Span, wanting: list[Span]) -> None:
        """Moves the pages of a span that nobody holds to one that wants as many, else gives them back."""
        if not self.holders[slice(*span)].any():
            size = span[1] - span[0]
            for other in wanting:
                if other[1] - other[0] == size and (other[1] <= span[0] or span[1] <= other[0]):
                    wanting.remove(other)
                    if self._moved(span[0], other[0], size):
                        return
                    break
        for begin, end in _free_runs(self.holders, span):
            self.map.madvise(mmap.MADV_DONTNEED, begin * PAGE, (end - begin) * PAGE)

    def _moved(self, begin: int, to: int, pages: int) -> bool:
        if self.libc is None:
            return False
        base, size = self.bytes.data_ptr(), pages * PAGE
        if self.libc.mremap(base + begin * PAGE, size, size, MOVE, base + to * PAGE) == base + to * PAGE:
            return True
        self.libc.mmap(base + to * PAGE, size, READ_WRITE, FIXED, -1, 0)  # it may have been unmapped before that failed
        self.map.madvise(mmap.MADV_NOHUGEPAGE, to * PAGE, size)
        self.libc = None  # an old kernel, or too many mappings: pages are given back and asked for anew
        return False

    def views(self, branch: int) -> list[memoryview]:
        whole = memoryview(self.map)
        return [whole[start:start + size] for start, size in self.branches[branch].parts]


def _libc() -> Any:
    """The C library's mremap and mmap; None where it has none."""
    found = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    try:
        found.mremap.restype, found.mremap.argtypes = address, [address, size, size, number, address]
        found.mmap.restype, found.mmap.argtypes = address, [address, size, number, number, number, ctypes.c_long]
    except AttributeError:
        return None
    return found


def _spans(branch: BranchBytes) -> tuple[Span, ...]:
    """The pages that a branch touches, none twice, in order."""
    found: list[Span] = []
    for start, size in sorted(branch.parts):
        begin, end = start // PAGE, align(start + size, PAGE) // PAGE
        if found and begin < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def _shared(spans: Sequence[Span], sharers: np.ndarray) -> tuple[int, ...]:
    """The pages of a branch that others touch, too."""
    return tuple(int(page) + span[0] for span in spans for page in np.flatnonzero(sharers[slice(*span)] > 1))


def _free_runs(holders: np.ndarray, span: Span) -> Iterator[Span]:
    """The runs of pages of a span that nobody holds."""
    free = np.flatnonzero(holders[slice(*span)] == 0) + span[0]
    for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1
