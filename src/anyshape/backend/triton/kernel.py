"""Kernel multi-versioning on a device: what code generation, compilation and the plan runner hand to each other.

    LoopProgram --codegen--> KernelSource: Triton text and its versions, each with the sizes that it is for
    KernelSource.choose(sizes) --> KernelVersion --compile.py--> DeviceKernel: machine code, and how to launch it

All three are immutable, and know neither torch nor a driver.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anyshape.base.errors import VerifyError
from anyshape.sym.expr import NUMBERS, Size, evaluate

POINTER, I32, I64, STATUS, SCRATCH, NULL = "pointer", "i32", "i64", "status", "scratch", "null"
LARGEST = (1 << 31) - (1 << 20)  # of an offset of 32 bits; a tile may go on behind the last element
ALIGNED = 16  # bytes of the widest access
DIVISORS = (16, 8, 4)  # of sizes, that a version is made for
# a divisor of 0 occurs only in sizes that a kernel without elements never uses; see sym/python_codegen.py
_FUNCTIONS = {**NUMBERS, "floordiv": lambda a, b: a // (b or 1)}


def number_of(size: Size, values: Mapping[str, int]) -> int:
    """A size of a kernel in numbers."""
    return evaluate(size, values, _FUNCTIONS)


@dataclass(frozen=True, slots=True)
class KernelVersion:
    """One way to run a kernel on a device, for some of its sizes.

    name: by which it is told from the kernel's other versions, in words (`explain`).
    function: of the text, in Triton.
    conditions: sizes over the kernel's own that must all be at least 0 for it to be right.
    constants: compile-time constants of the function (Triton's constexpr), by name.
    grid: programs along x; 0: there is nothing to launch.
    warps: of a program, of 32 threads. stages: Triton's num_stages.
    index: dtype of the size parameters, and of all offsets: i32 or i64.
    divisor: divides every size that a stride is made of (`KernelSource.steps`).
    alignment: bytes; the addresses of all params must be multiples of it. 1: of their elements' size.
    scratch: bytes of device memory that a launch needs for itself, of all its programs together.
    window: elements of 16 bytes, where rows are accessed in aligned windows (codegen/window.py): for addresses that are
        multiples of 16, and rows whose length no such number divides; else 0.
    guarded: a launch that finds the run's status word not 0 does nothing; else the word is not read, and may have no
        address.
    """

    name: str
    function: str
    conditions: tuple[Size, ...]
    constants: tuple[tuple[str, int], ...]
    grid: Size
    warps: int
    stages: int = 3
    index: str = I64
    divisor: int = 1
    alignment: int = 1
    scratch: Size = 0
    window: int = 0
    guarded: bool = False

    @property
    def title(self) -> str:
        """The name, with what the sizes allowed."""
        divided = f" /{self.divisor}" if self.divisor > 1 else ""
        return f"{self.name} {self.index}{divided}{'' if self.alignment > 1 else ' unaligned'}"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel as Triton text.

    params: (name, dtype in memory) of its pointers, in order. sizes: names of its sizes, which follow them.
    versions: in order of choice; the last one fits all sizes and addresses.
    small: sizes that no offset exceeds; None where such are not known.
    steps: the sizes that strides are made of: what divides them all says how wide an access may be.
    text: a Python module with Triton functions, and a head that says all of this (text.py).
    """

    name: str
    params: tuple[tuple[str, str], ...]
    sizes: tuple[str, ...]
    versions: tuple[KernelVersion, ...]
    small: tuple[Size, ...] | None
    steps: tuple[str, ...]
    text: str = field(repr=False)

    def choose(self, sizes: Sequence[int], alignment: int = ALIGNED, guarded: bool = False) -> KernelVersion:
        """The version for these sizes, made as special as they allow.

        Args:
            sizes: of the kernel, in its order. alignment: bytes, that all its addresses are multiples of.
            guarded: see `KernelVersion`; for a run with checks.

        Raises:
            VerifyError: none fits: a bug of the compiler.
        """
        values = dict(zip(self.sizes, sizes, strict=True))
        divisor = next((number for number in DIVISORS if all(values[name] % number == 0 for name in self.steps)), 1)
        for version in self.versions:
            if version.window and (divisor >= version.window or alignment % ALIGNED):
                continue
            if all(number_of(size, values) >= 0 for size in version.conditions):
                near = self.small is not None and all(number_of(size, values) < LARGEST for size in self.small)
                return dataclasses.replace(version, index=I32 if near else I64, divisor=divisor if self.steps else 1,
                                           alignment=ALIGNED if alignment % ALIGNED == 0 else 1, guarded=guarded)
        raise VerifyError(f"no version of kernel {self.name} fits its sizes", why=f"they are {values}",
                          do="report this as a bug of the compiler")


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKernel:
    """A version of a kernel as machine code.

    name: the kernel's. entry: the function in `image` (for `cuModuleGetFunction`, `hipModuleGetFunction`).
    version: of which it is the code.
    parameters: kinds of the function's parameters, in order, 8 bytes each but for i32, which are 4:
        pointer: the address of a param of the kernel, in its order
        status:  the address of the run's i64 status word, or 0 where `version` is not guarded
        i32, i64: a size of the kernel, in its order
        scratch: the address of `version.scratch` bytes, aligned to 64; only where the version has some
        null:    0 (Triton's own scratch and profiling pointers, which our kernels do not use)
    threads: of a program (block), along x. shared: bytes of shared memory, given at the launch.
    architecture: "sm_90", "gfx942". image: cubin or hsaco. assembly: PTX or AMD's text, for people and tests.
    """

    name: str
    entry: str
    version: KernelVersion
    parameters: tuple[str, ...]
    threads: int
    shared: int
    architecture: str
    image: bytes = field(repr=False)
    assembly: str = field(repr=False)

    def launch(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Programs along x, y and z at the kernel's sizes, by name; where x is 0 there is nothing to launch."""
        return number_of(self.version.grid, sizes), 1, 1
