"""The test accelerator (tests/torch_device.cpp) as a target: PyTorch's device and allocator, behind the fake driver."""
from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

import fake_device
from anyshape.backend import targets
from anyshape.backend.triton.streams import DeviceStreams
from fake_driver import FakeDriver

NAME = "testdev"
MISSING = "" if shutil.which("g++") else "g++"


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


class Extension:
    """What the accelerator's library says of its memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name in ("bytes_now", "bytes_most"):
            getattr(library, name).restype = ctypes.c_int64
        library.begin()

    def bytes(self) -> tuple[int, int]:
        """Now, and the most since `reset`."""
        return self.library.bytes_now(), self.library.bytes_most()

    def reset(self) -> None:
        self.library.reset()


def built(source: str, folder: Path) -> Path:
    """The library of a file that lies beside this one."""
    target = (folder / source).with_suffix(".so")
    words = ["-O0", "-std=c++20", "-fPIC", "-shared", str(Path(__file__).with_name(source)), "-o", str(target)]
    words += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    words += [word for path in include_paths() for word in ("-isystem", path)]
    words += [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]  # which this process has loaded
    done = subprocess.run(["g++", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def loaded(folder: Path) -> Extension:
    """The accelerator, built in a folder; 7 s."""
    extension = Extension(ctypes.CDLL(str(built("torch_device.cpp", folder))))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return extension


class TorchMemory:
    """Memory by the device's allocator of PyTorch."""

    def __init__(self, extension: Extension) -> None:
        self.extension = extension

    def current(self) -> int:
        return 0

    def allocate(self, bytes_: int, stream: int) -> torch.Tensor:
        return torch.empty(bytes_, dtype=torch.uint8, device=NAME)

    def uses(self, memory: torch.Tensor, stream: int) -> None: ...

    def captured(self, stream: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def resident(self) -> int:
        return self.extension.bytes()[0]


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
