"""Kernels of PyTorch's own operators that a user has replaced: `torch.library.Library("aten", "IMPL")`. Eager PyTorch
calls them through its dispatcher, compiled code has kernels of its own."""
from __future__ import annotations

from collections.abc import Collection

from anyshape import torch_compat as compat

# "aten/relu/CPU" for each kernel that Python has registered; torch adds and takes away in place
registered: Collection[str] = compat.get("torch.library._impls") or ()
_KEYS = frozenset(("CPU", "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd"))
_OF_TORCH = "_foreach_"  # of which torch 2.13 registers one itself
count = -1  # how many there were when this was asked last
last: tuple[str, ...] = ()  # and what was the answer


def replaced_kernels() -> tuple[str, ...]:
    """The operators, such as "aten::relu (CPU)"."""
    global count, last
    if count != len(registered):
        parts = (name.split("/") for name in sorted(registered) if name.startswith("aten/"))
        last = tuple(f"aten::{operator} ({key})" for _, operator, key in parts
                     if key in _KEYS and not operator.startswith(_OF_TORCH))
        count = len(registered)
    return last
