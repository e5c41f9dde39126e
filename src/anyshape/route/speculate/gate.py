"""A readers-writer lock: calls run side by side, and none runs while programs are made.

Tracers of torch patch modules for the whole process: a call of another thread would be caught in the trace.
"""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Gate:
    """Any number inside at once, or one `alone`. A copy is a new one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.inside = 0
        self.is_closed = False

    def __reduce__(self) -> Any:
        return Gate, ()

    def enter(self) -> None:
        """Begins what runs beside others; `leave` ends it. Every call does both, so they are short."""
        with self.lock:  # which the condition only wraps
            while self.is_closed:
                self.changed.wait()
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.is_closed:
                self.changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Not from the inside."""
        with self.changed:
            while self.is_closed:
                self.changed.wait()
            self.is_closed = True
        try:
            with self.changed:
                while self.inside:
                    self.changed.wait()
            yield
        finally:
            with self.changed:
                self.is_closed = False
                self.changed.notify_all()
