"""Profiling of routers: each call's ends of groups go to a queue or a ring buffer, and a thread counts them.

    eager:     ids, ends  -->  a queue of references                                      no operator, no copy
    compiled:  ids, ends  -->  ring[at % rows] = (at, cells, choices, ends, at)           in place, in the program
                               slots[at // stride % SLOTS] = ids,  at += 1

The counts are a by-product of the route plan. The buffers are tensors that a program changes in place, which
compilers fuse with what stands around it (two microseconds for a router, two nanoseconds for a choice). A row has its
call's number at both ends, so that the thread sees which rows are whole.
Of every `stride` calls the last one's ids are kept. Nothing waits for the thread: what it cannot follow is lost, and
counted. Operators that run again in a backward (activation checkpointing) are not counted again.
"""
from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anyshape.route.profile.tally import Tally
from anyshape.torch_compat import get

SLOTS = 4  # sampled calls that a program may be ahead of the thread
CAPACITY = 16384  # choices that are kept of a sampled call; those of the first cells where it has more
COMPILED = 1 << 40  # what is added to the numbers of calls of compiled programs, which count apart
PENDING = 4096  # calls that eager PyTorch may be ahead of the thread
RING = 1 << 16  # numbers of a ring, about
_in_backward: Callable[[], int] = get("torch._C._current_graph_task_id") or (lambda: -1)


@dataclass(slots=True)
class Stride:
    """Of how many calls one is sampled: a power of two that all recorders of a model share, so that they sample the
    same calls."""

    calls: int = 1


class _Buffers(nn.Module):
    """What a compiled program reads and writes: a module's buffers, whose sizes compilers take as constants."""

    ring: Tensor
    slots: Tensor
    at: Tensor
    stride: Tensor

    def __init__(self, rows: int, branches: int, device: torch.device) -> None:
        super().__init__()
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.register_buffer("ring", torch.full((rows, branches + 4), -1, **whole))
        kind = torch.int16 if branches < 1 << 15 else torch.int32
        self.register_buffer("slots", torch.zeros(SLOTS * (CAPACITY + 1), dtype=kind, device=device))
        self.register_buffer("at", torch.zeros(1, **whole))
        self.register_buffer("stride", torch.ones(1, **whole))


