"""Kernel launches as words: what the launch loop reads of the launch of a compiled kernel, and of a copy."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from anyshape.backend.cpu.native.records import words_of
from anyshape.backend.triton import launch_loop as loop
from anyshape.backend.triton.compile import Compiler
from anyshape.backend.triton.kernel import (
    NULL,
    POINTER,
    SCRATCH,
    STATUS,
    DeviceKernel,
    KernelSource,
    KernelVersion,
    number_of,
)
from anyshape.base.errors import DeviceError, VerifyError

_launch, _copy, _check = (step.encoder() for step in (loop.LaunchStep, loop.DeviceCopyStep, loop.CheckStep))
_PLACES = loop.LaunchStep.index("places")
ALIGNMENTS = (16, 1)  # of addresses, that code is chosen for
Place = tuple[int, int]  # slot, bytes


class LaunchableKernel(Protocol):
    """What a plan runner on a stream wants of a kernel."""

    @property
    def name(self) -> str:
        """By which the regimes of a plan's steps know it."""

    @property
    def sizes(self) -> Sequence[str]:
        """Names of its sizes, in order."""

    def codes(self, sizes: Sequence[int], alignments: Sequence[int], guarded: bool) -> Sequence[DeviceKernel]:
        """The code for these sizes, and for addresses that are multiples of one of `alignments`: of several the first
        one runs whose `version.alignment` all addresses have; the last one takes any. guarded: for a run with a
        status."""


class VersionedKernel:
    """A kernel whose versions are compiled when sizes ask for them. Thread-safe."""

    def __init__(self, source: KernelSource, compiler: Compiler) -> None:
        self.name = source.name
        self.sizes = source.sizes
        self.source = source
        self.compiler = compiler

    def wanted(self, sizes: Sequence[int], alignments: Sequence[int],
               guarded: bool) -> list[tuple[KernelSource, KernelVersion]]:
        """The versions for these sizes, for addresses of each of these alignments."""
        chosen = dict.fromkeys(self.source.choose(sizes, alignment, guarded) for alignment in alignments)
        return [(self.source, version) for version in chosen]

    def codes(self, sizes: Sequence[int], alignments: Sequence[int], guarded: bool) -> Sequence[DeviceKernel]:
        """See `LaunchableKernel`."""
        return self.compiler.compile(self.wanted(sizes, alignments, guarded))


def alignments_of(aligned: Sequence[bool], offsets: Sequence[int]) -> Sequence[int]:
    """The alignments that the addresses of a launch may have. aligned: whether it is known that memory begins at a
    multiple of 16, as what PyTorch allocates does, by pointer; offsets: bytes from there."""
    if any(offset % ALIGNMENTS[0] for known, offset in zip(aligned, offsets, strict=True) if known):
        return ALIGNMENTS[1:]
    return ALIGNMENTS[:1] if all(aligned) else ALIGNMENTS


def compile_ahead(launches: Sequence[tuple[Sequence[LaunchableKernel], Sequence[int], Sequence[int]]],
                  guarded: bool) -> None:
    """Compiles the versions of all launches of a plan at once, on several threads. What is refused is told where a step
    asks for it."""
    wanted: dict[Compiler, list[tuple[KernelSource, KernelVersion]]] = {}
    for kernels, sizes, alignments in launches:
        for kernel in kernels:
            if isinstance(kernel, VersionedKernel):
                wanted.setdefault(kernel.compiler, []).extend(kernel.wanted(sizes, alignments, guarded))
    for compiler, pairs in wanted.items():
        with contextlib.suppress(DeviceError):
            compiler.compile(pairs)


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots of a call's block that are no buffer's: the status, one that is 0, and the scratch."""

    status: int
    zero: int
    scratch: int


def launch_words(number: int, kernel: LaunchableKernel, places: Sequence[Place], sizes: Sequence[int], slots: Slots,
                 handle: Callable[[DeviceKernel], int], alignments: Sequence[int], guarded: bool) -> list[int]:
    """The words of a step. places: of the kernel's pointers. handle: of loaded code. alignments: see `alignments_of`.
    guarded: the run has a status."""
    words: list[int] = []
    values = dict(zip(kernel.sizes, sizes, strict=True))
    for code in reversed(kernel.codes(sizes, alignments, guarded)):
        grid = code.launch(values)
        if 0 in grid:
            return []
        params = _params(code, places, sizes, slots)
        words = [*_launch(
            op=loop.LAUNCH, length=_PLACES + 2 * len(params), number=number, function=handle(code), grid_x=grid[0],
            grid_y=grid[1], grid_z=grid[2], threads=code.threads, shared=code.shared,
            scratch=number_of(code.version.scratch, values),
            unaligned=code.version.alignment - 1 if len(alignments) > 1 else 0,
            otherwise=len(words), pointers=len(places), params=len(params),
            places=[word for place in params for word in place]), *words]
    return words


def _params(code: DeviceKernel, places: Sequence[Place], sizes: Sequence[int], slots: Slots) -> list[Place]:
    """A place for each parameter of the function."""
    kinds = code.parameters
    given, numbers = iter(places), iter(sizes)
    others = {STATUS: (slots.status, 0), SCRATCH: (slots.scratch, 0), NULL: (slots.zero, 0)}
    found = [next(given) if kind == POINTER else others.get(kind) or (slots.zero, next(numbers)) for kind in kinds]
    first = kinds[:kinds.count(POINTER)]
    if len(places) != len(first) or set(first) > {POINTER} or next(numbers, None) is not None:
        raise VerifyError(f"kernel {code.name} is called with other params than it was compiled for",
                          why=f"{len(places)} addresses and {len(sizes)} sizes for {', '.join(kinds)}",
                          do="report this as a bug of the compiler")
    return found


def check_words(number: int, word: int) -> list[int]:
    """The words behind a step that checks something."""
    return _check(op=loop.CHECK, length=words_of(loop.CheckStep), number=number, word=word)


def copy_words(number: int, target: Place, source: Place, bytes_: int) -> list[int]:
    """The words of a copy of one run of bytes."""
    return _copy(op=loop.COPY, length=words_of(loop.DeviceCopyStep), number=number, target=target, source=source,
                 bytes=bytes_)


def one_run(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two windows of a shape are laid out alike, without gaps: a copy of one run of bytes."""
    dims = sorted((step, other, n) for n, step, other in zip(shape, strides, others, strict=True) if n != 1)
    reach = 1
    for step, other, n in dims:
        if step != reach or other != reach:
            return False
        reach *= n
    return True
