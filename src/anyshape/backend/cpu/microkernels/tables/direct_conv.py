"""Names and sizes of the microkernels of direct convolution (backend/cpu/microkernels/direct_conv.py)."""
from __future__ import annotations

from anyshape.backend.cpu.machine.target import Machine

HEIGHTS = 3  # numbers of channels that a panel may have: 3, 2, 1 times `grain`
VECTORS = (1, 2)  # vectors of positions
DTYPES = ("f32",)
PLACE = "conv_place"
TILES = [f"conv_f32_{height}_{vectors}" for height in range(HEIGHTS) for vectors in VECTORS]


def grain(target: Machine) -> int:
    """Channels of the smallest panel. The largest, of three times as many, fills the registers with sums."""
    return {64: 4, 32: 2}.get(target.vector_bytes, 1)


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [*TILES, PLACE]
