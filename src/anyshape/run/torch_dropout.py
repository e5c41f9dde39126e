"""A dropout that drops nothing hands on its operand in a trace, as it does in eager PyTorch.

torch's decomposition of it, which traces run, gives a copy. That is another program where something is written in place
afterwards:

    b = dropout(a, 0.1, training=False)
    b += 1  # eager PyTorch: a has changed too
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def dropouts_hand_on() -> Iterator[None]:
    """Inside, `aten.dropout` without training, or with a probability of 0, gives its operand. Callers hold the lock of
    torch's compilers, for this is every thread's."""
    op = torch.ops.aten.dropout.default
    before = dict(op.py_kernels)
    op.py_kernels.update({key: _handing_on(kernel) for key, kernel in before.items()})
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        op.py_kernels.clear()
        op.py_kernels.update(before)
        op._dispatch_cache.clear()


def _handing_on(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
        return kernel(x, p, train) if train and p != 0 else x

    return dropout
