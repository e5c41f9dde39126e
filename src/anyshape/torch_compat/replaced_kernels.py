"""Kernels of PyTorch's own operators that a user has replaced: `torch.library.Library("aten", "IMPL")`. Eager PyTorch
calls them through its dispatcher, compiled code has kernels of its own."""
from __future__ import annotations

import re
from collections.abc import Collection

from anyshape import torch_compat as compat

# "aten/relu/CPU" for each kernel that Python has registered; torch adds and takes away in place
registered: Collection[str] = compat.get("torch.library._impls") or ()
_KEYS = frozenset(("CPU", "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd"))
# torch 2.13 registers kernels itself, such as those of Triton where it is installed, through operators of a namespace
# of their own: "_native/bmm_triton_0/CUDA" beside "aten/bmm/CUDA"
_OF_TORCH = re.compile(r"_native/(\w+)_[a-z]+_\d+/(\w+)")
count = -1  # how many there were when this was asked last
last: tuple[str, ...] = ()  # and what was the answer


def replaced_kernels() -> tuple[str, ...]:
    """The operators, such as "aten::relu (CPU)"."""
    global count, last
    if count != len(registered):
        own = {found.groups() for found in map(_OF_TORCH.fullmatch, registered) if found}
        parts = (name.split("/") for name in sorted(registered) if name.startswith("aten/"))
        last = tuple(f"aten::{operator} ({key})" for _, operator, key in parts
                     if key in _KEYS and (operator.replace(".", "_"), key) not in own)
        count = len(registered)
    return last
