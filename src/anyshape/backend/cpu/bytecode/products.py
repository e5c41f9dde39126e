"""Products of matrices: by dtype and size, which are done by our routines, which by the library (BLAS), and which by
PyTorch; entries of the routines. Their words: backend/cpu/routines/encoding/."""
from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from anyshape.backend.cpu.bytecode import format as host
from anyshape.backend.cpu.machine.blas import BlasRoutines
from anyshape.backend.cpu.machine.low_precision import BYTES, dtypes, tiles
from anyshape.backend.cpu.machine.target import Machine
from anyshape.backend.cpu.microkernels.tables import gemm, gemv

Shape = tuple[int, ...]

SMALL_MATRIX = 1 << 20  # multiply-adds below which many products in one call are quicker than one by one
# dtype -> products of matrices, of many matrices, struct code of a scalar
LIBRARY = {"f32": (host.SGEMM, host.SGEMM_BATCH, "f"), "f64": (host.DGEMM, host.DGEMM_BATCH, "d")}
PACKED = {dtype: host.PACKED + gemm.ROUTINES * index for index, dtype in enumerate(gemm.DTYPES)}
THIN = {name: host.THIN + index for index, name in enumerate(gemv.routines())}
# of a product by packed panels: bytes of a thread's scratch at most, most of it for rows, which stay in the second
# cache; words along k in a block; in half precision, up to how many words there is one block; with several, words in
# each, and the columns whose sums are kept
PANELS, DEEP, WHOLE, DEEP_HALF, SUMS = 768 << 10, 256, 704, 384, 256
TILE_PANELS = 1536 << 10  # the same on processors that multiply whole tiles, whose second caches hold 2 megabytes
# features of processors that multiply whole tiles at once, several times faster than vectors: where our routines do not
# (backend/cpu/microkernels/amx.py), PyTorch's do attention, and products too unless ours were measured to be faster
TILE_UNITS = {"bf16": "amx-bf16", "f16": "amx-fp16"}
# Products that our routines and the library's can do, by size; which one does them on this machine:
# backend/cpu/autotune.py. FULL and FEW: of f32, from so many rows, columns, and terms of a sum on, few up to so many
# rows; MANY: small ones that are not in the caches, for the library does not fetch what it needs next; THIN_ONES: few
# vectors; a dtype: all of it
FULL, FEW, MANY, THIN_ONES, ATTENTION = "f32", "few rows", "small matrices", "vectors", "attention"
OUR_ROWS, OUR_COLUMNS, OUR_INNER, FEW_ROWS = 12, 64, 128, 32
MANY_SIDE, MANY_INNER, MANY_BYTES = 24, 32, 2 << 20


class Products(Protocol):
    """Which products our routines do on a machine, and which the library's (backend/cpu/autotune.py). Hashable."""

    def __hash__(self) -> int: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def blas(self) -> BlasRoutines: ...

    def ours(self, kind: str) -> bool:
        """Whether our routines do those of a kind."""


class Fixed(NamedTuple):
    """The same answer for all products."""

    machine: Machine
    own: bool
    blas: BlasRoutines = BlasRoutines()

    def ours(self, kind: str) -> bool:
        return self.own


def at_slots(words: Sequence[int], marks: Iterable[int], number: int, places: Sequence[tuple[int, int]],
             windows: tuple[Any, ...]) -> list[int]:
    """Words that repeated layers share, as those of step `number`: at `marks`, the position of a window (-1: none)
    becomes its slot, and the word after it the bytes to its first element. places: (slot, bytes per element) of each
    window."""
    result = [*words]
    if result:
        result[2] = number
        for at in marks:
            window = words[at]
            if window >= 0:
                slot, item = places[window]
                result[at] = slot
                result[at + 1] = windows[window][2] * item
    return result


def native(dtype: str, machine: Machine, blas: BlasRoutines = BlasRoutines()) -> bool:
    """Whether the host's routines for this dtype suit the processor, by its features; `blas`: of the library."""
    if dtype in LIBRARY:
        return dtype == "f32" or blas.products
    return dtype in dtypes(machine) and (tiles(machine, dtype) or not machine.has(TILE_UNITS[dtype]))


def has(dtype: str, products: Products) -> bool:
    """Whether the host has a routine for products of this dtype, whichever is taken."""
    if dtype in LIBRARY:
        return dtype == "f32" or products.blas.products
    return dtype in (*dtypes(products.machine), BYTES)


def does(dtype: str, products: Products) -> bool:
    """Whether the host does products of this dtype."""
    return has(dtype, products) and (dtype in (*LIBRARY, BYTES) or products.ours(dtype))


def takes_any_strides(dtype: str, products: Products) -> bool:
    """Whether the host does products of this dtype whatever the strides of the operands."""
    return dtype != "f64" and does(dtype, products)


def may_pack_over(words: Sequence[int] | ctypes.Array[ctypes.c_int64], at: int) -> bool:
    """Whether the product whose words begin at `at` could pack its rows over themselves
    (backend/cpu/routines/packed_gemm_in_place.py), if nobody needs them later."""
    def has(field: str) -> int:
        return words[at + host.PackedProduct.index(field)]
    inner, lanes = has("k"), has("lanes")
    return (has("op") == host.PRODUCT and has("length") == host.MATMUL_DIMS
            and has("item") == host.F32 and has("bias.slot") < 0
            and has("a_item") == has("b_item") == has("c_item") == host.F32
            and has("batches") == 1 and has("n") > 1
            and 0 < inner <= host.OVER_INNER and inner % lanes == 0 and has("deep") <= DEEP
            and has("b_inner") == host.F32 and has("b_lane") == host.F32 * inner
            and has("b.slot") not in (has("a.slot"), has("c.slot")))


_NUMBER = {code: struct.Struct(f"<{code}").pack for code in "fd"}
_BITS = {"f": struct.Struct("<I").unpack, "d": struct.Struct("<q").unpack}
MOST_VECTORS = max(max(counts) for counts in gemv.COUNTS.values())


def bits(value: float, code: str) -> int:
    """The bits of a number as a float ("f") or a double ("d"), as a word of 64 bits with a sign."""
    return int(_BITS[code](_NUMBER[code](value))[0])
