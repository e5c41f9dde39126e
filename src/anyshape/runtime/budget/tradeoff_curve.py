"""The trade-off curve of memory and recomputation: what a call could drop at given sizes, point by point, from all
kept down to the least that works.

    bytes alive, forward then backward, everything kept          a point lower: h of layer 0 computed again
         __/^^\\__                                                    __/^^\\__
      __/        \\__                                              _/^        \\_/\\_

Point by point the value that relieves the fullest step and costs least time for its bytes is dropped, too (a
greedy covering, runtime/budget/greedy_search.py), or moved out where there is a store, so that each point's peak is
below that of the one before. What is alive is counted from the very lives and sizes that the layouts are made of. What
does not depend on sizes is worked out once (`TradeoffProblem`), and a tradeoff is climbed only as far as somebody asks.

When values are copied depends on how fast the disk was so far. The last points do not: their copies are waited for at
once, which takes more time and less memory, at usual costs, and in the end at none. So the least limit that works is
the same in every process.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from anyshape.base.align import align
from anyshape.kernel.schedule.hardware_params import Speeds
from anyshape.plan.ir.liveness import live_bytes
from anyshape.runtime.budget.greedy_search import GreedySearch, SearchTables, TradeoffPoint
from anyshape.runtime.budget.tradeoff_problem import TradeoffProblem
from anyshape.runtime.memory.offload_store import Store
from anyshape.runtime.specialize.offload_schedule import Clock
from anyshape.runtime.specialize.saved_policy import SavePolicy


class TradeoffCurves:
    """The curves of one problem, at one set of sizes after another."""

    def __init__(self, problem: TradeoffProblem) -> None:
        self.problem = problem
        self.tables: dict[bool, SearchTables] = {}  # without moves and with them, made when somebody asks

    def at(self, values: Mapping[str, int], scratch: tuple[int, int], threads: int = 1,
           store: Store | None = None, speeds: Speeds | None = None) -> TradeoffCurve:
        """The curve at the backward's sizes. scratch: bytes that all threads take in the forward, in the backward;
        store: where values may be moved out to; speeds: of one of the threads; None: the usual ones."""
        speeds = speeds or self.problem.program.target.hardware.speeds
        moving = store is not None
        clocks = (None,) if store is None else self.problem.clocks(values, threads, store, speeds)
        choices = self.tables.get(moving)
        if choices is None:
            choices = self.tables[moving] = SearchTables(self.problem, moving)
        return TradeoffCurve(choices, self.problem.sizes(values), self.problem.costs.seconds(values, speeds), scratch,
                             clocks, threads, 0 if store is None else store.limit)


class TradeoffCurve:
    """What a call could drop or move out at given sizes, point by point. Threads may share one.

    Args:
        bytes_: what the formulas of the problem say, int64; seconds: of their optional steps, float64.
        clocks: when steps and copies begin, first as fast as the store is; None: nothing is moved.
        threads: how many compute.
        most: bytes that may be moved out; 0: any number.
    """

    def __init__(self, choices: SearchTables, bytes_: np.ndarray, seconds: np.ndarray, scratch: tuple[int, int],
                 clocks: Sequence[Clock | None] = (None,), threads: int = 1, most: int = 0) -> None:
        self.choices, self.problem = choices, choices.problem
        self.bytes = bytes_
        self.seconds = seconds
        self.scratch = scratch
        self.clocks = clocks
        self.threads, self.most = threads, most
        self.lock = threading.Lock()
        # one after another, of which so many are at their end; of the next one so many points are among the found
        self.searches: list[GreedySearch] = []
        self.done = self.read = 0
        # the least bytes that it may need, by which search, and its point
        self.found: list[tuple[int, GreedySearch, int]] = []
        self.lowest = sys.maxsize
        self.points: dict[int, TradeoffPoint] = {}

    def __iter__(self) -> Iterator[TradeoffPoint]:
        number = self.next(0, sys.maxsize)
        while number >= 0:
            yield self.point(number)
            number = self.next(number + 1, sys.maxsize)

    def next(self, number: int, bytes_: int) -> int:
        """The first point from `number` on that may need at most so many bytes; -1: there is none."""
        with self.lock:
            while True:
                while number < len(self.found):
                    if self.found[number][0] <= bytes_:
                        return number
                    number += 1
                if not self._climb(bytes_):
                    return -1

    def point(self, number: int) -> TradeoffPoint:
        """A point that `next` has found."""
        with self.lock:
            if number not in self.points:
                _, search, at = self.found[number]
                self.points[number] = search.point(at)
            return self.points[number]

    def bound(self, number: int) -> int:
        """The least bytes that it may need."""
        return self.found[number][0]

    def cost(self, number: int) -> float:
        """The seconds that it takes, as `TradeoffPoint` has them."""
        _, search, at = self.found[number]
        return search.seconds(at)

    def upwards(self) -> Iterator[int]:
        """All points from the last to the first."""
        self.next(0, -1)
        return reversed(range(len(self.found)))

    def _climb(self, bytes_: int) -> bool:
        """Searches on, up to a point that may need at most so many bytes; whether there may be more."""
        if not self.searches:
            self.searches = [GreedySearch(self.choices, self, clock, self.threads, self.most) for clock in self.clocks]
        if self.done == len(self.searches):
            return False
        search = self.searches[self.done]
        lives = search.advance(bytes_)
        # below what usual speeds come to, measured ones choose nothing: so the last point does not depend on them
        floor = min((other.advance(-1)[-1] for other in self.searches[1:] if self.done == 0), default=-1)
        for number, bound in enumerate(search.bounds(self.read, len(lives)), self.read):
            if floor < lives[number] < self.lowest:
                self.lowest = lives[number]
                self.found.append((bound, search, number))
        self.read = len(lives)
        if search.done:
            self.done, self.read = self.done + 1, 0
        return True

    def alive(self, policy: SavePolicy) -> list[tuple[str, int]]:
        """What is alive at the fullest step, with its bytes, the largest first."""
        problem = self.problem
        curve = self.curve(policy)
        at = int(curve.argmax())
        found = [(life.label, int(self.bytes[life.number])) for life in problem.fixed if life.first <= at <= life.last]
        gaps = {name: gap for name, gap in zip(problem.names, problem.gaps, strict=True)
                if name in policy.dropped}
        gaps |= {move.saved: (move.gone + 1, problem.border + move.back) for move in policy.moved}
        for name, life in problem.held.items():
            gone = name in gaps and gaps[name][0] <= at < gaps[name][1]
            if life.first <= at <= life.last and not gone:
                found.append((life.label, self.kept(name)))
        return sorted(found, key=lambda one: -one[1])

    def curve(self, policy: SavePolicy) -> np.ndarray:
        """Bytes alive at each step of the forward, then of the backward."""
        problem = self.problem
        used = problem.keeps.used(policy)
        lives = [(int(self.bytes[life.number]), life.first, life.last)
                 for life in (*problem.fixed, *(life for life in problem.temporaries if life.name in used))]
        lives += [(self.kept(name), life.first, life.last) for name, life in problem.held.items()]
        lives += [(-self.kept(name), first, end - 1)
                  for name, (first, end) in zip(problem.names, problem.gaps, strict=True) if name in policy.dropped]
        lives += [(-self.kept(move.saved), move.gone + 1, problem.border + move.back - 1) for move in policy.moved]
        curve = np.array(live_bytes(lives, problem.length - 1), np.int64)
        curve[:problem.border] += self.scratch[0]
        curve[problem.border:] += self.scratch[1]
        return curve

    def kept(self, name: str) -> int:
        """Bytes of a saved value, as the kept block has it."""
        return align(int(self.bytes[self.problem.held[name].number]))


