"""Deployment on the CPU: the machine code of a program for a file, which processes it suits, and targets that take it,
in processes with torch and without, with LLVM and without."""
from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyshape.backend.cpu.autotune import Autotune
from anyshape.backend.cpu.bytecode.encode_plan import encode
from anyshape.backend.cpu.bytecode.format import KERNELS
from anyshape.backend.cpu.machine.blas import Blas, without_blas
from anyshape.backend.cpu.machine.target import Machine, may_use_tiles, model
from anyshape.backend.cpu.native_routines import FAMILIES, NativeRoutines, family_text, kept_routines
from anyshape.backend.cpu.target import CpuTarget
from anyshape.backend.interface import ObjectCache
from anyshape.backend.loaded_code import CodeSource, LoadedKernel
from anyshape.backend.measurements import Measurements
from anyshape.base.digests import blake2b
from anyshape.base.errors import ArtifactError
from anyshape.base.own_sources import PACKAGE, sources_in
from anyshape.base.version import __version__
from anyshape.plan.ir.program import Plan

if TYPE_CHECKING:
    from anyshape.kernel.loop_ir.program import LoopProgram

# what makes the words of a plan, and what reads them
GENERATOR = ("backend/cpu/bytecode", "backend/cpu/machine/low_precision.py", "backend/cpu/microkernels",
             "backend/cpu/routines", "backend/cpu/interpreter.py", "plan/ir")
# LLVM's names of features that code may use -> those of Linux, where they differ
LINUX = {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16", "avx512fp16": "avx512_fp16", "sse4.1": "sse4_1",
         "sse4.2": "sse4_2", "avx512vbmi2": "avx512_vbmi2", "avx512bitalg": "avx512_bitalg", "sse3": "pni",
         "avx512vpopcntdq": "avx512_vpopcntdq", "avx512vp2intersect": "avx512_vp2intersect", "avxvnni": "avx_vnni",
         "amx-tile": "amx_tile", "amx-bf16": "amx_bf16", "amx-int8": "amx_int8", "amx-fp16": "amx_fp16",
         "lzcnt": "abm", "bmi": "bmi1"}
VECTOR = ("sse", "avx", "fma", "f16c", "bmi", "amx", "lzcnt", "popcnt", "adx", "movbe")
_FIELDS: dict[str, type] = {"triple": str, "cpu": str, "features": str, "vector_bytes": int, "fma": bool,
                            "wide_int": bool}


@lru_cache(maxsize=1)
def generator() -> str:
    """A digest of everything that turns a plan into words, and of what reads them."""
    digest = blake2b(__version__.encode(), digest_size=32)
    for place in GENERATOR:
        path = f"{PACKAGE}/{place}"
        for name in [path] if place.endswith(".py") else sources_in(path):
            with open(name, "rb", buffering=0) as file:
                digest.update(file.read())
    return digest.hexdigest()


def machine_of(found: Any) -> Machine | None:
    """The machine that a file names; None: it names none."""
    fits = isinstance(found, dict) and found.keys() == _FIELDS.keys() and all(
        type(found[name]) is kind for name, kind in _FIELDS.items())
    return Machine(**found) if fits and found["vector_bytes"] in (16, 32, 64) else None


def lack(machine: Machine, code: Any) -> str:
    """What this process lacks of what machine code needs; "" where it lacks nothing. code: digest of its generator."""
    return "its native code was made by another version of AnyShape" if code != generator() else unfit(machine)


def unfit(machine: Machine) -> str:
    """What this process lacks of what machine code of this version needs; "" where it lacks nothing."""
    if platform.machine() not in ("x86_64", "AMD64") or not machine.triple.startswith("x86_64"):
        return f"its code is for {machine.triple.split('-')[0]}, this is {platform.machine()}"
    wanted = {name.strip("+") for name in machine.features.split(",")}
    used = {LINUX.get(name, name) for name in wanted if name.startswith(VECTOR)}
    have = _flags()
    missing = sorted(used - have - {"avx10.1-512", "avx10.1"})
    if missing:
        return f"its code uses {', '.join(missing)}, which this processor has not"
    tiles = frozenset(name for name in wanted if name.startswith("amx"))
    return "" if may_use_tiles(tiles) or not tiles else "its code uses tiles, which this process may not use"


