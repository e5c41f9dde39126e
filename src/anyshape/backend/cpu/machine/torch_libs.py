"""Native routines inside the libraries that torch ships: matrix products, and the threads that torch uses."""
from __future__ import annotations

import ctypes
import glob
import os
from functools import lru_cache

import torch

from anyshape.backend.cpu.machine.blas import Blas, address_in


@lru_cache(maxsize=1)
def library() -> Blas:
    """Looks the routines up once."""
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    math = _open(os.path.join(folder, "libtorch_cpu.*"))
    # the OpenMP library that is loaded already; another copy would bring a second pool of threads
    threads = _open(os.path.join(folder, "libgomp*")) or math
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    parallel, number, team = (address_in(threads, name) for name in names)
    if not (parallel and number and team):
        parallel = number = team = 0
    products = {name: address_in(math, f"{name}_")
                for name in ("sgemm", "dgemm", "sgemm_batch", "dgemm_batch")}
    return Blas(**products, parallel=parallel, thread_number=number, team_size=team,
                   barrier=address_in(threads, "GOMP_barrier") if parallel else 0,
                   clock=address_in(ctypes.CDLL(None), "clock_gettime"))


def threads_of_products() -> int:
    """On how many threads torch's products run."""
    return torch.get_num_threads()


def alone() -> None:
    """Tells the libraries to run on one thread where the calling thread, and no other, uses them."""
    torch.get_num_threads()  # which sets the thread up, once
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for pattern, name in (("libgomp*", "omp_set_num_threads"), ("libtorch_cpu.*", "omp_set_num_threads"),
                          ("libtorch_cpu.*", "MKL_Set_Num_Threads_Local")):
        loaded = _open(os.path.join(folder, pattern))
        if address_in(loaded, name):
            getattr(loaded, name)(ctypes.c_int(1))


def _open(pattern: str) -> ctypes.CDLL | None:
    for path in sorted(glob.glob(pattern)):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None
