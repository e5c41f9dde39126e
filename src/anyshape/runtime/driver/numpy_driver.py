"""The driver of numpy: arrays in the memory of this process, without any other package (runtime/driver/interface.py).

Other arrays come in by DLPack, and results go back the same way (artifact/arrays.py). numpy lacks bf16: its bits are
held as numbers of 16 bits.
"""
from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from anyshape.base.align import ALIGNMENT, LARGE_PAGE
from anyshape.base.errors import InputError
from anyshape.plan.ir.program import Plan
from anyshape.runtime.driver.interface import AccessCode, Argument, Sizes

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "bf16": np.dtype(np.uint16),
    "i8": np.dtype(np.int8), "i16": np.dtype(np.int16), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8), "u16": np.dtype(np.uint16), "u32": np.dtype(np.uint32), "u64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_), "c64": np.dtype(np.complex64), "c128": np.dtype(np.complex128),
}  # fmt: skip
NAMES = {dtype: name for name, dtype in reversed(NUMPY_DTYPES.items())}
NAMES[np.dtype(np.uint16)] = "u16"


@functools.lru_cache(4096)
def _elements(strides: Sizes, item: int) -> Sizes:
    return tuple([step // item if step % item == 0 else -1 for step in strides])


@functools.lru_cache(4096)
def _is_dense(sizes: Sizes, strides: Sizes) -> bool:
    """Whether `numpy.empty` gives these strides."""
    steps = itertools.accumulate(reversed(sizes[1:]), operator.mul, initial=1)
    return 0 in sizes or not sizes or tuple(steps)[::-1] == strides


def strides_of(array: np.ndarray[Any, Any]) -> Sizes:
    """In elements; a stride that is no whole number of them is none of ours."""
    return _elements(array.strides, array.itemsize)


def _interface_address(array: np.ndarray[Any, Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _read_address(array: np.ndarray[Any, Any]) -> int:
    """The address as numpy's C interface has it: `data` is the first field of an array's own (PyArrayObject_fields in
    numpy/ndarraytypes.h). Asking for `__array_interface__` makes a dict of five entries, which takes eight times as
    long."""
    return _word_at(id(array) + _DATA).value if array.__class__ is _NDARRAY else _interface_address(array)


_word_at = ctypes.c_size_t.from_address
_DATA = object.__basicsize__  # bytes of a Python object's head
_NDARRAY = np.ndarray


def _choice() -> Callable[[np.ndarray[Any, Any]], int]:
    """What reads addresses: by the array's memory if that is laid out as it is known to be."""
    if np.ndarray.__basicsize__ >= _DATA + 8 and ctypes.sizeof(ctypes.c_void_p) == 8:
        samples: list[np.ndarray[Any, Any]] = [np.zeros(3, np.uint8), np.zeros((2, 3))[1:, ::2], np.zeros(())]
        if all(_read_address(one) == _interface_address(one) for one in samples):
            return _read_address
    return _interface_address


address_of = _choice()  # of an array's first element


def empty_strided(sizes: Sizes, strides: Sizes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Memory of its own."""
    if _is_dense(sizes, strides):
        return np.empty(sizes, dtype)
    span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    return np.ndarray(sizes, dtype, np.empty(span, dtype), 0, tuple([step * dtype.itemsize for step in strides]))


class Teams:
    """Whether calls of this process may have had threads of OpenMP (made), and whether it was forked from such a
    process (lost)."""

    def __init__(self) -> None:
        self.made = self.lost = False

    def forked(self) -> None:
        """In the child of a fork, which has one thread."""
        self.lost = self.lost or self.made


_teams = Teams()
os.register_at_fork(after_in_child=_teams.forked)


class RandomSource:
    """The random numbers of a driver's programs: a generator of numpy's, for one thread at a time.

        with source as generator:
            generator.random(3)
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.generator: np.random.Generator | None = None  # most programs draw none

    def seed(self, seed: int | None) -> None:
        """What is drawn from now on follows from the seed, a whole number from 0; None: from the system's entropy."""
        with self.lock:
            self.generator = np.random.default_rng(seed)

    def __enter__(self) -> np.random.Generator:
        self.lock.acquire()
        if self.generator is None:
            self.generator = np.random.default_rng()
        return self.generator

    def __exit__(self, *_error: object) -> None:
        self.lock.release()


class NumpyDriver:
    """See `HostDriver`. random: what its programs draw.

    Args:
        threads: how many a call may use; 0: the cores that this process may run on.
    """

    dtypes = NUMPY_DTYPES
    large_from = LARGE_PAGE // 2
    result: Callable[[Sizes, Sizes, Any], Any] = staticmethod(empty_strided)
    address: Callable[[Any], int] = staticmethod(address_of)
    code = AccessCode(lambda name: f"strides_of({name})", lambda name: f"address_of({name})",
                      lambda name, wanted, _dtype, _device: f"{name}.dtype != {wanted}",
                      {"strides_of": strides_of, "address_of": address_of})

    def __init__(self, threads: int = 0) -> None:
        self.random = RandomSource()
        count = threads or len(os.sched_getaffinity(0))

        def usable() -> int:
            """One where a fork has lost the others: OpenMP would wait for them for ever."""
            if _teams.lost:
                return 1
            _teams.made = _teams.made or count > 1
            return count

        self.threads = usable

    def inspect(self, value: Any) -> Argument | None:
        """See `HostDriver`."""
        if not isinstance(value, np.ndarray):
            return None
        return Argument(NAMES.get(value.dtype) or str(value.dtype), value.shape)

    def device(self, name: str) -> str:
        """See `HostDriver`."""
        return name

    def fits(self, value: Any, dtype: Any, sizes: Sizes, device: Any) -> bool:
        """See `HostDriver`."""
        return isinstance(value, np.ndarray) and value.dtype == dtype and value.shape == sizes

    def strides(self, value: np.ndarray[Any, Any]) -> Sizes:
        """See `HostDriver`."""
        return strides_of(value)

    def refused(self, value: np.ndarray[Any, Any], plan: Plan, position: int) -> InputError | None:
        """See `HostDriver`."""
        return None

    def scalar(self, value: bool | int | float, dtype: str, device: str = "cpu") -> np.ndarray[Any, Any]:
        """See `HostDriver`."""
        return np.asarray(value, NUMPY_DTYPES[dtype])

    def plain(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """See `HostDriver`."""
        return value

    def restrided(self, value: np.ndarray[Any, Any], strides: Sizes) -> np.ndarray[Any, Any]:
        """See `HostDriver`."""
        if value.flags.aligned and (0 in value.shape or all(
                a == b for n, a, b in zip(value.shape, strides_of(value), strides, strict=True) if n != 1)):
            return value
        copy = empty_strided(value.shape, strides, value.dtype)
        copy[...] = value
        return copy

    def put_back(self, into: np.ndarray[Any, Any], value: np.ndarray[Any, Any]) -> None:
        """See `HostDriver`."""
        into[...] = value

    def alike(self, values: Sequence[Any], sizes: bool) -> Callable[..., bool] | None:
        """See `HostDriver`."""
        return None

    def empty(self, bytes_: int) -> tuple[np.ndarray[Any, Any], int]:
        """See `HostDriver`."""
        try:
            unit = LARGE_PAGE if bytes_ >= LARGE_PAGE else ALIGNMENT
            memory = np.empty(bytes_ + unit, np.uint8)  # what is skipped is never touched
        except (MemoryError, ValueError) as error:
            raise RuntimeError(str(error)) from error
        skip = -address_of(memory) % unit
        return memory[skip:skip + bytes_], address_of(memory) + skip

    def flat(self, memory: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
        """See `HostDriver`."""
        item = dtype.itemsize
        return memory[:len(memory) // item * item].view(dtype)

    def part(self, flat: np.ndarray[Any, Any], element: int, sizes: Sizes, strides: Sizes) -> np.ndarray[Any, Any]:
        """See `HostDriver`."""
        item = flat.itemsize
        return as_strided(flat[element:], sizes, tuple([step * item for step in strides]))

    def shares(self, value: np.ndarray[Any, Any], memory: np.ndarray[Any, Any]) -> bool:
        """See `HostDriver`."""
        return np.may_share_memory(value, memory)
