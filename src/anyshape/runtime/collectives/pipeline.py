"""Pipeline execution: a rank runs the actions of its schedule on the programs of its stages, and exchanges messages.

    rank 0 of 1f1b: F0 send, F1 send, receive B0, ...

A rank is a generator that yields where a message has not come yet. So the ranks of a mesh can be run in one process,
in turns (tests, with the reference interpreter), or one in each process, where messages are point to point operations
of torch.distributed and a receive waits.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from anyshape.dist.pipeline.schedules import Orders
from anyshape.dist.pipeline.segments import EARLY, ONCE, Key, Pipeline, Segment
from anyshape.runtime.collectives.parts import COMBINE
from anyshape.sym.expr import evaluate
from anyshape.torch_compat.dtypes import TORCH_DTYPES

Program = Callable[[list[Any]], Sequence[Any]]
SMALL = 64  # elements
STEP = -1  # in place of the number of a micro-batch: values of the whole step


class Transport(Protocol):
    """Messages between the ranks of a pipeline."""

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Sends without waiting; the tensor is not changed later."""

    def receive(self, like: Tensor, source: int, tag: int) -> Tensor | None:
        """The message, of the shape and dtype of `like`, which it may fill; None where it has not come yet."""


@dataclass(slots=True)
class Batch:
    """What a rank is given for a step.

    sizes: of each micro-batch, by name. inputs: of each micro-batch, the tensors that it has a part of. shared: all
    other tensors, by name.
    """

    sizes: Sequence[Mapping[str, int]]
    inputs: Sequence[Mapping[str, Tensor]]
    shared: Mapping[str, Tensor]


