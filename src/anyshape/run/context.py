"""What programs share: the native host, the pools of memory, the running calls that call back into Python."""
from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from anyshape.backend import (
    host_climb,
    host_words,
    limits,
    llvm_attention,
    llvm_build,
    llvm_digest,
    llvm_packed,
    llvm_thin,
)
from anyshape.backend.base import Kernel, ObjectCache, Routines
from anyshape.backend.host import emit_host
from anyshape.backend.torchlib import library
from anyshape.base.config import Config
from anyshape.run import pages
from anyshape.run.arena import Pool
from anyshape.run.cache import DiskCache, cache_of
from anyshape.run.idle import IdleRelease
from anyshape.run.packed_weights import PackedWeights
from anyshape.run.store import Stores

WORD = ctypes.c_int64
# families of routines for products: the text of those of some dtypes, and all names in the order of the host's table
FAMILIES = ((llvm_thin.emit_thin, llvm_thin.routines()), (llvm_packed.emit_packed, llvm_packed.routines()),
            (llvm_attention.emit_attention, llvm_attention.routines()))
USUAL = "f32"  # the dtype whose products most programs need
_making = threading.Lock()
_shared: dict[DiskCache | None, Context] = {}  # the first one, and the same for programs that are kept elsewhere


class Running(Protocol):
    """A call that native code calls back into."""

    def step(self, number: int) -> None:
        """Does step `number` by PyTorch."""

    error: BaseException | None
    block: Any


class Climbing:
    """The native loop of run/climb.py; both take the address of a frame."""

    def __init__(self, cache: ObjectCache | None) -> None:
        self.native = llvm_build.load(host_climb.emit_climb(), ("begin", "climb"), limits.host(), cache)
        routine = ctypes.CFUNCTYPE(WORD, WORD)
        self.begin, self.climb = routine(self.native.address["begin"]), routine(self.native.address["climb"])


