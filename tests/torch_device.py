"""The test accelerator (tests/torch_device.cpp) as a target: PyTorch's device and allocator, behind the fake driver."""
from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fake_device
from anyshape.backend import targets
from anyshape.backend.triton.streams import DeviceStreams
from fake_driver import FakeDriver

NAME = "testdev"
MISSING = " and ".join(tool for tool in ("g++", "ninja") if shutil.which(tool) is None)


class Module:
    """What torch asks a device's module."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def loaded(folder: Path) -> Any:
    """The accelerator, built in a folder; half a minute."""
    from torch.utils.cpp_extension import load
    extension = load(name="torch_device", sources=[str(Path(__file__).with_suffix(".cpp"))],
                     build_directory=str(folder), extra_cflags=["-O0"], verbose=False)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return extension


class TorchMemory:
    """Memory by the device's allocator of PyTorch."""

    def __init__(self, extension: Any) -> None:
        self.extension = extension

    def current(self) -> int:
        return 0

    def allocate(self, bytes_: int, stream: int) -> torch.Tensor:
        return torch.empty(bytes_, dtype=torch.uint8, device=NAME)

    def uses(self, memory: torch.Tensor, stream: int) -> None: ...

    def captured(self, stream: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def resident(self) -> int:
        return int(self.extension.bytes()[0])


class Target(fake_device.Target):
    """The accelerator."""

    device = f"{NAME}:0"
    own_ops: frozenset[str] = frozenset()

    def __init__(self, cpu: Any, fake: FakeDriver, extension: Any) -> None:
        super().__init__(cpu, fake)
        self.streams = DeviceStreams(self.driver, 0, TorchMemory(extension))

    def allocator(self) -> Callable[..., torch.Tensor]:
        return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=NAME)


DEVICE: list[tuple[FakeDriver, Any]] = []
_targets: list[Target] = []


def device_target_of(cache: Any, products: str, device: str, graphs_after: int = 0) -> Target:
    if not _targets:
        _targets.append(Target(targets._module(targets.TARGETS["cpu"]).target_of(cache, products), *DEVICE[0]))
    return _targets[0]
