"""What draws no random numbers is not taken for random in a trace.

A dropout that drops nothing hands on its operand, as in eager PyTorch. torch's decomposition of it, which traces run,
gives a copy. That is another program where something is written in place afterwards:

    b = dropout(a, 0.1, training=False)
    b += 1  # eager PyTorch: a has changed too

The CPU's fused attention has no dropout (it refuses one), and torch marks it as random all the same. Inside of
`torch.utils.checkpoint` torch's partition would then save and set the state of the generator about it, and a graph with
its own backward be refused.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyshape.run.torch_kernels import python_kernels


@contextlib.contextmanager
def nothing_drawn_in_vain() -> Iterator[None]:
    """Inside, `aten.dropout` without training, or with a probability of 0, gives its operand, and the CPU's fused
    attention is as any other operator. Other threads that compile wait, for this is every thread's."""
    from torch._dynamo import convert_frame
    with convert_frame.compile_lock, python_kernels({torch.ops.aten.dropout.default: _handing_on}):
        yield from _set_and_restored()


def _set_and_restored() -> Iterator[None]:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    tags, is_random = attention._tags, attention._nondeterministic_seeded
    attention._tags = [tag for tag in tags if tag != torch.Tag.nondeterministic_seeded]
    attention._nondeterministic_seeded = False
    try:
        yield
    finally:
        attention._tags, attention._nondeterministic_seeded = tags, is_random


def _handing_on(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
        return kernel(x, p, train) if train and p != 0 else x

    return dropout
