"""Names and sizes of the GEMV microkernels (backend/cpu/microkernels/gemv.py)."""
from __future__ import annotations

from anyshape.backend.cpu.machine import low_precision

PLACES = 8  # vectors at most
COUNTS = {"dot": (1, 2, 4, 8), "spread": (1, 2, 4, 8)}  # the routines' numbers of vectors
DTYPES = ("f32", "f64", *low_precision.DTYPES)
PANELS = (1, 2, 4, 8)  # numbers of vectors of the routines over panels


def routine(way: str, dtype: str, count: int, wide: bool = False) -> str:
    """The name of the routine that does `count` vectors: the least that is enough."""
    return f"{way}_{dtype}_{min(number for number in COUNTS[way] if number >= count)}{'_wide' * wide}"


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    narrow = [f"{way}_{dtype}_{count}" for dtype in DTYPES for way in COUNTS for count in COUNTS[way]]
    return [*narrow, *(f"{name}_wide" for name in narrow if name.split("_")[1] in low_precision.DTYPES),
            *(over_panels(dtype, count) for dtype in ("f32", low_precision.BYTES) for count in PANELS)]


def over_panels(dtype: str, count: int) -> str:
    """The name of the routine over panels that does `count` vectors."""
    return f"panels_{dtype}_{min(number for number in PANELS if number >= count)}"
