"""The judge of memory layouts: whether buffers at given offsets are inside the arena, aligned, and apart while both are
alive. It knows nothing of how offsets are assigned (plan/memory/symbolic_allocator.py).

    m at 0..64 in steps 0-3, s at 32..96 in steps 2-5  -->  VerifyError: they share 32 bytes in steps 2-3

A deployed file's layout is judged at every new shape, so what does not depend on sizes is looked at once per plan.
"""
from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from anyshape.base.errors import VerifyError
from anyshape.base.int64_array import int64_array
from anyshape.plan.ir.program import Buffer, Plan
from anyshape.sym.expr import Size, evaluate


class _Row(NamedTuple):
    """A buffer: which of the sizes it has, its life in steps, and whether its last byte lies in the kept block."""

    name: str
    size: int
    first: int
    last: int
    is_restored: bool
    is_kept: bool


MOST_PAIRS = 64  # for each buffer, above which those that are alive together are not listed
# (where buffers begin, sizes, which of these each has, pairs of buffers, bytes of the kept block) -> whether each lies
# at a multiple of 64 from 0 to 2^62 and on one side of the border of that block, and no pair shares a byte
Apart = Callable[["array[int]", "array[int]", "array[int]", "array[int]", int], bool]
_Span = tuple[int, int, str]  # where a buffer begins and ends, and its name


class _Placed(NamedTuple):
    """Of layouts that place so many `buffers`: their names, which of the sizes each has, and pairs of those that are
    alive together, first the ones and then the others; None: there are too many, or more applies to some than being
    apart."""

    buffers: int
    names: tuple[str, ...]
    sizes: array[int]
    pairs: array[int] | None


