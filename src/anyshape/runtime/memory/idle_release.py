"""Idle memory is given back: a daemon thread, which is there as long as a pool holds blocks that are worth it.

Neither a finaliser nor a callback of Python's garbage collector would do in its place: Ctrl-C that comes while one of
these runs is printed and forgotten.

A fork finds the thread between two looks (`_looking`), so it holds no lock that the child would wait for. The child has
no such thread until it makes a block of its own.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from anyshape.runtime.memory import huge_pages
from anyshape.runtime.memory.pools import IDLE_SECONDS, SMALL, Pool

WORTH = 16 << 20  # bytes for which there is a thread
_looking = threading.Lock()
os.register_at_fork(before=_looking.acquire, after_in_parent=_looking.release, after_in_child=_looking.release)


class IdleRelease:
    """Calls `release` once nobody has taken a block of these pools for IDLE_SECONDS.

    Args:
        release: gives back what idles and returns its bytes; called from a thread of its own.
    """

    def __init__(self, pools: tuple[Pool, ...], release: Callable[[], int]) -> None:
        self.pools = pools
        self.release = release
        self.thread: threading.Thread | None = None
        for pool in pools:
            pool.grown = self.begin

    def begin(self) -> None:
        """A pool has made a block."""
        if sum(pool.noted for pool in self.pools) < WORTH or (self.thread is not None and self.thread.is_alive()):
            return
        self.thread = threading.Thread(target=self._wait, name="anyshape idle", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:  # the interpreter ends, and the memory with it
            self.thread = None

    def look(self) -> bool:
        """Gives back what has idled for long; whether there is enough left to look again."""
        with _looking:
            idle = time.monotonic() - max(pool.used for pool in self.pools) > IDLE_SECONDS
            if idle and self.release() > SMALL:
                huge_pages.give_back()
            stays = sum(pool.noted for pool in self.pools) >= WORTH
            if not stays:
                self.thread = None  # a block that is made from now on begins another
            return stays

    def _wait(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS)
            if not self.look():
                return
