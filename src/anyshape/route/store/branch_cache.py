"""The cache of branches in memory: pins, eviction by probability, prefetch in a thread, under a limit that holds.

    with cache.use(branches):      loads those that are missing, in this thread; nobody evicts them meanwhile
        ...                        the branches run
    cache.advise(values, order)    how probable the next use of each branch is; the thread loads those of `order`

A branch is absent, loading, or in memory. Memory is taken before a load begins, so what is in flight counts, and the
limit holds at every moment. What leaves is the branch of the least value, among equals the one not used for longest;
the values age with the predictor (LFU with aging). A prefetch pushes out only what is clearly less probable. A call
takes all that it needs at once or waits holding nothing, so that two calls cannot wait for each other.

A failed read leaves that branch absent: the call that needs it raises, others go on with what is in memory.
"""
from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anyshape.base.errors import LimitError, StoreError
from anyshape.route.store.tiers import BranchBytes, LowerTier, UpperTier

ABSENT, LOADING, PRESENT = 0, 1, 2
MARGIN = 0.05  # of probability: a prefetch that gains less than this over what it pushes out is not worth its bytes
WASTE = 0.5  # share of prefetched bytes that nobody used, from which on there is no prefetch
AGING = 0.98  # of the bytes in that share, per prefetched branch
LEAST_BRANCHES = 16  # prefetched branches before that share says anything
PAUSE, LONGEST_PAUSE = 64, 4096  # uses without prefetch until it is tried again; doubled each time, up to


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What a cache has done. hits, misses: of branches that were used (a branch whose prefetch was under way is a hit).
    loaded, prefetched, wasted: bytes read, those of them ahead of their use, and those of these that left unused. peak:
    the most bytes held. failed: reads. pauses: how often prefetch was switched off because it was wasted."""

    hits: int = 0
    misses: int = 0
    loaded: int = 0
    prefetched: int = 0
    wasted: int = 0
    peak: int = 0
    failed: int = 0
    pauses: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


class Orders:
    """What the thread is to load, and the lock of it all; it knows no cache, so that a cache can go."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.branches: deque[int] = deque()
        self.stopped = False


