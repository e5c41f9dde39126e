"""The target description: the features of the processor, and the widths that the code generator works with."""
from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from anyshape.kernel.schedule.hardware_params import HardwareParams, Speeds

_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # arch_prctl(ARCH_REQ_XCOMP_PERM, tile data) on x86-64

# of every CPU, whatever it is: so that kernels, and with them the last bits of long sums, are the same on each. The
# speeds are of a core of docs/adr/010-library-gemm.md beside others that use the memory
HARDWARE = HardwareParams(
    vector_lanes=16, max_load_stride=4, min_vector_row=6, cache_line_bytes=64, row_buffer_bytes=16 << 10,
    near_cache_bytes=128 << 10, core_cache_bytes=4 << 20, parallelism=32, thread_elements=65536, write_streams=12,
    bytes_per_operation=0.3, free_operations=4, row_buffer_operations=8, launch_bytes=16 << 10,
    band_bytes=1 << 20, speeds=Speeds({"f32": 80e9, "f64": 40e9, "bf16": 80e9, "f16": 80e9}, 10e9))


@dataclass(frozen=True, slots=True)
class Machine:
    """A CPU as LLVM names it.

    triple, cpu, features: LLVM's words for the machine; features is a comma-separated list of +name and -name.
    vector_bytes: width of the widest vector register (16 for SSE and NEON, 32 for AVX2, 64 for AVX-512).
    fma: a fused multiply-add is one instruction.
    wide_int: 64-bit integer multiplication and conversion to f64 are vector instructions (AVX-512DQ).
    """

    triple: str
    cpu: str
    features: str
    vector_bytes: int
    fma: bool
    wide_int: bool

    @property
    def lanes(self) -> int:
        """Basic vector width, in f32 lanes."""
        return self.vector_bytes // 4

    def has(self, feature: str) -> bool:
        """Whether a feature, in LLVM's words, is on."""
        return f"+{feature}" in self.features.split(",")

    @property
    def key(self) -> str:
        """Everything that machine code depends on, for cache keys."""
        return f"{self.triple} {self.cpu} {self.features} llvmlite {llvm_version()}"


@lru_cache(maxsize=1)
def llvm_version() -> str:
    """Version of llvmlite and of the LLVM inside it."""
    import llvmlite
    import llvmlite.binding as llvm
    return f"{llvmlite.__version__} LLVM {'.'.join(map(str, llvm.llvm_version_info))}"


def llvm_major() -> int:
    """Major version of LLVM: the text form of masked memory access differs from 22 on."""
    import llvmlite.binding as llvm
    return int(llvm.llvm_version_info[0])


def target_of(triple: str, cpu: str, features: frozenset[str]) -> Machine:
    """A target from LLVM's words for it; `features` holds the names that are on."""
    vector_bytes = 16
    if "avx512f" in features and "avx512bw" in features and "avx512vl" in features:
        vector_bytes = 64
    elif "avx2" in features:
        vector_bytes = 32
    arm = triple.startswith(("aarch64", "arm64"))
    text = ",".join(f"+{name}" for name in sorted(features))
    return Machine(triple, cpu, text, vector_bytes, arm or "fma" in features, "avx512dq" in features)


def may_use_tiles(features: frozenset[str]) -> bool:
    """Whether this process, threads it has later too, may use the processor's unit for tiles: Linux has to be asked,
    once (Documentation/arch/x86/xstate.rst)."""
    if "amx-tile" not in features or not sys.platform.startswith("linux"):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0


@lru_cache(maxsize=1)
def model() -> str:
    """The processor by its maker's name; processors of one kind of code differ in speed."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    wanted = ("model name", "CPU part", "CPU implementer")
    parts = [value.strip() for name, value in found.items() if name.strip() in wanted]
    return " ".join(sorted(parts)) or platform.processor()


@lru_cache(maxsize=1)
def initialise() -> None:
    """Has LLVM make code for this kind of processor."""
    import llvmlite.binding as llvm
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@lru_cache(maxsize=1)
def host() -> Machine:
    """The machine that this process runs on: asked where a target is made, and handed on from there. LLVM is imported
    here, not above: programs that come with their code (artifact/) run where there is none."""
    import llvmlite.binding as llvm
    features = frozenset(name for name, on in llvm.get_host_cpu_features().items() if on)
    if not may_use_tiles(features):
        features = frozenset(name for name in features if not name.startswith("amx"))
    return target_of(llvm.get_process_triple(), llvm.get_host_cpu_name(), features)
