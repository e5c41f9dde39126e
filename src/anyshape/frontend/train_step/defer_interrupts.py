"""Deferred interrupts: Ctrl-C waits while weights are changed in place, so that a step is made whole, or not at all,
and while torch traces: its C++ drops Ctrl-C in some places, and ends the process in others."""
from __future__ import annotations

import signal
import threading
from typing import Any


class DeferInterrupts:
    """Inside, an interrupt waits for the end. It comes in the main thread only; elsewhere this does nothing.

    Args:
        once: a second one does not wait.
    """

    def __init__(self, once: bool = False) -> None:
        self.once = once

    def __enter__(self) -> None:
        self.seen: list[Any] = []
        is_main = threading.current_thread() is threading.main_thread()
        self.before = signal.getsignal(signal.SIGINT) if is_main else None
        if callable(self.before):
            signal.signal(signal.SIGINT, self._seen)

    def _seen(self, number: int, frame: Any) -> None:
        self.seen.append((number, frame))
        if self.once and len(self.seen) > 1:
            self.seen.clear()
            self.before(number, frame)  # type: ignore[operator,misc]

    def __exit__(self, *_: Any) -> None:
        if callable(self.before):
            signal.signal(signal.SIGINT, self.before)
            if self.seen:
                self.before(*self.seen[0])
