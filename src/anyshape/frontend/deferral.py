"""Calls that run as PyTorch for now: sizes that need one more program, until waiting for it is worth its while.

A general program that is there already serves all usual sizes. Where a call's sizes of 0 or 1 need another one, tracing
costs seconds, and such a call may take milliseconds. So these calls run as PyTorch does until they have taken as long
as a trace takes: whatever comes, no more than twice the time of the better choice is spent (the ski rental problem).
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from anyshape.torch_compat import tree as pytree

FORWARD_AND_BACKWARD = 3  # a backward takes about twice its forward's time, and is not seen from here
SMALL = 2
PLAIN = (bool, int, float, str, type(None))


class Deferred(Exception):
    """This call runs as PyTorch does, for `reason`; nothing of it has run yet. `pattern`: its small sizes, if they are
    why."""

    def __init__(self, pattern: Any, reason: str) -> None:
        super().__init__()
        self.pattern = pattern
        self.reason = reason


@dataclass(slots=True)
class Waiting:
    """Calls of one pattern of small sizes that have run as PyTorch.

    Args:
        reason: why no program takes them, in words.
        calls: how many.
        seconds: what they took.
    """
    reason: str
    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Deferral:
    """The account of one compiled object.

    Args:
        cost: seconds that its longest trace took; 0 before the first.
        waiting: by pattern of small sizes.
        patterns: by what can be seen of a call at once, the pattern for which such a call was deferred.
    """
    cost: float = 0.0
    waiting: dict[Any, Waiting] = field(default_factory=dict)
    patterns: dict[Any, Any] = field(default_factory=dict)

    def known(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The pattern for which a call like this one was deferred and may be again, or None: asking Dynamo each time
        takes longer than many a call."""
        pattern = self.patterns.get(_seen(arguments, keywords))
        waiting = self.waiting.get(pattern)
        return pattern if waiting is not None and waiting.seconds < self.cost else None

    def remember(self, arguments: tuple[Any, ...], keywords: dict[str, Any], pattern: Any) -> None:
        """A call with these arguments is deferred for `pattern`."""
        self.patterns[_seen(arguments, keywords)] = pattern

    def holds_back(self, pattern: Any, reason: str) -> bool:
        """Whether a call of this pattern shall run as PyTorch rather than wait for a trace."""
        if not self.cost:
            return False
        known = self.waiting.setdefault(pattern, Waiting(reason))
        if known.seconds >= self.cost:
            self.waiting.pop(pattern, None)
            return False
        return True

    def ran(self, pattern: Any, result: Any, seconds: float) -> None:
        """Counts a call that has run as PyTorch."""
        trains = any(isinstance(value, torch.Tensor) and value.requires_grad for value in pytree.tree_leaves(result))
        known = self.waiting.get(pattern)
        if known is not None:  # else another thread has begun to trace for it
            known.calls += 1
            known.seconds += seconds * (FORWARD_AND_BACKWARD if trains else 1)

    def told(self) -> tuple[str, ...]:
        """What waits, in words."""
        return tuple(f"{one.reason}: {one.calls} calls ran as PyTorch and took {one.seconds:.2g} of the "
                     f"{self.cost:.2g} s that a trace takes; then it is compiled"
                     for one in list(self.waiting.values()) if one.calls)


def small_sizes(values: Any) -> tuple[tuple[int, ...], ...] | None:
    """The sizes of the tensors among `values`, those of 2 and more as 2; None when there is no smaller one."""
    found = tuple(_sizes(value) for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
    return found if any(size < SMALL for sizes in found for size in sizes) else None


def _sizes(value: torch.Tensor) -> tuple[int, ...]:
    return () if value.is_nested else tuple(min(size, SMALL) for size in value.shape)


def _seen(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    found: list[Any] = [torch.is_grad_enabled(), *keywords]
    for value in pytree.tree_leaves((arguments, keywords)):
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.requires_grad, *_sizes(value)))
        else:
            found.append(value if isinstance(value, PLAIN) else type(value))
    return tuple(found)
