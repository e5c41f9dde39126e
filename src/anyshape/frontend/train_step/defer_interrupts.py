"""Deferred interrupts: Ctrl-C waits while weights are changed in place, so that a step is made whole, or not at all."""
from __future__ import annotations

import signal
import threading
from typing import Any


class DeferInterrupts:
    """Inside, an interrupt waits for the end. It comes in the main thread only; elsewhere this does nothing."""

    def __enter__(self) -> None:
        self.seen: list[Any] = []
        is_main = threading.current_thread() is threading.main_thread()
        self.before = signal.getsignal(signal.SIGINT) if is_main else None
        if callable(self.before):
            signal.signal(signal.SIGINT, lambda number, frame: self.seen.append((number, frame)))

    def __exit__(self, *_: Any) -> None:
        if callable(self.before):
            signal.signal(signal.SIGINT, self.before)
            if self.seen:
                self.before(*self.seen[0])
