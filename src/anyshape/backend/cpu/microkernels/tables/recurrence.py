"""Names and sizes of the microkernels of LSTM, GRU and RNN (backend/cpu/microkernels/recurrence.py)."""
from __future__ import annotations

from anyshape.backend.cpu.machine.target import Machine

FAMILY = "recurrence"  # what stands for the dtype of its products: programs without a recurrence do not compile it
BYTES_FAMILY = "recurrence_bytes"
HEIGHTS = ("many", "one")  # rows at a time
CELLS = ("lstm", "gru", "tanh", "relu", "reset", "new")
FIRST = {"gru_before": "reset"}  # the first routine of a cell that is not one of its name


def height(target: Machine) -> int:
    """Rows at a time of the routines for many: their sums fill half of the registers."""
    return 4 if target.vector_bytes == 64 else 2


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    names = [f"cell_{cell}_{rows}" for cell in (*CELLS, "bytes") for rows in HEIGHTS]
    return [*names, "quantize"]
