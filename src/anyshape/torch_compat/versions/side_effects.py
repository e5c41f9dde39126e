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

`aten._linalg_check_errors`, which raises where `linalg.inv` and others met a singular matrix, has no result. Before
2.13 torch's dead code elimination takes it out, too.
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
OWN = frozenset(("aten", "prims", "anyshape", "anyshape_route", "anyshape_recurrent"))
EFFECTS = tuple(f"torch._higher_order_ops.effects.{name}" for name in (
    "_get_effect", "_register_effectful_op", "_EffectType.ORDERED"))
_CHECK = "aten::_linalg_check_errors"
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
    attention is as any other operator; draws whose results nobody reads stay, and so do checks; as far as this torch
    lets it be set. Other threads that compile wait, for this is every thread's."""
    with compat.compile_lock(), _attention_drawing_nothing(), _draws_staying(), _checks_staying(), \
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


@contextlib.contextmanager
def _checks_staying() -> Iterator[None]:
    effect_of, register, ordered = map(compat.get, EFFECTS)
    if effect_of is None or register is None or ordered is None or effect_of(_CHECK) is not None:
        yield
        return
    registered = register(_CHECK, ordered)
    try:
        yield
    finally:
        registered.destroy()


def _handing_on(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
        return kernel(x, p, train) if train and p != 0 else x

    return dropout