def modules(target: Any, plan: Plan, programs: Mapping[str, LoopProgram]) -> tuple[Machine, dict[str, bytes]]:
    """The machine of a target, and the objects of a program: its kernels, what runs plans, and its products.

    Raises:
        ArtifactError: the target is no CPU.
    """
    from anyshape.backend.cpu.interpreter import emit_host
    from anyshape.backend.cpu.llvm import jit
    if not isinstance(target, CpuTarget):
        raise ArtifactError("native code is kept for CPUs only", why=f"the program is for {target.device}",
                            do="save it with native=False")
    machine, cache = target.machine, target.native.cache

    def code(text: str) -> bytes:
        found = None if cache is None else cache.get(jit.object_key(text, machine))
        return jit.object_code(text, machine) if found is None else found

    found = {"host": code(emit_host())}
    entries = {name: KERNELS + 4 * i for i, name in enumerate(programs)}
    for dtype in encode(plan, entries, target.autotune, target.native.fill)[1]:
        for number, names in enumerate(FAMILIES):
            text = family_text(number, machine, dtype)
            if any(f"@{name}(" in text for name in names):
                found[f"products {number} {dtype}"] = code(text)
    for name, one in programs.items():
        found[f"kernel {name}"] = code(target.emit(one))
    return machine, found


def kept_modules(target: CpuTarget, kernels: Sequence[LoadedKernel]) -> dict[str, bytes] | None:
    """The objects of a program that this process compiled, as `modules` names them, from its cache; None where that
    lacks one. kernels: the program's, whose products have been loaded."""
    from anyshape.backend.cpu.llvm import jit
    native, cache = target.native, target.native.cache
    if cache is None:
        return None
    found = {"host": jit.module_object("host", native.machine, cache)}
    for dtype, families in native.products.items():
        for number, family in enumerate(families):
            if family.address:
                module = f"products {number} {dtype}"
                found[module] = jit.module_object(module, native.machine, cache)
    for kernel in kernels:
        found[f"kernel {kernel.name}"] = cache.get(kernel.key) if kernel.key else None
    there = {module: data for module, data in found.items() if data is not None}
    return there if len(there) == len(found) else None


def processor(threads: int = 0) -> str:
    """What `compiling_target` makes of a graph depends on, in words; LLVM's version and our own apart."""
    return f"{model()} {sorted(_flags())} {libraries(threads).routines}"


def trusted_target(machine: Machine, code: CodeSource, threads: int = 0) -> CpuTarget:
    """The processor with machine code that was made before. threads: of a call at most; 0: all."""
    return deployed_target(NativeRoutines(machine, None, libraries(threads), code))


def compiling_target(cache: ObjectCache | None, threads: int = 0) -> CpuTarget:
    """The processor, for which this process compiles. threads: of a call at most; 0: all."""
    return deployed_target(kept_routines(libraries(threads), cache))


def libraries(threads: int = 0) -> Blas:
    """The native libraries of this process: torch's where it is loaded already, so that both share their threads. Its
    products run on as many threads as torch is set to: they are left out where a call may have another number."""
    if sys.modules.get("torch") is None:
        return without_blas()
    from anyshape.backend.cpu.machine.torch_libs import library, threads_of_products
    found = library()
    return found if threads in (0, threads_of_products()) else Blas(
        0, 0, 0, 0, found.parallel, found.thread_number, found.team_size, found.barrier, found.clock)


def deployed_target(native: NativeRoutines) -> CpuTarget:
    """The processor with these routines, whose products are all our own, or BLAS's where ours do not do them: nothing
    is measured."""
    return CpuTarget(native.machine, native, Autotune(native, Measurements(None, ""), "own"))


@lru_cache(maxsize=1)
def _flags() -> frozenset[str]:
    """The processor's features, in Linux's words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())
