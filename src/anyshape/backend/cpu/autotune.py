"""Autotuning of matrix products: which of two routines does those that our own routines and a library's can do.

    f32              256 x 512 @ 512 x 512    our packed panels    3.1 ms    BLAS 3.6 ms    -->  ours
    bf16             the same                 our packed panels    0.7 ms    PyTorch 0.5    -->  PyTorch's, if it wins
                                                                                                 by as much as `margin`

Both run in turn on one thread, whose own processor time counts, when a program first has such a product; of several
turns the fastest, for other work on the machine only makes them slower. What was measured is kept
(backend/measurements.py). The routine that the processor's features speak for is taken unless the other one is
clearly faster, so that noise does not change what is computed; it is also taken where nothing may be measured, or
nothing can be.
"""
from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.bytecode import template
from anyshape.backend.cpu.bytecode.plan_template import attention_words, kind_words, product_words, step_words
from anyshape.backend.cpu.bytecode.products import (
    ATTENTION,
    FEW,
    FULL,
    MANY,
    THIN_ONES,
    Fixed,
    bits,
    does,
)
from anyshape.backend.cpu.bytecode.products import native as suits
from anyshape.backend.cpu.bytecode.template import Word
from anyshape.backend.cpu.machine import low_precision
from anyshape.backend.cpu.machine.target import Machine, model
from anyshape.backend.cpu.native_routines import WORD, NativeRoutines
from anyshape.backend.measurements import Measurements
from anyshape.base.align import align
from anyshape.ir.types import size_of
from anyshape.ops.attention import roles

TURNS, CLEAR = 6, 3.0  # of each routine; the first one finds caches and pages cold. Enough is a ratio as clear as that


class ProductKind(NamedTuple):
    """Products that two routines can do. sizes: batch, rows, terms of a sum and columns of the one that is measured,
    of attention heads, rows, columns and depth. other: the library. margin: how many times as fast as the usual one
    the unusual routine has to be."""

    dtype: str
    sizes: tuple[int, int, int, int]
    other: str = "BLAS"
    margin: float = 1.04


# A product that is PyTorch's is a call back into Python, and kernels that cast its operands and read its result are
# steps of their own: it has to win by more than that costs in whole programs (docs/adr/025-tried-for-speed.md).
KINDS = {
    FULL: ProductKind("f32", (1, 192, 512, 512)), FEW: ProductKind("f32", (1, 16, 512, 512)),
    MANY: ProductKind("f32", (192, 32, 64, 32)),
    THIN_ONES: ProductKind("f32", (1, 1, 512, 1024), margin=1.2), ATTENTION: ProductKind("f32", (4, 256, 256, 64)),
    **{dtype: ProductKind(dtype, (1, 192, 512, 512), "PyTorch", 1.6) for dtype in low_precision.DTYPES},
}


def usual(kind: str, target: Machine) -> bool:
    """Whether our routines do such products where nothing is measured, by the processor's features. The library (MKL)
    has its best code for processors of its maker, and ours are made for vectors of 64 bytes: 108 against 91 GFLOP/s on
    a core of Zen 4, 260 against 120 on Zen 5."""
    if kind in low_precision.DTYPES:
        return suits(kind, target)
    if kind == THIN_ONES:
        return True
    return target.vector_bytes == 64 and target.has("sse4a")  # which only processors of AMD have


class Autotune:
    """Says which routine does a product. Threads may share one.

    Args:
        mode: "measured", "own", "library" or "usual": the faster one, our own ones wherever there are any, the
            library's, or the `usual` ones.
    """

    def __init__(self, native: NativeRoutines, measurements: Measurements, mode: str) -> None:
        self.native = native
        self.machine = native.machine
        self.measurements = measurements
        self.mode = mode
        self.decided: dict[str, bool] = {}
        self.blas = native.blas.routines

    def ours(self, kind: str) -> bool:
        """Whether our routines do products of a kind."""
        found = self.decided.get(kind)
        if found is None:
            found = self.decided[kind] = self._decide(kind)
        return found

    def _decide(self, kind: str) -> bool:
        if self.mode in ("own", "library"):
            return self.mode == "own"
        default = usual(kind, self.machine)
        gain = self.gain(kind) if self.mode == "measured" else None
        if gain is None:
            return default
        margin = KINDS[kind].margin
        return gain * margin >= 1 if default else gain >= margin

    def measure_again(self, kind: str) -> None:
        """Measures a kind in place of what was found before."""
        self.measurements.forget(_name(kind))
        self.decided.pop(kind, None)
        self.gain(kind)

    def told(self, dtype: str) -> str:
        """In words, which routines do products of a dtype, where that was measured."""
        found = []
        for kind, one in KINDS.items():
            gain = self.measurements.known.get(_name(kind)) if one.dtype == dtype else None
            if gain is not None and self.mode == "measured":
                by = "ours" if self.ours(kind) else one.other
                found.append(f"{by if kind == dtype else f'{by} for {kind}'} ({gain:.2f})")
        return f"by {', '.join(found)}: ours run at so many times the library's speed here" if found else ""

    def gain(self, kind: str) -> float | None:
        """How many times as fast as the library our routines are, as measured; None: there is only one of them."""
        if not (does(KINDS[kind].dtype, Fixed(self.machine, True, self.blas)) and self.blas.products):
            return None
        return self.measurements.get(_name(kind), lambda: measured(self.native, kind))


