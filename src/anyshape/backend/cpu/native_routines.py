"""The native routines of a process, which belong to no program: the interpreter of plans, products, and the searches of
the host (offset assignment, recompute selection), for every target."""
from __future__ import annotations

import copy
import ctypes
import itertools
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

from anyshape.backend.cpu.bytecode import format
from anyshape.backend.cpu.machine.blas import Blas
from anyshape.backend.cpu.machine.target import Machine, host
from anyshape.backend.cpu.microkernels.tables import (
    direct_conv,
    direct_conv_last,
    gemm,
    gemv,
    recurrence,
    softmax_rows,
    winograd_conv,
)
from anyshape.backend.interface import ObjectCache, PythonSteps
from anyshape.backend.loaded_code import CodeSource, LoadedKernel, Routines

WORD = ctypes.c_int64
# what is called of the module "host"
HOST = ("run_plan", "measure", "search", "neighbours", "live_peak", "apart", "fill_template")
# families of routines for products: all names in the order of the host's table
FAMILIES = tuple(family.routines() for family in (
    gemv, gemm, softmax_rows, direct_conv, direct_conv_last, winograd_conv, recurrence))
_making = threading.Lock()
_shared: dict[ObjectCache | None, NativeRoutines] = {}  # the first one, and the same for code that is kept elsewhere


