"""Probes of operators that have no rule: one row is changed, and the rows that change are looked at.

A probe refutes that rows are apart; it proves nothing, since another input may show what this one does not.
"""
from __future__ import annotations

import torch
from torch import Tensor

from anyshape.route.flow.call import OperatorCall, put

LARGEST = 1 << 20  # elements of a probe's operands
ROWS = 8  # rows that are changed, one after the other


def seems_apart(call: OperatorCall) -> bool | None:
    """False: a change of one row reaches another. True: none of these changes does. None: it cannot be asked."""
    values = call.values()
    counts = {one.shape[0] for one in values if not one.constant and one.rank}
    if len(counts) != 1 or sum(torch.Size(one.shape).numel() for one in values) > LARGEST \
            or not hasattr(call.op, "overloadpacket"):
        return None
    (count,) = counts
    if any(not shape or shape[0] != count for shape in call.shapes) or count < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    drawn = [_draw(one.shape, one.dtype, generator) if one.known is None else one.known for one in values]
    moved = [not one.constant and one.rank > 0 for one in values]
    try:
        before = _results(call, drawn)
        for row in range(min(count, ROWS)):
            changed = [_changed(one, row, generator) if move else one for one, move in zip(drawn, moved, strict=True)]
            for one, other in zip(before, _results(call, changed), strict=True):
                same = ((one == other) | ((one != one) & (other != other))).reshape(count, -1).all(1)
                same[row] = True
                if not bool(same.all()):
                    return False
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
        return None
    return True


def _results(call: OperatorCall, drawn: list[Tensor]) -> list[Tensor]:
    rest = iter([one.clone() for one in drawn])
    args = put(call.args, lambda _: next(rest))
    with torch.no_grad():
        found = call.op(*args, **put(call.kwargs, lambda _: next(rest)))
    return [found] if isinstance(found, Tensor) else list(found)


def _draw(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _changed(drawn: Tensor, row: int, generator: torch.Generator) -> Tensor:
    """One row drawn anew, far away."""
    found = drawn.clone()
    fresh = _draw(tuple(found[row].shape), found.dtype, generator)
    found[row] = fresh * 100 + 7 if found.dtype.is_floating_point else 1 - found[row].to(torch.int64).clamp(0, 1)
    return found