def _name(kind: str) -> str:
    return f"products of {kind}, ours over the library's"


def measured(native: NativeRoutines, kind: str) -> float:
    """How many times as fast as the library our routines are: in a thread of its own, which alone is told to run
    libraries on one thread."""
    found: list[float] = []

    def work() -> None:
        with contextlib.suppress(MemoryError, RuntimeError):  # torch has no memory for it
            found.append(_in_turn(native, kind))

    worker = threading.Thread(target=work, name="anyshape autotune")
    worker.start()
    worker.join()
    if not found:
        raise RuntimeError(f"{kind} could not be measured")
    return found[0]


def _in_turn(native: NativeRoutines, kind: str) -> float:
    """The library's time over ours, of the fastest turns."""
    from anyshape.backend.cpu.machine.torch_libs import alone
    alone()
    runs = [_run_of(native, kind, own) for own in (False, True)]
    other = own = math.inf
    for turn in range(TURNS):
        other, own = (min(best, _seconds(run)) for best, run in zip((other, own), runs, strict=True))
        if turn > 0 and max(other, own) > CLEAR * min(other, own):
            break
    return other / own if own > 0 else 1.0


def _seconds(run: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - begin) * 1e-9


def _run_of(native: NativeRoutines, kind: str, own: bool) -> Callable[[], object]:
    """A product of a kind by one of its routines: activations by a weight as nn.Linear has it."""
    import torch

    from anyshape.torch_compat.dtypes import TORCH_DTYPES
    one, fixed = KINDS[kind], Fixed(native.machine, own, native.blas.routines)
    batch, rows, inner, columns = one.sizes
    dtype = TORCH_DTYPES[one.dtype]
    if kind == ATTENTION:
        depth = columns
        shape, result = (1, batch, rows, depth), (1, rows, batch, depth)
        q, k, v = (torch.ones(shape, dtype=dtype) for _ in range(3))
        tensors = [q, k, v, torch.empty(result, dtype=dtype), torch.empty(1, batch, rows, dtype=dtype)]
        there = dict(zip(roles("attention", len(tensors)), tensors, strict=True))
        ordered = [there[role] for role in host.OPERANDS if role in there]
        return _native(native, template.ATTENTION, lambda at: attention_words(
            at, 0, "attention", one.dtype, True, bits(depth**-0.5, "f"), there), ordered, fixed, one.dtype)
    x, w = torch.ones(batch, rows, inner, dtype=dtype), torch.ones(batch, columns, inner, dtype=dtype).mT
    y = torch.empty(batch, rows, columns, dtype=dtype)
    if one.dtype in low_precision.DTYPES and not own:
        return lambda: torch.mm(x[0], w[0], out=y[0])
    return _native(native, template.PRODUCT, lambda at: product_words(at, 0, one.dtype, 1.0, 0.0, False), [x, w, y],
                   fixed, one.dtype)


def _native(native: NativeRoutines, kind: int, head: Callable[[int], list[Word]], tensors: Sequence[Any],
            products: Fixed, dtype: str) -> Callable[[], object]:
    """What runs one step of the host (backend/cpu/interpreter.py) on one thread. kind: of its piece; head: the words of
    that without its windows, from the address of a `ProductKind`. Slot i + 1 is tensor i."""
    known = kind_words(0, dtype, products)
    body = head(known.buffer_info()[0])
    for slot, tensor in enumerate(tensors, 1):
        body += template.window_words(slot, size_of(dtype), 0, tensor.shape, tensor.stride())
    words = step_words(kind, body, {dtype: known}, products, native.fill)
    assert words[0] not in (host.CALL, host.END), kind
    functions = native.functions([], (dtype,))
    program = array("q", [*[0] * host.HEAD_WORDS, *words])
    program[host.HEAD_FIRST], program[host.HEAD_WORKSPACE] = host.HEAD_WORDS, host.SLOTS + 1 + len(tensors)
    address = program.buffer_info()[0]
    native.measure(address, ctypes.addressof(functions), ctypes.addressof((WORD * 1)()))
    scratch = (ctypes.c_uint8 * (program[host.HEAD_SCRATCH] + 64))()
    block = array("q", bytes(8 * (host.SLOTS + 1 + len(tensors))))
    block[host.FUNCTIONS], block[host.PROGRAM], block[host.THREADS] = ctypes.addressof(functions), address, 1
    block[host.SCRATCH] = align(ctypes.addressof(scratch))
    for slot, tensor in enumerate(tensors, 1):
        block[host.SLOTS + slot] = tensor.data_ptr()
    alive = functions, program, scratch, tensors
    return lambda: (native.run_plan(block.buffer_info()[0]), alive)


def machine_key(machine: Machine) -> str:
    """What a measurement of this machine depends on, beside what was measured."""
    from importlib import metadata  # which brings `email` along: a loader of deployed files needs neither
    library = metadata.version("torch") if importlib.util.find_spec("torch") is not None else "none"
    return f"{model()}, {os.cpu_count()} cores, {machine.key} torch {library}"


def autotune_of(native: NativeRoutines, mode: str) -> Autotune:
    """What is measured is kept where the object code of `native` is."""
    return Autotune(native, _measurements(native), mode)


@lru_cache(maxsize=8)
def _measurements(native: NativeRoutines) -> Measurements:
    return Measurements(native.cache, machine_key(native.machine))
