"""The streams of a GPU by its driver's events, and memory from PyTorch's caching allocator: what the pools of a device
(runtime/memory/stream_pools.py) ask for."""
from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, Protocol

from anyshape.backend.triton.driver.driver import DeviceDriver


class DeviceMemory(Protocol):
    """A device as PyTorch sees it: backend/triton/torch_memory.py."""

    def current(self) -> int:
        """The driver's handle of the calling thread's current stream."""

    def allocate(self, bytes_: int, stream: int) -> Any:
        """See `Streams`."""

    def uses(self, memory: Any, stream: int) -> None:
        """See `Streams`."""

    def resident(self) -> int:
        """See `Streams`."""

    def captured(self, stream: int) -> AbstractContextManager[None]:
        """Inside, what this thread has PyTorch do goes to `stream`, where a graph is captured, and memory that it takes
        for that stays the graphs' own."""


class PinnedMemory:
    """Pinned memory of the host; `address`."""

    __slots__ = ("address", "driver")

    def __init__(self, driver: DeviceDriver, address: int) -> None:
        self.driver = driver
        self.address = address

    def __del__(self) -> None:
        self.driver.free("free_host", self.address)


class Mark:
    """A point of a stream; its event is used again when nobody has the mark any more."""

    __slots__ = ("event", "free")

    def __init__(self, event: int, free: list[int]) -> None:
        self.event = event
        self.free = free

    def __del__(self) -> None:
        self.free.append(self.event)  # one step of the interpreter: no lock


class DeviceStreams:
    """The streams of device number `device`. See `Streams` of backend/interface.py."""

    def __init__(self, driver: DeviceDriver, device: int, memory: DeviceMemory) -> None:
        self.driver = driver
        self.device = device
        self.memory = memory
        self.current = memory.current
        self.allocate = memory.allocate
        self.uses = memory.uses
        self.resident = memory.resident
        self._events: list[int] = []
        self._sides: dict[str, int] = {}
        self._lock = threading.Lock()
        self.captured = memory.captured
        self.capturing = threading.Lock()  # of the side stream on which graphs are captured
        self.last: tuple[int, Mark] | None = None  # of graphs with steps of PyTorch: their stream, and a point behind

    def mark(self, stream: int) -> Mark:
        """See `Streams`."""
        driver = self.driver
        with driver.current(self.device):
            try:
                event = self._events.pop()
            except IndexError:
                event = driver.event()
            driver.call("record_event", event, stream)
        return Mark(event, self._events)

    def passed(self, mark: Mark) -> bool:
        """See `Streams`."""
        return self.driver.passed(mark.event)

    def wait(self, stream: int, mark: Mark) -> None:
        """See `Streams`."""
        with self.driver.current(self.device):
            self.driver.call("wait_event", stream, mark.event, 0)

    def synchronize(self, stream: int) -> None:
        """See `Streams`."""
        with self.driver.current(self.device):
            self.driver.call("synchronize_stream", stream)

    def pinned(self, bytes_: int) -> PinnedMemory:
        """See `Streams`."""
        with self.driver.current(self.device):
            return PinnedMemory(self.driver, self.driver.pinned(bytes_))

    def copy(self, target: int, source: int, bytes_: int, stream: int, to_host: bool | None = None) -> None:
        """See `Streams`."""
        name = "copy" if to_host is None else "copy_to_host" if to_host else "copy_to_device"
        with self.driver.current(self.device):
            self.driver.call(name, target, source, bytes_, stream)

    def side(self, name: str) -> int:
        """See `Streams`."""
        with self._lock:
            if name not in self._sides:
                self._sides[name] = self.driver.stream(self.device)
            return self._sides[name]
