"""The process context: what programs share: pools of memory, files that values are moved out to, reordered weights."""
from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anyshape.backend.interface import HostRoutines, Streams, Target
from anyshape.backend.targets import host_routines, target_of
from anyshape.runtime.context.profiling import PROCESS
from anyshape.runtime.driver.interface import HostDriver
from anyshape.runtime.driver.usual import usual_driver
from anyshape.runtime.memory import huge_pages
from anyshape.runtime.memory.idle_release import IdleRelease
from anyshape.runtime.memory.packed_weights import PackedWeights
from anyshape.runtime.memory.pools import Pool

if TYPE_CHECKING:
    from anyshape.base.config import Config
    from anyshape.runtime.memory.offload_store import Stores
    from anyshape.runtime.memory.pinned_store import PinnedStores

_making = threading.Lock()
_shared: list[Context] = []


class Context:
    """Everything that outlives a call and is not the program: give the same one to all programs of a process.

    Args:
        host: native routines of the host; the process's own when left out.
        driver: of who calls the programs; PyTorch's when left out.
    """

    def __init__(self, host: HostRoutines | None = None, driver: HostDriver | None = None) -> None:
        self.host = host = host_routines() if host is None else host
        self.driver = driver = usual_driver() if driver is None else driver
        self.temporary = Pool(driver)
        self.kept = Pool(driver)
        self._stores: Stores | PinnedStores | None = None
        self.packed = PackedWeights(host.digest)
        self.idle = IdleRelease((self.temporary, self.kept), self.release)
        self.unread: list[Any] = []  # runs that have not ended (runtime/call/unread_status.py); the CPU has none
        self.devices: dict[Streams, Context] = {}
        self.profiler = PROCESS

    def on(self, target: Target) -> Context:
        """What programs of a target share: of one without streams this, else the same with pools of its own, by
        stream, and runs of its own that have not ended."""
        streams = target.streams
        if streams is None:
            return self
        from anyshape.runtime.memory.pinned_store import PinnedStores  # of devices only
        from anyshape.runtime.memory.stream_pools import StreamPool
        with _making:
            if streams not in self.devices:
                own = copy.copy(self)
                own.temporary, own.kept = StreamPool(streams), StreamPool(streams)
                own.idle = IdleRelease((own.temporary, own.kept), own.release)
                own.unread, own.devices, own._stores = [], {}, PinnedStores(streams)
                self.devices[streams] = own
            return self.devices[streams]

    @property
    def stores(self) -> Stores | PinnedStores:
        """Where values are moved out to; most processes move none."""
        from anyshape.runtime.memory.offload_store import Stores
        with _making:
            if self._stores is None:
                self._stores = Stores()
            return self._stores

    def release(self) -> int:
        """Gives back what no call is using: free blocks, reordered weights. Returns the bytes. Safe at any time, from
        any thread: calls that run keep what they have, and later ones take it anew."""
        found = self.temporary.release_idle() + self.kept.release_idle() + self.packed.release()
        return found + sum(one.release() for one in [*self.devices.values()])


def release() -> int:
    """Gives back what idles in the process's context, if there is one; returns the bytes."""
    found = sum(one.release() for one in _shared)
    huge_pages.give_back()
    return found


def shared_context() -> Context:
    """The process's context."""
    with _making:
        if not _shared:
            _shared.append(Context())
        return _shared[0]


@contextlib.contextmanager
def context_underway(config: Config) -> Iterator[None]:
    """Makes the context, and what its target loads, while what is inside runs: LLVM needs a core, and neither Python
    nor what a trace sets. The thread ends inside, so that a process that forks later has none."""
    worker = None
    if not _shared:
        worker = threading.Thread(target=_warm, args=(config,), name="anyshape host")
        worker.start()
    try:
        yield
    finally:
        if worker is not None:
            worker.join()


def _warm(config: Config) -> None:
    target_of(config).warm()
    shared_context()
