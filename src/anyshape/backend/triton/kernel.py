"""Kernel multi-versioning on a device: what code generation, compilation and the plan runner hand to each other.

    LoopProgram --codegen--> KernelSource: Triton text and its versions, each with the sizes that it is for
    KernelSource, version --compile.py--> DeviceKernel: machine code of one architecture, and how to launch it

All three are immutable, and know neither torch nor a driver.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anyshape.base.errors import VerifyError
from anyshape.sym.expr import Size, evaluate

POINTER, I32, I64, STATUS, SCRATCH, NULL = "pointer", "i32", "i64", "status", "scratch", "null"


@dataclass(frozen=True, slots=True)
class KernelVersion:
    """One way to run a kernel on a device, for some of its sizes.

    name: by which it is told from the kernel's other versions, in words (`explain`).
    conditions: sizes over the kernel's own that must all be at least 0 for it to be right.
    divisors: (size name, number): sizes that the number must divide.
    alignment: bytes; the addresses of all params must be multiples of it. 1: any address will do.
    index: dtype of the size parameters, and of all offsets: i32 or i64.
    constants: compile-time constants of the text (Triton's constexpr), by name.
    grid: programs along x, y and z; where one of them is 0, there is nothing to launch.
    warps, stages: of a program (Triton's num_warps, num_stages).
    scratch: bytes of device memory that a launch needs for itself, of all its programs together.
    """

    name: str
    conditions: tuple[Size, ...]
    constants: tuple[tuple[str, int], ...]
    grid: tuple[Size, ...]
    warps: int
    index: str = I64
    divisors: tuple[tuple[str, int], ...] = ()
    alignment: int = 1
    stages: int = 3
    scratch: Size = 0

    def fits(self, values: Mapping[str, int], alignment: int = 16) -> bool:
        """Whether it may run at these sizes, with addresses that are multiples of `alignment` bytes."""
        return (alignment % self.alignment == 0 and all(values[name] % number == 0 for name, number in self.divisors)
                and all(evaluate(size, values) >= 0 for size in self.conditions))


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel as Triton text.

    params: (name, dtype in memory) of its pointers, in order. sizes: names of its sizes, which follow them.
    versions: in order of choice; the last one fits all sizes and addresses.
    text: a Python module with one Triton function of the kernel's name, and a head that says all of this.
    """

    name: str
    params: tuple[tuple[str, str], ...]
    sizes: tuple[str, ...]
    versions: tuple[KernelVersion, ...]
    text: str = field(repr=False)

    def choose(self, sizes: Sequence[int], alignment: int = 16) -> KernelVersion:
        """The version for these sizes.

        Args:
            sizes: of the kernel, in its order. alignment: bytes, that all its addresses are multiples of.

        Raises:
            VerifyError: none fits: a bug of the compiler.
        """
        values = dict(zip(self.sizes, sizes, strict=True))
        for version in self.versions:
            if version.fits(values, alignment):
                return version
        raise VerifyError(f"no version of kernel {self.name} fits its sizes", why=f"they are {values}",
                          do="report this as a bug of the compiler")


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKernel:
    """A version of a kernel as machine code.

    name: the kernel's; entry: the function in `image` (`cuModuleGetFunction`, `hipModuleGetFunction`).
    version: of which it is the code.
    parameters: kinds of the function's parameters, in order, 8 bytes each but for i32, which are 4:
        pointer: the address of a param of the kernel, in its order
        status:  the address of the run's i64 status word. Where `guarded`, a launch that finds it not 0 does nothing;
                 else it is not read, and may be 0
        i32, i64: a size of the kernel, in its order
        scratch: the address of `version.scratch` bytes, aligned to 64
        null:    0 (Triton's own scratch and profiling pointers, which our kernels do not use)
    threads: of a program (block), along x. shared: bytes of shared memory, given at the launch.
    architecture: "sm_90", "gfx942". image: cubin or hsaco. text: the assembly, for people and tests.
    """

    name: str
    entry: str
    version: KernelVersion
    parameters: tuple[str, ...]
    threads: int
    shared: int
    architecture: str
    guarded: bool
    image: bytes = field(repr=False)
    text: str = field(repr=False)

    def launch(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """The grid at the kernel's sizes, by name; (x, y, z)."""
        found = [evaluate(size, sizes) for size in self.version.grid]
        x, y, z = (*found, 1, 1)[:3]
        return x, y, z
