"""Native libraries that plans call: BLAS, and the threads of OpenMP, as addresses. With torch they are its own
(backend/cpu/machine/torch_libs.py), so that both share one pool of threads; without it products are our routines'."""
from __future__ import annotations

import ctypes
from typing import NamedTuple


class Blas(NamedTuple):
    """Addresses; 0 where the library lacks the routine: our own is taken, or the host of the program called instead.

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

    @property
    def routines(self) -> BlasRoutines:
        """Which products it has."""
        return BlasRoutines(bool(self.sgemm and self.dgemm), bool(self.sgemm_batch), bool(self.dgemm_batch))


class BlasRoutines(NamedTuple):
    """Which products a library has: of f32 and f64, and many of them in one call."""

    products: bool = True
    f32_batches: bool = False
    f64_batches: bool = False


def without_blas() -> Blas:
    """What there is without torch: the clock, and the system's OpenMP runtime if it has one (libgomp of GCC)."""
    threads = _opened("libgomp.so.1")
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
    parallel, number, team, barrier = (address_in(threads, name) for name in names)
    if not (parallel and number and team and barrier):
        parallel = number = team = barrier = 0
    return Blas(sgemm=0, dgemm=0, sgemm_batch=0, dgemm_batch=0, parallel=parallel, thread_number=number,
                team_size=team, barrier=barrier, clock=address_in(ctypes.CDLL(None), "clock_gettime"))


def address_in(loaded: ctypes.CDLL | None, name: str) -> int:
    """The address of a function of a loaded library; 0: it has none of this name."""
    if loaded is None:
        return 0
    try:
        function = getattr(loaded, name)
    except AttributeError:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _opened(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
