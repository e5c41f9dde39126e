"""The tiers of a store, as interfaces: a lower one that has the weights of all branches, an upper one that computes.

    file  --read-->  host memory          here
    pinned host memory  --copy-->  device memory         the same two interfaces: `read` begins a copy on a side stream
                                                         and waits for its event, `replace` gives out slots
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Part = tuple[int, int]  # first byte in the upper tier, bytes


@dataclass(frozen=True, slots=True)
class BranchBytes:
    """Where the weights of one branch are in the upper tier: `parts`, one after another in the lower tier, too. name:
    for messages."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.parts)


class LowerTier(Protocol):
    """Has the bytes of every branch."""

    def read(self, branch: int, into: Sequence[memoryview]) -> None:
        """Fills `into`, one memory for each part. Raises StoreError."""


class UpperTier(Protocol):
    """Memory for some branches; bytes are those that are really taken. Calls are serialized by the cache's lock."""

    @property
    def held(self) -> int:
        """Bytes that branches hold."""

    def least(self, branches: Sequence[int]) -> int:
        """Bytes that branches take while no other is there."""

    def excess(self, leave: Sequence[int], enter: Sequence[int], limit: int) -> int:
        """Bytes by which the limit would be passed once some have left and others have entered; at most 0 where it
        holds."""

    def replace(self, leave: Sequence[int], enter: Sequence[int]) -> None:
        """Gives the memory of the first to the second, and what is left of it back."""

    def views(self, branch: int) -> list[memoryview]:
        """The memory of a branch that has entered, one for each part."""
