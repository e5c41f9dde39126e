"""The registration of our handler of XLA's foreign function interface (FFI): XLA knows it by one name, for all programs
and shapes. Its native code, and what it hands on: backend/cpu/xla_handler.py."""
from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyshape.backend.targets import host_routines
from anyshape.base.optional_packages import needed_by

with needed_by("anyshape.jax.jit"):
    import jax

TARGET = "anyshape_program"  # the name by which XLA knows the handler
HEAD, MESSAGE = 4, 3  # words of a call before the addresses, and which of them is the address of a message

Called = Callable[[int], int]


def _version() -> int:
    """The version of the interface that jaxlib speaks: minor and major in the halves of a word."""
    text = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text(encoding="utf-8")
    major, minor = (int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR"))
    return minor << 32 | major


@functools.cache
def register(called: Called) -> Any:
    """Makes the handler, which hands calls to `called` (the address of words -> 0, or the code of an error), and tells
    XLA of it. Once in a process: what is returned must live."""
    callback = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(called)
    address = host_routines().xla_handler(ctypes.cast(callback, ctypes.c_void_p).value or 0, _version())
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    jax.ffi.register_ffi_target(TARGET, capsule(address, None, None), platform="cpu")
    return callback
