"""Arrays of other libraries, by DLPack: a caller's array as numpy sees it, and a result in the caller's kind. No other
library is imported: an array's own class brings it along."""
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from anyshape.base.errors import InputError

Array = np.ndarray[Any, Any]
BF16 = "bfloat16"  # the dtype's name in ml_dtypes, which makes arrays of numpy of it; here they are bits of uint16


def incoming(value: Any, name: str, wanted: str = "bf16") -> Any:
    """A value as an array of numpy, over the same memory; numbers stay what they are. wanted: our name of the dtype.

    Raises:
        InputError: it is no array, lies on a device, or is of bf16, which no dtype of numpy's says, and not wanted so.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.name == BF16:
            return _bits(value, name, wanted)
        return value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("="))
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__"):
        raise InputError(f"{name} is a {type(value).__name__}", why="the program takes an array there",
                         do="pass an array of numpy, PyTorch or JAX, or what else has __dlpack__")
    torch = _torch_of(value)
    try:
        if torch is not None:
            value = value.detach()
            if value.dtype is torch.bfloat16:
                return _bits(np.from_dlpack(value.view(torch.int16)), name, wanted)
            if value.dtype is torch.bool:
                return np.from_dlpack(value.view(torch.uint8)).view(np.bool_)
        elif getattr(getattr(value, "dtype", None), "name", "") == BF16:  # numpy's DLPack does not know it
            return _bits(np.asarray(value), name, wanted)
        return np.from_dlpack(value)
    except InputError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InputError(f"{name} cannot be read", why=f"{type(value).__name__}: {str(error)[:200]}",
                         do="pass a dense array in the memory of this machine") from None


def _bits(value: Array, name: str, wanted: str) -> Array:
    if wanted != "bf16":
        raise InputError(f"{name} has dtype bf16", why=f"the program takes {wanted or 'a number'} there",
                         do="convert it, or save a program that takes bf16")
    return value.view(np.uint16)


def takes_writes(value: Any, array: Any) -> bool:
    """Whether what is written into `array`, which `incoming` made of the value, is written into the value, as its
    owner allows."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and value.dtype.isnative
    return _torch_of(value) is not None or array.flags.writeable


def outgoing(values: list[Any]) -> Callable[[Array, str], Any]:
    """What makes results of arrays, of the kind that the first array among the arguments has. Its second argument is
    our name of the dtype."""
    for value in values:
        if isinstance(value, np.ndarray):
            return _as_numpy
        torch = _torch_of(value)
        if torch is not None:
            return lambda array, dtype: _as_torch(torch, array, dtype)
        space = getattr(value, "__array_namespace__", None)
        if space is not None and hasattr(value, "__dlpack__"):
            own = space()
            return lambda array, dtype: own.asarray(_as_numpy(array, dtype)) if dtype == "bf16" else \
                own.from_dlpack(array)
    return _as_numpy


def _as_numpy(array: Array, dtype: str) -> Any:
    if dtype == "bf16" and "ml_dtypes" in sys.modules:
        return array.view(sys.modules["ml_dtypes"].bfloat16)
    return array


def _as_torch(torch: Any, array: Array, dtype: str) -> Any:
    if dtype == "bf16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    if dtype == "bool":
        return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
    return torch.from_dlpack(array)


def _torch_of(value: Any) -> Any:
    """torch, where the value is a tensor of it: then it is imported already."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(value, torch.Tensor) else None
