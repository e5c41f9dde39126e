"""What every backend returns: the addresses of a compiled kernel, and the object that keeps its code loaded."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A loaded kernel; addresses of C functions, `block` being int64*: pointers of the params, then the sizes.

    run: void(int64* block, int64 begin, int64 end, void* scratch), row blocks begin to end.
    blocks: int64(int64* block), number of row blocks at these sizes.
    scratch: int64(int64* block), bytes of scratch that one thread needs; the caller aligns it to 64 bytes.
    work: int64(int64* block), estimated scalar operations, for the choice between one thread and many.
    """

    name: str
    run: int
    blocks: int
    scratch: int
    work: int
    keep: object = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Routines:
    """Loaded functions other than kernels: name -> address."""

    address: dict[str, int]
    keep: object = field(repr=False, compare=False)


class ObjectCache(Protocol):
    """Stores object code by key; both methods may be called from several threads."""

    def get(self, key: str) -> bytes | None:
        """The bytes stored under `key`, or None."""

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`."""

    def put_first(self, key: str, data: bytes) -> bytes:
        """Keep `data` under `key` unless something is there; what is there then."""
