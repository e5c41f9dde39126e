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

from anyshape import torch_compat as compat

DROPOUT, ATTENTION = (f"torch.ops.aten.{name}.default" for name in (
    "dropout", "_scaled_dot_product_flash_attention_for_cpu"))


@contextlib.contextmanager
def nothing_drawn_in_vain() -> Iterator[None]:
    """Inside, `aten.dropout` without training, or with a probability of 0, gives its operand, and the CPU's fused
    attention is as any other operator; as far as this torch lets it be set. Other threads that compile wait, for this
    is every thread's."""
    with compat.compile_lock(), _attention_drawing_nothing():
        yield from _dropout_handing_on()


@contextlib.contextmanager
def _attention_drawing_nothing() -> Iterator[None]:
    if not compat.has(f"{ATTENTION}._tags", f"{ATTENTION}._nondeterministic_seeded"):
        yield
        return
    attention = compat.need(ATTENTION)
    tags, is_random = attention._tags, attention._nondeterministic_seeded
    attention._tags = [tag for tag in tags if tag != torch.Tag.nondeterministic_seeded]
    attention._nondeterministic_seeded = False
    try:
        yield
    finally:
        attention._tags, attention._nondeterministic_seeded = tags, is_random


def _dropout_handing_on() -> Iterator[None]:
    found, chosen = compat.get(f"{DROPOUT}.py_kernels"), compat.get(f"{DROPOUT}._dispatch_cache")
    if found is None or chosen is None:
        yield
        return
    kernels = dict(found)
    found.update({key: _handing_on(kernel) for key, kernel in kernels.items()})
    chosen.clear()
    try:
        yield
    finally:
        found.clear()
        found.update(kernels)
        chosen.clear()


def _handing_on(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
        return kernel(x, p, train) if train and p != 0 else x

    return dropout
