"""When a result counts as equal to eager's: by its dtype's tolerance, or by being as near to the float64 result."""
from __future__ import annotations

from typing import Any

import torch

RELATIVE, ABSOLUTE = 1e-4, 1e-5  # float32
HALF_RELATIVE = 2.0**-8  # bfloat16: one unit in the last place


def differs(found: Any, wanted: Any) -> str:
    """Why two results are not equal within the tolerance of their dtype; empty when they are."""
    if not isinstance(wanted, torch.Tensor) or not isinstance(found, torch.Tensor):
        try:
            torch.testing.assert_close(found, wanted, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)
        except (AssertionError, ValueError, TypeError) as error:
            return str(error).split("\n")[0]
        return ""
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return f"{found.dtype}{list(found.shape)} is not {wanted.dtype}{list(wanted.shape)}"
    if wanted.layout != torch.strided:
        return "" if torch.equal(found.to_dense(), wanted.to_dense()) else "sparse values differ"
    half = wanted.dtype in (torch.bfloat16, torch.float16)
    tight = wanted.dtype in (torch.float64, torch.complex128)
    relative, absolute = (1.6e-2, 1e-2) if half else (1e-7, 1e-9) if tight else (RELATIVE, ABSOLUTE)
    try:
        torch.testing.assert_close(found, wanted, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError as error:
        lines = [line for line in str(error).split("\n") if line.strip()]
        return " ".join(lines[:3])[:200]
    return ""


def no_worse(found: Any, wanted: Any, exact: Any) -> bool:
    """True when `found` is as near to the float64 result as eager's is: the sample is ill-conditioned, or rounding to
    half precision is what differs."""
    if not isinstance(found, torch.Tensor) or not found.dtype.is_floating_point or not isinstance(exact, torch.Tensor):
        return False
    if found.shape != wanted.shape or found.dtype != wanted.dtype or exact.shape != wanted.shape:
        return False
    finite = exact.isfinite() & wanted.isfinite()
    if not torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return False
    if not finite.any():
        return True
    own = (found.double() - exact)[finite].abs().max()
    allowed = (wanted.double() - exact)[finite].abs().max()
    unit = HALF_RELATIVE if found.dtype == torch.bfloat16 else RELATIVE * 1e-2
    return bool(own <= 1.5 * allowed + unit * exact[finite].abs().max())
