"""Names and sizes of the GEMM microkernels (backend/cpu/microkernels/gemm.py)."""
from __future__ import annotations

from anyshape.backend.cpu.machine.low_precision import BYTES, SIDE, tiles
from anyshape.backend.cpu.machine.target import Machine

DTYPES = ("bf16", "f16", "f32", BYTES)
LINE = 64  # bytes of a line of the caches
HEIGHTS = 3  # numbers of rows that a panel may have: 3, 2, 1 times `grain`
VECTORS = (1, 2)  # vectors of columns that a panel may have
TILES = HEIGHTS * len(VECTORS)
# routines of a dtype, in the order of the host's table of functions: tiles by height, then by vectors; then:
TURN, ALONG, ANY = range(TILES, TILES + 3)
WIDE = 3  # later in the table: the same for elements in f32, which are rounded all the same; or for those of 8 bits
ROWS = 6  # later: the same for panels of rows, where whole tiles are multiplied (backend/cpu/microkernels/amx.py)
FINISH, FINISH_WIDE, BEGIN, END = range(TILES + 2 * ROWS, TILES + 2 * ROWS + 4)
ROUTINES = END + 1


def grain(target: Machine, dtype: str) -> int:
    """Rows of the smallest panel of rows. The largest, of three times as many, fills the registers with sums. As many
    as a vector has lanes: those of whole tiles."""
    return SIDE if tiles(target, dtype) else {64: 4, 32: 2}.get(target.vector_bytes, 1)


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [name for dtype in DTYPES for name in
            (*(f"tile_{dtype}_{height}_{vectors}" for height in range(HEIGHTS) for vectors in VECTORS),
             *(f"{way}_{dtype}{lanes}{width}" for lanes in ("", "_rows") for width in ("", "_wide")
               for way in ("turn", "along", "any")),
             f"finish_{dtype}", f"finish_{dtype}_wide", f"begin_{dtype}", f"end_{dtype}")]