class NativeRoutines:
    """The native routines of a process, compiled for its processor. Threads may share one.

    Args:
        machine: for which they are compiled.
        cache: where object code is kept; None: it is compiled (a quarter of a second, and as much again for the
            products of a dtype, when a program first has one).
        blas: the libraries that its plans call; torch's when left out.
        code: what has been compiled already; compiled here when left out.
    """

    def __init__(self, machine: Machine, cache: ObjectCache | None = None, blas: Blas | None = None,
                 code: CodeSource | None = None) -> None:
        self.machine = machine
        self.cache = cache
        self.blas = _torch_blas() if blas is None else blas
        self.code = code
        self.native = self._loaded("host", _host_text, HOST)
        address = self.native.address
        self.run_plan = ctypes.CFUNCTYPE(WORD, ctypes.c_void_p)(address["run_plan"])
        self.measure = ctypes.CFUNCTYPE(WORD, *[ctypes.c_void_p] * 3)(address["measure"])
        self.fill = ctypes.CFUNCTYPE(WORD, ctypes.c_void_p, WORD, *[ctypes.c_void_p] * 2)(address["fill_template"])
        self._search = ctypes.CFUNCTYPE(WORD, WORD, WORD, ctypes.c_void_p, *[WORD] * 4,
                                        *[ctypes.c_void_p] * 3, WORD)(address["search"])
        self._neighbours = ctypes.CFUNCTYPE(WORD, WORD, WORD, *[ctypes.c_void_p] * 5)(address["neighbours"])
        self._live_peak = ctypes.CFUNCTYPE(WORD, WORD, ctypes.c_void_p, WORD, ctypes.c_void_p)(address["live_peak"])
        self._apart = ctypes.CFUNCTYPE(WORD, WORD, *[ctypes.c_void_p] * 3, WORD, ctypes.c_void_p,
                                       WORD)(address["apart"])
        self.load = (WORD * 3)()  # of the machine: backend/cpu/routines/threads.py
        self.lock = threading.Lock()
        self.products: dict[str, list[Routines]] = {}
        self._searches: list[_BudgetSearch] = []
        self._handlers: list[Routines] = []
        self.running: dict[int, tuple[PythonSteps, Any]] = {}  # calls that do steps for the host, and their frames
        self.numbers = itertools.count(1)
        self._callback = ctypes.CFUNCTYPE(WORD, WORD, WORD)(self._step)
        self.callback = ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def kept_in(self, cache: ObjectCache | None) -> NativeRoutines:
        """The same, for programs whose object code is kept in another cache: all but that is one thing."""
        other = copy.copy(self)
        other.cache = cache
        return other

    # --- plans

    def products_of(self, dtype: str) -> dict[str, int]:
        """Addresses of the routines for products of a dtype, which are compiled when they are first asked for."""
        with self.lock:
            if dtype not in self.products:
                self.products[dtype] = [
                    self._loaded(f"products {number} {dtype}", partial(family_text, number, self.machine, dtype), names)
                    for number, names in enumerate(FAMILIES)]
            return {name: address for loaded in self.products[dtype] for name, address in loaded.address.items()}

    def _loaded(self, module: str, text: Callable[[], str], names: Sequence[str]) -> Routines:
        """A module, with those of the routines `names` that it has. text: of it, where it has to be compiled."""
        if self.code is not None:
            return self.code.routines(module, names)
        # LLVM is not there in every process that runs programs
        from anyshape.backend.cpu.llvm import jit
        return jit.load_module(module, text, names, self.machine, self.cache)

    def functions(self, kernels: Sequence[LoadedKernel], dtypes: Iterable[str]) -> ctypes.Array[WORD]:
        """The table of addresses that a program's words refer to; see backend/cpu/interpreter.py.

        Args:
            dtypes: of the program's products; other dtypes' routines have the address 0, as those have that this
                processor does without.
        """
        blas = self.blas
        table = [blas.parallel, blas.thread_number, blas.team_size, blas.sgemm, blas.dgemm, blas.clock,
                 blas.sgemm_batch, blas.dgemm_batch, blas.barrier, ctypes.addressof(self.load)]
        found: dict[str, int] = {}
        for dtype in dtypes:
            found |= self.products_of(dtype)
        for names in FAMILIES:
            table += [found.get(name, 0) for name in names]
        for kernel in kernels:
            table += [kernel.run, kernel.blocks, kernel.scratch, kernel.work]
        return (WORD * len(table))(*table)

    def _step(self, state: int, number: int) -> int:
        # Ctrl-C during native code comes out here, perhaps before the first line; then ctypes prints it, and what it
        # returns to native code is not defined. So a step counts as done when this says so in the call's block.
        steps, block = self.running[state]
        try:
            steps.step(number)
            block[format.STEP] = format.STEP_DONE
        except BaseException as error:  # ctypes would print and forget it; the caller of run_plan raises it again
            steps.error = error
        return 0

    # --- searches

    def search(self, columns: array[int], count: int, fixed: int, wall: int, bound: int, good: int, top: int,
               room: array[int], starts: array[int], near: array[int] | None, repairs: bool) -> int:
        """See `HostRoutines`."""
        return int(self._search(count, fixed, _address(columns), wall, bound, good, top, _address(room),
                                _address(starts), None if near is None else _address(near), repairs))

    def neighbours(self, columns: array[int], count: int, fixed: int, order: array[int], starts: array[int],
                   near: array[int] | None) -> int:
        """Which items are alive with which, written to `near`, and how many pairs there are."""
        address = _address(columns)
        return int(self._neighbours(count, fixed, _address(order), address + 8 * count, address + 16 * count,
                                    _address(starts), None if near is None else _address(near)))

    def live_peak(self, columns: array[int], count: int, steps: int) -> int:
        """See `HostRoutines`."""
        changes = array("q", bytes(8 * (steps + 2)))
        return int(self._live_peak(count, _address(columns), steps, _address(changes)))

    def apart(self, starts: array[int], sizes: array[int], which: array[int], pairs: array[int], kept: int) -> bool:
        """See `HostRoutines`."""
        return bool(self._apart(len(which), _address(starts), _address(sizes), _address(which), len(pairs) // 2,
                                _address(pairs), kept))

    @property
    def budget_search(self) -> _BudgetSearch:
        """The search under a limit, compiled when it is first needed."""
        with self.lock:
            if not self._searches:
                from anyshape.backend.cpu.routines import budget_search
                names = "begin", "advance"
                self._searches.append(_BudgetSearch(self._loaded("budget", budget_search.emit_search, names)))
            return self._searches[0]

    # --- bytes and bits

    @cached_property
    def _digest(self) -> tuple[Any, Routines]:
        from anyshape.backend.cpu.microkernels import digest  # programs do without
        loaded = self._loaded("digest", digest.emit_digest, ("digest",))
        return ctypes.CFUNCTYPE(None, *[WORD] * 3)(loaded.address["digest"]), loaded

    def digest(self, address: int, bytes_: int) -> int:
        """A digest of a piece of memory."""
        found = ctypes.c_int64()
        self._digest[0](address, bytes_, ctypes.addressof(found))
        return found.value

    @cached_property
    def _twister(self) -> tuple[Any, Routines]:
        from anyshape.backend.cpu.microkernels import mt19937  # programs do without
        loaded = self._loaded("twister", partial(mt19937.emit_twister, self.machine), ("draw",))
        return ctypes.CFUNCTYPE(None, *[WORD] * 4)(loaded.address["draw"]), loaded

    def draw(self, state: int, result: int, count: int, limit: int) -> None:
        """Bools drawn as PyTorch's generator does from a state of `state_bytes` bytes, which goes on; both by address.
        limit: of 2**53, below which a draw is true."""
        self._twister[0](state, result, count, limit)

    @property
    def state_bytes(self) -> int:
        """See `HostRoutines`."""
        from anyshape.backend.cpu.microkernels import mt19937  # programs do without
        return mt19937.BYTES

    # --- calls from XLA

    def xla_handler(self, called: int, version: int) -> int:
        """See `HostRoutines`."""
        from anyshape.backend.cpu import xla_handler
        self._handlers.append(xla_handler.handler(self.machine, called, version))
        return self._handlers[-1].address[xla_handler.anyshape_program.__name__]


