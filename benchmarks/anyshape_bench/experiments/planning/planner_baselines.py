"""Ways to plan a problem that ours is compared with, each given the same steps: PyTorch's allocator in the order of the
program, and a greedy order with long-lived values placed first.

The allocator is that of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2): sizes are rounded up to 512 bytes; up to 1 MB
lie in the pool of segments of 2 MB, the others in that of segments of 20 MB, or of their own size rounded up to 2 MB
from 10 MB on; the smallest free block that fits is taken, and split; free neighbours become one; nothing is given back.
"""
from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from anyshape.plan.search import Problem
from anyshape_bench.experiments.planning.plan_solver import lives
from anyshape_bench.experiments.planning.problem_text import Solution

LEAST_BLOCK = 512  # kMinBlockSize
SMALL = 1 << 20  # kSmallSize
SMALL_SEGMENT, LARGE_SEGMENT = 2 << 20, 20 << 20  # kSmallBuffer, kLargeBuffer
LEAST_OWN, ROUNDED = 10 << 20, 2 << 20  # kMinLargeAlloc, kRoundLarge


@dataclass(slots=True)
class _Block:
    size: int
    small: bool
    before: _Block | None = None
    behind: _Block | None = None
    free: bool = False


@dataclass(slots=True)
class CachingAllocator:
    """reserved: bytes of segments. used, most: bytes of blocks that are taken now, and at the fullest moment."""

    reserved: int = 0
    used: int = 0
    most: int = 0
    pools: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    made: int = 0

    def take(self, bytes_: int) -> _Block:
        """A block of at least so many bytes."""
        size = max(-(-bytes_ // LEAST_BLOCK) * LEAST_BLOCK, LEAST_BLOCK)
        small = size <= SMALL
        pool = self.pools[small]
        place = bisect.bisect_left(pool, (size, -1))
        if place < len(pool):
            block = pool.pop(place)[2]
            block.free = False
        else:
            whole = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LEAST_OWN else -(-size // ROUNDED) * ROUNDED
            self.reserved += whole
            block = _Block(whole, small)
        rest = block.size - size
        if (rest >= LEAST_BLOCK) if small else (rest > SMALL):
            other = _Block(rest, small, block, block.behind)
            if block.behind is not None:
                block.behind.before = other
            block.behind, block.size = other, size
            self._give(other)
        self.used += block.size
        self.most = max(self.most, self.used)
        return block

    def drop(self, block: _Block) -> None:
        """Gives a block back to its pool."""
        self.used -= block.size
        for other in (block.before, block.behind):
            if other is not None and other.free:
                self._out(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.behind = second.behind
                if second.behind is not None:
                    second.behind.before = first
                block = first
        self._give(block)

    def _give(self, block: _Block) -> None:
        block.free = True
        self.made += 1
        bisect.insort(self.pools[block.small], (block.size, self.made, block), key=lambda one: one[:2])

    def _out(self, block: _Block) -> None:
        pool = self.pools[block.small]
        place = bisect.bisect_left(pool, (block.size, -1))
        while pool[place][2] is not block:
            place += 1
        pool.pop(place)
        block.free = False


def with_caching(problem: Problem, order: Sequence[int]) -> CachingAllocator:
    """The allocator after the steps in that order, from empty. What is made over another value takes its block."""
    allocator = CachingAllocator()
    come: dict[int, list[int]] = {}
    gone: dict[int, list[int]] = {}
    pieces = [life for life, _ in lives(problem, order, 1)]
    for number, (_, first, last) in enumerate(pieces):
        come.setdefault(first, []).append(number)
        gone.setdefault(last, []).append(number)
    blocks: dict[int, _Block] = {}
    for step in range(len(order) + 1):
        for number in come.get(step, ()):
            blocks[number] = allocator.take(pieces[number][0])
        for number in gone.get(step, ()):
            allocator.drop(blocks.pop(number))
    return allocator


def least_cost(problem: Problem) -> list[int]:
    """The greedy order: of the steps that can run the one that raises the peak least, and then leaves least alive."""
    ready = [step for step, before in enumerate(problem.before) if not before]
    found: list[int] = []
    done, now = 0, problem.start()
    peak = sum(now)
    while ready:
        costs = []
        for step in ready:
            during, after = problem.step(step, done, now)
            costs.append((max(peak, sum(during)), sum(after), step, after))
        peak, _, step, now = min(costs)
        ready.remove(step)
        done |= 1 << step
        found.append(step)
        ready += [other for other in problem.after[step] if not problem.before[other] & ~done]
    return found


def long_lived_first(problem: Problem, order: Sequence[int]) -> Solution:
    """The solution with that order in which what lives longest is placed first, and each at its lowest place."""
    pieces = sorted(lives(problem, order), key=lambda one: (one[0][1] - one[0][2], -one[0][0]))
    offsets = [-1] * len(problem.sizes)
    there: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    top = 0
    for (size, first, last), values in pieces:
        place = 0
        for start, end, begin, stop in there:
            if begin <= last and first <= stop:
                if start >= place + size:
                    break
                place = max(place, end)
        bisect.insort(there, (place, place + size, first, last))
        top = max(top, place + size)
        for value in values:
            offsets[value] = place
    return Solution(tuple(order), tuple(offsets), top)
