"""Kernels of PyTorch's own operators that a user has replaced: `torch.library.Library("aten", "IMPL")`. Eager PyTorch
calls them through its dispatcher, compiled code has kernels of its own."""
from __future__ import annotations

from collections.abc import Collection

from anyshape import torch_compat as compat

# "aten/relu/CPU" for each kernel that Python has registered; torch adds and takes away in place
_registered: Collection[str] = compat.get("torch.library._impls") or ()
_KEYS = frozenset(("CPU", "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd"))
_OF_TORCH = "_foreach_"  # of which torch 2.13 registers one itself
_seen = -1  # how many there were when this was asked last
_found: tuple[str, ...] = ()


def replaced_kernels() -> tuple[str, ...]:
    """The operators, such as "aten::relu (CPU)"; asked at every call."""
    global _seen, _found
    count = len(_registered)
    if count != _seen:
        parts = (name.split("/") for name in sorted(_registered) if name.startswith("aten/"))
        _found = tuple(f"aten::{operator} ({key})" for _, operator, key in parts
                       if key in _KEYS and not operator.startswith(_OF_TORCH))
        _seen = count
    return _found