class Recorder:
    """What one router writes to, and a thread reads. A copy or a pickle of it is None: copies of a model do not record.

    A router that several threads call at once is recorded whole in eager PyTorch; of a compiled program calls that
    overlap may be lost, and are not counted as such.
    """

    def __init__(self, branches: int, device: torch.device, stride: Stride) -> None:
        self.branches, self.shared = branches, stride
        self.rows = min(max(RING // (branches + 4), 16), 1024)
        self.buffers = _Buffers(self.rows, branches, device)
        self.sizes: dict[int, tuple[int, int]] = {}  # cells and choices of sampled calls, by their numbers
        self.pending: deque[tuple[int, int, Tensor | None, Tensor]] = deque()
        self.numbers, self.missed = itertools.count(), itertools.count()
        self.read, self.read_groups, self.told = 0, 0, 0

    def __reduce__(self) -> Any:
        return type(None), ()

    def note(self, ids: Tensor, ends: Tensor) -> None:
        """A call decided ids [cells, choices]; its groups end at ends [branches]."""
        if torch.compiler.is_compiling():
            self._write(ids, ends)
        elif _in_backward() == -1:
            if len(self.pending) >= PENDING:
                next(self.missed)
                return
            number = next(self.numbers)
            stride = self.shared.calls
            kept = None
            if number % stride == stride - 1:
                kept = ids[:CAPACITY // max(ids.shape[1], 1)].to(torch.int32)
            self.pending.append((number, ids.shape[0], kept, ends))

    def _write(self, ids: Tensor, ends: Tensor) -> None:
        own = self.buffers
        size = torch.tensor(ids.shape, dtype=torch.int32, device=ends.device)
        own.ring.index_copy_(0, (own.at % self.rows).long(), torch.cat([own.at, size, ends, own.at])[None])
        place = torch.arange(ids.numel(), device=ends.device).clamp(max=CAPACITY)  # the last place is not read
        own.slots.index_copy_(0, place + own.at // own.stride % SLOTS * (CAPACITY + 1),
                              ids.reshape(-1).to(own.slots.dtype))
        own.at.add_(1)

    # ---- read by one thread at a time

    def drain(self, tally: Tally, final: bool) -> int:
        """Counts what was written since; returns how many calls of compiled programs that was. final: no call is under
        way."""
        self._drain_queue(tally)
        calls = self._calls()
        ahead = calls - self.read
        self._drain_ring(tally, calls)
        self._drain_ids(tally, calls, final)
        return ahead

    def _calls(self) -> int:
        """Calls of compiled programs."""
        return int(self.buffers.at)

    def _drain_queue(self, tally: Tally) -> None:
        taken = [self.pending.popleft() for _ in range(len(self.pending))]
        if taken:
            loads = _loads(np.stack([ends.cpu().numpy() for _, _, _, ends in taken]))
            tally.count([one[0] for one in taken], [one[1] for one in taken], loads)
            for number, _, ids, _ in taken:
                if ids is not None:
                    tally.decide(number, ids.cpu().numpy())
        missed = _value(self.missed)
        tally.lost += missed - self.told
        self.told = missed

    def _drain_ring(self, tally: Tally, calls: int) -> None:
        """Counts the rows of calls with lower numbers than `calls`."""
        if calls == self.read:
            return
        numbers = np.arange(max(self.read, calls - self.rows), calls)
        rows = self.buffers.ring.cpu().numpy()[numbers % self.rows]
        whole = (rows[:, 0] == numbers) & (rows[:, -1] == numbers)
        tally.lost += calls - self.read - int(whole.sum())
        self.read = calls
        kept = rows[whole].astype(np.int64)
        tally.count((kept[:, 0] + COMPILED).tolist(), kept[:, 1].tolist(), _loads(kept[:, 3:-1]))
        sampled = kept[(kept[:, 0] + 1) % int(self.buffers.stride) == 0][-SLOTS:]
        self.sizes |= {number: (cells, choices) for number, cells, choices in sampled[:, :3].tolist()}
        self.sizes = dict(list(self.sizes.items())[-2 * SLOTS:])

    def _drain_ids(self, tally: Tally, calls: int, final: bool) -> None:
        """Keeps the ids of groups of calls that are over, and not yet overwritten."""
        stride = int(self.buffers.stride)
        done = (calls if final else calls - 1) // stride
        for group in range(max(self.read_groups, done - SLOTS + 1, 0), done):
            number = group * stride + stride - 1
            if number not in self.sizes:
                continue
            cells, choices = self.sizes[number]
            kept = min(cells, CAPACITY // max(choices, 1)) * choices
            ids = self.buffers.slots[group % SLOTS * (CAPACITY + 1):][:kept].cpu().numpy().copy()
            if self._calls() // stride < group + SLOTS:
                tally.decide(COMPILED + number, ids.reshape(-1, choices))
        self.read_groups = max(done, self.read_groups)

    def follow(self) -> None:
        """Takes over the stride that all share."""
        if int(self.buffers.stride) != self.shared.calls:
            self.buffers.stride.fill_(self.shared.calls)
            self.read_groups = self._calls() // self.shared.calls + 1


def _loads(ends: NDArray[np.integer]) -> NDArray[np.int64]:
    """Loads [calls, branches] from ends of groups."""
    whole = ends.astype(np.int64)
    return whole - np.pad(whole, ((0, 0), (1, 0)))[:, :-1]


def _value(counter: itertools.count[int]) -> int:
    """How often a counter was asked: `next` of one is a single step to other threads, adding to an attribute is not."""
    return int(repr(counter)[6:-1])