def _host_text() -> str:
    """The module "host", by what compiles our Python to LLVM: a process that loads machine code does without."""
    from anyshape.backend.cpu.interpreter import emit_host
    return emit_host()


def family_text(number: int, machine: Machine, dtype: str) -> str:
    """The LLVM text of one of the `FAMILIES`, of a dtype: a process that loads machine code does without."""
    from anyshape.backend.cpu.microkernels import (
        direct_conv,
        direct_conv_last,
        gemm,
        gemv,
        recurrence,
        softmax_rows,
        winograd_conv,
    )
    emit: Callable[[Machine, tuple[str, ...]], str] = (
        gemv.emit_thin, gemm.emit_packed, softmax_rows.emit_attention, direct_conv.emit_conv,
        direct_conv_last.emit_conv_last, winograd_conv.emit_winograd, recurrence.emit_recurrence)[number]
    return emit(machine, (dtype,))


class _BudgetSearch:
    """The native loop of a search for what to recompute or to offload; both take a frame
    (backend/cpu/bytecode/budget_frame.py)."""

    def __init__(self, native: Routines) -> None:
        self.native = native
        routine = ctypes.CFUNCTYPE(WORD, WORD)
        self.begin, self.advance = routine(self.native.address["begin"]), routine(self.native.address["advance"])


def _torch_blas() -> Blas:
    """Those of torch, which is imported when a program needs them."""
    from anyshape.backend.cpu.machine.torch_libs import library
    return library()


def routines_of(cache: ObjectCache | None) -> NativeRoutines:
    """The process's routines, for programs whose object code is kept in `cache` (None: nowhere)."""
    with _making:
        if cache not in _shared:
            _shared[cache] = next(iter(_shared.values())).kept_in(cache) if _shared else kept_routines(None, cache)
        return _shared[cache]


def kept_routines(blas: Blas | None, cache: ObjectCache | None) -> NativeRoutines:
    """Routines of their own for this machine, with these libraries; None: torch's."""
    return NativeRoutines(host(), cache, blas)


def first_routines(cache: Callable[[], ObjectCache | None]) -> NativeRoutines:
    """The process's first routines; `cache`: where their object code is kept if there are none yet."""
    with _making:
        if _shared:
            return next(iter(_shared.values()))
    return routines_of(cache())


def _address(words: array[int]) -> int:
    return words.buffer_info()[0]
