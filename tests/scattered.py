"""A process whose free memory is in small pieces, far apart, compiles and runs a kernel; run by test_backend.py.

Regions of 3 GB are reserved, nothing is free above them, and each gets a hole: one page in the highest, two in the
next, and so on. So whoever asks for pieces of several sizes finds each in another region.
"""
from __future__ import annotations

import ctypes

import numpy as np

from anyshape.backend.cpu.codegen.kernel import emit
from anyshape.backend.cpu.llvm.jit import build
from anyshape.backend.cpu.machine.target import host
from test_backend import I, pointwise, run

PAGE, REGION = 4096, 3 << 30
RESERVED = 0x4022  # MAP_PRIVATE, MAP_ANONYMOUS, MAP_NORESERVE
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def reserve(bytes_: int) -> int:
    place = library.mmap(None, bytes_, 0, RESERVED, -1, 0)
    assert place != ctypes.c_void_p(-1).value, "no address space"
    return place


def scatter(regions: int = 12) -> None:
    places = sorted((reserve(REGION) for _ in range(regions)), reverse=True)
    for size in (PAGE << shift for shift in range(18, -1, -1)):
        while (place := reserve(size)) > places[-1]:
            pass
        library.munmap(place, size)
    for k, place in enumerate(places):
        library.munmap(place + REGION // 2, PAGE * (k + 1))


def main() -> None:
    program = pointwise("sine", "f32", "f32", I(1, "sin", (0,), "f32"))
    text = emit(program, host())
    x, y = np.linspace(-3, 3, 100, dtype=np.float32), np.zeros(100, np.float32)
    build([emit(pointwise("first", "f32", "f32"), host())], host())  # what LLVM itself needs
    scatter()
    kernel = build([text], host())[0]
    run(kernel, [x, y], [100])
    np.testing.assert_allclose(y, np.sin(x), atol=1e-6)
    print("well")


if __name__ == "__main__":
    main()