class BranchCache:
    """The branches that are in memory, under a limit in bytes. Threads may share one.

    Args:
        branches: what there is. upper, lower: the tiers. limit: bytes that branches may hold in the upper tier.
        ahead: whether branches are prefetched.

    Raises:
        LimitError: a branch alone has more bytes than the limit.
    """

    def __init__(self, branches: Sequence[BranchBytes], upper: UpperTier, lower: LowerTier, limit: int, *,
                 ahead: bool = True) -> None:
        self.branches, self.upper, self.lower, self.limit, self.ahead = tuple(branches), upper, lower, limit, ahead
        check_limit(branches, upper, limit)
        count = len(self.branches)
        self.state = np.zeros(count, np.int8)
        self.held = np.zeros(count, bool)  # has its memory
        self.pins = np.zeros(count, np.int64)
        self.used = np.zeros(count, np.int64)  # when it was last used
        self.unused = np.zeros(count, bool)  # prefetched and not used yet
        self.values = np.zeros(count)
        self.counts = CacheCounts()
        self.clock = 0
        self.ends: weakref.finalize[Any, BranchCache] | None = None
        self._begin()

    def _begin(self) -> None:
        """The lock and the thread of this process."""
        self.process = os.getpid()
        self.orders = Orders()
        self.waiting = 0  # calls that wait for memory: they come before prefetches
        self.recent_prefetched = self.recent_wasted = 0.0
        self.recent_count, self.pause, self.resume = 0, PAUSE, 0
        self.worker: threading.Thread | None = None
        if self.ends is not None:
            self.ends.detach()  # the thread is the parent's
        self.ends = None

    def _after_fork(self) -> None:
        """A forked process has the memory, and neither the thread nor what was under way in the parent."""
        if os.getpid() == self.process:
            return
        self._begin()
        lost = [int(one) for one in np.flatnonzero(self.state == LOADING)]
        self.pins[:] = 0
        self.state[lost] = ABSENT
        self._leave([one for one in lost if self.held[one]], ())

    # ---- use

    def rounds(self, branches: Sequence[int]) -> list[list[int]]:
        """Branches in order, cut into runs each of which fits under the limit."""
        if self.upper.least(branches) <= self.limit:
            return [list(branches)]
        found: list[list[int]] = []
        for one in branches:
            if found and self.upper.least([*found[-1], one]) <= self.limit:
                found[-1].append(one)
            else:
                found.append([one])
        return found

    @contextlib.contextmanager
    def use(self, branches: Sequence[int]) -> Iterator[None]:
        """Has the branches, which fit under the limit together, in memory while it lasts.

        Raises:
            StoreError: one cannot be read. Nothing is pinned then.
        """
        self._after_fork()
        own = self._pin(branches)
        try:
            for one in branches:
                mine = one in own
                own.discard(one)
                self._settle(one, mine)
            yield
        finally:
            self._unpin(branches, own)

    def _pin(self, branches: Sequence[int]) -> set[int]:
        """Pins branches and takes the memory for those that are absent, all or none; these are this thread's to
        load."""
        with self.orders.changed:
            self.waiting += 1
            while not self._taken([one for one in branches if not self.held[one]], branches, None):
                self.orders.changed.wait()
            self.waiting -= 1
            own = {one for one in branches if self.state[one] == ABSENT}
            self.clock += 1
            for one in branches:
                self.pins[one] += 1
                self.used[one], self.unused[one] = self.clock, False
            self.state[list(own)] = LOADING
            self._count(hits=len(branches) - len(own), misses=len(own))
            return own

    def _settle(self, one: int, own: bool) -> None:
        """Returns when a pinned branch is in memory. Where another thread's load fails, this one tries itself."""
        while not own:
            with self.orders.changed:
                while self.state[one] == LOADING:
                    self.orders.changed.wait()
                if self.state[one] == PRESENT:
                    return
                self.state[one], own = LOADING, True
        self._load(one)

    def _load(self, one: int, prefetch: bool = False) -> None:
        done = False
        try:
            self.lower.read(one, self.upper.views(one))
            done = True
        finally:
            with self.orders.changed:
                self.state[one] = PRESENT if done else ABSENT
                size = self.branches[one].size if done else 0
                self._count(loaded=size, prefetched=size * prefetch, failed=int(not done))
                if not self.pins[one]:
                    self.unused[one] = done
                    if not done:
                        self._leave([one], ())
                self.orders.changed.notify_all()

    def _unpin(self, branches: Sequence[int], own: set[int]) -> None:
        """own: those that were this thread's to load and have not been tried."""
        with self.orders.changed:
            for one in own:
                if self.state[one] == LOADING:
                    self.state[one] = ABSENT
            gone = []
            for one in branches:
                self.pins[one] -= 1
                if not self.pins[one] and self.state[one] == ABSENT and self.held[one]:
                    gone.append(one)
            self._leave(gone, ())
            self.orders.changed.notify_all()

    # ---- memory; under the lock

    def _taken(self, enter: Sequence[int], keep: Sequence[int], below: float | None) -> bool:
        """Whether memory for some branches could be taken; others leave for it. below: only those of a lesser value."""
        leave: list[int] = []
        if self.upper.excess((), enter, self.limit) > 0:
            free = self.held & (self.pins == 0) & (self.state == PRESENT)
            free[list(keep)] = False
            if below is not None:
                free &= self.values < below
            victims = np.flatnonzero(free)
            for one in victims[np.lexsort((self.used[victims], self.values[victims]))]:
                leave.append(int(one))
                if self.upper.excess(leave, enter, self.limit) <= 0:
                    break
            else:
                return False
        self._leave(leave, enter)
        return True

    def _leave(self, leave: Sequence[int], enter: Sequence[int]) -> None:
        if not leave and not enter:
            return
        self.upper.replace(leave, enter)
        wasted = sum(self.branches[one].size for one in leave if self.unused[one])
        self.recent_wasted += wasted
        gone = list(leave)
        self.state[gone], self.held[gone], self.unused[gone] = ABSENT, False, False
        self.held[list(enter)] = True
        self.counts = replace(self.counts, wasted=self.counts.wasted + wasted,
                              peak=max(self.counts.peak, self.upper.held))

    def _count(self, **more: int) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + number
                                              for name, number in more.items()})

    # ---- prefetch

    def advise(self, values: np.ndarray, order: Sequence[int] = ()) -> None:
        """Says how probable the next use of each branch is, [branches], and which to prefetch, in this order; what was
        ordered before and has not begun is forgotten."""
        self._after_fork()
        with self.orders.changed:
            self.values = values
            self.orders.branches.clear()
            if not self.ahead or not len(order) or self._paused():
                return
            self.orders.branches.extend(order)
            if self.worker is None:
                self.worker = threading.Thread(target=_work, args=(weakref.ref(self), self.orders),
                                               name="anyshape preload", daemon=True)
                self.ends = weakref.finalize(self, _stop, self.orders, self.worker)
                self.worker.start()
            self.orders.changed.notify_all()

    def _paused(self) -> bool:
        """Whether prefetch is off, because too much of it was wasted; it is tried again after a while."""
        if self.clock < self.resume:
            return True
        if self.recent_count >= LEAST_BRANCHES:
            if self.recent_wasted > WASTE * self.recent_prefetched:
                self.resume = self.clock + self.pause
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
                self.recent_prefetched = self.recent_wasted = 0.0
                self.recent_count = 0
                self._count(pauses=1)
                return True
            if self.recent_wasted < WASTE / 2 * self.recent_prefetched:
                self.pause = PAUSE
        return False

    def prefetch(self) -> None:
        """Loads the first branch of the orders that is absent and worth its memory; called by the thread."""
        with self.orders.changed:
            one = self._chosen()
            if one is None:
                return
            self.state[one] = LOADING
            self.recent_prefetched = self.recent_prefetched * AGING + self.branches[one].size
            self.recent_wasted *= AGING
            self.recent_count += 1
        with contextlib.suppress(StoreError):  # who needs the branch tries again, and says so
            self._load(one, prefetch=True)

    def _chosen(self) -> int | None:
        orders = self.orders.branches
        if self.waiting:
            orders.clear()
        while orders and not self.orders.stopped:
            one = orders.popleft()
            if self.state[one] == ABSENT and not self.held[one] \
                    and self._taken([one], [one], self.values[one] - MARGIN):
                return one
        return None