class Context:
    """Everything that outlives a call and is not the program: give the same one to all programs of a process.

    Args:
        cache: where the host's object code is kept; None: it is compiled (a quarter of a second, and as much again for
            the products of a dtype, when a program first has one).
    """

    def __init__(self, cache: ObjectCache | None = None) -> None:
        self.cache = cache
        self.temporary = Pool()
        self.kept = Pool()
        self.stores = Stores()
        names = "run_plan", "measure", "search", "neighbours"
        self.native = llvm_build.load(emit_host(), names, limits.host(), cache)
        address = self.native.address
        self.run_plan = ctypes.CFUNCTYPE(WORD, ctypes.c_void_p)(address["run_plan"])
        self.measure = ctypes.CFUNCTYPE(WORD, *[ctypes.c_void_p] * 3)(address["measure"])
        self.search = ctypes.CFUNCTYPE(WORD, WORD, WORD, ctypes.c_void_p, *[WORD] * 4,
                                       *[ctypes.c_void_p] * 3)(address["search"])
        self.neighbours = ctypes.CFUNCTYPE(WORD, WORD, WORD, *[ctypes.c_void_p] * 5)(address["neighbours"])
        self.load = (WORD * 3)()  # of the machine: backend/host_threads.py
        self.lock = threading.Lock()
        self.products: dict[str, list[Routines]] = {}
        self._climbing: list[Climbing] = []
        self.digests = llvm_build.load(llvm_digest.emit_digest(), ("digest",), limits.host(), cache)
        self.packed = PackedWeights(ctypes.CFUNCTYPE(None, *[WORD] * 3)(self.digests.address["digest"]))
        self.calls: dict[int, Running] = {}
        self.numbers = itertools.count(1)
        self._callback = ctypes.CFUNCTYPE(WORD, WORD, WORD)(self._step)
        self.callback = ctypes.cast(self._callback, ctypes.c_void_p).value or 0
        self.idle = IdleRelease((self.temporary, self.kept), self.release)

    def release(self) -> int:
        """Gives back what no call is using: free blocks, reordered weights. Returns the bytes. Safe at any time, from
        any thread: calls that run keep what they have, and later ones take it anew."""
        return self.temporary.release_idle() + self.kept.release_idle() + self.packed.release()

    @property
    def climbing(self) -> Climbing:
        """The search under a limit, compiled when it is first needed."""
        with self.lock:
            if not self._climbing:
                self._climbing.append(Climbing(self.cache))
            return self._climbing[0]

    def keeping_in(self, cache: ObjectCache | None) -> Context:
        """This context, for programs whose object code is kept in another cache: all but that is one thing."""
        other = copy.copy(self)
        other.cache = cache
        return other

    def products_of(self, dtype: str) -> dict[str, int]:
        """Addresses of the routines for products of a dtype, which are compiled when they are first asked for."""
        with self.lock:
            if dtype not in self.products:
                self.products[dtype] = [_loaded(emit(limits.host(), (dtype,)), names, self.cache)
                                        for emit, names in FAMILIES]
            return {name: address for loaded in self.products[dtype] for name, address in loaded.address.items()}

    def functions(self, kernels: list[Kernel], dtypes: Iterable[str]) -> ctypes.Array[WORD]:
        """The table of addresses that a program's words refer to; see backend/host.py.

        Args:
            dtypes: of the program's products; other dtypes' routines have the address 0, as those have that this
                processor does without.
        """
        torch = library()
        table = [torch.parallel, torch.thread_number, torch.team_size, torch.sgemm, torch.dgemm, torch.clock,
                 torch.sgemm_batch, torch.dgemm_batch, torch.barrier, ctypes.addressof(self.load)]
        found: dict[str, int] = {}
        for dtype in dtypes:
            found |= self.products_of(dtype)
        for _, names in FAMILIES:
            table += [found.get(name, 0) for name in names]
        for kernel in kernels:
            table += [kernel.run, kernel.blocks, kernel.scratch, kernel.work]
        return (WORD * len(table))(*table)

    def _step(self, state: int, number: int) -> int:
        # Ctrl-C during native code comes out here, perhaps before the first line; then ctypes prints it, and what it
        # returns to native code is not defined. So a step counts as done when this says so in the call's block.
        call = self.calls[state]
        try:
            call.step(number)
            call.block[host_words.STEP] = host_words.STEP_DONE
        except BaseException as error:  # ctypes would print and forget it; the caller of run_plan raises it again
            call.error = error
        return 0


def release() -> int:
    """Gives back what idles in the process's context, if there is one; returns the bytes."""
    found = sum(one.release() for one in list(_shared.values())[:1])  # the others share its memory
    pages.give_back()
    return found


def _loaded(text: str, names: list[str], cache: ObjectCache | None) -> Routines:
    """The module of `text`, with those of the routines `names` that it has."""
    found = [name for name in names if f"@{name}(" in text]
    return llvm_build.load(text, found, limits.host(), cache) if found else Routines({}, None)


def shared_context() -> Context:
    """The process's context: the first that a program asked for, or one with the cache folder of the environment."""
    with _making:
        if _shared:
            return next(iter(_shared.values()))
    return context_of(cache_of(Config.make()))


def context_of(cache: DiskCache | None) -> Context:
    """The process's context, for programs whose object code is kept in `cache` (None: nowhere)."""
    with _making:
        if cache not in _shared:
            _shared[cache] = next(iter(_shared.values())).keeping_in(cache) if _shared else Context(cache)
        return _shared[cache]


@contextlib.contextmanager
def context_underway(config: Config) -> Iterator[None]:
    """Makes the shared context while what is inside runs: LLVM needs a core, and neither Python nor what a trace sets.
    The thread ends inside, so that a process that forks later has none."""
    worker = None
    if not _shared:
        worker = threading.Thread(target=lambda: context_of(cache_of(config)).products_of(USUAL), name="anyshape host")
        worker.start()
    try:
        yield
    finally:
        if worker is not None:
            worker.join()
