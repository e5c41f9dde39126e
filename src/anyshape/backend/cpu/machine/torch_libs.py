"""Native routines inside the libraries that torch ships: matrix products, and the threads that torch uses."""
from __future__ import annotations

import ctypes
import glob
import os
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class TorchBlas:
    """Addresses; 0 where this build of torch lacks the routine, and then PyTorch is called instead.

    sgemm, dgemm: Fortran BLAS (column-major, every argument a pointer, 32-bit integers);
    sgemm_batch, dgemm_batch: MKL's own, many products in one call.
    parallel, thread_number, team_size, barrier: GOMP_parallel, omp_get_thread_num, omp_get_num_threads, GOMP_barrier of
        the OpenMP runtime that torch itself runs on, so that both share one pool of threads.
    clock: clock_gettime of the C library, for profiles.
    """

    sgemm: int
    dgemm: int
    sgemm_batch: int
    dgemm_batch: int
    parallel: int
    thread_number: int
    team_size: int
    barrier: int
    clock: int


@lru_cache(maxsize=1)
def library() -> TorchBlas:
    """Looks the routines up once."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    math = _open(os.path.join(folder, "libtorch_cpu.*"))
    # the OpenMP library that is loaded already; another copy would bring a second pool of threads
    threads = _open(os.path.join(folder, "libgomp*")) or math
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    parallel, number, team = (_address(threads, name) for name in names)
    if not (parallel and number and team):
        parallel = number = team = 0
    products = {name: _address(math, f"{name}_")
                for name in ("sgemm", "dgemm", "sgemm_batch", "dgemm_batch")}
    return TorchBlas(**products, parallel=parallel, thread_number=number, team_size=team,
                   barrier=_address(threads, "GOMP_barrier") if parallel else 0,
                   clock=_address(ctypes.CDLL(None), "clock_gettime"))


def alone() -> None:
    """Tells the libraries to run on one thread where the calling thread, and no other, uses them."""
    torch.get_num_threads()  # which sets the thread up, once
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for pattern, name in (("libgomp*", "omp_set_num_threads"), ("libtorch_cpu.*", "omp_set_num_threads"),
                          ("libtorch_cpu.*", "MKL_Set_Num_Threads_Local")):
        loaded = _open(os.path.join(folder, pattern))
        if _address(loaded, name):
            getattr(loaded, name)(ctypes.c_int(1))


def _open(pattern: str) -> ctypes.CDLL | None:
    for path in sorted(glob.glob(pattern)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _address(loaded: ctypes.CDLL | None, name: str) -> int:
    if loaded is None:
        return 0
    try:
        function = getattr(loaded, name)
    except AttributeError:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
