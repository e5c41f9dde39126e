"""Low-precision instructions of the processor (bf16, f16, 8 bits; VNNI, AMX): which numbers it converts, which it
multiplies as pairs or fours in a lane, and which as whole tiles."""
from __future__ import annotations

from anyshape.backend.cpu.machine.target import Machine

DTYPES = ("bf16", "f16")
BYTES = "u8"  # stands for products of u8 by i8, in i32
SIDE = 16  # rows of a tile, words of one of its rows
TILE_BYTES = 64  # of a row of a tile
FEATURES = ("amx-tile", "amx-bf16", "avx512bf16")


def dtypes(target: Machine) -> tuple[str, ...]:
    """Those that the processor can convert."""
    return DTYPES if not target.triple.startswith(("x86", "i")) or target.has("f16c") else ("bf16",)


def pairs(target: Machine, dtype: str) -> bool:
    """Whether a word is a pair."""
    return dtype == "bf16" and target.vector_bytes == 64 and target.has("avx512bf16")


def per_word(target: Machine, dtype: str) -> int:
    """Elements in a word."""
    return 4 if dtype == BYTES else 2 if pairs(target, dtype) else 1


def tiles(target: Machine, dtype: str) -> bool:
    """Whether products of a dtype are of whole tiles."""
    return dtype == "bf16" and target.vector_bytes == TILE_BYTES and all(map(target.has, FEATURES))
