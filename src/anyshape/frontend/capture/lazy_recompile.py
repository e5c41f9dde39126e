"""Deferred recompilation: calls whose sizes or numbers need one more program run as PyTorch until a trace is worth its
while.

A general program that is there already serves all usual sizes. Where a call needs another one (a size of 0 or 1 that
the code asks for; a number that the trace took as a constant, as the length of a list), tracing costs seconds, and such
a call may take milliseconds. So these calls run as PyTorch does until they have taken as long as a trace takes:
whatever comes, no more than twice the time of the better choice is spent (the ski rental problem). Calls are counted
together by what forces the program. Where each of them has another number, no program serves the next one: so each
trace for one cause must wait twice as long as the one before, and there are MOST at most. A call of another kind
(another dtype, another mode) is traced at once, KINDS times.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from anyshape.torch_compat import tree as pytree
from anyshape.torch_compat.versions.autocast import casts

FORWARD_AND_BACKWARD = 3  # a backward takes about twice its forward's time, and is not seen from here
SMALL = 2
MOST = 5  # traces for one cause
KINDS = 16  # traces of one frame for calls of other kinds, before these wait too
TOLD = 4  # calls for one cause that run as PyTorch before it is warned of
MOST_PATTERNS = 1024
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
    """Calls of one pattern that have run as PyTorch since the last trace for it.

    Args:
        reason: why no program takes them, in words.
        calls: how many.
        seconds: what they took.
        traces: how many were made for this pattern.
    """
    reason: str
    calls: int = 0
    seconds: float = 0.0
    traces: int = 0


@dataclass(slots=True)
class Deferral:
    """The account of one compiled object.

    Args:
        cost: seconds that its longest trace took; 0 before the first.
        waiting: by pattern: of small sizes, or a frame's code and what its programs took as a constant.
        patterns: by what can be seen of a call at once, the pattern for which such a call was deferred.
        kinds: per code object, how often it was traced for calls of another kind.
        warned: a warning was given.
    """
    cost: float = 0.0
    waiting: dict[Any, Waiting] = field(default_factory=dict)
    patterns: dict[Any, Any] = field(default_factory=dict)
    kinds: dict[Any, int] = field(default_factory=dict)
    warned: bool = False

    def known(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The pattern for which a call like this one was deferred and may be again, or None: asking Dynamo each time
        takes longer than many a call."""
        pattern = self.patterns.get(_seen(arguments, keywords))
        waiting = self.waiting.get(pattern)
        return pattern if waiting is not None and waiting.seconds < self._price(waiting) else None

    def remember(self, arguments: tuple[Any, ...], keywords: dict[str, Any], pattern: Any) -> None:
        """A call with these arguments is deferred for `pattern`."""
        if len(self.patterns) >= MOST_PATTERNS:
            self.patterns.clear()
        self.patterns[_seen(arguments, keywords)] = pattern

    def pattern_of(self, code: Any, cause: str) -> Any:
        """The pattern of a call that misses all programs of a frame by `cause`, or, where that is empty, for it is of
        another kind; None when it is traced at once."""
        if not cause:
            self.kinds[code] = self.kinds.get(code, 0) + 1
            if self.kinds[code] <= KINDS:
                return None
        return code, cause

    def holds_back(self, pattern: Any, reason: str) -> bool:
        """Whether a call of this pattern shall run as PyTorch rather than wait for a trace."""
        if not self.cost:
            return False
        known = self.waiting.setdefault(pattern, Waiting(reason))
        if known.seconds >= self._price(known):
            known.traces, known.calls, known.seconds = known.traces + 1, 0, 0.0
            return False
        return True

    def _price(self, waiting: Waiting) -> float:
        """Seconds that calls of a pattern must have taken before the next trace."""
        return self.cost * 2**waiting.traces if waiting.traces < MOST else float("inf")

    def ran(self, pattern: Any, result: Any, seconds: float) -> None:
        """Counts a call that has run as PyTorch."""
        trains = any(isinstance(value, torch.Tensor) and value.requires_grad for value in pytree.tree_leaves(result))
        known = self.waiting.get(pattern)
        if known is not None:  # else another thread has begun to trace for it
            known.calls += 1
            known.seconds += seconds * (FORWARD_AND_BACKWARD if trains else 1)

    def warning(self, pattern: Any) -> str:
        """What there is to say, once, of calls that keep coming with other numbers; empty for most calls."""
        known = self.waiting.get(pattern)
        if self.warned or known is None or known.calls < TOLD or not is_cause(pattern):
            return ""
        self.warned = True
        return self._words(known)

    def told(self) -> tuple[str, ...]:
        """What waits, in words."""
        return tuple(self._words(one) for one in list(self.waiting.values()) if one.calls)

    def _words(self, one: Waiting) -> str:
        said = f"{one.reason}: {one.calls} calls ran as PyTorch and took {one.seconds:.2g}"
        if one.traces >= MOST:
            return f"{said} s; {one.traces} programs were made for other numbers, and no more will be"
        more = f" (after {one.traces} other programs)" if one.traces else ""
        return f"{said} of the {self._price(one):.2g} s that they wait for a trace{more}; then it is compiled"


def is_cause(pattern: Any) -> bool:
    """Whether a pattern is one of `pattern_of`, not of small sizes."""
    return isinstance(pattern, tuple) and len(pattern) == 2 and isinstance(pattern[1], str)


def small_sizes(values: Any) -> tuple[tuple[int, ...], ...] | None:
    """The sizes of the tensors among `values`, those of 2 and more as 2; None when there is no smaller one."""
    found = tuple(_sizes(value) for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor))
    return found if any(size < SMALL for sizes in found for size in sizes) else None


def _sizes(value: torch.Tensor) -> tuple[int, ...]:
    return () if value.is_nested else tuple(min(size, SMALL) for size in value.shape)


def _seen(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, ...]:
    found: list[Any] = [torch.is_grad_enabled(), casts(), *keywords]
    for value in pytree.tree_leaves((arguments, keywords)):
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.requires_grad, *_sizes(value)))
        else:
            found.append(value if isinstance(value, PLAIN) else type(value))
    return tuple(found)
