"""Collectives by torch.distributed: the rows of ops/collective.py on process groups, gloo or NCCL, asynchronously.

    start([m], [g1, g2])     all_reduce of m = [g1 | g2] is under way
    wait([a1, a2], [m])      it has come

These are the operators that programs call (ir/asynchronous.py); what travels is in runtime/collectives/messages.py.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyshape.base import counters
from anyshape.base.errors import RankError, VerifyError
from anyshape.dist.mesh import Mesh
from anyshape.runtime.collectives.messages import Line, begin, finish, most_elements
from anyshape.runtime.collectives.parts import Numbers


@dataclass(slots=True)
class ProcessMesh:
    """A mesh whose ranks are the processes of torch.distributed, one group of processes for each line along an axis.

    Args:
        mesh: its number of ranks is the number of processes.
        rank: of this process.
        groups: by axis, the group that this process is in.
        control: of all processes, for what is agreed on before a step.
        launched: by axis, how many messages there were: the same number on all of its ranks.
        met: how many times its ranks have compared what they are about to do.
        failed: a step has begun to send and has not ended: where it failed, others may wait for its messages.
        failure: why its groups are closed; None while they are not.
    """

    mesh: Mesh
    rank: int
    groups: dict[str, Any] = field(default_factory=dict)
    control: Any = None
    launched: dict[str, int] = field(default_factory=dict)
    met: int = 0
    failed: bool = False
    failure: RankError | None = None

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this process is along each axis."""
        return self.mesh.coordinates(self.rank)


MESHES: dict[str, ProcessMesh] = {}  # by text: programs name a mesh, whose groups belong to the process


def process_mesh(mesh: Mesh) -> ProcessMesh:
    """The groups of processes of a mesh, made once, and again where they were closed; every process calls this, in the
    same order."""
    found = MESHES.get(str(mesh))
    if found is not None and found.control is not None and dist.is_initialized():
        return found
    made = ProcessMesh(mesh, dist.get_rank(), control=dist.new_group())
    for axis in mesh.axes:
        for ranks in mesh.groups(axis.name):
            group = dist.new_group(list(ranks))
            if made.rank in ranks:
                made.groups[axis.name] = group
    MESHES[str(mesh)] = made
    return made


@contextmanager
def sending(mesh: ProcessMesh) -> Iterator[None]:
    """Inside, ranks that have met send each other the messages of a step. Where it fails, those that were not waited
    for are let go of."""
    mesh.failed = True
    try:
        yield
        mesh.failed = False
    finally:
        if mesh.failed:
            abandon()


def close(mesh: ProcessMesh, failure: RankError) -> None:
    """Ends the groups of a mesh on this rank. gloo closes their connections with that, so a rank that waits for this
    one hears of it at once, as where its process ends. failure: what a step over this mesh says from here on."""
    mesh.failure = failure
    if MESHES.get(str(mesh.mesh)) is mesh:
        del MESHES[str(mesh.mesh)]
    groups = [*mesh.groups.values(), *([mesh.control] if mesh.control is not None else [])]
    mesh.groups.clear()
    mesh.control = None
    while groups:
        group = groups.pop()
        if dist.is_initialized() and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def forget() -> None:
    """Groups of a torch.distributed that has ended are not used again."""
    MESHES.clear()


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A message that was launched: torch's own handle, which keeps it alive, and the thread that waits for it."""

    work: Any
    thread: int


FIRST_TAG, TAGS = 1 << 24, 1 << 20  # of messages from rank to rank; those of others are below
UNDER_WAY: dict[int, UnderWay] = {}  # by address of the message: no other is there until it was waited for


def line_of(mesh: ProcessMesh, axis: str) -> Line:
    """The processes along an axis."""
    group = mesh.groups[axis]
    by_gloo = group is not None and dist.get_backend(group) == "gloo"
    tag = FIRST_TAG + mesh.launched.get(axis, 0)
    return Line(group, mesh.mesh.axis(axis).size, mesh.coordinates[axis], by_gloo, tag)