@dataclass(slots=True)
class PipelineRank:
    """One rank of a pipeline. programs: by the key of a segment; they take sizes and `given`, and return `made`; there
    is none of a segment that only passes values on."""

    plan: Pipeline
    orders: Orders
    rank: int
    programs: Mapping[Key, Program]
    transport: Transport
    numbers: dict[tuple[str, int], int] = field(init=False)  # of messages, by value and receiving stage
    packs: dict[tuple[str, int], tuple[str, ...]] = field(init=False)  # by the same, small values that are one message
    kept: dict[tuple[int, int], dict[str, Tensor]] = field(init=False, default_factory=dict)
    sums: dict[str, Tensor] = field(init=False, default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        every = [(name, stage) for one in self.plan.segments.values() for name, stage in one.sends]
        self.numbers = {one: number for number, one in enumerate(every)}
        self.packs = _packs(self.plan)

    def run(self, batch: Batch) -> Iterator[None]:
        """One step; `results` has what it gives when the iterator ends. Inputs that are written change at the end."""
        self.kept, self.sums, self.copies = {}, {}, []
        micro = len(batch.sizes)
        for number in range(micro):
            yield from self._segment(EARLY, number, batch)
            self.kept.pop((EARLY.stage, number), None)
        yield from self._segment(ONCE, STEP, batch)
        once = self.kept.pop((ONCE.stage, STEP), {})
        self.sums |= once
        ends = {(one.chunk, one.micro): one for one in self.orders[self.rank]}  # the last action of each
        for action in self.orders[self.rank]:
            stage = action.chunk * self.plan.ranks + self.rank
            yield from self._segment(Key(action.kind, stage), action.micro, batch)
            if ends[action.chunk, action.micro] == action:
                self.kept.pop((stage, action.micro), None)
        for key in self.plan.segments:
            if key.kind == "U" and key.stage % self.plan.ranks == self.rank:
                yield from self._segment(key, STEP, batch)
        with torch.no_grad():  # a target may be a parameter itself
            for target, value in self.copies:
                target.copy_(value)

    def results(self) -> list[Any]:
        """The outputs of the step, after `run`; memory of the step is let go."""
        every = {name: value for (stage, _), store in self.kept.items() for name, value in store.items()} | self.sums
        found = [every[one] if isinstance(one, str) else one for one in self.plan.results]
        self.kept, self.sums, self.copies = {}, {}, []
        return found

    def _segment(self, key: Key, micro: int, batch: Batch) -> Iterator[None]:
        segment = self.plan.segments.get(key)
        if segment is None:
            return
        sizes = batch.sizes[max(micro, 0)]
        store = self.kept.setdefault((key.stage, micro), {})
        for name, source in segment.receives:
            yield from self._receive(segment, name, source, micro, sizes, store)
        own: Mapping[str, Tensor] = batch.inputs[micro] if micro >= 0 else {}
        given: list[Any] = [sizes[v.name] for v in segment.graph.inputs[:-len(segment.given) or None]]
        given += [self._value(name, store, own, batch.shared) for name in segment.given]
        made = self.programs[key](given) if key in self.programs else ()
        store.update(zip(segment.made, made, strict=True))
        for one in segment.sums:
            value = store[one.of]
            if one.name not in self.sums:
                self.sums[one.name] = value.clone()  # a stage may keep or send it
            elif one.combine == "add":
                self.sums[one.name] += value
            else:
                self.sums[one.name] = COMBINE[one.combine](self.sums[one.name], value)
        for name, stage in segment.sends:
            pack = self.packs.get((name, stage), (name,))
            if stage % self.plan.ranks == self.rank:
                self.kept.setdefault((stage, micro), {})[name] = self._value(name, store)
            elif name == pack[0]:
                values = [self._value(one, store) for one in pack]
                message = torch.cat([one.reshape(-1) for one in values]) if len(pack) > 1 else values[0]
                self.transport.send(message, stage % self.plan.ranks, self._tag(name, stage, micro))
        self.copies += [(batch.shared[target], self._value(name, store, own, batch.shared))
                        for target, name in segment.copies]

    def _value(self, name: str, *stores: Mapping[str, Tensor]) -> Tensor:
        for store in (*stores, self.sums):
            if name in store:
                return store[name]
        raise AssertionError(name)

    def _receive(self, segment: Segment, name: str, source: int, micro: int, sizes: Mapping[str, int],
                 store: dict[str, Tensor]) -> Iterator[None]:
        rank = source % self.plan.ranks
        if rank == self.rank:
            assert name in store, (segment.key, name)
            return
        pack = self.packs.get((name, segment.key.stage), (name,))
        if name != pack[0]:  # it came with the first one
            assert name in store, (segment.key, name)
            return
        shapes = [[evaluate(size, sizes) for size in self.plan.types[one].shape] for one in pack]
        counts = list(map(math.prod, shapes))
        like = torch.empty([sum(counts)] if len(pack) > 1 else shapes[0],
                           dtype=TORCH_DTYPES[self.plan.types[name].dtype])
        tag = self._tag(name, segment.key.stage, micro)
        while (found := self.transport.receive(like, rank, tag)) is None:
            yield
        store.update((one, part.view(shape)) for one, part, shape in zip(
            pack, found.split(counts) if len(pack) > 1 else (found,), shapes, strict=True))

    def _tag(self, name: str, stage: int, micro: int) -> int:
        """Of a message; the same on both sides, and no other one of a step has it."""
        count = 2 + max(one.micro for one in self.orders[self.rank])
        return self.numbers[name, stage] * count + micro + 1


def _packs(plan: Pipeline) -> dict[tuple[str, int], tuple[str, ...]]:
    """Small values that one segment sends to one other, as the norms of gradients: by value and receiving stage, all
    that travel in that message, in the order in which they are received."""
    sender = {(name, stage): key for key, one in plan.segments.items() for name, stage in one.sends}
    groups: dict[object, list[tuple[str, int]]] = {}
    for key, one in plan.segments.items():
        for name, _ in one.receives:
            shape = [size for size in plan.types[name].shape if isinstance(size, int)]
            if len(shape) == len(plan.types[name].shape) and 0 < math.prod(shape) <= SMALL:
                place = name, key.stage
                groups.setdefault((sender[place], key, plan.types[name].dtype), []).append(place)
    return {place: tuple(name for name, _ in group) for group in groups.values() if len(group) > 1 for place in group}


class Mailbox:
    """Messages of ranks in one process. `of` a rank is its transport."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, int, int], Tensor] = {}  # by sender, receiver, tag
        self.count = 0

    def of(self, rank: int) -> Transport:
        """The transport of one rank."""
        return _Post(self, rank)


@dataclass(slots=True)
class _Post:
    box: Mailbox
    rank: int

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """See Transport."""
        key = self.rank, to, tag
        assert key not in self.box.waiting, key
        self.box.waiting[key] = tensor.clone()
        self.box.count += 1

    def receive(self, like: Tensor, source: int, tag: int) -> Tensor | None:
        """See Transport."""
        found = self.box.waiting.pop((source, self.rank, tag), None)
        assert found is None or (found.shape, found.dtype) == (like.shape, like.dtype), (found.shape, like.shape)
        return found


def run_all(ranks: Sequence[PipelineRank], batches: Sequence[Batch]) -> list[list[Any]]:
    """One step of all ranks of a pipeline in this process, in turns; the results of each."""
    running = dict(enumerate(rank.run(batch) for rank, batch in zip(ranks, batches, strict=True)))
    idle = 0
    while running:
        for number in list(running):
            before = _progress(ranks)
            try:
                next(running[number])
            except StopIteration:
                del running[number]
                idle = 0
            else:
                idle = 0 if _progress(ranks) != before else idle + 1
        assert idle <= 2 * len(ranks), "the ranks of a pipeline wait for each other"
    return [rank.results() for rank in ranks]


def _progress(ranks: Sequence[PipelineRank]) -> int:
    return sum(len(store) for rank in ranks for store in rank.kept.values())
