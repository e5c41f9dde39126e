"""The driver interface: what a program needs of the host that calls it: arrays as it knows them, memory, libraries.

    PyTorch   runtime/driver/torch_driver.py    tensors, torch's allocator and number of threads
    numpy     runtime/driver/numpy_driver.py    arrays; nothing else is needed

The same plan, records, pools and bytecode serve them all (BladeDISC calls this layer RAL). Whatever a call touches is a
plain function here, not a method that looks something up: a warm call takes microseconds.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from anyshape.base.errors import InputError
from anyshape.plan.ir.program import Plan

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """An array that a caller brings. dtype: our name of it, or the host's where we have none."""

    dtype: str
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class AccessCode:
    """Python text of what is asked of an array in every call, as functions of the array's name; `names` are what the
    text uses. unlike: whether it is more than its memory, has another dtype than the one that the second argument names
    (the third is the dtype itself), or is on another device than the one that the fourth names."""

    strides: Callable[[str], str]
    address: Callable[[str], str]
    unlike: Callable[[str, str, Any, str], str]
    names: Mapping[str, Any]


class HostDriver(Protocol):
    """What a program asks of the host that calls it: arrays, memory, threads. Threads may share one.

    dtypes: our names of dtypes -> the host's. result: memory for a result of sizes, strides (in elements) and one of
    `dtypes`. address: of an array's first element. threads: how many a call may use. code: see `AccessCode`.
    large_from: bytes of arena from which it is made of whole large pages (runtime/memory/huge_pages.py).
    """

    large_from: int

    result: Callable[[Sizes, Sizes, Any], Any]
    address: Callable[[Any], int]
    threads: Callable[[], int]
    code: AccessCode

    @property
    def dtypes(self) -> Mapping[str, Any]: ...

    def inspect(self, value: Any) -> Argument | None:
        """What it is; None: no array of this host."""

    def device(self, name: str) -> Any:
        """The host's device of a name that types have."""

    def fits(self, value: Any, dtype: Any, sizes: Sizes, device: Any) -> bool:
        """Whether it is an array of this dtype and these sizes, on this device, and nothing more than its memory."""

    def strides(self, value: Any) -> Sizes:
        """In elements."""

    def refused(self, value: Any, plan: Plan, position: int) -> InputError | None:
        """The error for an array that no program takes; None where programs do."""

    def scalar(self, value: bool | int | float, dtype: str, device: str = "cpu") -> Any:
        """An array without dims."""

    def plain(self, value: Any) -> Any:
        """The array as what lies in memory; a copy where it means something else."""

    def restrided(self, value: Any, strides: Sizes) -> Any:
        """The array with these strides; a copy where it has others."""

    def put_back(self, into: Any, value: Any) -> None:
        """Writes a value into the array that a copy was made of."""

    def alike(self, values: Sequence[Any], sizes: bool) -> Callable[..., bool] | None:
        """A quick comparison with arrays that were looked at and fit; None: there is none. sizes: these count."""

    def empty(self, bytes_: int) -> tuple[Any, int]:
        """Memory that is aligned to 64 bytes, and its address. RuntimeError: there is none."""

    def flat(self, memory: Any, dtype: Any) -> Any:
        """All of what `empty` gave as an array of one dim."""

    def part(self, flat: Any, element: int, sizes: Sizes, strides: Sizes) -> Any:
        """An array over a part of that."""

    def shares(self, value: Any, memory: Any) -> bool:
        """Whether an array lies in what `empty` gave."""