def _next_line(mesh: ProcessMesh, axis: str) -> Line:
    """The processes along an axis, for a message that is to be launched."""
    mesh.launched[axis] = (mesh.launched.get(axis, 0) + 1) % TAGS
    return line_of(mesh, axis)


@torch.library.custom_op("anyshape_collective::start", mutates_args=("messages",))
def start(messages: Sequence[Tensor], pieces: Sequence[Tensor], combine: str, op: str, mesh: str, axis: str,
          numbers: Sequence[int], apart: int) -> None:
    """Launches a collective of a program; see ops/collective.py.

    Args:
        messages: what travels, each of one dim; it is there after `wait`.
        numbers: five for each operand, and for `into`.
        apart: so many operands are messages by themselves, the first ones; all others are one.
    """
    for message, own, entries in _messages(messages, pieces, _entries(numbers), apart):
        counters.count("collectives")
        work = begin(_next_line(MESHES[mesh], axis), op, message, own, combine, entries)
        if work is not None:
            UNDER_WAY[message.data_ptr()] = UnderWay(work, threading.get_ident())


@torch.library.custom_op("anyshape_collective::wait", mutates_args=("results",))
def wait(results: Sequence[Tensor], messages: Sequence[Tensor], op: str, mesh: str, axis: str, numbers: Sequence[int],
         apart: int) -> None:
    """Waits for messages, and writes what this rank gets of them, for each operand that has not the message's memory.

    Raises:
        VerifyError: they were not launched, or were waited for before.
    """
    line = line_of(MESHES[mesh], axis)
    for message, own, entries in _messages(messages, results, _entries(numbers), apart):
        if line.ranks > 1 and message.numel():
            found = UNDER_WAY.pop(message.data_ptr(), None)
            if found is None:
                raise VerifyError(f"{op} along {axis} is waited for, and is not under way",
                                  do="this is a bug of AnyShape: please report it")
            begun = time.perf_counter()
            found.work.wait()
            counters.count("collective_wait_seconds", time.perf_counter() - begun)
        if own[0].data_ptr() != message.data_ptr():
            finish(line, op, message, own, entries)


def _messages(messages: Sequence[Tensor], tensors: Sequence[Tensor], entries: Sequence[Numbers], apart: int
              ) -> list[tuple[Tensor, Sequence[Tensor], Sequence[Numbers]]]:
    """Each message with its operands or results, and how they are dealt out."""
    found = [(messages[place], tensors[place:place + 1], entries[place:place + 1]) for place in range(apart)]
    return [*found, *((message, tensors[apart:], entries[apart:]) for message in messages[apart:])]


def abandon() -> None:
    """Lets go of messages of this thread that a call which failed has not waited for."""
    here = threading.get_ident()
    for address, one in list(UNDER_WAY.items()):
        if one.thread == here:
            del UNDER_WAY[address]


def _entries(numbers: Sequence[int]) -> list[Numbers]:
    return [tuple(numbers[at:at + 5]) for at in range(0, len(numbers), 5)]  # type: ignore[misc]


def gathered(mesh: ProcessMesh, own: Tensor, cuts: Sequence[tuple[str, Numbers]]) -> Tensor:
    """The whole of which this process has `own`. cuts: (axis, how it was dealt out) each, in that order."""
    for axis, numbers in reversed(cuts):
        line, (dim, outer, n, inner, _) = _next_line(mesh, axis), numbers
        whole = own.new_empty((*own.shape[:dim], outer * n * inner, *own.shape[dim + 1:]))
        message = own.new_empty(line.ranks * most_elements(own.shape, numbers, line.ranks))
        work = begin(line, "all_gather", message, [own], "add", [numbers])
        if work is not None:
            work.wait()
        finish(line, "all_gather", message, [whole], [numbers])
        own = whole
    return own
