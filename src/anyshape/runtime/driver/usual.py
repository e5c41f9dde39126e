"""The driver of programs that PyTorch calls, imported when the first of them is made: the loader of deployed files does
without torch."""
from __future__ import annotations

from anyshape.runtime.driver.interface import HostDriver


def usual_driver() -> HostDriver:
    """PyTorch's."""
    from anyshape.runtime.driver.torch_driver import DRIVER
    return DRIVER
