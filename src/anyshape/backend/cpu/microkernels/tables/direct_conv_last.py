"""Names and sizes of direct convolution, channels last (backend/cpu/microkernels/direct_conv_last.py)."""
from __future__ import annotations

from anyshape.backend.cpu.microkernels.tables.direct_conv import HEIGHTS, VECTORS

# times `grain` positions at most, by vectors: registers hold the sums and a number of each position, for LLVM loads all
# of these first
HIGHEST = {1: 3, 2: 2}


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [f"conv_last_f32_{height}_{vectors}" for height in range(HEIGHTS) for vectors in VECTORS]
