"""Packed weights: copies of convolution weights in the library's own order, kept between calls within a bound."""
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Digest = Callable[[int, int], int]  # of a piece of memory: its address and bytes


class PackedWeights:
    """Reordered weights of all programs.

    They are kept while they and what the running call holds besides fit into `limit` bytes, or into what the neediest
    call so far has held, whichever is more. So they take memory that is used anyhow, or at most `limit`. What has no
    room is reordered for its call alone. Thread-safe.
    """

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        self.lock = threading.RLock()  # a program may go, and say so, while the thread is in here
        self.entries: dict[tuple[int, int], tuple[Any, torch.Tensor, int]] = {}
        self.owners = itertools.count(1)
        self.bytes = 0
        self.most = 0
        self.room = 0

    def begin(self, need: int, weights: Sequence[int], limit: int) -> None:
        """A call begins that holds `need` bytes besides, and whose weights have so many bytes each. What has no room
        goes, the latest first."""
        with self.lock:
            self.most = max(self.most, need)
            self.room = max(limit, self.most) - need
            if sum(weights) > self.room:
                self.room -= max(weights)  # for the one that is reordered for the moment
            while self.entries and self.bytes > self.room:
                self._drop(next(reversed(self.entries)))

    def release(self) -> int:
        """Gives all of them back; returns their bytes. They are made anew where they are needed."""
        with self.lock:
            before = self.bytes
            for key in list(self.entries):
                self._drop(key)
            return before - self.bytes

    def forget(self, owner: int) -> None:
        """A program is gone."""
        with self.lock:
            for key in [key for key in self.entries if key[0] == owner]:
                self._drop(key)

    def has_room(self, key: tuple[int, int], weights: torch.Tensor) -> bool:
        """Whether reordered weights are here, or could be kept."""
        with self.lock:
            return key in self.entries or self.bytes + weights.nbytes <= self.room

    def get(self, key: tuple[int, int], weights: torch.Tensor, pack: Callable[[], torch.Tensor]) -> torch.Tensor:
        """`weights` reordered by `pack`, of this call or of one before."""
        if not self.has_room(key, weights):
            return pack()
        content = (self.digest(weights.data_ptr(), weights.nbytes), weights.shape, weights.stride())
        with self.lock:
            entry = self.entries.get(key)
            if entry is not None and entry[0] == content:
                return entry[1]
            if entry is not None:
                self._drop(key)
        packed = pack()
        with self.lock:
            if key not in self.entries and self.bytes + weights.nbytes <= self.room:
                self.entries[key] = (content, packed, weights.nbytes)
                self.bytes += weights.nbytes
        return packed

    def _drop(self, key: tuple[int, int]) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[2]
