"""Memory limit of a server: the bytes that its requests and calls may hold at once."""
from __future__ import annotations

import threading


class Budget:
    """A number of bytes that several threads share. A call waits for its part; a request does not."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.changed = threading.Condition()

    def try_take(self, bytes_: int) -> bool:
        """Takes a part, or says that there is none now."""
        with self.changed:
            if self.held + bytes_ > self.limit:
                return False
            self.held += bytes_
            return True

    def take(self, bytes_: int) -> None:
        """Waits until there is room; `bytes_` are at most the limit."""
        assert bytes_ <= self.limit
        with self.changed:
            self.changed.wait_for(lambda: self.held + bytes_ <= self.limit)
            self.held += bytes_

    def give(self, bytes_: int) -> None:
        """Gives a part back."""
        with self.changed:
            self.held -= bytes_
            self.changed.notify_all()
