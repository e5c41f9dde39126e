"""Materialisation: numbers that are to wait in memory in another dtype.

    half = anyshape.store(gradient, bfloat16)  -->  half = store(gradient | "bf16")

A cast is cheap, so kernels would rather read what it was made of and round again: that is what would wait then.
"""
from __future__ import annotations

import torch
from torch import Tensor

from anyshape.frontend.aten.table import Translator, translates
from anyshape.ir.graph import Value


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value`, of any shape, rounded to `dtype`, in memory of its own."""
    return torch.ops.anyshape.store(value, dtype)  # type: ignore[no-any-return]


@torch.library.custom_op("anyshape::store", mutates_args=())
def _store(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype, copy=True)


@_store.register_fake
def _(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(value, dtype=dtype)


@translates(torch.ops.anyshape.store.default)
def _(t: Translator, value: Value, dtype: torch.dtype) -> Value:
    return t.op("store", value, dtype=t.out.dtype)
