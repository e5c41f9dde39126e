"""The driver of PyTorch: tensors on the CPU, torch's allocator, its threads (runtime/driver/interface.py)."""
from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyshape.base.errors import InputError
from anyshape.plan.ir.program import Plan
from anyshape.runtime.driver.interface import AccessCode, Argument, Sizes
from anyshape.runtime.driver.tensor_kinds import odd, refused
from anyshape.torch_compat import is_zeros, storage_id
from anyshape.torch_compat.dtypes import DTYPE_NAMES, TORCH_DTYPES
from anyshape.torch_compat.tensors import in_memory
from anyshape.torch_compat.versions import api


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides mean the same elements: they may differ where the size is 1, or when there are none."""
    return one == other or 0 in shape or all(a == b for n, a, b in zip(shape, one, other, strict=True) if n != 1)


def restrided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """`tensor` itself if it has these strides, else a copy that has. Elements that share a place in it, as those of a
    view of what was expanded do, are equal."""
    if same_strides(tensor.shape, tensor.stride(), strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if not overlaps(tensor.shape, strides):
        return copy.copy_(tensor.detach())
    flat = copy.as_strided((copy.untyped_storage().nbytes() // copy.itemsize,), (1,))
    places = torch.arange(len(flat), device=tensor.device).as_strided(tensor.shape, strides)
    flat[places.reshape(-1)] = tensor.detach().reshape(-1)  # `copy_` refuses it
    return copy


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share a place: False where each dim steps over what those of smaller steps reach."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (n - 1)
    return False


class TorchDriver:
    """See `HostDriver`."""

    dtypes = TORCH_DTYPES
    large_from = sys.maxsize  # a memory limit counts an arena's bytes as the plan says
    address = staticmethod(torch.Tensor.data_ptr)
    threads = staticmethod(torch.get_num_threads)
    code = AccessCode(lambda name: f"{name}.stride()", lambda name: f"{name}.data_ptr()", odd,
                      {"strided": torch.strided, "is_zeros": is_zeros})

    def __init__(self) -> None:
        self.result = api.allocator()

    def inspect(self, value: Any) -> Argument | None:
        """See `HostDriver`."""
        if not isinstance(value, torch.Tensor):
            return None
        return Argument(DTYPE_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape))

    def device(self, name: str) -> torch.device:
        """See `HostDriver`."""
        return torch.device(name)

    def fits(self, value: Any, dtype: Any, sizes: Sizes, device: Any) -> bool:
        """See `HostDriver`."""
        return isinstance(value, torch.Tensor) and value.dtype is dtype and value.shape == sizes \
            and value.device == device and value.layout is torch.strided

    def strides(self, value: torch.Tensor) -> Sizes:
        """See `HostDriver`."""
        return value.stride()

    def refused(self, value: torch.Tensor, plan: Plan, position: int) -> InputError | None:
        """See `HostDriver`."""
        return refused(value, plan, position)

    def scalar(self, value: bool | int | float, dtype: str, device: str = "cpu") -> torch.Tensor:
        """See `HostDriver`."""
        return torch.tensor(value, dtype=TORCH_DTYPES[dtype], device=device)

    def plain(self, value: torch.Tensor) -> torch.Tensor:
        """See `HostDriver`."""
        return in_memory(value)

    def restrided(self, value: torch.Tensor, strides: Sizes) -> torch.Tensor:
        """See `HostDriver`."""
        return restrided(value, strides)

    def put_back(self, into: torch.Tensor, value: torch.Tensor) -> None:
        """See `HostDriver`."""
        into.copy_(value)

    def alike(self, values: Sequence[Any], sizes: bool) -> Callable[..., bool] | None:
        """See `HostDriver`."""
        return api.same_kind(values, sizes)

    def empty(self, bytes_: int) -> tuple[torch.Tensor, int]:
        """See `HostDriver`."""
        memory = torch.empty(bytes_, dtype=torch.uint8)
        address = memory.data_ptr()
        if address % 64:  # torch's own allocator gives more, another one may not
            memory = torch.empty(bytes_ + 64, dtype=torch.uint8)
            skip = -memory.data_ptr() % 64
            memory = memory[skip:skip + bytes_]
            address = memory.data_ptr()
        return memory, address

    def flat(self, memory: torch.Tensor, dtype: Any) -> torch.Tensor:
        """See `HostDriver`."""
        item = dtype.itemsize
        return memory[:len(memory) // item * item].view(dtype)

    def part(self, flat: torch.Tensor, element: int, sizes: Sizes, strides: Sizes) -> torch.Tensor:
        """See `HostDriver`."""
        return flat.as_strided(sizes, strides, flat.storage_offset() + element)

    def shares(self, value: torch.Tensor, memory: torch.Tensor) -> bool:
        """See `HostDriver`."""
        return storage_id(value) == storage_id(memory)


DRIVER = TorchDriver()
