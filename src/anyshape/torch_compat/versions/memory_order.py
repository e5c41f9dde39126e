"""Memory order of traced tensors: which dim lies outermost, which innermost, as far as formulas say it without a guard.

    [N, C, H, W] with channels last   strides (C * H * W, 1, C * W, C)   order (0, 2, 3, 1)
"""
from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from anyshape.torch_compat import get

_MAX = "torch.utils._sympy.functions.Max"
_MOST = 6  # dims of which all orders are tried


def memory_order(x: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of a traced tensor as they lie densely in memory, the outermost first; None where that is not known.
    With sizes of 1 there may be several; the first one of these in alphabetical order."""
    if x.dim() > _MOST:
        return tuple(range(x.dim())) if _lies_in(x, tuple(range(x.dim()))) else None
    return next((order for order in itertools.permutations(range(x.dim())) if _lies_in(x, order)), None)


def drawn_in_memory_order(like: torch.Tensor, share: float, generator: Any = None) -> torch.Tensor | None:
    """Bools that `bernoulli_` draws, in the order in which the elements of a traced tensor lie in memory, which is
    where the result's lie; None where that is not known. `aten.bernoulli.p` draws in the order of indices."""
    order = memory_order(like)
    if order is None:
        return None
    blank = torch.empty([like.shape[d] for d in order], dtype=torch.bool, device=like.device)
    drawn = torch.ops.aten.bernoulli.p(blank, share, generator=generator)
    return drawn.permute([order.index(d) for d in range(len(order))]) if list(order) != sorted(order) else drawn


def channels_last_format(x: torch.Tensor) -> torch.memory_format | None:
    """The memory format of a traced tensor [N, C, *S] of 4 or 5 dims that is known to lie as [N, *S, C] and not as
    [N, C, *S], None for others."""
    natural = tuple(range(x.dim()))
    if x.dim() not in (4, 5) or _lies_in(x, natural) or not _lies_in(x, (0, *natural[2:], 1)):
        return None
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _lies_in(x: torch.Tensor, order: tuple[int, ...]) -> bool:
    """Whether the dims of a traced tensor are known to lie densely in this order; dims of size 1 do not count."""
    step: Any = 1
    for dim in reversed(order):
        size = x.shape[dim]
        if type(size) is int and size == 1:
            continue
        if not _same(x.stride(dim), step):
            return False
        step = step * size
    return True


def _same(one: Any, other: Any) -> bool:
    if type(one) is int and type(other) is int:
        return one == other
    formulas = [_without_floor(number) for number in (one, other)]
    return bool(formulas[0] == formulas[1])


def _without_floor(number: Any) -> Any:
    """Of a size, its formula with s in place of max(1, s), which torch writes so that strides of nothing are not 0."""
    maximum = get(_MAX)
    formula = number.node.expr if isinstance(number, torch.SymInt) else number
    if isinstance(formula, int) or maximum is None:
        return formula
    return formula.replace(lambda e: isinstance(e, maximum) and 1 in e.args,
                           lambda e: math.prod(one for one in e.args if one != 1) if len(e.args) == 2 else e).expand()
