"""What programs share: the native host, the pools of memory, the running calls that call back into Python."""
from __future__ import annotations

import ctypes
import itertools
from functools import lru_cache
from typing import Any, Protocol

from anyshape.backend import host_words, limits, llvm_attention, llvm_build, llvm_digest, llvm_packed, llvm_thin
from anyshape.backend.base import Kernel, ObjectCache, Routines
from anyshape.backend.host import emit_host
from anyshape.backend.torchlib import library
from anyshape.base.config import Config
from anyshape.run.arena import Pool
from anyshape.run.cache import cache_of
from anyshape.run.convolution import PackedWeights

WORD = ctypes.c_int64


class Running(Protocol):
    """A call that native code calls back into."""

    def step(self, number: int) -> None:
        """Does step `number` by PyTorch."""

    error: BaseException | None
    block: Any


class Context:
    """Everything that outlives a call and is not the program: give the same one to all programs of a process.

    Args:
        cache: where the host's object code is kept; None: it is compiled (a quarter of a second).
    """

    def __init__(self, cache: ObjectCache | None = None) -> None:
        self.temporary = Pool()
        self.kept = Pool()
        self.native = llvm_build.load(emit_host(), ("run_plan", "measure", "place"), limits.host(), cache)
        address = self.native.address
        self.run_plan = ctypes.CFUNCTYPE(WORD, ctypes.c_void_p)(address["run_plan"])
        self.measure = ctypes.CFUNCTYPE(WORD, *[ctypes.c_void_p] * 3)(address["measure"])
        self.place = ctypes.CFUNCTYPE(WORD, WORD, WORD, *[ctypes.c_void_p] * 6, WORD, WORD)(address["place"])
        self.products = [
            _routines(llvm_thin.emit_thin(limits.host()), llvm_thin.routines(), cache),
            _routines(llvm_packed.emit_packed(limits.host()), llvm_packed.routines(), cache),
            _routines(llvm_attention.emit_attention(limits.host()), llvm_attention.routines(), cache)]
        self.digests = llvm_build.load(llvm_digest.emit_digest(), ("digest",), limits.host(), cache)
        self.packed = PackedWeights(ctypes.CFUNCTYPE(None, *[WORD] * 3)(self.digests.address["digest"]))
        self.calls: dict[int, Running] = {}
        self.numbers = itertools.count(1)
        self._callback = ctypes.CFUNCTYPE(WORD, WORD, WORD)(self._step)
        self.callback = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def functions(self, kernels: list[Kernel]) -> ctypes.Array[WORD]:
        """The table of addresses that a program's words refer to; see backend/host.py."""
        torch = library()
        table = [torch.parallel, torch.thread_number, torch.team_size, torch.sgemm, torch.dgemm, torch.clock,
                 torch.sgemm_batch, torch.dgemm_batch]
        for _, addresses in self.products:
            table += addresses
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


def _routines(text: str, names: list[str], cache: ObjectCache | None) -> tuple[Routines, list[int]]:
    """The loaded module and the addresses of routines by name; 0 for those that this processor does without."""
    found = [name for name in names if f"@{name}(" in text]
    loaded = llvm_build.load(text, found, limits.host(), cache)
    return loaded, [loaded.address.get(name, 0) for name in names]


@lru_cache(maxsize=1)
def shared_context() -> Context:
    """The process's context; the cache folder is that of the environment."""
    return Context(cache_of(Config.make()))
