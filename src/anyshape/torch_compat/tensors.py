"""Tensors as plain memory: copies of those whose numbers are not what lies in their memory."""
from __future__ import annotations

import torch

from anyshape.torch_compat import is_zeros


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its numbers are what lies in its memory, else a copy of which that holds."""
    if tensor.is_neg() or tensor.is_conj():
        return tensor.detach().resolve_conj().resolve_neg()
    if is_zeros(tensor):
        return tensor.detach().clone()
    return tensor


def plain_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor in memory: sparse ones become dense, subclasses that only add to a tensor lose what
    they add. Subclasses that are made of other tensors stay: PyTorch says what it does with those."""
    if type(gradient) is not torch.Tensor and type(gradient).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        gradient = gradient.as_subclass(torch.Tensor)
    if gradient.layout is not torch.strided and not gradient.is_nested:
        gradient = gradient.to_dense()
    return in_memory(gradient) if type(gradient) is torch.Tensor else gradient
