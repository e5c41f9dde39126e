"""Names and sizes of the microkernels of softmax over rows, in attention (backend/cpu/microkernels/softmax_rows.py)."""
from __future__ import annotations

DTYPES = ("f32", "f64")
_WEIGH = ("scores", "step", "rows", "columns", "limit", "grow", "scale", "mask", "mask_step", "sums", "sums_step")
ARGUMENTS = {"weigh": (*_WEIGH, "factors"), "unweigh": (*_WEIGH, "gradients", "products", "products_step")}


def routines() -> list[str]:
    """The names of all routines, in the order of the host's table of functions."""
    return [f"{way}_{dtype}" for dtype in DTYPES for way in ARGUMENTS]
