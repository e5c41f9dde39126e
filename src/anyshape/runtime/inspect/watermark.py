"""The high watermark: counts the bytes of the arena that runs of a program really write, whose blocks are filled with a
pattern before a run and looked through after it.

    with watched(executable) as seen:
        executable([x])
    seen[0].record.arena == seen[0].counted

What is counted is memory, not the plan: neither offsets nor formulas have a part in it. A run takes longer meanwhile;
a program that nobody watches does not know of this file.
"""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from anyshape.base.align import align
from anyshape.runtime.call.executable import Executable
from anyshape.runtime.context.profiling import Profiler, recorded
from anyshape.runtime.memory.pools import Block, Pool, whole
from anyshape.runtime.specialize.specialization import Specialization

PATTERN = 0xA5  # neither a likely number of any dtype nor the byte of a bool
CHUNK = 1 << 20  # bytes looked at together, from the top


@dataclass(frozen=True, slots=True)
class Seen:
    """One run. counted: one past the highest byte of the arena that was written, rounded up to the alignment; the
    kept block of a backward's forward counts as a whole, for the tape holds it."""

    record: Specialization
    counted: int


class _Lasting(Block):
    """A block that is there until it has been looked through."""

    def release(self) -> None:
        pass


class _Pool(Pool):
    """A pool whose blocks come filled with the pattern; `last` is the one that was taken last, `taken` are all since
    one was given."""

    def __init__(self) -> None:
        super().__init__()
        self.last = self.empty
        self.taken: list[Block] = []

    def take(self, bytes_: int) -> Block:
        return self._noted(super().take(bytes_))

    def fresh(self, bytes_: int) -> Block:
        return self._noted(_Lasting(bytes_))

    def _new(self, bytes_: int) -> Block:
        return _Lasting(whole(bytes_))

    def _noted(self, block: Block) -> Block:
        self.last = block
        self.taken.append(block)
        block.tensor.fill_(PATTERN)
        return block


class _TemporaryPool(_Pool):
    """Counts when a run gives its block back, which is the last thing that it does."""

    def __init__(self, executable: Executable, kept: _Pool, seen: list[Seen]) -> None:
        super().__init__()
        self.executable = executable
        self.kept = kept
        self.seen = seen

    def give(self, block: Block) -> None:
        runs = self.executable.context.profiler.runs
        if runs:
            record = runs.pop().record
            pieces = [one for one in self.taken if one is not block]
            above = max((_written(piece, piece.bytes) for piece in pieces), default=0) if record.phases else 0
            above = above + record.temporary if above else _written(block, record.temporary)
            if record.reused_output >= 0:  # the lower block is a result's memory
                below = 0
            elif record.given < 0 and (above or self.executable.takes_tape):
                below = record.kept
            else:
                below = _written(self.kept.last, record.kept)
            self.seen.append(Seen(record, below + above))
        self.taken.clear()
        super().give(block)


def _written(block: Block, bytes_: int) -> int:
    """One past the highest of the first bytes that is not the pattern any more, rounded up."""
    for end in range(bytes_, 0, -CHUNK):
        start = max(0, end - CHUNK)
        found = (block.tensor[start:end] != PATTERN).nonzero()
        if len(found):
            return align(start + int(found[-1]) + 1)
    return 0


@contextlib.contextmanager
def watched(executable: Executable) -> Iterator[list[Seen]]:
    """Watches the runs of a program; the list receives one entry per run that ends well. Not for several threads."""
    seen: list[Seen] = []
    before = executable.context
    context = copy.copy(before)
    context.kept = _Pool()
    context.temporary = _TemporaryPool(executable, context.kept, seen)
    context.profiler = Profiler()
    executable.context = context
    try:
        with recorded(context.profiler):
            yield seen
    finally:
        executable.context = before
