"""Released memory of tensors of which a rank holds a part: their shape stays, their bytes go.

A model keeps whole parameters as objects: their shapes are what is traced. Under FSDP nobody is to hold them whole, so
their memory becomes one page of NaN, mapped as often as they are long. Who reads such a tensor reads NaN, and no number
that is old; `TrainStep.whole` brings numbers back.
"""
from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_PIECE = 1 << 21  # bytes of the page
_LEAST = 1 << 16  # bytes of a tensor for which a mapping of its own pays
_FIXED, _PRIVATE, _ANONYMOUS = 0x10, 0x02, 0x20  # of Linux
_MARK = "_anyshape_released"
_FAILED = ctypes.c_void_p(-1).value


@lru_cache(maxsize=1)
def _library() -> Any:
    """mmap and munmap of the C library; None elsewhere than on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


@lru_cache(maxsize=1)
def _page() -> int:
    """The descriptor of the page: all bits set, which is NaN in every float dtype."""
    descriptor = os.memfd_create("anyshape_released")
    os.write(descriptor, b"\xff" * _PIECE)
    return descriptor


def _mapped(size: int) -> Any:
    """A buffer of `size` bytes that all show the page; None where that cannot be had."""
    library = _library()
    if library is None:
        return None
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    base = library.mmap(None, length, mmap.PROT_READ, _PRIVATE | _ANONYMOUS, -1, 0)
    if base in (None, _FAILED):
        return None
    for offset in range(0, length, _PIECE):
        piece = min(_PIECE, length - offset)
        found = library.mmap(base + offset, piece, mmap.PROT_READ | mmap.PROT_WRITE, _PRIVATE | _FIXED, _page(), 0)
        if found == _FAILED:
            library.munmap(base, length)
            return None
    buffer = (ctypes.c_byte * size).from_address(base)
    weakref.finalize(buffer, library.munmap, base, length)
    return buffer


def release(tensor: Tensor) -> None:
    """Lets the memory of a dense tensor go; its shape, dtype and strides stay, and it reads as NaN."""
    size = tensor.numel() * tensor.element_size()
    buffer = _mapped(size) if size >= _LEAST else None
    with torch.no_grad():
        if buffer is None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        else:
            tensor.data = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
    setattr(tensor, _MARK, True)


def is_released(tensor: Tensor) -> bool:
    """True where a tensor has no numbers: nobody has restored it, or written into it."""
    return hasattr(tensor, _MARK) and tensor.numel() > 0 and bool(tensor.detach().flatten()[0].isnan())


def restore(tensor: Tensor, whole: Tensor) -> None:
    """Gives a tensor numbers and memory again."""
    with torch.no_grad():
        tensor.data = whole
    if hasattr(tensor, _MARK):
        delattr(tensor, _MARK)