class LayoutJudge:
    """Judges layouts of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.name = plan.name
        self.in_arena = tuple(buffer.name for buffer in plan.buffers if buffer.in_arena)
        sizes: dict[Size, int] = {}  # layers that repeat have equal formulas
        rows = [_row(buffer, sizes.setdefault(buffer.bytes, len(sizes)), len(plan.steps)) for buffer in plan.buffers
                if not buffer.is_optional]
        self.sizes = tuple(sizes)
        self.rows = tuple(sorted(rows, key=lambda row: (row.first, row.last)))
        # restored ones may share bytes with each other; those that are never alive are compared with all
        self.apart = frozenset(number for number, row in enumerate(self.rows)
                               if row.is_restored or row.first > row.last)
        self.sweep = self._order()
        self.placed: _Placed | None = None

    def _order(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The rows that are not apart in order of their first steps, each with those whose lives have ended by then."""
        order = [number for number in range(len(self.rows)) if number not in self.apart]
        ending = sorted(order, key=lambda number: self.rows[number].last)
        found, ended = [], 0
        for number in order:
            begun = ended
            while self.rows[ending[ended]].last < self.rows[number].first:
                ended += 1
            found.append((number, tuple(ending[begun:ended])))
        return tuple(found)

    def is_right(self, sizes: Sequence[int], offsets: Mapping[str, int], kept: int, apart: Apart) -> bool:
        """Whether a layout whose arena ends where the buffers do is right, asked of all buffers at once; False: ask
        `check`, which says what is wrong, if anything is. sizes: what `self.sizes` are, from 0 to 2^62; apart: looks at
        the numbers."""
        known = self.placed
        if known is None or known.buffers != len(offsets):  # another layout of the plan places others
            known = self.placed = self._placed(offsets)
        if known.pairs is None:
            return False
        try:
            starts = int64_array([offsets[name] for name in known.names])
        except (KeyError, struct.error):
            return False
        return apart(starts, int64_array(sizes), known.sizes, known.pairs, kept)

    def _placed(self, offsets: Mapping[str, int]) -> _Placed:
        """What `is_right` looks at in layouts that place these buffers."""
        rows = {number: place for place, number in enumerate(
            number for number, row in enumerate(self.rows) if row.name in offsets)}
        alive: dict[int, None] = {}
        pairs: list[tuple[int, int]] = []
        for number, ended in self.sweep:
            for other in ended:
                alive.pop(other, None)
            if number in rows and len(pairs) <= MOST_PAIRS * len(rows):
                pairs += [(rows[other], rows[number]) for other in alive]
                alive[number] = None
        names = [self.rows[number].name for number in rows]
        simple = not self.apart and not any(self.rows[number].is_kept for number in rows) \
            and not set(self.in_arena) - set(names) and len(pairs) <= MOST_PAIRS * len(rows)
        ends = int64_array([*(one for one, _ in pairs), *(other for _, other in pairs)])
        return _Placed(len(offsets), tuple(names), int64_array([self.rows[number].size for number in rows]),
                       ends if simple else None)

    def check(self, values: Mapping[str, int], offsets: Mapping[str, int], arena: int | None, kept: int) -> None:
        """Checks a layout at the symbols' `values`.

        Args:
            offsets: buffer name -> byte offset.
            arena, kept: bytes of the arena and of the block at its bottom; None: the arena ends where the buffers do.

        Raises:
            VerifyError: a buffer is outside of the arena, badly aligned, or over one that is alive.
        """
        for name in self.in_arena:
            if name not in offsets:
                self._fail(f"buffer {name} has no offset")
        sizes: dict[int, int] = {}  # of those that have a place: others may not be known yet
        spans: list[_Span | None] = []
        top = kept
        for name, formula, _, _, is_restored, is_kept in self.rows:
            start = offsets.get(name)
            if start is None:
                spans.append(None)
                continue
            size = sizes.get(formula)
            if size is None:
                size = sizes[formula] = evaluate(self.sizes[formula], values)
            stop = start + size
            spans.append((start, stop, name))
            if start < 0 or (arena is not None and stop > arena):
                self._fail(f"buffer {name} at {start}..{stop} lies outside the arena of {arena} bytes")
            if start % 64 and not is_restored:
                self._fail(f"buffer {name} at {start} is not aligned to 64 bytes")
            if start < kept < stop or (is_kept and stop > kept):
                self._fail(f"buffer {name} at {start}..{stop} crosses the kept block of {kept} bytes")
            if stop > top:
                top = stop
        if arena is not None and (top + 63) // 64 * 64 != arena:
            self._fail(f"the arena is {arena} bytes, the highest buffer ends at {top}")
        self._check_sweep(spans)
        self._check_pairs(spans)

    def _check_sweep(self, spans: list[_Span | None]) -> None:
        """Goes over the steps with what is alive in order of offsets: that is apart, so that what is new can only meet
        its neighbours."""
        alive: list[_Span] = []
        for number, over_numbers in self.sweep:
            span = spans[number]
            for other in over_numbers:
                over = spans[other]
                if over is not None and over[0] < over[1]:
                    alive.pop(bisect_left(alive, over))
            if span is None or span[0] >= span[1]:
                continue
            place = bisect_left(alive, span)
            if place and alive[place - 1][1] > span[0]:
                self._fail_shared(alive[place - 1], span)
            if place < len(alive) and alive[place][0] < span[1]:
                self._fail_shared(span, alive[place])
            alive.insert(place, span)

    def _check_pairs(self, spans: list[_Span | None]) -> None:
        for number in sorted(self.apart):
            one, row = spans[number], self.rows[number]
            for other, beside in zip(spans, self.rows, strict=True):
                if one is not None and other is not None and beside is not row and not (
                        row.is_restored and beside.is_restored):
                    shared = min(one[1], other[1]) > max(one[0], other[0])
                    if shared and row.first <= beside.last and beside.first <= row.last:
                        self._fail_shared(*sorted((one, other)))

    def _fail_shared(self, one: _Span, other: _Span) -> None:
        self._fail(f"buffers {one[2]} and {other[2]} are alive together and share "
                   f"{min(one[1], other[1]) - other[0]} bytes")

    def _fail(self, why: str) -> None:
        raise VerifyError(f"the plan of {self.name} is wrong", why=why, do="report this plan: a bug of AnyShape")


def life_of(buffer: Buffer, steps: int) -> tuple[int, int]:
    """The first and the last step at which a buffer is there, of a plan of so many steps."""
    return 0 if buffer.is_restored else buffer.first, steps if buffer.is_saved else buffer.last


def _row(buffer: Buffer, size: int, steps: int) -> _Row:
    first, last = life_of(buffer, steps)
    return _Row(buffer.name, size, first, last, buffer.is_restored, buffer.is_saved or buffer.is_restored)
