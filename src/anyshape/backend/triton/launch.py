"""Kernel launches as data: what a compiled kernel says of one at given sizes, and the words that the launch loop reads."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from anyshape.backend.cpu.native.compiler import words_of
from anyshape.backend.triton import launch_loop as loop

_launch, _copy = loop.LaunchStep.encoder(), loop.DeviceCopyStep.encoder()
_POINTERS = loop.LaunchStep.index("places")


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of machine code.

    image: what the driver loads; entry: the kernel's name in it. grid: programs; threads: of each; shared: bytes of
    dynamic shared memory of each. numbers: words of the params behind the pointers; one of fewer bits is the low part
    of its word. aligned: a power of 2 that divides every pointer.
    """

    image: bytes
    entry: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    numbers: tuple[int, ...]
    aligned: int = 1


class DeviceKernel(Protocol):
    """What a plan runner on a stream wants of a kernel."""

    @property
    def name(self) -> str:
        """By which the regimes of a plan's steps know it."""

    def launches(self, sizes: Sequence[int]) -> Sequence[Launch]:
        """The launches of which the first that fits its pointers runs, at these sizes; none where nothing is to be
        done. The last one fits all."""


class Loader(Protocol):
    """Loads machine code: backend/triton/driver/driver.py."""

    def function(self, image: bytes, entry: str, shared: int, device: int = 0) -> int:
        """The handle of a kernel."""


def launch_words(number: int, found: Sequence[Launch], places: Sequence[int], loader: Loader, device: int) -> list[int]:
    """The words of a step. places: slot and bytes of each pointer, one after the other."""
    words: list[int] = []
    for one in reversed(found):
        length = _POINTERS + len(places) + len(one.numbers)
        function = loader.function(one.image, one.entry, one.shared, device)
        words = [*_launch(op=loop.LAUNCH, length=length, number=number, function=function, grid_x=one.grid[0],
                          grid_y=one.grid[1], grid_z=one.grid[2], threads=one.threads, shared=one.shared,
                          unaligned=one.aligned - 1, otherwise=len(words), pointers=len(places) // 2,
                          numbers=len(one.numbers), places=(*places, *one.numbers)), *words]
    return words


def copy_words(number: int, target: tuple[int, int], source: tuple[int, int], bytes_: int) -> list[int]:
    """The words of a copy of one run of bytes; target, source: slot and bytes."""
    return _copy(op=loop.COPY, length=words_of(loop.DeviceCopyStep), number=number, target=target, source=source, bytes=bytes_)


def one_run(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two windows of a shape are laid out alike, without gaps: a copy of one run of bytes."""
    dims = sorted((step, other, n) for n, step, other in zip(shape, strides, others, strict=True) if n != 1)
    reach = 1
    for step, other, n in dims:
        if step != reach or other != reach:
            return False
        reach *= n
    return True
