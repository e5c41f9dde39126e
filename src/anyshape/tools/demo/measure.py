"""What the demo measures of its own process: resident memory per step, and the compiler's counters per backend."""

from __future__ import annotations

import contextlib
import itertools
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from anyshape.base import counters
from anyshape.torch_compat.versions.api import allocations

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def resident_peak() -> int:
    """Most resident bytes since the last `forget_peak` (Linux), or since the process began (elsewhere)."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> None:
    """Begin a new high-water mark; a kernel or container that does not allow it keeps the old one."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return


def resident_now() -> int:
    """Resident bytes at this moment (Linux), or the most there ever were (elsewhere)."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return resident_peak()


@contextlib.contextmanager
def counted_peak(asked: bool) -> Iterator[list[int]]:
    """A list with one number, at the end the most bytes that torch's allocator had given at once beyond what was alive
    before; blocks of the arena that wait for the next call count as taken by it. 0 if nobody asked."""
    found = [0]
    if not asked:
        yield found
        return
    waiting = int(counters.stats()["arena_bytes"])
    with allocations() as changes:
        yield found
    found[0] = waiting + max(itertools.accumulate(changes), default=0)
