"""Measurements of a machine, each made once and kept in the disk cache: later processes find what the first found.

A measurement is a positive number. It is kept by what was measured, the processor, its features, the number of cores,
and the versions of torch and of the code generator, so that a cache that several machines share has one for each.
"""
from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable

from anyshape.backend.interface import ObjectCache
from anyshape.base.digests import sha256

VERSION = 2  # of how it is measured
NUMBER = struct.Struct("<d")


class Measurements:
    """What was measured by this process, or is in its cache. Threads may share one.

    Args:
        cache: None: only this process remembers.
        machine: everything that a measurement depends on beside what is measured.
    """

    def __init__(self, cache: ObjectCache | None, machine: str) -> None:
        self.cache = cache
        self.machine = machine
        self.lock = threading.RLock()  # one at a time: two would slow each other down
        self.known: dict[str, float] = {}

    def get(self, what: str, measure: Callable[[], float]) -> float | None:
        """The number called `what`, measured if nobody has done so yet; None: it cannot be measured now."""
        found = self.known.get(what)
        if found is None:
            with self.lock:
                if what not in self.known:
                    self.known[what] = self._kept(what, measure)
                found = self.known[what]
        return found if _is_sound(found) else None

    def forget(self, what: str) -> None:
        """Has the number measured when it is asked for again; programs that are there stay as they are."""
        with self.lock:
            self.known.pop(what, None)
            if self.cache is not None:
                self.cache.put(key_of(what, self.machine), b"")

    def _kept(self, what: str, measure: Callable[[], float]) -> float:
        key = key_of(what, self.machine)
        data = None if self.cache is None else self.cache.get(key)
        if data is not None and len(data) == NUMBER.size and _is_sound(NUMBER.unpack(data)[0]):
            return float(NUMBER.unpack(data)[0])
        try:
            found = measure()
        except (MemoryError, RuntimeError):  # torch has no memory for it
            return math.nan
        if self.cache is None or not _is_sound(found):
            return found
        # what another process has put there meanwhile counts: all choose alike
        if data is not None:
            self.cache.put(key, NUMBER.pack(found))
            return found
        kept = self.cache.put_first(key, NUMBER.pack(found))
        return float(NUMBER.unpack(kept)[0]) if len(kept) == NUMBER.size else found


def key_of(what: str, machine: str) -> str:
    """The name of a measurement in the cache."""
    return sha256(f"speed {VERSION} {what} on {machine}".encode()).hexdigest()  # type: ignore[no-any-return]


def _is_sound(number: float) -> bool:
    return math.isfinite(number) and number > 0
