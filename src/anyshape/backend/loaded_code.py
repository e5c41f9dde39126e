"""Machine code that is loaded, as addresses of functions, and where it comes from: the JIT, or a deployed file."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

ENTRIES = ("", "_blocks", "_scratch", "_work")  # what follows a kernel's name in the names of its functions


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A loaded kernel; addresses of C functions, `block` being int64*: pointers of the params, then the sizes.

    run: void(int64* block, int64 begin, int64 end, void* scratch), row blocks begin to end.
    blocks: int64(int64* block), number of row blocks at these sizes.
    scratch: int64(int64* block), bytes of scratch that one thread needs; the caller aligns it to 64 bytes.
    work: int64(int64* block), estimated scalar operations, for the choice between one thread and many.
    key: by which its object code is kept; "": it is not.
    """

    name: str
    run: int
    blocks: int
    scratch: int
    work: int
    keep: object = field(repr=False, compare=False)
    key: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Routines:
    """Loaded functions other than kernels: name -> address."""

    address: dict[str, int]
    keep: object = field(repr=False, compare=False)


class CodeSource(Protocol):
    """Machine code that was made before: that of a file (artifact/native_code.py)."""

    def routines(self, module: str, names: Sequence[str]) -> Routines:
        """Those of the routines `names` that the module has; VerifyError: there is no such module."""
