"""Side effects of operators, random draws above all: which have some. What draws nothing is not taken for random in a
trace, and what draws stays in it.

A dropout that drops nothing hands on its operand, as in eager PyTorch. torch's decomposition of it, which traces run,
gives a copy. That is another program where something is written in place afterwards:

    b = dropout(a, 0.1, training=False)
    b += 1  # eager PyTorch: a has changed too

The CPU's fused attention has no dropout (it refuses one), and torch marks it as random all the same. Inside of
`torch.utils.checkpoint` torch's partition would then save and set the state of the generator about it, and a graph with
its own backward be refused.

A number that is drawn and not used moves the generator all the same. torch's dead code elimination takes it out, unless
Inductor is asked for the random numbers of eager PyTorch.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from anyshape import torch_compat as compat
from anyshape.torch_compat.versions.python_kernels import python_kernels

ATTENTION = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
# namespaces of operators of which we know what they do
OWN = frozenset(("aten", "prims", "anyshape", "anyshape_route"))
_EFFECTS = frozenset(("aten._assert_async.default", "aten._assert_async.msg", "aten._print.default"))


def has_effect(target: Any) -> bool:
    """True for operators that do more than give their results: they draw random numbers, check or print, or are not
    PyTorch's own or made of others, so that this is not known."""
    if not isinstance(target, compat.OpOverload):
        return isinstance(target, compat.need("torch._ops.HigherOrderOperator"))
    random = torch.Tag.nondeterministic_seeded in target.tags and f"torch.ops.{target}" != ATTENTION
    return random or str(target) in _EFFECTS or target.namespace not in OWN


@contextlib.contextmanager
def nothing_drawn_in_vain() -> Iterator[None]:
    """Inside, `aten.dropout` without training, or with a probability of 0, gives its operand, and the CPU's fused
    attention is as any other operator; draws whose results nobody reads stay; as far as this torch lets it be set.
    Other threads that compile wait, for this is every thread's."""
    with compat.compile_lock(), _attention_drawing_nothing(), _draws_staying(), \
            python_kernels({torch.ops.aten.dropout.default: _handing_on}):
        yield


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


@contextlib.contextmanager
def _draws_staying() -> Iterator[None]:
    config = compat.get("torch._inductor.config")
    with contextlib.nullcontext() if config is None else config.patch(fallback_random=True):
        yield


def _handing_on(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
        return kernel(x, p, train) if train and p != 0 else x

    return dropout
