"""Names and sizes of the microkernels of Winograd convolution (backend/cpu/microkernels/winograd_conv.py)."""
from __future__ import annotations

from anyshape.backend.cpu.machine.target import Machine

MOST = 6  # channels of a block
BLOCK = "inputs channels weights sums far".split()
ARGUMENTS = {"winograd_weights": "weight channels target step far".split(),
             "winograd_input": "x line plane channels target".split(),
             "winograd_write": "sums outs biases result step line positions lines addend least flag".split(),
             **{f"winograd_{height}": BLOCK for height in range(1, MOST + 1)}}


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return list(ARGUMENTS)


def most(target: Machine) -> int:
    """Channels of the largest block, whose sums fill the registers."""
    return MOST if target.vector_bytes == 64 else MOST // 2
