"""Device memory by PyTorch's caching allocator: what the streams of a GPU get from torch, so that memory is counted and
shared with everything else that runs there."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anyshape.torch_compat.versions import api


class TorchMemory:
    """A device of torch.cuda, NVIDIA's or AMD's; device: torch's word for it, with its number. See `DeviceMemory`."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.number = self.device.index or 0
        self.raw = api.raw_stream()
        self.pool: Any = None  # of what graphs need beside their arenas: workspaces of libraries

    def current(self) -> int:
        """See `DeviceMemory`."""
        return self.raw(self.number)

    def allocate(self, bytes_: int, stream: int) -> torch.Tensor:
        """See `DeviceMemory`. The allocator aligns to 512 bytes."""
        if stream == self.current():
            return torch.empty(bytes_, dtype=torch.uint8, device=self.device)
        with torch.cuda.stream(self._outside(stream)):
            return torch.empty(bytes_, dtype=torch.uint8, device=self.device)

    def uses(self, memory: Any, stream: int) -> None:
        """See `DeviceMemory`."""
        memory.record_stream(self._outside(stream))

    def resident(self) -> int:
        """See `DeviceMemory`."""
        return torch.cuda.memory_reserved(self.device)

    @contextmanager
    def captured(self, stream: int) -> Iterator[None]:
        """See `DeviceMemory`."""
        if self.pool is None:
            self.pool = torch.cuda.MemPool()
        with torch.cuda.stream(self._outside(stream)), torch.cuda.use_mem_pool(self.pool, self.device):
            yield

    def allocator(self) -> Callable[[tuple[int, ...], tuple[int, ...], Any], Any]:
        """See `Target`."""
        return api.allocator(self.device)

    def architecture(self) -> str:
        """AMD's name of the architecture, such as "gfx942"."""
        return str(torch.cuda.get_device_properties(self.device).gcnArchName).partition(":")[0]

    def _outside(self, stream: int) -> torch.cuda.ExternalStream:
        return torch.cuda.ExternalStream(stream, device=self.device)


def is_hip() -> bool:
    """Whether this build of torch is for AMD's GPUs."""
    return torch.version.hip is not None
