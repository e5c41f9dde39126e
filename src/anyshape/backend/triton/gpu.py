"""GPUs as targets: kernels by Triton, products, attention and convolutions by PyTorch's libraries, plans by the launch
loop on PyTorch's current stream."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from anyshape.backend.cpu.native_routines import routines_of
from anyshape.backend.interface import ObjectCache, Streams
from anyshape.backend.triton import toolchain
from anyshape.backend.triton.compile import Compiler
from anyshape.backend.triton.driver.driver import DeviceDriver, open_driver
from anyshape.backend.triton.launch import LaunchableKernel, VersionedKernel
from anyshape.backend.triton.runner import LaunchLoop, StreamRunner
from anyshape.backend.triton.schedule import emit
from anyshape.backend.triton.streams import DeviceStreams
from anyshape.backend.triton.target import HARDWARE, PRODUCT_SHARES, unsupported
from anyshape.backend.triton.text import read
from anyshape.backend.triton.torch_memory import TorchMemory, is_hip
from anyshape.base.errors import DeviceError
from anyshape.kernel.loop_ir.program import LoopProgram
from anyshape.kernel.schedule.hardware_params import HardwareParams
from anyshape.plan.ir.program import Plan


class GpuTarget:
    """A GPU as a target: kernels by Triton, products and convolutions by the libraries of PyTorch.

    Args:
        device: PyTorch's word for it, such as "cuda:0". architecture: as Triton calls it, such as "sm_90".
        streams, loop: of its driver. graphs_after: see the setting `device_graphs`. own_products: whether all products
            that a pointwise kernel alone reads are done by Triton; else those for which it pays.
    """

    own_ops: frozenset[str] = frozenset()

    def __init__(self, device: str, architecture: str, memory: TorchMemory, streams: DeviceStreams, loop: LaunchLoop,
                 cache: ObjectCache | None, graphs_after: int, own_products: bool = False) -> None:
        self.hardware = hardware_of(architecture, own_products)
        self.device = device
        self.graphs_after = graphs_after
        self.architecture = architecture
        self.memory = memory
        self.streams: Streams | None = streams
        self.own = streams
        self.loop = loop
        self.compiler = Compiler(architecture, cache)
        self.machine_key = f"{architecture} {streams.driver.name(streams.device)}"

    @property
    def unsupported(self) -> frozenset[str]:
        """See `Target`."""
        return frozenset(unsupported())

    def emit(self, program: LoopProgram) -> str:
        """See `Target`."""
        return emit(program)

    def build(self, texts: Sequence[str]) -> list[LaunchableKernel]:
        """See `Target`. Machine code is made when sizes choose a version."""
        return [VersionedKernel(read(text), self.compiler) for text in texts]

    def multiplies(self, dtype: str) -> bool:
        """See `Target`."""
        return dtype in ("f32", "f64", "bf16", "f16")

    def multiplies_any_strides(self, dtype: str) -> bool:
        """See `Target`."""
        return self.multiplies(dtype)

    def products_in_words(self, dtype: str) -> str:
        """See `Target`."""
        return ""

    def warm(self) -> None:
        """See `Target`."""
        toolchain.version()

    def allocator(self) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
        """See `Target`."""
        return self.memory.allocator()

    def runner(self, plan: Plan, kernels: Sequence[LaunchableKernel]) -> StreamRunner:
        """See `Target`."""
        return StreamRunner(plan, kernels, self.own, self.loop, self.graphs_after)


def hardware_of(architecture: str, own_products: bool) -> HardwareParams:
    """The parameters of a device. own_products: see `GpuTarget`."""
    share = 1.0 if own_products else PRODUCT_SHARES.get(architecture, 0.0)
    return dataclasses.replace(HARDWARE, band_bytes=0, product_share=share)  # products are done as a whole


@lru_cache(maxsize=64)
def device_target_of(cache: ObjectCache | None, products: str, device: str, graphs_after: int = 0) -> GpuTarget:
    """The target of a device of torch.cuda, one object per device, cache and setting.

    Raises:
        DeviceError: its driver is missing or old, shows no device, or kernels for it cannot be compiled.
    """
    kind = "hip" if is_hip() else "cuda"
    driver = open_driver(kind)
    memory = TorchMemory(device)
    if memory.number >= driver.count:
        raise DeviceError(f"there is no device {device}", why=f"the driver shows {driver.count}",
                          do="name another one")
    toolchain.version()
    native = routines_of(cache)
    streams = DeviceStreams(driver, memory.number, memory)
    loop = LaunchLoop(driver, native.machine, cache)
    return GpuTarget(device, architecture_of(driver, memory), memory, streams, loop, cache,
                     graphs_after, products == "own")


def architecture_of(driver: DeviceDriver, memory: TorchMemory) -> str:
    """What Triton calls the architecture of a device.

    Raises:
        DeviceError: Triton has no code for it.
    """
    if driver.kind == "hip":
        return memory.architecture()
    major, minor = (driver.attribute(name, memory.number) for name in ("major", "minor"))
    if major < 7:
        raise DeviceError(f"{driver.name(memory.number)} is too old", why=f"its compute capability is {major}.{minor}; "
                          "Triton compiles for 7.0 and later", do="use another card, or the CPU")
    return f"sm_{10 * major + minor}"
