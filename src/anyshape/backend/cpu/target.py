"""The CPU as a target: kernels by LLVM, products by our routines or the library's, plans by a native interpreter."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from anyshape.backend.cpu.autotune import Autotune, autotune_of, machine_key
from anyshape.backend.cpu.bytecode.products import native, takes_any_strides
from anyshape.backend.cpu.machine.target import HARDWARE, Machine
from anyshape.backend.cpu.native_routines import NativeRoutines, routines_of
from anyshape.backend.cpu.plan_runner import CpuPlanRunner
from anyshape.backend.interface import ObjectCache, Streams
from anyshape.backend.loaded_code import LoadedKernel
from anyshape.plan.ir.program import Plan

if TYPE_CHECKING:
    from anyshape.kernel.loop_ir.program import LoopProgram

USUAL = "f32"  # the dtype whose products most programs need


class CpuTarget:
    """The CPU as a target: what kernels, products and plans are compiled for.

    Args:
        machine: the processor. native: the process's routines, and where object code is kept.
        autotune: says which routine does a product.
    """

    device = "cpu"
    streams: Streams | None = None
    hardware = HARDWARE
    own_ops = frozenset(("attention", "bernoulli"))

    def __init__(self, machine: Machine, native: NativeRoutines, autotune: Autotune) -> None:
        self.machine = machine
        self.native = native
        self.autotune = autotune

    @property
    def machine_key(self) -> str:
        """See `Target`."""
        return machine_key(self.machine)

    @property
    def unsupported(self) -> frozenset[str]:
        """See `Target`."""
        from anyshape.backend.cpu.llvm.scalar_ops import unsupported  # not needed where machine code is loaded
        return unsupported()

    def emit(self, program: LoopProgram) -> str:
        """See `Target`."""
        from anyshape.backend.cpu.codegen.kernel import emit  # not needed where machine code is loaded
        return emit(program, self.machine)

    def build(self, texts: Sequence[str]) -> Sequence[LoadedKernel]:
        """See `Target`."""
        # LLVM is not there in every process that runs programs
        from anyshape.backend.cpu.llvm.jit import build
        return build(texts, self.machine, self.native.cache)

    def kept(self, keys: Mapping[str, str]) -> Sequence[LoadedKernel] | None:
        """Kernels that were built before, by name and key; None where their object code is gone."""
        from anyshape.backend.cpu.llvm.jit import kept
        return kept(keys, self.native.cache)

    def multiplies(self, dtype: str) -> bool:
        """See `Target`."""
        return native(dtype, self.machine, self.autotune.blas)

    def multiplies_any_strides(self, dtype: str) -> bool:
        """See `Target`."""
        return takes_any_strides(dtype, self.autotune)

    def products_in_words(self, dtype: str) -> str:
        """See `Target`."""
        return self.autotune.told(dtype)

    def warm(self) -> None:
        """See `Target`."""
        self.native.products_of(USUAL)

    def allocator(self) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
        """See `Target`."""
        from anyshape.torch_compat.versions import api
        return api.allocator()

    def runner(self, plan: Plan, kernels: Sequence[LoadedKernel]) -> CpuPlanRunner:
        """See `Target`."""
        return CpuPlanRunner(plan, kernels, self.native, self.autotune)


@lru_cache(maxsize=16)
def target_of(cache: ObjectCache | None, products: str) -> CpuTarget:
    """The processor that this process runs on, one object per cache and mode (backend/cpu/autotune.py)."""
    native_routines = routines_of(cache)
    return CpuTarget(native_routines.machine, native_routines, autotune_of(native_routines, products))