def check_limit(branches: Sequence[BranchBytes], upper: UpperTier, limit: int, kept: int = 0) -> None:
    """Raises LimitError where a branch alone does not fit. kept: bytes that are always in memory besides."""
    if not branches:
        return
    sizes = [upper.least([one]) for one in range(len(branches))]
    largest = int(np.argmax(sizes))
    if sizes[largest] > limit:
        beside = f", beside {kept} bytes that stay in memory" if kept else ""
        raise LimitError(f"memory_limit is {limit + kept} bytes, less than one branch",
                         where=branches[largest].name, why=f"that branch takes {sizes[largest]} bytes{beside}",
                         do=f"set it to {sizes[largest] + kept} or more", least=sizes[largest] + kept)


def _work(cache: weakref.ref[BranchCache], orders: Orders) -> None:
    while True:
        with orders.changed:
            while not orders.stopped and not orders.branches:
                orders.changed.wait()
            if orders.stopped:
                return
        alive = cache()
        if alive is None:
            return
        alive.prefetch()
        del alive


def _stop(orders: Orders, worker: threading.Thread) -> None:
    """Ends a cache's thread."""
    with orders.changed:
        orders.stopped = True
        orders.branches.clear()
        orders.changed.notify_all()
    if worker is not threading.current_thread() and worker.is_alive():
        worker.join()
