"""Python kernels of operators (`py_impl`), which PyTorch runs in traces in place of the operators, where those compute
something else than eager PyTorch does: inside of `eager_operators` they are set aside, or ours run instead.

    softshrink    torch's is differentiated step by step: 0 * inf is NaN where the operator's gradient is 0
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from anyshape import torch_compat as compat

aten = torch.ops.aten
Kernel = Callable[..., Any]


def _softshrink(x: torch.Tensor, lambd: Any = 0.5) -> torch.Tensor:
    """What lies within the limits has no gradient, whatever comes from behind."""
    most = torch.finfo(x.dtype).max
    check = compat.need("torch._check")
    check(0 <= lambd <= most,
          lambda: f"lambda must be in range [0, {most}] for input dtype {x.dtype}, but found {lambd}")
    y = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # where the limit is not rounded
    return torch.where(y.abs() > lambd, y - torch.sign(y).detach() * lambd, y.detach() * 0).to(x.dtype)


# operator -> the kernel in place of torch's
_OURS: dict[Any, Callable[[Kernel], Kernel]] = {
    aten.softshrink.default: lambda torchs: _softshrink,
}


@contextlib.contextmanager
def eager_operators() -> Iterator[None]:
    """See the head of this file. Other threads that compile wait, for this is every thread's."""
    with compat.compile_lock(), python_kernels(_OURS):
        yield


@contextlib.contextmanager
def python_kernels(changes: Mapping[Any, Callable[[Kernel], Kernel]]) -> Iterator[None]:
    """Inside, the Python kernels of each operator are what its function makes of them, if this torch has such."""
    found = [(op, *compat.python_kernels(op)) for op in changes] if compat.has(*compat.PYTHON_KERNELS) else []
    before = [(kernels, chosen, dict(kernels)) for _, kernels, chosen in found]
    for op, kernels, chosen in found:
        kernels.update({key: changes[op](kernel) for key, kernel in kernels.items()})
        chosen.clear()
    try:
        yield
    finally:
        for kernels, chosen, torchs in before:
            kernels.clear()
            kernels.update(torchs)
            chosen.clear()
