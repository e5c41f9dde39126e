"""Trials of prefetch: whether reading ahead makes calls faster, by their times with it and without it.

Reading ahead is no gain by itself: a thread that takes the interpreter or a core from small branches costs more than
the read that it saves, and on a busy machine any does. So both ways take turns for a window of calls each; the faster
one holds for a while, and then both are tried again, more seldom each time that the outcome is the same.
"""
from __future__ import annotations

import statistics

WINDOW = 16  # turns of each router
SETTLING = 4  # of these, that are not counted: what the window before has read is still there
HOLD, LONGEST = 32, 1024  # windows
CLOSE = 1.02  # times as slow as without, up to which prefetch stays


class PrefetchTrial:
    """Whether reading ahead pays, by the times of calls with it and without it. Not thread-safe.

    on: whether to read ahead now.
    """

    def __init__(self, routers: int) -> None:
        self.routers, self.on, self.hold = routers, True, HOLD
        self.outcome: bool | None = None
        self._begin()

    def _begin(self) -> None:
        self.times: dict[bool, list[list[float]]] = {
            way: [[] for _ in range(self.routers)] for way in (True, False)}
        self.windows = 2
        self.left = WINDOW * self.routers

    def took(self, router: int, seconds: float) -> None:
        """A turn of a router has ended."""
        if self.windows:
            self.times[self.on][router].append(seconds)
        self.left -= 1
        if self.left > 0:
            return
        if not self.windows:  # a hold is over
            self._begin()
            return
        self.windows -= 1
        if self.windows:
            self.on, self.left = not self.on, WINDOW * self.routers
            return
        found = self._ahead() <= CLOSE
        self.hold = min(2 * self.hold, LONGEST) if found == self.outcome else HOLD
        self.on = self.outcome = found
        self.left = self.hold * WINDOW * self.routers

    def _ahead(self) -> float:
        """The time with prefetch over that without: sums over routers of their median turns."""
        sums = {way: sum(statistics.median(times[SETTLING:]) for times in own if len(times) > SETTLING)
                for way, own in self.times.items()}
        return sums[True] / sums[False] if sums[False] else 1.0
