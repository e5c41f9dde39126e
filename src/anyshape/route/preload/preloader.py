"""The preloader, the store of a model's branches and who predicts: shared by all its routers.

    a router begins with its loads  -->  the predictor learns; what is likely next is read ahead, as much as can be
"""
from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anyshape.route.preload.branch_predictor import BranchPredictor
from anyshape.route.preload.layout import Layout, Place, flat_bytes
from anyshape.route.preload.prefetch_trial import PrefetchTrial
from anyshape.route.store import BranchBytes, BranchCache, BranchFile, BranchMemory, CacheCounts

FARTHER = 0.25  # of its value that a branch loses whose turn is a whole round of the routers away
DOUBT = 0.5  # branches of the next router are read ahead that are at least so probable, of the n-th 1 - DOUBT**n
PAST = 0.8  # what earlier times weigh in the time between two routers


class Preloader:
    """Reads branches ahead that a model's routers will probably take. Thread-safe.

    Args:
        limit: bytes of branches' weights in memory, with those that always stay there. popular, joint: of
            BranchPredictor. depth: routers to look ahead.

    Raises:
        StoreError, LimitError.
    """

    def __init__(self, layout: Layout, limit: int, popular: Sequence[Any], joint: Mapping[tuple[int, int], Any], *,
                 folder: str | None = None, ahead: bool = True, depth: int = 3) -> None:
        self.layout, self.limit, self.depth = layout, limit, depth
        self.memory = BranchMemory(layout.size, layout.branches)
        self.file = BranchFile(layout.branches, folder)
        self.cache = BranchCache(layout.branches, self.memory, self.file, limit - layout.kept, ahead=ahead)
        self.first = np.cumsum([0, *(len(router.branches) for router in layout.routers)])
        self.sizes = np.array([one.size for one in layout.branches], np.float64)
        self.predictor = BranchPredictor(popular, joint)
        self.values = np.concatenate([*popular, np.zeros(0)])
        self.following = [(number + 1) % len(layout.routers) for number in range(len(layout.routers))]
        self.between = 0.0  # seconds from one router to the next
        self.trial = PrefetchTrial(len(layout.routers))
        self.lock = threading.Lock()
        self.before = threading.local()  # this thread's last router, and when it ran

    def store(self, tensors: Mapping[int, Tensor]) -> None:
        """Writes the weights of all branches, by the keys of their places. Raises StoreError."""
        for router, first in zip(self.layout.routers, self.first, strict=False):
            whole = [(place, flat_bytes(place, tensors[place.key])) for place in router.places]
            for number, branch in enumerate(router.branches):
                self.file.write(int(first) + number, _parts(branch, number, len(router.branches), whole))

    @property
    def held(self) -> int:
        """Bytes of branches' weights in memory now."""
        return self.memory.held + self.layout.kept

    @property
    def counts(self) -> CacheCounts:
        return self.cache.counts

    # ---- a call of a router

    def observe(self, router: int, counts: NDArray[np.int64]) -> None:
        """A router begins, with so many cells of each branch."""
        now, last = time.perf_counter(), getattr(self.before, "last", None)
        with self.lock:
            if last is not None:
                self.following[last[0]] = router
                self.between = PAST * self.between + (1 - PAST) * (now - last[1]) if self.between else now - last[1]
            self.predictor.observe(router, counts)
            # its own turn is over: what is not pinned now is wanted when all others have had theirs
            self.values = self.values.copy()
            self.values[self._own(router)] = self.predictor.popularity(router) * (1 - FARTHER)
            self.cache.advise(self.values)
        self.before.last = router, now

    def look_ahead(self, router: int, counts: NDArray[np.int64]) -> None:
        """Orders what the next routers are likely to need, as much as can be read until it is their turn."""
        with self.lock:
            values, at = self.values.copy(), router
            order: list[int] = []
            rate = self.file.rate() * self.between
            for depth in range(1, self.depth + 1):
                at = self.following[at]
                own = self._own(at)
                odds = self.predictor.predict(router, counts, at)
                values[own] = odds * (1 - FARTHER * min(depth / len(self.layout.routers), 1))
                likely = np.flatnonzero((odds >= 1 - DOUBT ** depth) & (self.cache.state[own] == 0))
                order += (likely[np.argsort(-odds[likely], kind="stable")] + own.start).tolist()
                if at == router:
                    break
            if rate:  # the first is always worth a try: the estimate is of the past
                order = order[:1 + int(np.searchsorted(np.cumsum(self.sizes[order]), rate * self.depth))]
            self.values = values
            self.cache.advise(values, order if self.trial.on else ())

    def ended(self, router: int, seconds: float) -> None:
        """A router's branches have run."""
        with self.lock:
            self.trial.took(router, seconds)

    def _own(self, router: int) -> slice:
        return slice(int(self.first[router]), int(self.first[router + 1]))


def _parts(branch: BranchBytes, number: int, count: int, whole: Sequence[tuple[Place, memoryview]]) -> list[memoryview]:
    """The bytes of one branch, as they lie in its parts."""
    slices = [data[place.bytes // count * number:place.bytes // count * (number + 1)] for place, data in whole
              if place.branch < 0]
    if slices or not branch.parts:
        return slices
    (start, size), = branch.parts
    found = memoryview(bytearray(size))
    for place, data in whole:
        if place.branch == number:
            found[place.start - start:place.start - start + len(data)] = data
    return [found]
